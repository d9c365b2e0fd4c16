"""The tuner's loop on recorded outcomes: what it asks, records, resumes and decides. No kernel runs here."""

from __future__ import annotations

import dataclasses
import os
import signal
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from pathlib import Path

import pytest

from autoflash.db.repository import Repository
from autoflash.device import CROSS_TARGETS, Device, DeviceKind
from autoflash.dispatch.buckets import problem_of
from autoflash.evaluate.evaluator import Outcome
from autoflash.evaluate.grid import Case
from autoflash.problem import Cell, DType, Mask, Problem
from autoflash.runtime.compile import CompileOutcome
from autoflash.runtime.probe import environment
from autoflash.search import tuner
from autoflash.search.replay import RecordedEvaluator
from autoflash.search.request import CellFinished, CellStarted, Event, TrialFinished, TuneRequest
from autoflash.search.tuner import plan, tune
from autoflash.space import catalog
from autoflash.trial import Level, Resources, Status
from autoflash.variant import Family, Variant
from tests.contract import evaluator as contract
from tests.factories import make_cell, make_measurement, make_verification

_CPU = Device(kind=DeviceKind.CPU, name="test cpu", arch="x86_64", multiprocessors=2, shared_bytes=0, warp_size=1)
_CELL = make_cell(dtype=DType.FP32, q_bucket=7)
_FASTEST = {"block_m": 128, "block_n": 128, "heads_per_step": 1}


def _good(variant: Variant, median_us: float) -> Outcome:
    return Outcome(
        status=Status.CORRECT,
        verification=make_verification(level=Level.SCREEN),
        measurement=make_measurement(median_us=median_us),
        source_digest="" if variant.family is Family.VENDOR else "0123456789abcdef",
    )


def _time(variant: Variant) -> float:
    if variant.family is Family.VENDOR:
        return 150.0
    distance = sum(variant.config[name] != value for name, value in _FASTEST.items())
    return 100.0 * (1 + distance) + 50.0 * (variant.structure["loop_order"] != "query_outer")


def _recorded(cell: Cell = _CELL) -> RecordedEvaluator:
    variants = [
        *catalog.search_space(cell, _CPU, Family.TORCH_TILED).variants(),
        *catalog.vendors(cell, _CPU),
    ]
    return RecordedEvaluator({variant: _good(variant, _time(variant)) for variant in variants})


def _request(cells: tuple[Cell, ...] = (_CELL,), *, trials: int = 12, more: int | None = None) -> TuneRequest:
    return TuneRequest(cells=cells, device=_CPU, trials=trials, more=more, seed=0)


@pytest.fixture
def repository(tmp_path: Path) -> Iterator[Repository]:
    with Repository.open(str(tmp_path / "tuning.sqlite")) as repository:
        yield repository


def _generated(repository: Repository) -> list[Variant]:
    return [trial.variant for trial in repository.trials() if trial.variant.family is not Family.VENDOR]


def test_a_recording_satisfies_the_evaluators_contract() -> None:
    problem = problem_of(_CELL, _CPU)
    space = catalog.search_space(_CELL, _CPU, Family.TORCH_TILED)
    good, other, outside = space.default(), space.variants()[0], space.variant({"block_m": 4096})

    contract.check_screening(_recorded(), problem, good)
    contract.check_full_verification(_recorded(), problem, good)
    contract.check_comparison(_recorded(), problem, good, other)
    contract.check_failure(_recorded(), problem, outside)


def test_a_cell_gets_its_trials_and_a_decision(repository: Repository) -> None:
    summary = tune(_request(), repository, evaluator=_recorded())

    decision = repository.decisions(cell=_CELL)[0]
    assert len(_generated(repository)) == len(set(_generated(repository))) == 12
    assert decision == summary.cells[0].decision
    assert dict(decision.choices[0].variant.config) == _FASTEST
    assert decision.vendor is not None
    assert decision.vendor.median_us == 150.0
    assert summary.failed == ()


def test_the_default_is_tried_first_and_compared_in_the_end(repository: Repository) -> None:
    evaluator = _recorded()

    summary = tune(_request(), repository, evaluator=evaluator)

    default = catalog.search_space(_CELL, _CPU, Family.TORCH_TILED).default()
    assert evaluator.screened[len(catalog.vendors(_CELL, _CPU))] == default
    assert summary.cells[0].default_us == _time(default)


