"""The evaluator that the tuner uses: each request in a worker process, under the device's lock."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import ParamSpec, Protocol, TypeVar

from autoflash.device import Device
from autoflash.evaluate import evaluator
from autoflash.evaluate.benchmark import device_lock
from autoflash.evaluate.evaluator import DEFAULT_BINDER, Outcome
from autoflash.evaluate.worker import Failure, Worker
from autoflash.problem import Problem
from autoflash.variant import Variant

P = ParamSpec("P")
T = TypeVar("T")


class Evaluator(Protocol):
    """Tries variants: on a device, or in a recorded table."""

    def screen(self, problem: Problem, variant: Variant) -> Outcome:
        """Verify at the first level, then time."""
        ...

    def verify_full(self, problem: Problem, inside: Problem | None, variant: Variant) -> Outcome:
        """Verify on the full grid; no timing."""
        ...

    def rerank(self, problem: Problem, variants: Sequence[Variant], run: str) -> list[Outcome]:
        """Time in turns; one outcome for each variant, in order."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeLimits:
    """Wall-clock seconds after which a worker is killed, its start and the wait for the device not included.

    Attributes:
        screen_s: For one candidate; also for each of a comparison.
        verify_s: For the full grid.
        rerank_s: For a comparison of many.
    """

    screen_s: float = 60.0
    verify_s: float = 300.0
    rerank_s: float = 300.0


class IsolatedEvaluator:
    """Evaluates in a worker process that is replaced when it crashes, hangs, or poisons its device context."""

    def __init__(self, device: Device, *, binder: str = DEFAULT_BINDER, limits: TimeLimits | None = None) -> None:
        self._device = device
        self._binder = binder
        self._limits = limits or TimeLimits()
        self._worker = Worker()

    def __enter__(self) -> IsolatedEvaluator:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def pid(self) -> int | None:
        """Process id of the worker; None while there is none."""
        return self._worker.pid

    def screen(self, problem: Problem, variant: Variant) -> Outcome:
        """Verify at the first level, then time."""
        reply = self._call(evaluator.screen, self._limits.screen_s, problem, variant, self._device, self._binder)
        return self._outcome(reply)

    def verify_full(self, problem: Problem, inside: Problem | None, variant: Variant) -> Outcome:
        """Verify on the full grid; no timing."""
        reply = self._call(
            evaluator.verify_full, self._limits.verify_s, problem, inside, variant, self._device, self._binder
        )
        return self._outcome(reply)

    def rerank(self, problem: Problem, variants: Sequence[Variant], run: str) -> list[Outcome]:
        """Time in turns; one outcome for each variant, in order."""
        # A few take no longer than to screen them would.
        limit_s = min(self._limits.rerank_s, self._limits.screen_s * len(variants))
        reply = self._call(evaluator.rerank, limit_s, problem, tuple(variants), self._device, run, self._binder)
        if isinstance(reply, Failure):
            return [self._outcome(reply) for _ in variants]
        if any(outcome.poisoned for outcome in reply):
            self._worker.restart()
        return reply

    def close(self) -> None:
        """Kill the worker."""
        self._worker.close()

    def _call(self, function: Callable[P, T], timeout_s: float, /, *args: P.args, **kwargs: P.kwargs) -> T | Failure:
        # The device is opened before the lock is asked for, and the clock of the time-out runs under the lock only.
        if self._worker.pid is None:
            failure = self._worker.call(evaluator.prepare, self._limits.verify_s, self._device)
            if isinstance(failure, Failure):
                return failure
        with device_lock(self._device):
            reply = self._worker.call(function, timeout_s, *args, **kwargs)
        if isinstance(reply, Failure):
            # Also where the process lives: what was raised outside of a candidate may have left the device unusable.
            self._worker.restart()
        return reply

    def _outcome(self, reply: Outcome | Failure) -> Outcome:
        if isinstance(reply, Failure):
            return Outcome(status=reply.status, detail=reply.detail)
        if reply.poisoned:
            self._worker.restart()
        return reply
