"""The specification of attention: what every kernel is compared with. Float64, plain formulas, linear memory.

Query i stands at position i + Sk - Sq among the keys (bottom-right), or at i (top-left), and sees the keys up to its
position. A row that sees no key has output 0, log-sum-exp -inf and zero gradients.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Literal, overload

import torch
from torch import Tensor

from autoflash.errors import InvalidProblemError
from autoflash.problem import Alignment

Causal = bool | str

# 64 MiB of float64 scores at a time: S = 16384 with many heads fits beside the tensors that it belongs to.
_SCORES_AT_ONCE = 1 << 23


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: Causal = ...,
    scale: float | None = ...,
    return_lse: Literal[False] = ...,
) -> Tensor: ...
@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, causal: Causal = ..., scale: float | None = ..., return_lse: Literal[True]
) -> tuple[Tensor, Tensor]: ...
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, causal: Causal = False, scale: float | None = None, return_lse: bool = False
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact attention, computed in float64 from inputs of any dtype.

    Args:
        q: [B, H, M, D].
        k: [B, H_KV, N, D], where H is a multiple of H_KV.
        v: [B, H_KV, N, D_V].
        causal: False, ``"bottom_right"`` (the same as True) or ``"top_left"``.
        scale: Factor of the scores; 1/sqrt(D) by default.
        return_lse: Also return the natural log of the sum of exponentials of each row.

    Returns:
        The output [B, H, M, D_V] and, if asked, the log-sum-exp [B, H, M]; both float64.

    Raises:
        InvalidProblemError: if the shapes do not belong together, or ``causal`` names no alignment.
    """
    _check(q, k, v)
    diagonal, scale = _diagonal(causal, q, k), _scale(scale, q)
    keys, values = k.double(), v.double()
    out = q.new_empty((*q.shape[:3], v.shape[3]), dtype=torch.float64)
    lse = q.new_empty(q.shape[:3], dtype=torch.float64)

    for rows in _chunks(q, k):
        s = _scores(_grouped(q[:, :, rows].double(), k), keys, rows, diagonal, scale)  # [B, H_KV, G * m, N]
        row_lse = torch.logsumexp(s, dim=-1, keepdim=True)  # [B, H_KV, G * m, 1]
        out[:, :, rows] = _ungrouped(_probabilities(s, row_lse) @ values, q)
        lse[:, :, rows] = _ungrouped(row_lse, q).squeeze(-1)
    return (out, lse) if return_lse else out