def test_the_same_command_again_does_nothing(repository: Repository) -> None:
    tune(_request(), repository, evaluator=_recorded())
    again = _recorded()

    summary = tune(_request(), repository, evaluator=again)

    assert again.screened == []
    assert summary.cells[0].added == {}
    assert not summary.cells[0].is_new
    assert len(repository.decisions(history=True)) == 1


def test_trials_is_a_total_that_a_later_run_completes(repository: Repository) -> None:
    tune(_request(trials=5), repository, evaluator=_recorded())
    later = _recorded()

    tune(_request(trials=12), repository, evaluator=later)

    assert len(later.screened) == 7
    assert len(set(_generated(repository))) == len(_generated(repository)) == 12


def test_more_adds_to_what_is_there(repository: Repository) -> None:
    tune(_request(trials=5), repository, evaluator=_recorded())

    tune(_request(more=3), repository, evaluator=_recorded())

    assert len(_generated(repository)) == 8


def test_a_space_smaller_than_the_budget_is_tried_whole(repository: Repository) -> None:
    size = len(catalog.search_space(_CELL, _CPU, Family.TORCH_TILED).variants())

    summary = tune(_request(trials=1000), repository, evaluator=_recorded())

    assert summary.cells[0].total == len(_generated(repository)) == size


def test_one_seed_gives_one_order(tmp_path: Path) -> None:
    orders = []
    for name in ("a", "b"):
        evaluator = _recorded()
        with Repository.open(str(tmp_path / f"{name}.sqlite")) as repository:
            tune(_request(), repository, evaluator=evaluator)
        orders.append(evaluator.screened)

    assert orders[0] == orders[1]


def test_the_winner_of_one_cell_is_tried_early_in_the_next(repository: Repository) -> None:
    evaluator = _recorded()
    neighbour = dataclasses.replace(_CELL, q_bucket=8)
    tune(_request(), repository, evaluator=evaluator)
    before = len(evaluator.screened)

    tune(_request((neighbour,), trials=3), repository, evaluator=evaluator)

    tried = [variant for variant in evaluator.screened[before:] if variant.family is not Family.VENDOR]
    assert _FASTEST in [dict(variant.config) for variant in tried]


class _Failing(RecordedEvaluator):
    """A recording in which everything generated fails, in two ways."""

    def screen(self, problem: Problem, variant: Variant) -> Outcome:
        outcome = super().screen(problem, variant)
        if variant.family is Family.VENDOR:
            return outcome
        status = Status.RUNTIME if len(self.screened) % 2 else Status.TIMEOUT
        return Outcome(status=status, detail="out of memory")


def test_when_everything_fails_there_is_no_decision_and_the_kinds_are_said(repository: Repository) -> None:
    summary = tune(_request(), repository, evaluator=_Failing(_recorded()._outcomes))

    assert repository.decisions() == []
    assert summary.failed == summary.cells
    assert "6 runtime" in summary.cells[0].note
    assert "6 timeout" in summary.cells[0].note


def test_when_everything_fails_the_old_decision_is_kept(repository: Repository) -> None:
    before = tune(_request(trials=4), repository, evaluator=_recorded()).cells[0].decision

    summary = tune(_request(more=4), repository, evaluator=_Failing(_recorded()._outcomes))

    assert repository.decisions(cell=_CELL)[0].choices[0].variant == before.choices[0].variant  # type: ignore[union-attr]  # checked above
    assert summary.failed == ()


class _WrongWinner(RecordedEvaluator):
    """The fastest variant turns out wrong on the full grid."""

    def verify_full(self, problem: Problem, inside: Problem | None, variant: Variant) -> Outcome:
        if dict(variant.config) == _FASTEST:
            refuted = make_verification(level=Level.FULL, passed=False, worst_ratio=7.0)
            return Outcome(status=Status.CORRECTNESS, detail="dq", verification=refuted)
        return super().verify_full(problem, inside, variant)


