"""Executables that compute in plain torch and fail on demand, and a dispatcher that uses them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from autoflash.device import Device
from autoflash.dispatch.ladder import Here
from autoflash.dispatch.resolve import Resolver
from autoflash.dispatch.table import Origin, Table
from autoflash.evaluate import reference
from autoflash.ops import CALLS, allocate
from autoflash.problem import Form, Mask, Pass, Problem
from autoflash.runtime.executable import (
    NO_EXTRAS,
    NO_TERMS,
    BackwardCall,
    Executable,
    Extras,
    ForwardCall,
    TermGradients,
)
from autoflash.trial import Decision, Environment, Level, Resources, Verification
from autoflash.variant import Family, Variant
from tests.factories import DIGEST, make_device, make_environment, make_verification

CPU = make_device("cpu")
CPU_HERE = Here(device=CPU, environment=make_environment(device=CPU))


def scores(problem: Problem, q: Tensor, k: Tensor, scale: float) -> Tensor:
    k = k.repeat_interleave(problem.group, 1)
    result = q.double() @ k.double().transpose(-1, -2) * scale
    if problem.causal:
        rows, columns = torch.arange(problem.seqlen_q)[:, None], torch.arange(problem.seqlen_k)
        result = result.masked_fill(columns > rows + problem.diagonal, float("-inf"))
    return result


@dataclass
class FakeExecutable:
    """Attention in float64 under any variant's name."""

    variant: Variant
    source_digest: str = DIGEST
    refuses: str | None = None
    breaks: Exception | None = None
    loaded: bool = True
    prepared: int = 0
    calls: int = 0

    def why_not(self, problem: Problem, *tensors: Tensor) -> str | None:
        return self.refuses

    def is_loaded(self, problem: Problem, *tensors: Tensor, extras: Extras = NO_EXTRAS) -> bool:
        return self.loaded

    def resources(self) -> Resources | None:
        return None

    def prepare_forward(
        self, problem: Problem, q: Tensor, k: Tensor, v: Tensor, scale: float, extras: Extras = NO_EXTRAS
    ) -> ForwardCall:
        self.prepared += 1
        if self.breaks is not None:
            raise self.breaks
        differentiable = self.variant.family is Family.VENDOR

        def call(
            q: Tensor,
            k: Tensor,
            v: Tensor,
            out: Tensor | None = None,
            lse: Tensor | None = None,
            extras: Extras = NO_EXTRAS,
        ) -> tuple[Tensor, Tensor]:
            self.calls += 1
            with contextlib.nullcontext() if differentiable else torch.no_grad():
                s = scores(problem, q, k, scale)
                p = torch.softmax(s, -1).nan_to_num(0.0)
                result = (p @ v.double().repeat_interleave(problem.group, 1)).to(q.dtype)
                found = torch.logsumexp(s, -1).float()
            if differentiable:
                # As torch's kernels: their own outputs, and no LSE.
                return result, q.new_empty(0, dtype=torch.float32)
            if out is None:
                out = allocate(q, q.shape[1], q.shape[2], v.shape[3])
            return (result if out is None else out.copy_(result)), (found if lse is None else lse.copy_(found))

        return call

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
        self.prepared += 1
        if self.breaks is not None:
            raise self.breaks

        def call(
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
            self.calls += 1
            p = torch.exp(scores(problem, q, k, scale) - lse.double()[..., None]).nan_to_num(0.0)
            keys, values = (x.double().repeat_interleave(problem.group, 1) for x in (k, v))
            delta = (dout.double() * out.double()).sum(-1, keepdim=True)
            extra = 0.0 if dlse is None else dlse.double()[..., None]
            ds = p * (dout.double() @ values.transpose(-1, -2) - delta + extra) * scale
            grouped = [
                ds @ keys,
                (ds.transpose(-1, -2) @ q.double()).unflatten(1, (-1, problem.group)).sum(2),
                (p.transpose(-1, -2) @ dout.double()).unflatten(1, (-1, problem.group)).sum(2),
            ]
            found = [g.to(q.dtype) for g in grouped]
            into = [x if given is None else given.copy_(x) for x, given in zip(found, (dq, dk, dv), strict=True)]
            return into[0], into[1], into[2]

        return call


@dataclass
class FakeKernels:
    """Binds every variant to a fake; ``made`` holds them, ``scripts`` says which fail and how."""

    scripts: dict[Variant, dict[str, object]] = field(default_factory=dict)
    made: dict[tuple[Pass, Mask, Variant], FakeExecutable] = field(default_factory=dict)
    verified: list[Variant] = field(default_factory=list)
    passes: bool = True
    lock: threading.Lock = field(default_factory=threading.Lock)

    def bind(self, form: Form, variant: Variant, device: Device) -> Executable:
        with self.lock:
            script = dict(self.scripts.get(variant, {}))
            if "unbindable" in script:
                raise RuntimeError(str(script["unbindable"]))
            made = self.made.setdefault((form.op, form.mask, variant), FakeExecutable(variant))
            for name, value in script.items():
                setattr(made, name, value)
            return made

    def verify(self, executable: Executable, problem: Problem) -> Verification:
        self.verified.append(executable.variant)
        return make_verification(level=Level.SCREEN, passed=self.passes, detail="last row is wrong")

    def resolver(self, *decisions: Decision, here: Here = CPU_HERE) -> Resolver:
        return Resolver(
            self.verify,
            loader=lambda: Table.from_decisions(decisions, Origin.DATABASE),
            binder=self.bind,
            here=lambda device: here,
        )

    def ran(self, op: Pass = Pass.FORWARD) -> list[Variant]:
        return [made.variant for key, made in self.made.items() if made.calls and key[0] is op]


@contextlib.contextmanager
def dispatching(kernels: FakeKernels, *decisions: Decision, here: Here = CPU_HERE) -> Iterator[Resolver]:
    """Let ``autoflash.attention`` choose among fakes."""
    before = CALLS.resolver
    CALLS.reset()
    CALLS.resolver = kernels.resolver(*decisions, here=here)
    try:
        yield CALLS.resolver
    finally:
        CALLS.reset()
        CALLS.resolver = before


def cpu_environment(**changes: object) -> Environment:
    return make_environment(device=CPU, **changes)  # type: ignore[arg-type]


def exact(q: Tensor, k: Tensor, v: Tensor, **options: object) -> Tensor:
    """The float64 specification in the dtype of q."""
    out = reference.attention(q, k, v, **options)  # type: ignore[arg-type]
    assert isinstance(out, Tensor)
    return out.to(q.dtype)
