"""The evaluator on the CPU, with good candidates and with faulty ones."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from autoflash.device import Device
from autoflash.errors import NoKernelError, RenderError, UnsupportedError
from autoflash.evaluate import evaluator as module
from autoflash.evaluate.evaluator import Outcome
from autoflash.evaluate.isolated import IsolatedEvaluator, TimeLimits
from autoflash.evaluate.worker import Failure
from autoflash.problem import DType, Pass, Problem
from autoflash.runtime.probe import probe
from autoflash.trial import Level, Measurement, Stage, Status
from autoflash.variant import Choices, Family, Variant
from tests import faults
from tests.contract import evaluator as contract
from tests.factories import make_problem, make_variant

_BINDER = "tests.faults:bind"


@pytest.fixture(scope="module")
def cpu() -> Device:
    return probe("cpu")


@pytest.fixture(scope="module")
def isolated(cpu: Device) -> Iterator[IsolatedEvaluator]:
    with IsolatedEvaluator(cpu, binder=_BINDER) as evaluator:
        yield evaluator


def _problem(op: Pass = Pass.FORWARD) -> Problem:
    return make_problem(op=op, dtype=DType.FP32, head_dim=16, seqlen_q=128)


def _variant(fault: str | None = None, op: Pass = Pass.FORWARD) -> Variant:
    """A portable variant with the given fault, or a good one."""
    every = [
        make_variant(
            family=Family.TORCH_TILED,
            op=op,
            block_m=block_m,
            block_n=block_n,
            heads_per_step=4 if fault else 0,
            loop_order=order,
        )
        for order in ("query_outer", "key_outer")
        for block_n in (64, 128)
        for block_m in (64, 128)
    ]
    return next(variant for variant in every if faults.fault_of(variant) == fault)


def test_the_isolated_evaluator_satisfies_the_contract(isolated: IsolatedEvaluator) -> None:
    contract.check_screening(isolated, _problem(), _variant())
    contract.check_full_verification(isolated, _problem(), _variant())
    contract.check_comparison(isolated, _problem(), _variant(), make_variant(family=Family.TORCH_TILED))
    contract.check_failure(isolated, _problem(), _variant("raise"))


@pytest.mark.parametrize("fault", ["nan", "wrong_last_rows", "overrun", "raise", "compiler", "memory"])
@pytest.mark.parametrize("op", list(Pass))
def test_a_fault_gets_its_status_and_a_reason(cpu: Device, fault: str, op: Pass) -> None:
    outcome = module.screen(_problem(op), _variant(fault, op), cpu, _BINDER)

    assert outcome.status is faults.FAULTS[fault]
    assert outcome.detail
    assert "\n" not in outcome.detail
    assert outcome.measurement is None


@pytest.mark.parametrize("fault", ["nan", "wrong_last_rows", "overrun"])
def test_a_fault_does_not_pass_the_full_grid(cpu: Device, fault: str) -> None:
    outcome = module.verify_full(_problem(), None, _variant(fault), cpu, _BINDER)

    assert outcome.status is Status.CORRECTNESS
    assert outcome.verification is not None
    assert not outcome.verification.passed


@pytest.mark.parametrize("full", [False, True])
def test_a_vendor_kernel_that_cannot_do_the_problem_says_so(cpu: Device, full: bool) -> None:
    problem = _problem(Pass.BACKWARD).replace(deterministic=True)
    flash = Variant(family=Family.VENDOR, structure=Choices(backend="flash"), config=Choices())

    outcome = module.verify_full(problem, None, flash, cpu) if full else module.screen(problem, flash, cpu)

    assert outcome.status is Status.CONSTRAINTS
    assert "the backward of torch's flash backend is not deterministic" in outcome.detail
    assert outcome.verification is None


def test_an_exit_and_a_hang_cost_the_worker_and_nothing_else(cpu: Device) -> None:
    with faults.Impatient(cpu) as evaluator:
        left = evaluator.screen(_problem(), _variant("exit"))
        hung = evaluator.screen(_problem(), _variant("hang"))

    assert (left.status, left.detail) == (Status.RUNTIME, "the worker exited with status 9")
    assert hung.status is Status.TIMEOUT


def test_case_a18_a_worker_whose_context_is_poisoned_is_replaced(isolated: IsolatedEvaluator) -> None:
    isolated.screen(_problem(), _variant())
    before = isolated.pid

    isolated._outcome(Outcome(status=Status.RUNTIME, detail="illegal access", poisoned=True))

    assert before is not None
    assert isolated.pid is None
    assert isolated.screen(_problem(), _variant()).status is Status.CORRECT


@pytest.mark.parametrize("time_us", [float("nan"), float("inf"), 0.0, -3.0])
def test_case_a37_a_time_that_cannot_be_is_a_failure(
    cpu: Device, monkeypatch: pytest.MonkeyPatch, time_us: float
) -> None:
    impossible = Measurement(stage=Stage.SCREEN, median_us=time_us, p20_us=1.0, p80_us=1.0, samples=5, policy="test")
    monkeypatch.setattr(module, "benchmark", lambda *_, **__: impossible)

    outcome = module.screen(_problem(), _variant(), cpu)

    assert outcome.status is Status.RUNTIME
    assert outcome.measurement is None


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (RuntimeError("PassManager::run failed"), Status.COMPILE),
        (faults.CompilationError("at 3:4"), Status.COMPILE),
        (RenderError("no such form"), Status.COMPILE),
        (UnsupportedError("head_dim"), Status.CONSTRAINTS),
        (NoKernelError("unequal head dims"), Status.CONSTRAINTS),
        (MemoryError(), Status.RUNTIME),
        (RuntimeError("misaligned address"), Status.RUNTIME),
    ],
)
def test_exceptions_are_sorted_into_statuses(error: Exception, status: Status) -> None:
    assert module._status_of(error) is status


def test_a_finalist_that_fails_does_not_stop_the_comparison(cpu: Device) -> None:
    good, bad = _variant(), _variant("raise")

    outcomes = module.rerank(_problem(), [good, bad, good], cpu, "run", _BINDER)

    assert [outcome.status for outcome in outcomes] == [Status.CORRECT, Status.RUNTIME, Status.CORRECT]
    assert [outcome.measurement is not None for outcome in outcomes] == [True, False, True]


def test_a_comparison_that_loses_its_worker_fails_as_a_whole_and_costs_nothing_else(cpu: Device) -> None:
    with faults.Impatient(cpu) as evaluator:
        lost = evaluator.rerank(_problem(), [_variant(), _variant("exit")], "one")
        again = evaluator.rerank(_problem(), [_variant()], "two")

    assert [(outcome.status, outcome.measurement) for outcome in lost] == [(Status.RUNTIME, None)] * 2
    assert [outcome.measurement is not None for outcome in again] == [True]


def test_a_worker_in_which_something_was_raised_outside_of_a_candidate_is_replaced(
    isolated: IsolatedEvaluator,
) -> None:
    isolated.screen(_problem(), _variant())
    before = isolated.pid

    reply = isolated._call(int, 300.0, "no number")

    assert isinstance(reply, Failure)
    assert before is not None
    assert isolated.pid is None


def test_a_comparison_of_few_takes_no_longer_than_to_screen_them(cpu: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[float] = []
    evaluator = IsolatedEvaluator(cpu, limits=TimeLimits(screen_s=60.0, rerank_s=300.0))

    def call(function: object, limit_s: float, *_: object) -> list[Outcome]:
        limits.append(limit_s)
        return []

    monkeypatch.setattr(evaluator, "_call", call)
    for count in (1, 3, 8):
        evaluator.rerank(_problem(), [_variant()] * count, "run")

    assert limits == [60.0, 180.0, 300.0]


def test_both_levels_are_named(cpu: Device) -> None:
    screened = module.screen(_problem(), _variant(), cpu).verification
    full = module.verify_full(_problem(), _problem().replace(seqlen_q=127, seqlen_k=127), _variant(), cpu).verification

    assert screened is not None
    assert full is not None
    assert (screened.level, full.level) == (Level.SCREEN, Level.FULL)
    assert full.checks > screened.checks
