"""What every evaluator satisfies: the one that runs on a device and the one that reads a recording."""

from __future__ import annotations

from autoflash.evaluate.isolated import Evaluator
from autoflash.problem import Problem
from autoflash.trial import Level, Stage, Status
from autoflash.variant import Variant


def check_screening(evaluator: Evaluator, problem: Problem, good: Variant) -> None:
    """A right variant is verified before it is timed, and both are reported."""
    outcome = evaluator.screen(problem, good)

    assert outcome.status is Status.CORRECT, outcome.detail
    assert outcome.detail == ""
    assert outcome.verification is not None
    assert outcome.verification.passed
    assert outcome.verification.level >= Level.SCREEN
    assert outcome.measurement is not None
    assert outcome.measurement.stage is Stage.SCREEN
    assert outcome.measurement.median_us > 0.0


def check_full_verification(evaluator: Evaluator, problem: Problem, good: Variant) -> None:
    """The full grid is compared and nothing is timed."""
    outcome = evaluator.verify_full(problem, None, good)

    assert outcome.status is Status.CORRECT, outcome.detail
    assert outcome.verification is not None
    assert outcome.verification.level is Level.FULL
    assert outcome.measurement is None


def check_comparison(evaluator: Evaluator, problem: Problem, good: Variant, other: Variant) -> None:
    """Finalists are timed in one run, each with its own result."""
    outcomes = evaluator.rerank(problem, [good, other], "a-run")

    measurements = [outcome.measurement for outcome in outcomes]
    assert len(measurements) == 2
    assert all(m is not None and m.stage is Stage.FINAL and m.run == "a-run" for m in measurements)


def check_failure(evaluator: Evaluator, problem: Problem, bad: Variant) -> None:
    """A variant that cannot run is an outcome with a reason, not an exception."""
    outcome = evaluator.screen(problem, bad)

    assert outcome.status is not Status.CORRECT
    assert outcome.detail
    assert outcome.measurement is None
