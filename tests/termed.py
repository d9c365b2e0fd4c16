"""Attention with terms of scores as a formula for autograd: it shares no code with the specification."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
TOLERANCE = {torch.float16: 4e-3, torch.bfloat16: 3e-2, torch.float32: 1e-5}


def formula(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool | str = False,
    window: tuple[int, int] | None = None,
    softcap: float = 0.0,
    mask: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    bias: Tensor | None = None,
    sinks: Tensor | None = None,
    keep: Tensor | float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Out [B, H, M, D_V] and LSE [B, H, M] of tensors [B, H, S, D]; ``keep`` is the factor of each probability."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    s = q @ k.mT * q.shape[3] ** -0.5
    if softcap:
        s = softcap * torch.tanh(s / softcap)
    m, n = s.shape[2:]
    positions = torch.arange(m)[:, None] + (0 if causal == "top_left" else n - m)
    distance = torch.arange(n)[None] - positions
    if alibi_slopes is not None:
        s = s - alibi_slopes.view(-1, s.shape[1], 1, 1) * distance.abs()
    if bias is not None:
        s = s + bias
    if mask is not None:
        s = s.masked_fill(~mask, -torch.inf) if mask.dtype is torch.bool else s + mask.double()
    if causal:
        s = s.masked_fill(distance > 0, -torch.inf)
    if window is not None:
        s = s.masked_fill((distance < -window[0]) | (distance > window[1]), -torch.inf)
    if sinks is None:
        # So that a row without keys gives 0: a score that weighs nothing beside any other.
        sinks = s.new_full((s.shape[1],), -1e30)
    s = torch.cat([s, sinks[:, None, None].expand(*s.shape[:3], 1)], dim=-1)
    lse = torch.logsumexp(s, dim=-1)
    return (torch.softmax(s, dim=-1)[..., :-1] * keep) @ v, lse.masked_fill(lse < -1e29, -torch.inf)


def derived(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, dlse: Tensor, terms: dict[str, Tensor], how: dict[str, Any]
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, ...]]:
    """Results of the formula in float64, and its gradients by q, k, v and the terms, in that order."""
    leaves = [x.detach().double().requires_grad_() for x in (q, k, v, *terms.values())]
    out, lse = formula(*leaves[:3], **dict(zip(terms, leaves[3:], strict=True)), **how)
    found = torch.autograd.grad((out, lse), leaves, (dout.double(), dlse.double()), allow_unused=True)
    return (out, lse), tuple(torch.zeros_like(x) if g is None else g for x, g in zip(leaves, found, strict=True))