def test_what_fails_the_full_grid_is_never_chosen(repository: Repository) -> None:
    tune(_request(trials=1000), repository, evaluator=_WrongWinner(_recorded()._outcomes))

    chosen = [dict(ranked.variant.config) for ranked in repository.decisions()[0].choices]
    assert chosen
    assert _FASTEST not in chosen


def test_events_tell_the_story(repository: Repository) -> None:
    events: list[Event] = []

    tune(_request(), repository, evaluator=_recorded(), on_event=events.append)

    trials = [event for event in events if isinstance(event, TrialFinished)]
    assert isinstance(events[0], CellStarted)
    assert events[0].plan.to_do == 12
    assert isinstance(events[-1], CellFinished)
    assert len(trials) == 12 + len(catalog.vendors(_CELL, _CPU))
    assert (trials[-1].done, trials[-1].total) == (12, 12)
    assert trials[-1].vendor_us == 150.0
    assert trials[-1].best_us == min(event.median_us or 1e9 for event in trials[2:])


def test_no_time_means_no_cell(repository: Repository) -> None:
    summary = tune(dataclasses.replace(_request(), budget_s=0.0), repository, evaluator=_recorded())

    assert summary.cells == ()
    assert summary.unreached == (_CELL,)


def test_a_plan_runs_nothing(repository: Repository) -> None:
    tune(_request(trials=5), repository, evaluator=_recorded())

    planned = plan(_request(), repository)

    assert [(one.recorded, one.to_do) for one in planned] == [(5, 7)]
    assert plan(_request(), None)[0].to_do == 12


def test_a_variant_that_a_live_process_has_claimed_is_left_to_it(repository: Repository) -> None:
    size = len(catalog.search_space(_CELL, _CPU, Family.TORCH_TILED).variants())
    default = catalog.search_space(_CELL, _CPU, Family.TORCH_TILED).default()
    evaluator = _recorded()

    with repository.claim(_CELL, default, environment(_CPU)) or pytest.fail("not claimed"):
        tune(_request(trials=1000), repository, evaluator=evaluator)

    assert default not in evaluator.screened
    assert len(_generated(repository)) == size - 1


class _Interrupting(RecordedEvaluator):
    """Something stops the process in the fifth trial."""

    def __init__(self, recorded: RecordedEvaluator, stop: Callable[[], None]) -> None:
        super().__init__(recorded._outcomes)
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
        tune(_request(), repository, evaluator=_Interrupting(_recorded(), stop))

    assert len(repository.trials()) == 4
    assert repository.claimed(_CELL, environment(_CPU)) == []
    assert signal.getsignal(signal.SIGTERM) is handler
    tune(_request(), repository, evaluator=_recorded())
    assert len(_generated(repository)) == 12


def test_families_share_the_trials_and_a_small_space_leaves_its_share_to_the_others() -> None:
    assert tuner._shared_out(32, {Family.GLUON_SM90: 100, Family.TRITON: 100}) == {
        Family.GLUON_SM90: 16,
        Family.TRITON: 16,
    }
    assert tuner._shared_out(32, {Family.GLUON_SM90: 0, Family.TRITON: 100}) == {
        Family.GLUON_SM90: 0,
        Family.TRITON: 32,
    }
    assert tuner._shared_out(33, {Family.GLUON_SM90: 5, Family.TRITON: 20}) == {
        Family.GLUON_SM90: 5,
        Family.TRITON: 20,
    }
    assert sum(tuner._shared_out(7, {Family.GLUON_SM90: 9, Family.TRITON: 9}).values()) == 7


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
            future.set_result(CompileOutcome(status=Status.CORRECT, resources=resources, source_digest="aa"))
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
    evaluator = RecordedEvaluator({variant: _good(variant, 100.0) for variant in variants})
    request = TuneRequest(cells=(cell,), device=device, trials=24, seed=0, vendors=False, families=(Family.TRITON,))

    summary = tune(request, repository, evaluator=evaluator)

    loads = {(variant.structure["loads"], variant.structure["row_sum"]) for variant in evaluator.screened}
    assert loads == {("pointer", "each_block")}
    assert summary.cells[0].total == 24
    assert max(pool.submitted.values()) == 1
