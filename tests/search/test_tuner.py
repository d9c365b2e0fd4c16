"""The tuner's loop on recorded outcomes: what it asks, records, resumes and decides. No kernel runs here."""

from __future__ import annotations

import dataclasses
import os
import signal
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from pathlib import Path

import pytest

from autoflash.db.repository import Repository
from autoflash.device import CROSS_TARGETS, Device
from autoflash.dispatch.buckets import problem_of
from autoflash.evaluate.evaluator import Outcome
from autoflash.evaluate.grid import Case
from autoflash.evaluate.isolated import TimeLimits
from autoflash.problem import Mask, Problem
from autoflash.runtime.compile import CompileOutcome
from autoflash.runtime.probe import environment
from autoflash.search import tuner
from autoflash.search.records import current_digest
from autoflash.search.replay import RecordedEvaluator
from autoflash.search.request import CellFinished, CellStarted, Event, TrialFinished, TuneRequest
from autoflash.search.tuner import plan, tune
from autoflash.space import catalog
from autoflash.trial import Resources, Stage, Status
from autoflash.variant import Family, Variant
from tests.contract import evaluator as contract
from tests.factories import make_cell, make_measurement, make_trial
from tests.search.recorded import CELL, CPU, FASTEST, default, generated, good, outcomes, recorded, request, time_of


def test_a_recording_satisfies_the_evaluators_contract() -> None:
    problem = problem_of(CELL, CPU)
    space = catalog.search_space(CELL, CPU, Family.TORCH_TILED)
    good, other, outside = space.default(), space.variants()[0], space.variant({"block_m": 4096})

    contract.check_screening(recorded(), problem, good)
    contract.check_full_verification(recorded(), problem, good)
    contract.check_comparison(recorded(), problem, good, other)
    contract.check_failure(recorded(), problem, outside)


def test_a_cell_gets_its_trials_and_a_decision(repository: Repository) -> None:
    summary = tune(request(), repository, evaluator=recorded())

    decision = repository.decisions(cell=CELL)[0]
    assert len(generated(repository)) == len(set(generated(repository))) == 12
    assert decision == summary.cells[0].decision
    assert dict(decision.choices[0].variant.config) == FASTEST
    assert decision.vendor is not None
    assert decision.vendor.median_us == 150.0
    assert summary.failed == ()


def test_the_default_is_tried_first_and_compared_in_the_end(repository: Repository) -> None:
    evaluator = recorded()

    summary = tune(request(), repository, evaluator=evaluator)

    default = catalog.search_space(CELL, CPU, Family.TORCH_TILED).default()
    assert evaluator.screened[len(catalog.vendors(CELL, CPU))] == default
    assert summary.cells[0].default_us == time_of(default)


def test_the_same_command_again_does_nothing(repository: Repository) -> None:
    tune(request(), repository, evaluator=recorded())
    again = recorded()

    summary = tune(request(), repository, evaluator=again)

    assert again.screened == []
    assert summary.cells[0].added == {}
    assert not summary.cells[0].is_new
    assert len(repository.decisions(history=True)) == 1


def test_trials_is_a_total_that_a_later_run_completes(repository: Repository) -> None:
    tune(request(trials=5), repository, evaluator=recorded())
    later = recorded()

    tune(request(trials=12), repository, evaluator=later)

    assert len(later.screened) == 7
    assert len(set(generated(repository))) == len(generated(repository)) == 12


def test_more_adds_to_what_is_there(repository: Repository) -> None:
    tune(request(trials=5), repository, evaluator=recorded())

    tune(request(more=3), repository, evaluator=recorded())

    assert len(generated(repository)) == 8


def test_a_space_smaller_than_the_budget_is_tried_whole(repository: Repository) -> None:
    size = len(catalog.search_space(CELL, CPU, Family.TORCH_TILED).variants())

    summary = tune(request(trials=1000), repository, evaluator=recorded())

    assert summary.cells[0].total == len(generated(repository)) == size


def test_one_seed_gives_one_order(tmp_path: Path) -> None:
    orders = []
    for name in ("a", "b"):
        evaluator = recorded()
        with Repository.open(str(tmp_path / f"{name}.sqlite")) as repository:
            tune(request(), repository, evaluator=evaluator)
        orders.append(evaluator.screened)

    assert orders[0] == orders[1]


def test_the_winner_of_one_cell_is_tried_early_in_the_next(repository: Repository) -> None:
    evaluator = recorded()
    neighbour = dataclasses.replace(CELL, q_bucket=8)
    tune(request(), repository, evaluator=evaluator)
    before = len(evaluator.screened)

    tune(request((neighbour,), trials=3), repository, evaluator=evaluator)

    tried = [variant for variant in evaluator.screened[before:] if variant.family is not Family.VENDOR]
    assert FASTEST in [dict(variant.config) for variant in tried]


