from __future__ import annotations

import pytest

from autoflash.space.knob import Knob, Part, split

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
