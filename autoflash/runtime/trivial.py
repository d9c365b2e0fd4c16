"""The answer where there is nothing to launch: no query, or no key that one could see.

Packed or not, a tensor without rows makes it so: the other one's rows get zeros, wherever its sequences lie.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from autoflash.runtime.executable import NO_EXTRAS, Extras, ForwardCall
from autoflash.runtime.layouts import Operand


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
        return out.zero_(), lse.fill_(-math.inf)

    return call


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
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of zero."""
    dq, dk, dv = (
        torch.zeros_like(tensor) if given is None else given.zero_() for tensor, given in ((q, dq), (k, dk), (v, dv))
    )
    return dq, dk, dv
