"""The names of the ``flash_attn`` package that its tests import, as thin shells around autoflash.

Only names and argument orders are mapped. What a test wants of dropout (the sign of each probability) is computed from
the specification of the mask and the seed that the call drew, in place of FlashAttention's debugging output.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

import autoflash
from autoflash.evaluate import reference

VENDOR = "never"


def _window(window_size: Any) -> tuple[int, int]:
    left, right = (int(bound) for bound in window_size)
    return left, right


@contextmanager
def _watched() -> Iterator[list[Tensor]]:
    """The seeds that calls draw meanwhile."""
    # The attribute of the package is the function of that name.
    module = sys.modules["autoflash.attention"]
    drawn: list[Tensor] = []
    original = module.draw_rng

    def draw(like: Tensor) -> Tensor:
        drawn.append(original(like))
        return drawn[-1]

    module.draw_rng = draw  # type: ignore[attr-defined]
    try:
        yield drawn
    finally:
        module.draw_rng = original  # type: ignore[attr-defined]


def _alibi(slopes: Tensor, rows: int, columns: int, shift: Tensor) -> Tensor:
    """What slopes [B, H] add to the scores [B, H, M, N], where the keys of each sequence begin a shift [B] before."""
    places = torch.arange(rows, device=slopes.device)[:, None] - torch.arange(columns, device=slopes.device)
    return -slopes[..., None, None] * (places + shift[:, None, None, None]).abs()


def _signed_probabilities(
    q: Tensor,
    k: Tensor,
    lse: Tensor,
    rng: Tensor,
    dropout_p: float,
    scale: float | None,
    slopes: Tensor | None,
    shift: Tensor,
) -> Tensor:
    """exp(score - LSE) [B, H, M, N], negative where dropped: q [B, M, H, D], k [B, N, H_KV, D].

    As in FlashAttention's debugging output, anything may stand where a mask or padding hides a score.
    """
    queries, keys = q.detach().transpose(1, 2).float(), k.detach().transpose(1, 2).float()
    keys = keys.repeat_interleave(queries.shape[1] // keys.shape[1], dim=1)
    scores = queries @ keys.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if slopes is not None:
        scores = scores + _alibi(slopes, *scores.shape[2:], shift)
    p = torch.exp(scores - lse.detach().masked_fill(lse == -torch.inf, torch.inf)[..., None])
    batch, heads, rows, columns = p.shape
    keep = reference.dropout_keep(rng, dropout_p, batch, heads, slice(0, rows), columns, p.device)
    return torch.where(keep, p, -p)


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Any = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """[B, S, H, D] tensors."""
    with _watched() as drawn:
        out, lse = autoflash.attention(
            q,
            k,
            v,
            causal=causal,
            window=_window(window_size),
            softcap=softcap,
            alibi_slopes=alibi_slopes,
            dropout_p=dropout_p,
            scale=softmax_scale,
            layout="bshd",
            return_lse=True,
            deterministic=deterministic,
            vendor=VENDOR,
        )
    if not return_attn_probs:
        return out
    if not dropout_p:
        return out, lse, None
    shift = torch.tensor([k.shape[1] - q.shape[1]], device=q.device)
    return out, lse, _signed_probabilities(q, k, lse, drawn[0], dropout_p, softmax_scale, alibi_slopes, shift)


def flash_attn_kvpacked_func(q: Tensor, kv: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Keys and values [B, S, 2, H_KV, D]."""
    return flash_attn_func(q, *kv.unbind(2), *args, **kwargs)


