"""FlexAttention, torch's own generator of attention kernels: what features are compared with."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from autoflash.evaluate.peer import Attend, Peer
from autoflash.problem import Alignment, Feature, MaskTensor, Pass, Problem
from autoflash.runtime.executable import Extras
from autoflash.variant import Choices, Family, Variant

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

FLEX = Variant(family=Family.VENDOR, structure=Choices(backend="flex"), config=Choices())

_Modifier = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
_Predicate = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]

# Whatever comes to be a feature is refused until it is written here.
_ABLE = (
    Feature.VARLEN,
    Feature.SOFTCAP,
    Feature.FLOAT_MASK,
    Feature.BOOL_MASK,
    Feature.WINDOW,
    Feature.ALIBI,
    Feature.ALIBI_GRADIENT,
    Feature.BIAS,
    Feature.BIAS_GRADIENT,
)

# One kernel is compiled for each shape, as somebody who measures it would have it; torch stops at eight by default.
_MOST_COMPILED = 10_000


class FlexAttention(Peer):
    """Torch's flex_attention, compiled for each problem, with its block mask made ahead."""

    variant = FLEX
    compiles = True

    def __init__(self, *, compiled: bool = True) -> None:
        """Compile nothing yet.

        Args:
            compiled: False runs it as plain torch operations, which means the same and is no fair time.
        """
        self._compiled = compiled

    def why_not(self, problem: Problem, *tensors: Tensor) -> str | None:
        """What it cannot do; None if it can run the problem."""
        if problem.is_empty:
            return "there is no query or no key"
        unable = [feature.value for feature in problem.features if feature not in _ABLE]
        if unable:
            return f"flex_attention is not asked for {unable[0]}"
        if problem.is_varlen and problem.alibi:
            return "flex_attention is not asked for alibi of packed sequences"
        if problem.op is Pass.BACKWARD and problem.deterministic:
            return "the backward of flex_attention is not deterministic"
        if self._compiled and problem.op is Pass.BACKWARD and problem.alibi_gradient:
            return "flex_attention compiles no gradient of slopes: torch 2.11 adds it up by head in a wrong shape"
        if self._compiled and tensors and not tensors[0].is_cuda:
            return "flex_attention is compared on GPUs: on a CPU it has no backward when compiled"
        return None

    def compiling(self) -> AbstractContextManager[None]:
        """Torch's limits of how often a function is compiled, lifted."""
        limits = {"recompile_limit": _MOST_COMPILED, "accumulated_recompile_limit": _MOST_COMPILED}
        return torch._dynamo.config.patch(limits)  # type: ignore[no-any-return]  # torch does not type it

    def attend(self, problem: Problem, q: Tensor, scale: float, extras: Extras) -> Attend:
        """flex_attention with everything bound but q, k and v."""
        # Its compiler takes seconds to import.
        from torch.nn.attention.flex_attention import flex_attention

        function = torch.compile(flex_attention, dynamic=False) if self._compiled else flex_attention
        return functools.partial(
            function,
            score_mod=_modifier(problem, extras),
            block_mask=_block_mask(problem, extras, q.device),
            scale=scale,
            enable_gqa=problem.group > 1,
        )


def _modifier(problem: Problem, extras: Extras) -> _Modifier | None:
    """What is done to the scaled scores."""
    cap, mask = problem.softcap, extras.mask if problem.mask_tensor is MaskTensor.FLOAT else None
    bias, slopes, diagonal = extras.bias, extras.alibi_slopes, problem.diagonal
    if not cap and mask is None and bias is None and slopes is None:
        return None

    def modify(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        if cap:
            score = cap * torch.tanh(score / cap)
        if mask is not None:
            score = score + mask[b, h, q_idx, kv_idx]
        if bias is not None:
            score = score + bias[_inside(bias, b, h, q_idx, kv_idx)]
        if slopes is not None:
            score = score - slopes[_inside(slopes, b, h)] * (q_idx + diagonal - kv_idx).abs()
        return score

    return modify


def _inside(tensor: Tensor, *places: Tensor) -> tuple[Tensor, ...]:
    """Places in a tensor that has one element where it is shared by all."""
    return tuple(
        torch.zeros_like(place) if size == 1 else place for place, size in zip(places, tensor.shape, strict=True)
    )


def _block_mask(problem: Problem, extras: Extras, device: torch.device) -> BlockMask | None:
    """Which pairs take part, by tiles; one for all batches and heads unless a mask tensor differs between them."""
    predicates = [_positions(problem, extras)] if problem.causal or problem.has_window or problem.is_varlen else []
    sizes: tuple[int | None, int | None] = (None, None)
    if problem.mask_tensor is MaskTensor.BOOL:
        mask = extras.mask
        assert mask is not None
        sizes = (problem.batch, problem.heads if mask.stride(1) else None)
        predicates.append(lambda b, h, q_idx, kv_idx: mask[b, h, q_idx, kv_idx])
    if not predicates:
        return None

    def sees(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        seen = predicates[0](b, h, q_idx, kv_idx)
        for predicate in predicates[1:]:
            seen = seen & predicate(b, h, q_idx, kv_idx)
        return seen

    from torch.nn.attention.flex_attention import create_block_mask

    return create_block_mask(sees, *sizes, problem.rows_q, problem.rows_k, device=device.type)


def _positions(problem: Problem, extras: Extras) -> _Predicate:
    """What a causal mask, a window and the borders of packed sequences let through."""
    left = problem.window_left
    right = 0 if problem.causal else problem.window_right

    def within(query: Tensor, key: Tensor) -> Tensor:
        seen = torch.ones_like(query - key, dtype=torch.bool)
        if right is not None:
            seen = seen & (key <= query + right)
        return seen if left is None else seen & (key >= query - left)

    if not problem.is_varlen:
        diagonal = problem.diagonal
        return lambda b, h, q_idx, kv_idx: within(q_idx + diagonal, kv_idx)
    assert extras.cu_seqlens_q is not None
    assert extras.cu_seqlens_k is not None
    of_query, query_at, lengths_q = _places(extras.cu_seqlens_q, problem.rows_q)
    of_key, key_at, lengths_k = _places(extras.cu_seqlens_k, problem.rows_k)
    if problem.alignment is Alignment.BOTTOM_RIGHT:
        query_at = query_at + torch.cat([lengths_k - lengths_q, lengths_q.new_zeros(1)])[of_query]
    # Rows behind the last sequence see nothing.
    of_query = torch.where(of_query == lengths_q.shape[0], -1, of_query)
    return lambda b, h, q_idx, kv_idx: (of_query[q_idx] == of_key[kv_idx]) & within(query_at[q_idx], key_at[kv_idx])


def _places(borders: Tensor, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of each packed row, its sequence (behind the last: their number) and its place there; then the lengths."""
    row = torch.arange(rows, device=borders.device)
    sequence = torch.searchsorted(borders[1:].long(), row, right=True)
    return sequence, row - borders.long()[sequence], borders.diff().long()
