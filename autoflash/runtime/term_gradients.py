"""Gradients of the terms of scores that need no kernel of their own, or are what a kernel's parts add up to."""

from __future__ import annotations

import math

import torch
from torch import Tensor

_LOG2_E = math.log2(math.e)


def sinks_gradient(sinks: Tensor, lse: Tensor, delta: Tensor, into: Tensor) -> None:
    """Write the gradient of sinks [H], float32: a sink's probability meets a value of 0, so that its own dp is 0.

    Args:
        sinks: [H], float32.
        lse: [B, H, M], natural; -inf in rows that have no sink, whose ``delta`` is not looked at.
        delta: [B, H, M], float32: what the softmax takes from dp, the gradient of LSE included.
        into: [H], float32.
    """
    shares = torch.exp(sinks[:, None] - lse.masked_fill(lse == -math.inf, math.inf))
    torch.sum((shares * -delta).masked_fill_(shares == 0.0, 0.0), dim=(0, 2), out=into)


def bias_gradient_of_sums(sums: Tensor, into: Tensor) -> None:
    """Write the gradient of a bias from the sums of each head.

    Args:
        sums: [B, H, M, 1] or [B, H, 1, N], float32.
        into: Of the bias' shape and type: where a size is 1, all are added up.
    """
    shared = [dim for dim in range(4) if into.shape[dim] != sums.shape[dim]]
    into.copy_(torch.sum(sums, dim=shared, keepdim=True) if shared else sums)


def slopes_gradient_of_sums(sums: Tensor, into: Tensor) -> None:
    """Write the gradient of slopes [B, H] or [1, H] from its shares [B, H, tiles], all float32."""
    each = torch.sum(sums, dim=2)
    into.copy_(each if into.shape[0] == each.shape[0] else torch.sum(each, dim=0, keepdim=True))


def sinks_gradient_of_rows(sinks: Tensor, log2_sum: Tensor, delta: Tensor, batch: int, into: Tensor) -> None:
    """As :func:`sinks_gradient`, from the workspaces of a backward, of which it writes over the first.

    Args:
        sinks: [H], float32.
        log2_sum: Base-2 log-sum-exp of the padded rows of B * H heads, contiguous; inf where there is no row.
        delta: Likewise; 0 where there is no row.
        batch: B of the tensors.
        into: [H], float32.
    """
    rows, deltas = (tensor.view(batch, len(sinks), -1) for tensor in (log2_sum, delta))
    shares = torch.sub((sinks * _LOG2_E)[:, None], rows, out=rows).exp2_().mul_(deltas)
    torch.sum(shares.neg_(), dim=(0, 2), out=into)