def gradients(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    dlse: Tensor | None = None,
    *,
    causal: Causal = False,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Exact gradients of :func:`attention` by q, k and v, in float64.

    ``dout`` [B, H, M, D_V] is the gradient of the output and ``dlse`` [B, H, M] that of the log-sum-exp, if it was
    used; the rest is as in :func:`attention`.

    Returns:
        dq, dk and dv in the shapes of q, k and v; those of shared key/value heads are summed over their query heads.
    """
    _check(q, k, v)
    diagonal, scale = _diagonal(causal, q, k), _scale(scale, q)
    keys, values = k.double(), v.double()
    dq = torch.zeros_like(q, dtype=torch.float64, memory_format=torch.contiguous_format)
    dk = torch.zeros_like(k, dtype=torch.float64, memory_format=torch.contiguous_format)
    dv = torch.zeros_like(v, dtype=torch.float64, memory_format=torch.contiguous_format)

    for rows in _chunks(q, k):
        queries, douts = (_grouped(tensor[:, :, rows].double(), k) for tensor in (q, dout))
        s = _scores(queries, keys, rows, diagonal, scale)  # [B, H_KV, G * m, N]
        p = _probabilities(s, torch.logsumexp(s, dim=-1, keepdim=True))
        dp = douts @ values.mT
        ds = p * (dp - (p * dp).sum(dim=-1, keepdim=True))
        if dlse is not None:
            ds += p * _grouped(dlse[:, :, rows, None].double(), k)
        dq[:, :, rows] = _ungrouped(ds @ keys, q) * scale
        dk += ds.mT @ queries * scale
        dv += p.mT @ douts
    return dq, dk, dv


def plain(
    q: Tensor, k: Tensor, v: Tensor, *, causal: Causal = False, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """Attention as a user would write it in torch, every step rounded to the dtype of the inputs. Differentiable.

    Its error against the specification is the unit in which the errors of kernels are measured. Rows that see no key
    are set to 0 (and get zero gradients), where the formula itself would give NaN.

    Returns:
        The output in q's dtype, and the log-sum-exp [B, H, M] of the same scores, summed in float32.
    """
    _check(q, k, v)
    group = q.shape[1] // k.shape[1]
    s = (q @ k.repeat_interleave(group, dim=1).mT) * _scale(scale, q)  # [B, H, M, N]
    diagonal = _diagonal(causal, q, k)
    hidden = _hidden(slice(0, q.shape[2]), k.shape[2], diagonal, q.device)
    blind = hidden.all(dim=-1, keepdim=True)
    # A blind row stays unmasked: a softmax over nothing but -inf would send NaN into the gradients.
    p = torch.softmax(s.masked_fill(hidden & ~blind, -math.inf), dim=-1).masked_fill(blind, 0.0)
    lse = torch.logsumexp(s.float().masked_fill(hidden, -math.inf), dim=-1)
    return p @ v.repeat_interleave(group, dim=1), lse


def plain_gradients(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    dlse: Tensor | None = None,
    *,
    causal: Causal = False,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of :func:`plain` by autograd, in the dtype of the inputs."""
    leaves = [tensor.detach().requires_grad_() for tensor in (q, k, v)]
    out, lse = plain(*leaves, causal=causal, scale=scale)
    roots, seeds = ([out], [dout]) if dlse is None else ([out, lse], [dout, dlse])
    dq, dk, dv = torch.autograd.grad(roots, leaves, seeds)
    return dq, dk, dv


def magnitude(q: Tensor, k: Tensor, v: Tensor, *, causal: Causal = False, scale: float | None = None) -> Tensor:
    """What the rounding of the output is proportional to, [B, H, M, D_V] in float64.

    It is the sum that makes up the output with every term taken absolutely, and a probability counted as often as
    the terms of its score add up to: the rounding of a score is a relative error of its exponential.
    """
    _check(q, k, v)
    diagonal, scale = _diagonal(causal, q, k), _scale(scale, q)
    keys, values = k.double(), v.double()
    out = q.new_empty((*q.shape[:3], v.shape[3]), dtype=torch.float64)
    for rows in _chunks(q, k):
        p = _weights(_grouped(q[:, :, rows].double(), k), keys, rows, diagonal, scale)  # [B, H_KV, G * m, N]
        out[:, :, rows] = _ungrouped(p @ values.abs(), q)
    return out


def gradient_magnitudes(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, *, causal: Causal = False, scale: float | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """As :func:`magnitude`, for dq, dk and dv.

    Where one key is visible, for example, dq is exactly 0 as the difference of two equal numbers, and this is not.
    """
    _check(q, k, v)
    diagonal, scale = _diagonal(causal, q, k), _scale(scale, q)
    keys, values = k.double(), v.double()
    dq = torch.zeros_like(q, dtype=torch.float64, memory_format=torch.contiguous_format)
    dk = torch.zeros_like(k, dtype=torch.float64, memory_format=torch.contiguous_format)
    dv = torch.zeros_like(v, dtype=torch.float64, memory_format=torch.contiguous_format)

    for rows in _chunks(q, k):
        queries, douts = (_grouped(tensor[:, :, rows].double(), k) for tensor in (q, dout.abs()))
        p = _weights(queries, keys, rows, diagonal, scale)  # [B, H_KV, G * m, N]
        dp = douts @ values.abs().mT
        ds = p * dp + p * (p * dp).sum(dim=-1, keepdim=True)
        dq[:, :, rows] = _ungrouped(ds @ keys.abs(), q) * abs(scale)
        dk += ds.mT @ queries.abs() * abs(scale)
        dv += p.mT @ douts
    return dq, dk, dv


def visible_keys(q: Tensor, k: Tensor, *, causal: Causal = False) -> Tensor:
    """How many keys each query sees, [M] int64."""
    diagonal = _diagonal(causal, q, k)
    seqlen_k = k.shape[2]
    if diagonal is None:
        return torch.full((q.shape[2],), seqlen_k, device=q.device)
    return (torch.arange(q.shape[2], device=q.device) + diagonal + 1).clamp(0, seqlen_k)


def _check(q: Tensor, k: Tensor, v: Tensor) -> None:
    shapes = f"q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}"
    if not q.dim() == k.dim() == v.dim() == 4:
        raise InvalidProblemError(f"q, k and v must have four dimensions [B, H, S, D], got {shapes}")
    if k.shape[:3] != v.shape[:3] or q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise InvalidProblemError(f"batch, key/value heads, key length and head_dim must agree, got {shapes}")
    if q.shape[1] % k.shape[1]:
        raise InvalidProblemError(f"query heads must be a multiple of key/value heads, got {shapes}")


def _scale(scale: float | None, q: Tensor) -> float:
    return 1.0 / math.sqrt(q.shape[3]) if scale is None else scale


def _diagonal(causal: Causal, q: Tensor, k: Tensor) -> int | None:
    """Query i sees key j when j <= i + diagonal; None without a mask."""
    if causal is False:
        return None
    alignment = Alignment.BOTTOM_RIGHT if causal is True else Alignment(causal)
    return k.shape[2] - q.shape[2] if alignment is Alignment.BOTTOM_RIGHT else 0


def _chunks(q: Tensor, k: Tensor) -> Iterator[slice]:
    """Slices of rows whose scores fit into the memory set aside for them."""
    scores_per_row = max(1, q.shape[0] * q.shape[1] * k.shape[2])
    step = max(1, _SCORES_AT_ONCE // scores_per_row)
    for start in range(0, q.shape[2], step):
        yield slice(start, min(start + step, q.shape[2]))


def _grouped(rows: Tensor, k: Tensor) -> Tensor:
    """[B, H, m, X] -> [B, H_KV, G * m, X]: the queries that share a key head, as rows of one matrix."""
    batch, heads, count, width = rows.shape
    return rows.reshape(batch, k.shape[1], heads // k.shape[1] * count, width)


def _ungrouped(rows: Tensor, q: Tensor) -> Tensor:
    """[B, H_KV, G * m, X] -> [B, H, m, X]."""
    batch, kv_heads, count, width = rows.shape
    return rows.reshape(batch, q.shape[1], count * kv_heads // q.shape[1], width)


def _hidden(rows: slice, seqlen_k: int, diagonal: int | None, device: torch.device) -> Tensor:
    """Boolean [m, N]: True where the query may not see the key."""
    positions = torch.arange(rows.start, rows.stop, device=device)[:, None]
    if diagonal is None:
        return torch.zeros((len(positions), seqlen_k), dtype=torch.bool, device=device)
    return torch.arange(seqlen_k, device=device)[None, :] > positions + diagonal


def _scores(queries: Tensor, keys: Tensor, rows: slice, diagonal: int | None, scale: float) -> Tensor:
    s = queries @ keys.mT * scale  # [B, H_KV, G * m, N]
    if diagonal is not None:
        hidden = _hidden(rows, keys.shape[2], diagonal, keys.device)
        s.view(*s.shape[:2], s.shape[2] // len(hidden), *hidden.shape).masked_fill_(hidden, -math.inf)
    return s


def _probabilities(s: Tensor, row_lse: Tensor) -> Tensor:
    """Softmax of the scores; a row whose log-sum-exp is -inf (no key) becomes 0 and not NaN."""
    return torch.exp(s - row_lse.masked_fill(row_lse == -math.inf, 0.0))


def _weights(queries: Tensor, keys: Tensor, rows: slice, diagonal: int | None, scale: float) -> Tensor:
    """Probabilities, each times one more than the sum of the absolute terms of its score."""
    s = _scores(queries, keys, rows, diagonal, scale)
    p = _probabilities(s, torch.logsumexp(s, dim=-1, keepdim=True))
    return p * (1.0 + queries.abs() @ keys.abs().mT * abs(scale))