class _Failing(RecordedEvaluator):
    """A recording in which everything generated fails, in two ways."""

    def screen(self, problem: Problem, variant: Variant) -> Outcome:
        outcome = super().screen(problem, variant)
        if variant.family is Family.VENDOR:
            return outcome
        status = Status.RUNTIME if len(self.screened) % 2 else Status.TIMEOUT
        return Outcome(status=status, detail="out of memory")


def test_when_everything_fails_there_is_no_decision_and_the_kinds_are_said(repository: Repository) -> None:
    summary = tune(request(), repository, evaluator=_Failing(outcomes()))

    assert repository.decisions() == []
    assert summary.failed == summary.cells
    assert "6 runtime" in summary.cells[0].note
    assert "6 timeout" in summary.cells[0].note


def test_when_everything_fails_the_old_decision_is_kept(repository: Repository) -> None:
    before = tune(request(trials=4), repository, evaluator=recorded()).cells[0].decision

    summary = tune(request(more=4), repository, evaluator=_Failing(outcomes()))

    assert repository.decisions(cell=CELL)[0].choices[0].variant == before.choices[0].variant  # type: ignore[union-attr]  # checked above
    assert summary.failed == ()


def test_events_tell_the_story(repository: Repository) -> None:
    events: list[Event] = []

    tune(request(), repository, evaluator=recorded(), on_event=events.append)

    trials = [event for event in events if isinstance(event, TrialFinished)]
    assert isinstance(events[0], CellStarted)
    assert events[0].plan.to_do == 12
    assert isinstance(events[-1], CellFinished)
    assert len(trials) == 12 + len(catalog.vendors(CELL, CPU))
    assert (trials[-1].done, trials[-1].total) == (12, 12)
    assert trials[-1].vendor_us == 150.0
    assert trials[-1].best_us == min(event.median_us or 1e9 for event in trials[2:])


def test_no_time_means_no_cell(repository: Repository) -> None:
    summary = tune(dataclasses.replace(request(), budget_s=0.0), repository, evaluator=recorded())

    assert summary.cells == ()
    assert summary.unreached == (CELL,)


def test_a_plan_runs_nothing(repository: Repository) -> None:
    tune(request(trials=5), repository, evaluator=recorded())

    planned = plan(request(), repository)

    assert [(one.recorded, one.to_do) for one in planned] == [(5, 7)]
    assert plan(request(), None)[0].to_do == 12


def test_a_variant_that_a_live_process_has_claimed_is_left_to_it(repository: Repository) -> None:
    size = len(catalog.search_space(CELL, CPU, Family.TORCH_TILED).variants())
    default = catalog.search_space(CELL, CPU, Family.TORCH_TILED).default()
    evaluator = recorded()

    with repository.claim(CELL, default, environment(CPU)) or pytest.fail("not claimed"):
        tune(request(trials=1000), repository, evaluator=evaluator)

    assert default not in evaluator.screened
    assert len(generated(repository)) == size - 1


class _Interrupting(RecordedEvaluator):
    """Something stops the process in the fifth trial."""

    def __init__(self, stop: Callable[[], None]) -> None:
        super().__init__(outcomes())
        self._stop = stop

    def screen(self, problem: Problem, variant: Variant) -> Outcome:
        outcome = super().screen(problem, variant)
        if len(self.screened) == 5:
            self._stop()
        return outcome


def _ctrl_c() -> None:
    raise KeyboardInterrupt


def _sigterm() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize("stop", [_ctrl_c, _sigterm])
def test_an_interruption_loses_the_trial_in_flight_alone(repository: Repository, stop: Callable[[], None]) -> None:
    handler = signal.getsignal(signal.SIGTERM)

    with pytest.raises(KeyboardInterrupt):
        tune(request(), repository, evaluator=_Interrupting(stop))

    assert len(repository.trials()) == 4
    assert repository.claimed(CELL, environment(CPU)) == []
    assert signal.getsignal(signal.SIGTERM) is handler
    tune(request(), repository, evaluator=recorded())
    assert len(generated(repository)) == 12


class _Stopped(RecordedEvaluator):
    """The run ends in the middle of the final comparison."""

    def rerank(self, problem: Problem, variants: Sequence[Variant], run: str) -> list[Outcome]:
        raise KeyboardInterrupt


def test_a_run_that_was_stopped_in_its_end_is_completed(repository: Repository) -> None:
    before = tune(request(trials=3), repository, evaluator=recorded()).cells[0].decision
    later = {variant: _taken_later(outcome) for variant, outcome in outcomes().items()}
    with pytest.raises(KeyboardInterrupt):
        tune(request(), repository, evaluator=_Stopped(later))
    evaluator = RecordedEvaluator(later)

    summary = tune(request(), repository, evaluator=evaluator).cells[0]

    assert evaluator.screened == []
    assert summary.is_new
    assert summary.decision != before
    assert not tune(request(), repository, evaluator=evaluator).cells[0].is_new


