"""The one shape that every way of computing attention has, whether generated or a vendor's.

The verification harness, the benchmark and the dispatcher all run kernels through it, so that what was verified and
timed is what runs. Tensors are always views of layout [B, H, S, D]; their strides are free. Packed sequences are views
[1, H, T, D], with an LSE of [1, H, T]; rows behind the last sequence get 0 (LSE -inf), and so do their gradients.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from autoflash.errors import NoKernelError
from autoflash.problem import Problem
from autoflash.trial import Resources
from autoflash.variant import Variant


class Extras(NamedTuple):
    """The tensors beside q, k and v that some problems have. A plain problem has none.

    A mask has the strides that it was prepared with, or any others of a call prepared anew.

    Attributes:
        mask: [B, H, M, N], expanded to that by strides of 0; bool (True takes part), or fp16, bf16, fp32 (added to the
            scores after the softcap).
        cu_seqlens_q, cu_seqlens_k: Where packed sequences begin, and the end of the last: [B + 1], int32, contiguous.
        rng: Seed and offset of the dropout, [2], int64, contiguous, on the device.
        sinks: A score of each head without a key, [H], float32, contiguous.
        bias: Added to the scores after the softcap, fp16, bf16 or fp32; of rank 4, and not expanded: each size is that
            of [B, H, M, N], or 1.
        alibi_slopes: [B, H] or [1, H], float32, contiguous; of packed sequences, B is their number.
        query_blocks: For each block of queries a list of the blocks of keys that a block mask shows it, [B or 1, H or
            1, M blocks, N blocks + 2], int32, contiguous: :mod:`autoflash.runtime.block_map` says how.
        key_blocks: Likewise of blocks of queries for each block of keys.
        params: What the problem's expressions read, by name: float32, int32 or bool, with the strides that the call
            was prepared with.
    """

    mask: Tensor | None = None
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    rng: Tensor | None = None
    sinks: Tensor | None = None
    bias: Tensor | None = None
    alibi_slopes: Tensor | None = None
    query_blocks: Tensor | None = None
    key_blocks: Tensor | None = None
    params: tuple[Tensor, ...] = ()

    def replaced(self, terms: Mapping[str, Tensor]) -> Extras:
        """The same with other tensors for some of the fields of one."""
        return self._replace(**terms)  # type: ignore[arg-type]  # which names they are is not known here

    @property
    def sequences(self) -> int | None:
        """How many sequences are packed; None where none are."""
        return None if self.cu_seqlens_q is None else self.cu_seqlens_q.shape[0] - 1

    @property
    def flat(self) -> tuple[Tensor | None, ...]:
        """Every field of one tensor, and behind them the parameters."""
        single = tuple(getattr(self, name) for name in SINGLE)
        return (*single, *self.params)

    @classmethod
    def of_flat(cls, tensors: Sequence[Tensor | None]) -> Extras:
        """What :attr:`flat` gave."""
        params = tuple(tensor for tensor in tensors[len(SINGLE) :] if tensor is not None)
        return cls(**dict(zip(SINGLE, tensors, strict=False)), params=params)


SINGLE = tuple(name for name in Extras._fields if name != "params")
"""The extras that are one tensor each."""

NO_EXTRAS = Extras()


class TermGradients(NamedTuple):
    """Gradients of those extras that have one, which a backward writes where they are given.

    Attributes:
        sinks: [H], float32, contiguous.
        bias: Of the bias' shape and type, contiguous: summed over what it is broadcast over.
        alibi_slopes: Of the shape of the slopes, float32, contiguous.
        params: One for each of the parameters, of its shape, float32 and contiguous, or None; empty where none is
            wanted.
    """

    sinks: Tensor | None = None
    bias: Tensor | None = None
    alibi_slopes: Tensor | None = None
    params: tuple[Tensor | None, ...] = ()

    @classmethod
    def unwritten(cls, extras: Extras, names: Container[str]) -> TermGradients:
        """Gradients of the terms of these names, to be written."""
        terms = {name: getattr(extras, name) for name in cls._fields if name in names}
        return cls(**{name: term.new_empty(term.shape) for name, term in terms.items()})

    @classmethod
    def asked_by(cls, problem: Problem, extras: Extras) -> TermGradients:
        """All that a problem may ask for, to be written."""
        made = cls.unwritten(extras, asked_terms(problem))
        wanted = [problem.params_gradient and tensor.dtype.is_floating_point for tensor in extras.params]
        return made._replace(params=unwritten_params(extras, wanted))

    @property
    def present(self) -> dict[str, Tensor]:
        """Those that there are, by name: ``sinks``, and ``param_0`` for the first of the parameters."""
        named = {name: getattr(self, name) for name in SINGLE_TERMS}
        named |= {f"param_{place}": gradient for place, gradient in enumerate(self.params)}
        return {name: gradient for name, gradient in named.items() if gradient is not None}


SINGLE_TERMS = tuple(name for name in TermGradients._fields if name != "params")
"""The gradients of extras that are one tensor each."""

NO_TERMS = TermGradients()


def asked_terms(problem: Problem) -> tuple[str, ...]:
    """The extras of one tensor each whose gradients a problem may ask for."""
    asked = {"sinks": problem.sinks, "bias": problem.bias_gradient, "alibi_slopes": problem.alibi_gradient}
    return tuple(name for name, is_asked in asked.items() if is_asked)


def unwritten_params(extras: Extras, wanted: Sequence[bool]) -> tuple[Tensor | None, ...]:
    """Gradients of those parameters that are wanted, to be written; nothing where none is."""
    if not any(wanted):
        return ()
    return tuple(
        torch.empty_like(tensor, memory_format=torch.contiguous_format) if is_wanted else None
        for tensor, is_wanted in zip(extras.params, wanted, strict=True)
    )


class ForwardCall(Protocol):
    """A forward pass prepared for tensors of one shape, stride, dtype, device and 16-byte alignment."""

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        extras: Extras = NO_EXTRAS,
    ) -> tuple[Tensor, Tensor]:
        """Compute out [B, H, M, D_V] in q's dtype and lse [B, H, M] in float32 (natural log, -inf without keys).

        Outputs that are not given are allocated from torch, ``out`` in the memory order of q.
        """
        ...


class BackwardCall(Protocol):
    """A backward pass prepared for tensors of one shape, stride, dtype, device and 16-byte alignment."""

    def __call__(
        self,
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
        """Compute dq, dk, dv in the dtype of q from the gradients of out and, if given, of lse (float32).

        The gradients of extras are written to what is given in ``terms``.
        """
        ...


class Executable(Protocol):
    """A variant made ready for one device. Holds loaded kernels; thread-safe."""

    @property
    def variant(self) -> Variant:
        """What it runs."""
        ...

    @property
    def source_digest(self) -> str:
        """Digest of the rendered text; empty for vendor kernels."""
        ...

    def why_not(self, problem: Problem, *tensors: Tensor) -> str | None:
        """The precondition that these tensors (q, k, v, and dout for a backward) miss; None if it can run them."""
        ...

    def is_loaded(self, problem: Problem, *tensors: Tensor, extras: Extras = NO_EXTRAS) -> bool:
        """Whether a prepared call would need neither a compilation nor a module load (for CUDA-graph capture)."""
        ...

    def prepare_forward(
        self, problem: Problem, q: Tensor, k: Tensor, v: Tensor, scale: float, extras: Extras = NO_EXTRAS
    ) -> ForwardCall:
        """Compile and load what the call needs, and bind everything that does not change between calls."""
        ...

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
        """As :meth:`prepare_forward`; ``problem.op`` is backward."""
        ...

    def resources(self) -> Resources | None:
        """What the compiler said of the kernels loaded so far; None where nothing was compiled."""
        ...


def refuse_unable(executable: Executable, problem: Problem, *tensors: Tensor) -> None:
    """Let an executable prepare only what it can run.

    Raises:
        NoKernelError: where its ``why_not`` has something to say.
    """
    reason = executable.why_not(problem, *tensors)
    if reason is not None:
        raise NoKernelError(reason)
