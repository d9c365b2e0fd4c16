from __future__ import annotations

import math

import pytest

from autoflash.problem import Feature, Pass
from autoflash.search.sampler import Feedback, Sampler
from autoflash.space import catalog
from autoflash.space.knob import Knob, Part, split
from autoflash.trial import Status
from autoflash.variant import Family, Variant
from tests.factories import make_cell, make_device

_KNOBS = (
    Knob(name="loads", part=Part.STRUCTURE, values=("pointer", "tma"), default="pointer"),
    Knob(name="BLOCK", part=Part.CONFIG, values=(16, 32, 64, 128), default=64),
    Knob(name="stages", part=Part.CONFIG, values=(1, 2, 3, 4), default=1),
    Knob(name="only", part=Part.CONFIG, values=(7,), default=7),
)


def _variant(loads: str = "pointer", block: int = 64, stages: int = 1) -> Variant:
    structure, config = split(_KNOBS, {"loads": loads, "BLOCK": block, "stages": stages})
    return Variant(family=Family.TRITON, structure=structure, config=config)


_ALL = [
    _variant(loads, block, stages)
    for loads in ("pointer", "tma")
    for block in (16, 32, 64, 128)
    for stages in (1, 2, 3, 4)
]


def _time(variant: Variant) -> float:
    """Fastest at (tma, 128, 3)."""
    distance = abs(math.log2(variant.config.number("BLOCK") / 128)) + abs(variant.config.number("stages") - 3)
    return 100.0 * (1.0 + distance + (variant.structure["loads"] != "tma"))


def _sampler(*, budget: int = 16, seed: int = 0, first: tuple[Variant, ...] = ()) -> Sampler:
    scores = dict.fromkeys(_ALL, 0.0)
    return Sampler(family=Family.TRITON, knobs=_KNOBS, scores=scores, first=first, budget=budget, seed=seed)


def _correct(variant: Variant) -> Feedback:
    return Feedback(status=Status.CORRECT, median_us=_time(variant))


def _run(sampler: Sampler, trials: int) -> list[Variant]:
    asked = []
    for _ in range(trials):
        variant = sampler.ask()
        assert variant is not None
        sampler.tell(variant, _correct(variant))
        asked.append(variant)
    return asked


def test_what_it_is_given_is_asked_first_and_in_order() -> None:
    first = (_variant("tma", 16, 4), _variant("pointer", 128, 1))

    asked = _run(_sampler(first=first), 2)

    assert tuple(asked) == first


def test_nothing_is_asked_twice_and_everything_in_the_end() -> None:
    sampler = _sampler(budget=len(_ALL))

    asked = _run(sampler, len(_ALL))

    assert sorted(asked, key=str) == sorted(_ALL, key=str)
    assert sampler.ask() is None


@pytest.mark.parametrize("seed", [0, 1])
def test_the_same_seed_gives_the_same_order(seed: int) -> None:
    assert _run(_sampler(seed=seed), 16) == _run(_sampler(seed=seed), 16)


def test_half_of_a_small_space_is_enough_to_find_its_best() -> None:
    sampler = _sampler(budget=16)

    _run(sampler, 16)

    assert sampler.best == (_variant("tma", 128, 3), 100.0)


def test_a_recorded_variant_is_known_and_not_asked_again() -> None:
    sampler = _sampler(budget=len(_ALL))
    sampler.warm(_variant(), _correct(_variant()))

    asked = _run(sampler, len(_ALL) - 1)

    assert _variant() not in asked
    assert sampler.counted == len(_ALL)


def test_recorded_variants_outside_the_space_are_noted() -> None:
    sampler = _sampler()
    structure, config = split(_KNOBS[:1], {})

    sampler.warm(Variant(family=Family.TRITON, structure=structure, config=config), _correct(_variant()))

    assert sampler.outside == 1
    assert sampler.counted == 0


@pytest.mark.parametrize("status", [status for status in Status if status is not Status.CORRECT])
def test_a_search_survives_failures_of_every_kind(status: Status) -> None:
    sampler = _sampler(budget=20)

    for _ in range(20):
        variant = sampler.ask()
        assert variant is not None
        failed = variant.structure["loads"] == "tma"
        sampler.tell(variant, Feedback(status=status) if failed else _correct(variant))

    assert sampler.best == (_variant("pointer", 128, 3), 200.0)


@pytest.mark.parametrize("time_us", [float("nan"), float("inf"), 0.0, -1.0, None])
def test_a_time_that_is_none_is_a_failure(time_us: float | None) -> None:
    sampler = _sampler(budget=20)

    for _ in range(20):
        variant = sampler.ask()
        assert variant is not None
        sampler.tell(variant, Feedback(status=Status.CORRECT, median_us=time_us))

    assert sampler.best is None


def test_static_refusals_are_not_counted() -> None:
    sampler = _sampler()
    variant = sampler.ask()
    assert variant is not None

    sampler.tell(variant, Feedback(status=Status.CONSTRAINTS))

    assert sampler.counted == 0


def test_what_another_process_claims_is_skipped_without_a_verdict() -> None:
    sampler = _sampler(budget=len(_ALL))
    variant = sampler.ask()
    assert variant is not None

    sampler.skip(variant)

    assert variant not in _run(sampler, len(_ALL) - 1)
    sampler.warm(variant, _correct(variant))
    assert sampler.counted == len(_ALL) - 1


def test_the_compilers_word_decides_who_goes_first() -> None:
    sampler = _sampler()
    good = _variant("tma", 32, 2)
    for variant in _ALL[:8]:
        sampler.learn(variant, 1.0)
    sampler.learn(good, 2.0)

    assert sampler.ask() == good


def test_compiling_ahead_spreads_over_tilings() -> None:
    sampler = _sampler()

    planned = sampler.plan(8)

    assert len(planned) == len({variant.config for variant in planned}) == 8


def test_variants_without_a_knob_that_came_later_are_learned_from_and_neighbour_those_with_it() -> None:
    late = Knob(name="tiles", part=Part.STRUCTURE, values=("padded", "split"), default="padded", came_later=True)
    plain = _variant()
    other = Variant(family=plain.family, structure=plain.structure.replace(tiles="split"), config=plain.config)
    sampler = Sampler(
        family=plain.family, knobs=(*_KNOBS, late), scores=dict.fromkeys((plain, other), 0.0), budget=2, seed=0
    )

    sampler.warm(plain, _correct(plain))

    assert sampler.outside == 0
    assert sampler._steps(plain, other) == 1
    assert _run(sampler, 1) == [other]


def test_every_variant_of_a_space_whose_knobs_depend_on_others_can_be_told() -> None:
    cell = make_cell(op=Pass.BACKWARD, features=(Feature.BIAS, Feature.BIAS_GRADIENT))
    space = catalog.search_space(cell, make_device("sm_90"), Family.TRITON)
    alone = space.variant({"loop_order": "key_outer"})
    sampler = Sampler(
        family=Family.TRITON, knobs=space.knobs, scores={alone: 0.0, space.default(): 1.0}, first=(), budget=4, seed=0
    )

    sampler.warm(alone, _correct_at(10.0))
    sampler.warm(space.default(), _correct_at(20.0))

    assert sampler.counted == 2


def _correct_at(median_us: float) -> Feedback:
    return Feedback(status=Status.CORRECT, median_us=median_us)