def _taken_later(outcome: Outcome) -> Outcome:
    assert outcome.measurement is not None
    return dataclasses.replace(
        outcome, measurement=dataclasses.replace(outcome.measurement, taken_at="2099-01-01T00:00:00+00:00")
    )


def test_trials_of_another_text_are_neither_counted_nor_ranked(repository: Repository) -> None:
    """As if a template had been edited after they were recorded, and its kernels had been fast."""
    stale = "f" * 16
    for variant in outcomes():
        if variant.family is not Family.VENDOR:
            measurement = make_measurement(median_us=1.0, stage=Stage.FINAL, run="old")
            repository.record(
                make_trial(
                    cell=CELL,
                    variant=variant,
                    environment=environment(CPU),
                    source_digest=stale,
                    measurement=measurement,
                )
            )
    evaluator = recorded()

    planned = plan(request(), repository)
    summary = tune(request(), repository, evaluator=evaluator).cells[0]

    assert [(one.recorded, one.to_do) for one in planned] == [(0, 12)]
    assert summary.total == 12
    assert len(evaluator.screened) == 12 + len(catalog.vendors(CELL, CPU))
    assert summary.decision is not None
    assert all(
        ranked.source_digest == current_digest(CELL, ranked.variant) != stale for ranked in summary.decision.choices
    )
    assert min(ranked.median_us for ranked in summary.decision.choices) == 100.0
    assert summary.default_us == time_of(default())


def test_a_trial_of_which_nothing_was_heard_counts(repository: Repository) -> None:
    """The worker died, or never said what it had rendered."""
    silent = {variant: Outcome(status=Status.TIMEOUT, detail="no answer") for variant in outcomes()}
    tune(request(), repository, evaluator=RecordedEvaluator(silent))
    again = recorded()

    summary = tune(request(), repository, evaluator=again).cells[0]

    assert again.screened == []
    assert summary.total == 12


def test_candidates_are_made_and_limited_as_the_request_says(
    repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[object] = []

    class Isolated(RecordedEvaluator):
        def __init__(self, device: Device, *, binder: str, limits: TimeLimits) -> None:
            super().__init__(outcomes())
            made.extend([device, binder, limits])

        def __enter__(self) -> RecordedEvaluator:
            return self

        def __exit__(self, *_: object) -> None:
            made.append("closed")

    monkeypatch.setattr(tuner, "IsolatedEvaluator", Isolated)
    limits = TimeLimits(screen_s=1.0)

    tune(dataclasses.replace(request(trials=1), binder="tests:binder", limits=limits), repository)

    assert made == [CPU, "tests:binder", limits, "closed"]


class _Pool:
    """Compiles nothing: the structure says what the compiler would."""

    processes = 4

    def __init__(self, _: int | None = None) -> None:
        self.submitted: Counter[Variant] = Counter()

    def __enter__(self) -> _Pool:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def submit(self, problem: Problem, variant: Variant, device: Device) -> Future[CompileOutcome]:
        self.submitted[variant] += 1
        future: Future[CompileOutcome] = Future()
        if variant.structure["loads"] == "tma":
            future.set_result(CompileOutcome(status=Status.CONSTRAINTS, detail="too much shared memory"))
        elif variant.structure["row_sum"] == "per_thread":
            future.set_result(CompileOutcome(status=Status.COMPILE, detail="PassManager::run failed"))
        else:
            resources = Resources(shared_bytes=32768, registers=128)
            digest = current_digest(make_cell(mask=Mask.FULL), variant)
            future.set_result(CompileOutcome(status=Status.CORRECT, resources=resources, source_digest=digest))
        return future

    def prepare(self, cases: Iterable[Case], variant: Variant, device: Device) -> Callable[[], None]:
        return lambda: None


def test_what_does_not_compile_reaches_no_device(repository: Repository, monkeypatch: pytest.MonkeyPatch) -> None:
    device = CROSS_TARGETS["sm_90"]
    cell = make_cell(mask=Mask.FULL)
    pool = _Pool()
    monkeypatch.setattr(tuner, "CompilePool", lambda _: pool)
    monkeypatch.setattr(tuner, "environment", lambda d: dataclasses.replace(environment(d), triton="3.6"))
    variants = catalog.search_space(cell, device, Family.TRITON).variants()
    evaluator = RecordedEvaluator({variant: good(variant, 100.0, cell) for variant in variants})
    wanted = TuneRequest(cells=(cell,), device=device, trials=24, seed=0, vendors=False, families=(Family.TRITON,))

    summary = tune(wanted, repository, evaluator=evaluator)

    loads = {(variant.structure["loads"], variant.structure["row_sum"]) for variant in evaluator.screened}
    assert loads == {("pointer", "each_block")}
    assert summary.cells[0].total == 24
    assert max(pool.submitted.values()) == 1
