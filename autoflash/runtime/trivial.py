"""The answer where there is nothing to launch: no query, or no key that one could see.

Packed or not, a tensor without rows makes it so: the other one's rows get zeros, wherever its sequences lie. Sinks are
seen without keys, by the rows of sequences alone.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from autoflash.runtime.executable import NO_EXTRAS, NO_TERMS, Extras, ForwardCall, TermGradients
from autoflash.runtime.layouts import Operand
from autoflash.runtime.term_gradients import sinks_gradient


def empty_forward(planned: Operand) -> ForwardCall:
    """A call that gives zeros in the planned layout and a log-sum-exp of minus infinity."""

    def call(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        extras: Extras = NO_EXTRAS,
    ) -> tuple[Tensor, Tensor]:
        if out is None:
            out = torch.empty_strided(planned.shape, planned.strides, dtype=q.dtype, device=q.device)
        if lse is None:
            lse = torch.empty(planned.shape[:3], dtype=torch.float32, device=q.device)
        return out.zero_(), fill_empty(lse, extras)

    return call


def fill_empty(lse: Tensor, extras: Extras) -> Tensor:
    """Write the log-sum-exp [B, H, M] of rows without keys: the sink, where there is one, else minus infinity."""
    if extras.sinks is None:
        return lse.fill_(-math.inf)
    lse.copy_(extras.sinks[:, None].expand(lse.shape))
    if extras.cu_seqlens_q is not None:
        behind = torch.arange(lse.shape[2], device=lse.device) >= extras.cu_seqlens_q[-1]
        lse.masked_fill_(behind, -math.inf)
    return lse


def empty_backward(
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
    """Gradients of zero, but for that of sinks, which are the LSE."""
    for term in (terms.bias, terms.alibi_slopes, *terms.params):
        if term is not None:
            term.zero_()
    if terms.sinks is not None and extras.sinks is not None:
        sinks_gradient(extras.sinks, lse, torch.zeros_like(lse) if dlse is None else -dlse, terms.sinks)
    dq, dk, dv = (
        torch.zeros_like(tensor) if given is None else given.zero_() for tensor, given in ((q, dq), (k, dk), (v, dv))
    )
    return dq, dk, dv
