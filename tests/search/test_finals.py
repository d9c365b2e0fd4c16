"""The end of a cell where candidates turn out wrong, or take the worker with them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import cast

from autoflash.db.repository import Repository
from autoflash.device import CROSS_TARGETS
from autoflash.dispatch.buckets import problem_of
from autoflash.evaluate.compile_pool import CompilePool
from autoflash.evaluate.evaluator import Outcome
from autoflash.problem import Problem
from autoflash.runtime.probe import environment
from autoflash.search.finals import _CPU_FINALISTS, Finals
from autoflash.search.records import Records, current_digest
from autoflash.search.replay import RecordedEvaluator
from autoflash.search.tuner import tune
from autoflash.space import catalog
from autoflash.trial import Decision, Level, Status
from autoflash.variant import Family, Variant
from tests.factories import make_cell, make_trial, make_verification
from tests.search.recorded import FASTEST, default, good, outcomes, recorded, request, time_of

_EVERYTHING = 1000
_CRASH = Outcome(status=Status.RUNTIME, detail="the worker was killed by SIGSEGV")


def _tuned(repository: Repository, evaluator: RecordedEvaluator) -> Decision:
    """The decision over the whole space of the cell."""
    decision = tune(request(trials=_EVERYTHING), repository, evaluator=evaluator).cells[0].decision
    assert decision is not None
    return decision


def _is_fastest(variant: Variant) -> bool:
    return dict(variant.config) == FASTEST


def _by_time() -> list[Variant]:
    """Generated variants, fastest first."""
    return sorted(_generated(list(outcomes())), key=time_of)


def _generated(variants: Sequence[Variant]) -> list[Variant]:
    return [variant for variant in variants if variant.family is not Family.VENDOR]


class _Wrong(RecordedEvaluator):
    """Some turn out wrong on the full grid."""

    def __init__(self, is_wrong: Callable[[Variant], bool], recording: Mapping[Variant, Outcome] | None = None) -> None:
        super().__init__(outcomes() if recording is None else recording)
        self.verified: list[Variant] = []
        self._is_wrong = is_wrong

    def verify_full(self, problem: Problem, inside: Problem | None, variant: Variant) -> Outcome:
        self.verified.append(variant)
        if self._is_wrong(variant):
            refuted = make_verification(level=Level.FULL, passed=False, worst_ratio=7.0)
            return Outcome(status=Status.CORRECTNESS, detail="dq", verification=refuted)
        return super().verify_full(problem, inside, variant)


def test_the_next_best_take_the_place_of_finalists_that_are_wrong(repository: Repository, tmp_path: Path) -> None:
    with Repository.open(str(tmp_path / "usual.sqlite")) as other:
        usual = _Wrong(lambda _: False)
        _tuned(other, usual)
    evaluator = _Wrong(_is_fastest)

    decision = _tuned(repository, evaluator)

    right = [variant for variant in _generated(evaluator.verified) if not _is_fastest(variant)]
    assert len(right) == len(set(right)) == len(_generated(usual.verified))
    assert not any(_is_fastest(ranked.variant) for ranked in decision.choices)
    # Those that nobody is faster than, as far as times tell them apart.
    fastest = [variant for variant in _by_time() if not _is_fastest(variant)]
    assert sorted(map(time_of, right)) == [time_of(variant) for variant in fastest[: len(right)]]


def test_a_family_that_is_wrong_throughout_is_given_up(repository: Repository) -> None:
    evaluator = _Wrong(lambda variant: variant.family is not Family.VENDOR)

    summary = tune(request(trials=_EVERYTHING), repository, evaluator=evaluator)

    assert summary.cells[0].decision is None
    assert summary.cells[0].note == "no candidate passed the full verification"
    assert len(_generated(evaluator.verified)) <= 2 * (_CPU_FINALISTS + 1) < len(_by_time())


class _NoPool:
    """Nothing is compiled."""

    def prepare(self, *_: object) -> Callable[[], None]:
        return lambda: None


def test_a_kernel_that_runs_with_any_strides_is_replaced_by_another_such(repository: Repository) -> None:
    device = CROSS_TARGETS["sm_90"]
    cell, here = make_cell(), environment(CROSS_TARGETS["sm_90"])
    variants = catalog.search_space(cell, device, Family.TRITON).variants()
    tma = [variant for variant in variants if catalog.has_precondition(variant)][:9]
    plain = [variant for variant in variants if not catalog.has_precondition(variant)][:4]
    for place, variant in enumerate([*tma, *plain]):
        repository.record(
            make_trial(
                cell=cell,
                variant=variant,
                environment=here,
                source_digest=current_digest(cell, variant),
                verification=make_verification(level=Level.SCREEN),
                median_us=100.0 + place,
            )
        )
    evaluator = _Wrong(lambda variant: variant == plain[0], {v: good(v, 100.0, cell) for v in [*tma, *plain]})
    finals = Finals(repository, Records(repository, here), evaluator, cast(CompilePool, _NoPool()), device, here)

    finals.decide(cell, problem_of(cell, device), finals.pick(cell, ()), ())

    assert evaluator.verified == [*tma[:6], *plain[:3]]


class _Crashing(RecordedEvaluator):
    """Comparisons in which something takes the worker down."""

    def __init__(self, is_lost: Callable[[int, Sequence[Variant]], bool]) -> None:
        super().__init__(outcomes())
        self.compared: list[tuple[Variant, ...]] = []
        self._is_lost = is_lost

    def rerank(self, problem: Problem, variants: Sequence[Variant], run: str) -> list[Outcome]:
        self.compared.append(tuple(variants))
        if self._is_lost(len(self.compared), variants):
            return [_CRASH for _ in variants]
        return super().rerank(problem, variants, run)


def test_a_comparison_that_lost_its_worker_is_made_again(repository: Repository) -> None:
    evaluator = _Crashing(lambda count, _: count == 1)

    decision = _tuned(repository, evaluator)

    assert len(evaluator.compared) == 2
    assert evaluator.compared[0] == evaluator.compared[1]
    assert _is_fastest(decision.choices[0].variant)


def test_the_others_are_compared_without_the_one_that_takes_the_worker_down(repository: Repository) -> None:
    evaluator = _Crashing(lambda _, variants: any(map(_is_fastest, variants)))

    decision = _tuned(repository, evaluator)

    everybody = evaluator.compared[0]
    culprits = [variant for variant in everybody if _is_fastest(variant)]
    assert culprits
    assert evaluator.compared[1] == everybody
    assert set(evaluator.compared[2:-1]) == {(variant,) for variant in everybody}
    assert evaluator.compared[-1] == tuple(variant for variant in everybody if variant not in culprits)
    assert {ranked.variant for ranked in decision.choices} <= set(evaluator.compared[-1])
    assert decision.choices
    assert decision.vendor is not None


def test_those_that_live_by_themselves_alone_are_compared_by_that(repository: Repository) -> None:
    evaluator = _Crashing(lambda _, variants: len(variants) > 1)

    decision = _tuned(repository, evaluator)

    assert _is_fastest(decision.choices[0].variant)
    assert len(decision.choices) > 1


def test_one_healthy_candidate_is_enough(repository: Repository) -> None:
    evaluator = _Crashing(lambda _, variants: tuple(variants) != (default(),))

    decision = _tuned(repository, evaluator)

    assert [ranked.variant for ranked in decision.choices] == [default()]
    assert decision.vendor is None


class _Poisoning(_Crashing):
    """The fastest leaves the device unusable, and the device says so."""

    def __init__(self) -> None:
        super().__init__(lambda *_: False)

    def rerank(self, problem: Problem, variants: Sequence[Variant], run: str) -> list[Outcome]:
        outcomes = super().rerank(problem, variants, run)
        if not any(map(_is_fastest, variants)):
            return outcomes
        poisoned = Outcome(status=Status.RUNTIME, detail="illegal access", poisoned=True)
        return [poisoned if _is_fastest(variant) else _CRASH for variant in variants]


def test_who_is_known_to_have_broken_the_device_is_left_out_at_once(repository: Repository) -> None:
    evaluator = _Poisoning()

    decision = _tuned(repository, evaluator)

    everybody = evaluator.compared[0]
    assert evaluator.compared[1:] == [tuple(variant for variant in everybody if not _is_fastest(variant))]
    assert decision.choices


def test_where_nothing_can_be_timed_again_the_old_decision_stays_and_the_reason_is_said(
    repository: Repository,
) -> None:
    before = tune(request(trials=4), repository, evaluator=recorded()).cells[0].decision

    summary = tune(request(trials=_EVERYTHING), repository, evaluator=_Crashing(lambda *_: True)).cells[0]

    assert summary.note == f"no candidate could be timed again: {_CRASH.detail}"
    assert (summary.decision, summary.is_new) == (before, False)
    assert repository.decisions() == [before]


def test_without_a_time_there_is_no_decision(repository: Repository) -> None:
    summary = tune(request(), repository, evaluator=_Crashing(lambda *_: True))

    assert summary.cells[0].decision is None
    assert summary.cells[0].note == f"no candidate could be timed again: {_CRASH.detail}"


def test_times_of_an_earlier_comparison_are_not_taken_for_this_ones(repository: Repository) -> None:
    """The default took part in the first comparison, and cannot be timed in the second."""
    first = tune(request(trials=4), repository, evaluator=recorded()).cells[0]

    second = tune(request(), repository, evaluator=_Crashing(lambda _, variants: default() in variants)).cells[0]

    assert first.default_us == time_of(default())
    assert second.is_new
    assert second.default_us is None
    assert second.decision is not None
    assert len(second.decision.choices) > 1
    assert default() not in {ranked.variant for ranked in second.decision.choices}