def flash_attn_qkvpacked_func(qkv: Tensor, *args: Any, **kwargs: Any) -> Any:
    """All three [B, S, 3, H, D]."""
    return flash_attn_func(*qkv.unbind(2), *args, **kwargs)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Any = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Any:
    """Packed [T, H, D] tensors."""
    if block_table is not None:
        raise NotImplementedError("block_table is not built")
    with _watched() as drawn:
        out, lse = autoflash.attention_varlen(
            q,
            k,
            v,
            cu_seqlens_q,
            cu_seqlens_k,
            max_seqlen_q=int(max_seqlen_q),
            max_seqlen_k=int(max_seqlen_k),
            causal=causal,
            window=_window(window_size),
            softcap=softcap,
            alibi_slopes=alibi_slopes,
            dropout_p=dropout_p,
            scale=softmax_scale,
            return_lse=True,
            deterministic=deterministic,
            vendor=VENDOR,
        )
    if not return_attn_probs:
        return out
    if not dropout_p:
        return out, lse, None
    queries, keys = (_padded(x, cu) for x, cu in ((q, cu_seqlens_q), (k, cu_seqlens_k)))
    lses = _padded(lse.transpose(0, 1)[..., None], cu_seqlens_q)[..., 0].transpose(1, 2)  # [B, H, longest]
    shift = cu_seqlens_k.diff() - cu_seqlens_q.diff()
    return out, lse, _signed_probabilities(queries, keys, lses, drawn[0], dropout_p, softmax_scale, alibi_slopes, shift)


def flash_attn_varlen_kvpacked_func(q: Tensor, kv: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Keys and values [T, 2, H_KV, D]."""
    return flash_attn_varlen_func(q, *kv.unbind(1), *args, **kwargs)


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int, *args: Any, **kwargs: Any
) -> Any:
    """All three [T, 3, H, D]."""
    q, k, v = qkv.unbind(1)
    return flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, *args, **kwargs)


def _padded(rows: Tensor, cu_seqlens: Tensor) -> Tensor:
    """[T, ...] -> [B, longest, ...], 0 behind each sequence."""
    lengths = cu_seqlens.diff().tolist()
    parts = rows.split([*lengths, rows.shape[0] - sum(lengths)])[:-1]
    return torch.nn.utils.rnn.pad_sequence(list(parts), batch_first=True)


def unpad_input(hidden: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None) -> Any:
    """The rows of [B, S, ...] that a mask [B, S] lets through, with their places and offsets."""
    every = attention_mask if unused_mask is None else attention_mask + unused_mask
    lengths, used = every.sum(-1, dtype=torch.int32), attention_mask.sum(-1, dtype=torch.int32)
    indices = every.flatten().nonzero().flatten()
    offsets = functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    return hidden.flatten(0, 1)[indices], indices, offsets, int(lengths.max()), used


def pad_input(rows: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """The contrary of :func:`unpad_input`; 0 elsewhere."""
    padded = rows.new_zeros(batch * seqlen, *rows.shape[1:])
    return padded.index_put((indices,), rows).unflatten(0, (batch, seqlen))


def _not_here(*args: Any, **kwargs: Any) -> Any:
    raise NotImplementedError("a part of flash_attn that these tests are not run for")


def install() -> None:
    """Put these functions where ``import flash_attn`` finds them."""
    here = sys.modules[__name__]
    package = ModuleType("flash_attn")
    for name in dir(here):
        if name.startswith("flash_attn_"):
            setattr(package, name, getattr(here, name))
    package.flash_attn_with_kvcache = _not_here  # type: ignore[attr-defined]
    padding = ModuleType("flash_attn.bert_padding")
    padding.pad_input, padding.unpad_input = pad_input, unpad_input  # type: ignore[attr-defined]
    interface = ModuleType("flash_attn.flash_attn_interface")
    interface._get_block_size_n = _not_here  # type: ignore[attr-defined]
    interface._flash_attn_varlen_forward = interface.flash_attn_gpu = _not_here  # type: ignore[attr-defined]
    interface.USE_TRITON_ROCM = False  # type: ignore[attr-defined]
    layers, rotary = ModuleType("flash_attn.layers"), ModuleType("flash_attn.layers.rotary")
    rotary.apply_rotary_emb = _not_here  # type: ignore[attr-defined]
    for module in (package, padding, interface, layers, rotary):
        sys.modules[module.__name__] = module


def normalised(probabilities: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Stands for the normalisation of that output, which the shells do not need."""
    return probabilities
