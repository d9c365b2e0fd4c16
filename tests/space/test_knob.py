from __future__ import annotations

import itertools

import pytest

from autoflash.space.knob import Knob, Part, spellings, split, structures

_KNOBS = (
    Knob(name="loop_order", part=Part.STRUCTURE, values=("query_outer", "key_outer"), default="query_outer"),
    Knob(
        name="loads",
        part=Part.STRUCTURE,
        values=("pointer", "tma"),
        default="pointer",
        applies=lambda choices: choices["loop_order"] == "query_outer",
    ),
    Knob(
        name="BLOCK",
        part=Part.CONFIG,
        values=(32, 64, 128),
        default=64,
        applies=lambda choices: choices["loop_order"] == "query_outer",
    ),
)


def test_a_default_outside_the_values_is_refused() -> None:
    with pytest.raises(ValueError, match="default"):
        Knob(name="loads", part=Part.STRUCTURE, values=("pointer",), default="tma")


def test_an_inapplicable_structure_knob_takes_its_default_and_a_config_knob_vanishes() -> None:
    structure, config = split(_KNOBS, {"loop_order": "key_outer", "loads": "tma", "BLOCK": 32})

    assert dict(structure) == {"loop_order": "key_outer", "loads": "pointer"}
    assert dict(config) == {}


def test_choices_left_out_take_their_default() -> None:
    structure, config = split(_KNOBS, {})

    assert dict(structure) == {"loop_order": "query_outer", "loads": "pointer"}
    assert dict(config) == {"BLOCK": 64}


@pytest.mark.parametrize(("one", "other", "steps"), [(32, 32, 0), (32, 64, 1), (128, 32, 2)])
def test_numbers_are_apart_by_their_place_in_the_list(one: int, other: int, steps: int) -> None:
    assert _KNOBS[2].distance(one, other) == steps


def test_words_are_one_step_apart() -> None:
    assert _KNOBS[1].distance("pointer", "tma") == 1


def test_the_default_of_a_knob_that_came_later_is_spelled_by_leaving_it_out() -> None:
    late = Knob(name="tiles", part=Part.STRUCTURE, values=("padded", "split"), default="padded", came_later=True)
    knobs = (*_KNOBS, late)

    assert split(knobs, {"tiles": "padded"}) == split(knobs, {}) == split(_KNOBS, {})
    assert dict(split(knobs, {"tiles": "split"})[0]) == {**split(_KNOBS, {})[0], "tiles": "split"}
    assert late.of({}) == "padded"
    assert _KNOBS[2].of({}) is None


def test_spellings_are_those_of_all_choices_once_and_in_their_order() -> None:
    late = Knob(name="warps", part=Part.CONFIG, values=(4, 8), default=4, came_later=True)
    knobs = (*_KNOBS, late)

    made = list(spellings(knobs))

    names = [knob.name for knob in knobs]
    every = itertools.product(*(knob.values for knob in knobs))
    assert made == list(dict.fromkeys(split(knobs, dict(zip(names, values, strict=True))) for values in every))
    assert len(made) == 2 * 3 * 2 + 2


def test_spellings_share_equal_structures_and_configs() -> None:
    made = list(spellings(_KNOBS))

    assert len({id(structure) for structure, _ in made}) == len({structure for structure, _ in made}) == 3


def test_each_structure_comes_once_with_its_configs() -> None:
    made = [(structure, list(configs)) for structure, configs in structures(_KNOBS)]

    assert [(structure, config) for structure, configs in made for config in configs] == list(spellings(_KNOBS))
    assert [len(configs) for _, configs in made] == [3, 3, 1]
