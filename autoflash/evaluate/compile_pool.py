"""Compilation in parallel on CPU cores, each in a process that may crash or hang."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from types import MappingProxyType, TracebackType

from autoflash.device import Device
from autoflash.evaluate.expected import masks_of
from autoflash.evaluate.grid import Case, reduced_seqlen
from autoflash.evaluate.inputs import Memory
from autoflash.evaluate.worker import Failure, Worker
from autoflash.evaluate.worker_pool import WorkerPool
from autoflash.problem import Problem
from autoflash.runtime.backward_features import PlacedMask
from autoflash.runtime.compile import CompileOutcome, compile_variant
from autoflash.trial import Status
from autoflash.variant import Variant

_TIMEOUT_S = 90.0


def default_processes() -> int:
    """As many as there are cores, less two for the tuner and its GPU worker; at least one."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores - 2)


class CompilePool:
    """Compiles variants in the order in which they are submitted; what was submitted before is not compiled again.

    A thread for each process waits for it; the processes start when there is work for them.
    """

    def __init__(self, processes: int | None = None, *, timeout_s: float = _TIMEOUT_S) -> None:
        self.processes = processes or default_processes()
        self._timeout_s = timeout_s
        self._pool = WorkerPool(self.processes, name="compile")
        self._known: dict[tuple[object, ...], Future[CompileOutcome]] = {}

    def __enter__(self) -> CompilePool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def submit(
        self,
        problem: Problem,
        variant: Variant,
        device: Device,
        scale_sign: int = 1,
        masks: Mapping[str, PlacedMask] = MappingProxyType({}),
    ) -> Future[CompileOutcome]:
        """Compile a variant, as :func:`compile_variant` does; at once where there is nothing to compile."""
        if not variant.family.uses_triton:
            done: Future[CompileOutcome] = Future()
            done.set_result(compile_variant(problem, variant, device))
            return done
        # Batch, kv heads and how long a sequence is change no kernel; divisibility and the diagonal's sign may.
        like = problem.replace(
            batch=1,
            heads=problem.group,
            kv_heads=1,
            seqlen_q=reduced_seqlen(problem.seqlen_q),
            seqlen_k=reduced_seqlen(problem.seqlen_k),
        )
        key = (like, variant, device, scale_sign, problem.diagonal >= 0, tuple(masks.items()))
        if key not in self._known or self._known[key].cancelled():
            compile_it = functools.partial(self._compile, problem, variant, device, scale_sign, dict(masks))
            self._known[key] = self._pool.submit(compile_it)
        return self._known[key]

    def prepare(self, cases: Iterable[Case], variant: Variant, device: Device) -> Callable[[], None]:
        """Compile what a verification on these cases will launch; failures will be seen there.

        Returns:
            Waits until all of it is compiled.
        """
        futures = [
            self.submit(
                case.problem,
                variant,
                device,
                (case.score_scale > 0) - (case.score_scale < 0),
                masks_of(case),
            )
            for case in cases
            if variant.family.uses_triton
            and case.memory is not Memory.STRIDED
            and case.problem.seqlen_q * case.problem.seqlen_k
        ]
        return functools.partial(_wait_for, futures)

    def close(self) -> None:
        """Forget what waits, kill what runs."""
        self._pool.close()

    def _compile(
        self,
        problem: Problem,
        variant: Variant,
        device: Device,
        scale_sign: int,
        masks: dict[str, PlacedMask],
        worker: Worker,
    ) -> CompileOutcome:
        outcome = worker.call(compile_variant, self._timeout_s, problem, variant, device, scale_sign, masks)
        if isinstance(outcome, Failure):
            status = Status.COMPILE if outcome.status is Status.RUNTIME else outcome.status
            return CompileOutcome(status=status, detail=outcome.detail)
        return outcome


def _wait_for(futures: Sequence[Future[CompileOutcome]]) -> None:
    wait(futures)
