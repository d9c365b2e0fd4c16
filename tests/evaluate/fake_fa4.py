"""A stand-in for the package flash-attn-4: its two functions by torch's SDPA, in its layouts, with its meanings."""

from __future__ import annotations

import itertools
import types

import torch
from torch import Tensor
from torch.nn import functional

Bounds = tuple[int | None, int | None]


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    softmax_scale: float,
    causal: bool = False,
    window_size: Bounds = (None, None),
    learnable_sink: Tensor | None = None,
    softcap: float = 0.0,
    deterministic: bool = False,
) -> tuple[Tensor, None]:
    """Of [B, S, H, D]; masks are aligned bottom-right. The output is contiguous, and None follows it for an LSE."""
    assert learnable_sink is None
    assert not softcap
    q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
    distance = torch.arange(k.shape[2]) - torch.arange(q.shape[2])[:, None] - (k.shape[2] - q.shape[2])
    left, right = window_size[0], 0 if causal else window_size[1]
    seen = torch.ones_like(distance, dtype=torch.bool)
    if left is not None:
        seen &= distance >= -left
    if right is not None:
        seen &= distance <= right
    out = functional.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=softmax_scale, enable_gqa=True)
    return out.transpose(1, 2).contiguous(), None


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    **options: object,
) -> tuple[Tensor, None]:
    """Of [T, H, D], sequence by sequence."""
    made = []
    for queries, keys in zip(_sequences(cu_seqlens_q), _sequences(cu_seqlens_k), strict=True):
        assert queries.stop - queries.start <= max_seqlen_q
        assert keys.stop - keys.start <= max_seqlen_k
        one, _ = flash_attn_func(q[None, queries], k[None, keys], v[None, keys], **options)
        made.append(one[0])
    return torch.cat(made), None


def _sequences(borders: Tensor) -> list[slice]:
    return [slice(start, end) for start, end in itertools.pairwise(borders.tolist())]


def module(**replaced: object) -> types.ModuleType:
    """The stand-in for ``flash_attn.cute.interface``, some of it replaced."""
    made = types.ModuleType("flash_attn.cute.interface")
    contents = {"flash_attn_func": flash_attn_func, "flash_attn_varlen_func": flash_attn_varlen_func}
    for name, content in (contents | replaced).items():
        setattr(made, name, content)
    return made
