"""What the worker process does with a candidate: verify, measure, and turn every way to fail into a status.

These functions run in the worker. They make their own tensors and never see a user's.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch

from autoflash.device import Device, DeviceKind
from autoflash.errors import NoKernelError, RenderError, UnsupportedError
from autoflash.evaluate.benchmark import Call, benchmark, interleaved, make_call
from autoflash.evaluate.verify import verify
from autoflash.problem import Form, Problem
from autoflash.runtime.executable import Executable
from autoflash.trial import Level, Measurement, Resources, Stage, Status, Verification
from autoflash.variant import Variant

Binder = Callable[[Form, Variant, Device], Executable]

DEFAULT_BINDER = "autoflash.runtime.bind:bind"
"""``module:function`` that makes executables; tests name another to inject faulty candidates."""

_SCREEN_MS = 30.0
_FINAL_MS = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of evaluating a variant.

    Attributes:
        status: CORRECT, or how it failed.
        detail: The reason in one line; empty when correct.
        verification: The comparison made; None where it did not come to one.
        measurement: The timing; None unless one was asked for and the variant is correct.
        resources: As compiled; None where nothing was.
        source_digest: Of the rendered text; empty for vendor kernels and where there is none.
        poisoned: The process's device context is unusable after it.
    """

    status: Status
    detail: str = ""
    verification: Verification | None = None
    measurement: Measurement | None = None
    resources: Resources | None = None
    source_digest: str = ""
    poisoned: bool = False


def screen(problem: Problem, variant: Variant, device: Device, binder: str = DEFAULT_BINDER) -> Outcome:
    """Verify a variant on the specialisation that will be timed and an irregular shape; time it if it passes."""

    def work(executable: Executable) -> Outcome:
        verification = verify(executable, problem, Level.SCREEN, device=device)
        if not verification.passed:
            return _rejected(verification)
        call = make_call(executable, problem, device)
        measurement = benchmark(call, device, stage=Stage.SCREEN, min_ms=_SCREEN_MS)
        return _timed(Outcome(status=Status.CORRECT, verification=verification), measurement)

    return _guarded(problem, variant, device, binder, work)


def verify_full(
    problem: Problem, inside: Problem | None, variant: Variant, device: Device, binder: str = DEFAULT_BINDER
) -> Outcome:
    """Verify a variant on the full grid, and on a problem with odd lengths inside the same cell."""

    def work(executable: Executable) -> Outcome:
        verification = verify(executable, problem, Level.FULL, device=device)
        if verification.passed and inside is not None:
            verification = _both(verification, verify(executable, inside, Level.SCREEN, device=device))
        if not verification.passed:
            return _rejected(verification)
        return Outcome(status=Status.CORRECT, verification=verification)

    return _guarded(problem, variant, device, binder, work)


def rerank(
    problem: Problem, variants: Sequence[Variant], device: Device, run: str, binder: str = DEFAULT_BINDER
) -> list[Outcome]:
    """Time finalists in turns. One that fails has a status instead of a time; the others go on without it."""
    calls: dict[int, Call] = {}
    outcomes: list[Outcome] = []
    for index, variant in enumerate(variants):

        def work(executable: Executable, index: int = index) -> Outcome:
            call = make_call(executable, problem, device)
            call()
            calls[index] = call
            return Outcome(status=Status.CORRECT)

        outcomes.append(_guarded(problem, variant, device, binder, work))
        if outcomes[-1].poisoned:
            return [*outcomes, *(_untried(outcomes[-1]) for _ in variants[index + 1 :])]
    measurements = interleaved(list(calls.values()), device, stage=Stage.FINAL, run=run, min_ms=_FINAL_MS)
    for index, measurement in zip(calls, measurements, strict=True):
        outcomes[index] = _timed(outcomes[index], measurement)
    return outcomes


def prepare(device: Device) -> None:
    """Open the device, so that no candidate's time-out pays for it."""
    torch.zeros(1, device=device.torch_device).item()


def _guarded(
    problem: Problem, variant: Variant, device: Device, binder: str, work: Callable[[Executable], Outcome]
) -> Outcome:
    """Run one step on one candidate. The one place where anything that it raises becomes a status."""
    executable: Executable | None = None
    try:
        executable = _resolve(binder)(Form.of(problem), variant, device)
        outcome = work(executable)
    except Exception as error:
        outcome = Outcome(status=_status_of(error), detail=_one_line(error), poisoned=_is_poisoned(device))
        if isinstance(error, torch.OutOfMemoryError) and not outcome.poisoned:
            torch.cuda.empty_cache()
    if executable is None or outcome.poisoned:
        return outcome
    return replace(outcome, resources=executable.resources(), source_digest=executable.source_digest)


def _resolve(binder: str) -> Binder:
    module, _, name = binder.partition(":")
    return cast(Binder, getattr(importlib.import_module(module), name))


def _rejected(verification: Verification) -> Outcome:
    """Of a kernel that did not pass: it computes something else, or it refused every problem."""
    if not verification.checks:
        return Outcome(status=Status.CONSTRAINTS, detail=verification.detail)
    return Outcome(status=Status.CORRECTNESS, detail=verification.detail, verification=verification)


def _timed(outcome: Outcome, measurement: Measurement) -> Outcome:
    """The outcome with its time; a time that is none is a failure."""
    if 0.0 < measurement.median_us < math.inf:
        return replace(outcome, measurement=measurement)
    return replace(outcome, status=Status.RUNTIME, detail=f"a time of {measurement.median_us} us cannot be")


def _both(one: Verification, other: Verification) -> Verification:
    worse = max((one, other), key=lambda verification: (not verification.passed, verification.worst_ratio))
    return replace(
        one,
        passed=one.passed and other.passed,
        worst_ratio=worse.worst_ratio,
        detail=worse.detail,
        checks=one.checks + other.checks,
    )


def _untried(cause: Outcome) -> Outcome:
    return Outcome(status=Status.RUNTIME, detail=f"not timed: an earlier kernel failed with {cause.detail}")


def _status_of(error: Exception) -> Status:
    if isinstance(error, (NoKernelError, UnsupportedError)):
        return Status.CONSTRAINTS
    # By name, since Triton need not be installed: its compiler raises CompilationError, and plain RuntimeError when
    # a pass of MLIR fails.
    if isinstance(error, RenderError) or "Compilation" in type(error).__name__ or "PassManager" in str(error):
        return Status.COMPILE
    return Status.RUNTIME


def _one_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0]}"[:500] if lines else type(error).__name__


def _is_poisoned(device: Device) -> bool:
    """Whether the context still works: an illegal access fails every later call of the process."""
    if device.kind is DeviceKind.CPU:
        return False
    try:
        torch.cuda.synchronize(device.index)
    except RuntimeError:
        return True
    return False
