"""A binder whose portable kernels misbehave on purpose, by the numbers of their variant.

Give it to a worker as ``tests.faults:bind``. Variants that take 4 heads per step have a fault; all others are good.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

from torch import Tensor

from autoflash.device import Device
from autoflash.evaluate.evaluator import Outcome
from autoflash.evaluate.isolated import IsolatedEvaluator, TimeLimits
from autoflash.problem import Form, Problem
from autoflash.runtime.bind import bind as real_bind
from autoflash.runtime.executable import (
    NO_EXTRAS,
    NO_TERMS,
    BackwardCall,
    Executable,
    Extras,
    ForwardCall,
    TermGradients,
)
from autoflash.trial import Resources, Status
from autoflash.variant import Family, Variant

FAULTS: dict[str, Status] = {
    "raise": Status.RUNTIME,
    "exit": Status.RUNTIME,
    "hang": Status.TIMEOUT,
    "nan": Status.CORRECTNESS,
    "wrong_last_rows": Status.CORRECTNESS,
    "overrun": Status.CORRECTNESS,
    "compiler": Status.COMPILE,
    "memory": Status.RUNTIME,
}
"""Every fault, and the status that it must be recorded with."""


def fault_of(variant: Variant) -> str | None:
    """The fault of a variant; None for a good one."""
    if variant.family is not Family.TORCH_TILED or variant.config["heads_per_step"] != 4:
        return None
    index = (
        (variant.config["block_m"] != 64)
        + 2 * (variant.config["block_n"] != 64)
        + 4 * (variant.structure["loop_order"] != "query_outer")
    )
    return list(FAULTS)[index]


def bind(form: Form, variant: Variant, device: Device) -> Executable:
    """As ``runtime.bind.bind``, with faults."""
    executable = real_bind(form, variant, device)
    fault = fault_of(variant)
    return executable if fault is None else Faulty(executable, fault)


def bind_only_failures(form: Form, variant: Variant, device: Device) -> Executable:
    """Nothing works here but vendor kernels: as on a device whose memory is full."""
    if variant.family is Family.VENDOR:
        return real_bind(form, variant, device)
    raise MemoryError("out of memory")


class Impatient(IsolatedEvaluator):
    """Waits long for candidates that are only slow, as on a busy machine, and not for one that hangs."""

    def __init__(self, device: Device) -> None:
        super().__init__(device, binder=f"{__name__}:bind", limits=TimeLimits(screen_s=300.0))

    def screen(self, problem: Problem, variant: Variant) -> Outcome:
        patient = self._limits
        if fault_of(variant) == "hang":
            self._limits = TimeLimits(screen_s=2.0)
        outcome = super().screen(problem, variant)
        self._limits = patient
        return outcome


class CompilationError(Exception):
    """Named as Triton's."""


@dataclass(frozen=True)
class Faulty:
    """An executable that does one thing wrong."""

    good: Executable
    fault: str

    @property
    def variant(self) -> Variant:
        return self.good.variant

    @property
    def source_digest(self) -> str:
        return self.good.source_digest

    def why_not(self, problem: Problem, *tensors: Tensor) -> str | None:
        return self.good.why_not(problem, *tensors)

    def is_loaded(self, problem: Problem, *tensors: Tensor, extras: Extras = NO_EXTRAS) -> bool:
        return self.good.is_loaded(problem, *tensors, extras=extras)

    def resources(self) -> Resources | None:
        return self.good.resources()

    def prepare_forward(
        self, problem: Problem, q: Tensor, k: Tensor, v: Tensor, scale: float, extras: Extras = NO_EXTRAS
    ) -> ForwardCall:
        call = self.good.prepare_forward(problem, q, k, v, scale, extras)

        def faulty(
            q: Tensor,
            k: Tensor,
            v: Tensor,
            out: Tensor | None = None,
            lse: Tensor | None = None,
            extras: Extras = NO_EXTRAS,
        ) -> tuple[Tensor, Tensor]:
            self._before()
            result = call(q, k, v, out, lse, extras)
            self._after(result[0])
            return result

        return faulty

    def prepare_backward(
        self,
        problem: Problem,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        dout: Tensor,
        scale: float,
        extras: Extras = NO_EXTRAS,
    ) -> BackwardCall:
        call = self.good.prepare_backward(problem, q, k, v, out, dout, scale, extras)

        def faulty(
            q: Tensor,
            k: Tensor,
            v: Tensor,
            out: Tensor,
            lse: Tensor,
            dout: Tensor,
            dlse: Tensor | None = None,
            dq: Tensor | None = None,
            dk: Tensor | None = None,
            dv: Tensor | None = None,
            extras: Extras = NO_EXTRAS,
            terms: TermGradients = NO_TERMS,
        ) -> tuple[Tensor, Tensor, Tensor]:
            self._before()
            result = call(q, k, v, out, lse, dout, dlse, dq, dk, dv, extras, terms)
            self._after(result[0])
            return result

        return faulty

    def _before(self) -> None:
        if self.fault == "raise":
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        if self.fault == "compiler":
            raise CompilationError("at 12:8: unsupported layout")
        if self.fault == "memory":
            raise MemoryError("out of memory")
        if self.fault == "exit":
            os._exit(9)
        if self.fault == "hang":
            time.sleep(600)

    def _after(self, result: Tensor) -> None:
        if self.fault == "nan" and result.numel():
            result[..., :1, :1] = float("nan")
        if self.fault == "wrong_last_rows":
            result[..., -16:, :] *= 1.5
        if self.fault == "overrun":
            past = result.storage_offset() + sum(
                (n - 1) * s for n, s in zip(result.shape, result.stride(), strict=True)
            )
            result.as_strided((1,), (1,), past + 1).fill_(1.0)
