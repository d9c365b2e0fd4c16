"""What an attention computes beside its tensors: how scores are made, hidden and dropped. Any floating dtype.

The specification and the yardstick walk over the same blocks of rows by the same semantics, one in float64 and the
other in the dtype of the inputs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from autoflash.errors import InvalidProblemError
from autoflash.evaluate.modifiers import Modifiers
from autoflash.evaluate.philox import Rng, dropout_keep
from autoflash.problem import Alignment, Problem
from autoflash.runtime.block_map import shown_blocks
from autoflash.runtime.executable import NO_EXTRAS, Extras

Causal = bool | str
"""False, ``"bottom_right"`` (the same as True) or ``"top_left"``."""

Window = tuple[int | None, int | None] | None
"""How many keys a query sees left and right of its position; None or -1 has no bound there."""

# 64 MiB of float64 scores at a time: S = 16384 with many heads fits beside the tensors that it belongs to.
SCORES_AT_ONCE = 1 << 23


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Some queries of one sequence, with all of its keys.

    Attributes:
        rows, keys: Where they lie in the tensors of queries and keys.
        start: Number of the first query inside its sequence.
        diagonal: Query i of the sequence stands at key i + diagonal.
        sequence: Number of the packed sequence; 0 where nothing is packed.
    """

    rows: slice
    keys: slice
    start: int
    diagonal: int
    sequence: int

    @property
    def within(self) -> slice:
        """The queries' numbers inside their sequence."""
        return slice(self.start, self.start + self.rows.stop - self.rows.start)


@dataclass(frozen=True, slots=True, kw_only=True)
class Semantics:
    """Everything that decides the result beside q, k and v.

    Attributes:
        scale: Factor of the scores.
        alignment: Where query i stands among the keys.
        left, right: Bounds of the keys that a query sees around its position; None has none. ``right`` is 0 under a
            causal mask.
        softcap: Scores become softcap * tanh(score / softcap); 0 leaves them alone.
        mask: [B, H, M, N], bool (True takes part) or added to the scores; None for none.
        alibi_slopes: How much scores fall with each key of distance, [B, H] or [1, H]; None for none.
        bias: Added to the scores, of rank 4: each size is that of [B, H, M, N] or 1; None for none.
        sinks: A score of each head without a key, [H]; None for none.
        modifiers: Expressions that modify the scores after the softcap, or say which keys take part; None for none.
        shown: Which blocks of pairs take part, [B or 1, H or 1, M blocks, N blocks]; None for all.
        block_size: Queries and keys of a block.
        dropout_p: Share of the probabilities that are dropped.
        rng: Seed and offset of the dropout.
        starts_q, starts_k: Where packed sequences begin, and the end of the last; None where nothing is packed.
    """

    scale: float
    alignment: Alignment = Alignment.BOTTOM_RIGHT
    left: int | None = None
    right: int | None = None
    softcap: float = 0.0
    mask: Tensor | None = None
    alibi_slopes: Tensor | None = None
    bias: Tensor | None = None
    sinks: Tensor | None = None
    modifiers: Modifiers | None = None
    shown: Tensor | None = None
    block_size: int = 0
    dropout_p: float = 0.0
    rng: Rng = (0, 0)
    starts_q: tuple[int, ...] | None = None
    starts_k: tuple[int, ...] | None = None

    @classmethod
    def of(
        cls,
        q: Tensor,
        k: Tensor,
        *,
        causal: Causal,
        scale: float | None,
        window: Window,
        softcap: float | None,
        mask: Tensor | None,
        dropout_p: float,
        rng: Rng | None,
        alibi_slopes: Tensor | None = None,
        bias: Tensor | None = None,
        sinks: Tensor | None = None,
        modifiers: Modifiers | None = None,
    ) -> Semantics:
        """From the arguments of :func:`autoflash.evaluate.reference.attention`.

        Raises:
            InvalidProblemError: for a mask, a bias or sinks that do not fit q and k, a dropout without seed and
                offset, or a negative window.
            ValueError: if ``causal`` names no alignment.
        """
        if dropout_p and rng is None:
            raise InvalidProblemError("dropout needs rng: a seed and an offset")
        shape = (*q.shape[:3], k.shape[2])
        if mask is not None:
            mask = _of_rank_4("mask", mask, shape).expand(shape)
        if bias is not None:
            bias = _of_rank_4("bias", bias, shape)
        if sinks is not None and tuple(sinks.shape) != (q.shape[1],):
            raise InvalidProblemError(f"sinks must have shape [H] = [{q.shape[1]}], got {list(sinks.shape)}")
        if alibi_slopes is not None:
            if alibi_slopes.dim() not in (1, 2) or alibi_slopes.shape[-1] != q.shape[1]:
                raise InvalidProblemError(f"alibi_slopes must have shape [H] or [B, H], got {list(alibi_slopes.shape)}")
            alibi_slopes = alibi_slopes.view(-1, q.shape[1])
        left, right = (None if bound == -1 else bound for bound in window or (None, None))
        if min(left or 0, right or 0) < 0:
            raise InvalidProblemError(f"a side of window must be None, -1 (both unbounded) or at least 0, got {window}")
        return cls(
            scale=1.0 / math.sqrt(q.shape[-1]) if scale is None else scale,
            alignment=Alignment.BOTTOM_RIGHT if isinstance(causal, bool) else Alignment(causal),
            left=left,
            right=0 if causal else right,
            softcap=softcap or 0.0,
            mask=mask,
            alibi_slopes=alibi_slopes,
            bias=bias,
            sinks=sinks,
            modifiers=modifiers,
            dropout_p=dropout_p,
            rng=(0, 0) if rng is None else rng,
        )

    @classmethod
    def of_problem(cls, problem: Problem, scale: float, extras: Extras = NO_EXTRAS) -> Semantics:
        """What a kernel shall compute for a problem and its extra tensors."""
        return cls(
            scale=scale,
            alignment=problem.alignment,
            left=problem.window_left,
            right=0 if problem.causal else problem.window_right,
            softcap=problem.softcap,
            mask=extras.mask,
            alibi_slopes=extras.alibi_slopes,
            bias=extras.bias,
            sinks=extras.sinks,
            modifiers=Modifiers.of_problem(problem, extras.params),
            shown=None if extras.query_blocks is None else shown_blocks(extras.query_blocks),
            block_size=problem.block_size,
            dropout_p=problem.dropout_p,
            rng=(0, 0) if extras.rng is None else extras.rng,
        ).packed(extras.cu_seqlens_q, extras.cu_seqlens_k)

    def packed(self, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None) -> Semantics:
        """The same for packed sequences that begin there.

        Raises:
            InvalidProblemError: where these are not the beginnings of as many sequences of queries as of keys.
        """
        if cu_seqlens_q is None or cu_seqlens_k is None:
            return self
        starts_q, starts_k = tuple(cu_seqlens_q.tolist()), tuple(cu_seqlens_k.tolist())
        for starts in (starts_q, starts_k):
            if len(starts) != len(starts_q) or list(starts) != sorted(starts) or starts[:1] != (0,):
                raise InvalidProblemError(
                    "cu_seqlens_q and cu_seqlens_k must have one length, begin with 0 and never decrease"
                )
        return replace(self, starts_q=starts_q, starts_k=starts_k)

    def blocks(self, q: Tensor, k: Tensor) -> Iterator[Block]:
        """All queries of all sequences, in blocks whose scores fit into the memory set aside for them."""
        starts_q = (0, q.shape[2]) if self.starts_q is None else self.starts_q
        starts_k = (0, k.shape[2]) if self.starts_k is None else self.starts_k
        for sequence in range(len(starts_q) - 1):
            first, end = starts_q[sequence : sequence + 2]
            keys = slice(*starts_k[sequence : sequence + 2])
            length = keys.stop - keys.start
            step = max(1, SCORES_AT_ONCE // max(1, q.shape[0] * q.shape[1] * length))
            diagonal = length - (end - first) if self.alignment is Alignment.BOTTOM_RIGHT else 0
            for start in range(first, end, step):
                yield Block(
                    rows=slice(start, min(start + step, end)),
                    keys=keys,
                    start=start - first,
                    diagonal=diagonal,
                    sequence=sequence,
                )

    def _hidden(self, block: Block, device: torch.device) -> Tensor | None:
        """Which keys the queries do not see by position or mask; None if they see all."""
        hidden: Tensor | None = None
        positions = torch.arange(block.within.start, block.within.stop, device=device)[:, None] + block.diagonal
        keys = torch.arange(block.keys.stop - block.keys.start, device=device)[None]
        if self.left is not None:
            hidden = keys < positions - self.left
        if self.right is not None:
            beyond = keys > positions + self.right
            hidden = beyond if hidden is None else hidden | beyond
        if self.mask is not None:
            mask = self.mask[:, :, block.within]
            masked = ~mask if mask.dtype is torch.bool else mask == -math.inf
            hidden = masked if hidden is None else hidden | masked
        if self.bias is not None:
            masked = self._bias_of(block) == -math.inf
            hidden = masked if hidden is None else hidden | masked
        if self.shown is not None:
            rows = torch.arange(block.within.start, block.within.stop, device=device) // self.block_size
            masked = ~self.shown[:, :, rows][..., keys[0] // self.block_size]
            hidden = masked if hidden is None else hidden | masked
        return hidden

    def capped(self, products: Tensor) -> Tensor:
        """Scores [B, H, m, N] of the products of queries and keys, as a score_mod is given them."""
        s = products * self.scale
        return self.softcap * torch.tanh(s / self.softcap) if self.softcap else s

    def hidden(self, s: Tensor, block: Block) -> Tensor | None:
        """Which keys the queries do not see, whatever their score, broadcastable to s [B, H, m, N]; None for none."""
        hidden = self._hidden(block, s.device)
        masked = None if self.modifiers is None else self.modifiers.hidden(s, block.start)
        if hidden is None or masked is None:
            return masked if hidden is None else hidden
        return hidden | masked

    def scores(self, s: Tensor, block: Block, hidden: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Scores [B, H, m, N] from capped ones, and which are hidden: a score_mod hides by -inf as well.

        None of them is -inf. Each step keeps the dtype.
        """
        if self.modifiers is not None:
            s, hidden = self.modifiers.modified(s, block.start, hidden)
        if self.alibi_slopes is not None:
            wide = torch.promote_types(s.dtype, torch.float32)
            fall = self._slopes_of(block).to(wide)[:, :, None, None] * self.distances(block, s.device)
            s = (s - fall).to(s.dtype)
        if self.bias is not None:
            bias = self._bias_of(block)
            s = (s + bias.masked_fill(bias == -math.inf, 0.0)).to(s.dtype)
        if self.mask is not None and self.mask.dtype is not torch.bool:
            mask = self.mask[:, :, block.within]
            s = (s + mask.masked_fill(mask == -math.inf, 0.0)).to(s.dtype)
        return s, hidden

    def distances(self, block: Block, device: torch.device) -> Tensor:
        """How far each key is from the query's position, [m, N]."""
        positions = torch.arange(block.within.start, block.within.stop, device=device)[:, None] + block.diagonal
        return (torch.arange(block.keys.stop - block.keys.start, device=device) - positions).abs()

    def slopes_at(self, block: Block) -> slice:
        """The rows of the slopes that belong to a block: one for each batch entry, or of one sequence, or of all."""
        assert self.alibi_slopes is not None
        is_own = self.starts_q is not None and self.alibi_slopes.shape[0] > 1
        return slice(block.sequence, block.sequence + 1) if is_own else slice(None)

    def _slopes_of(self, block: Block) -> Tensor:
        """[B or 1, H]."""
        assert self.alibi_slopes is not None
        return self.alibi_slopes[self.slopes_at(block)]

    def _bias_of(self, block: Block) -> Tensor:
        """The bias of a block's rows, broadcastable to [B, H, m, N]."""
        assert self.bias is not None
        return self.bias if self.bias.shape[2] == 1 else self.bias[:, :, block.within]

    def slope(self, products: Tensor, block: Block, hidden: Tensor | None) -> Tensor | float:
        """Derivative of the scores by the products times scale."""
        slope: Tensor | float = 1.0
        if self.softcap:
            capped = torch.tanh(products * (self.scale / self.softcap))
            slope = 1.0 - capped * capped
        if self.modifiers is not None:
            slope = slope * self.modifiers.slope(self.capped(products), block.start, hidden)
        return slope

    def kept(self, q: Tensor, block: Block) -> Tensor | float:
        """Factor of each probability [B, H, m, N] in float64 that a dropout leaves: 0 or 1 / (1 - p)."""
        if not self.dropout_p:
            return 1.0
        keys = block.keys.stop - block.keys.start
        batch, heads = q.shape[:2]
        keep = dropout_keep(
            self.rng, self.dropout_p, batch, heads, block.within, keys, q.device, first_batch=block.sequence
        )
        return keep.double() / (1.0 - self.dropout_p)


def _of_rank_4(name: str, tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    """A view of rank 4 that can be broadcast to [B, H, M, N]."""
    sizes = (1,) * (4 - tensor.dim()) + tuple(tensor.shape)
    if len(sizes) > 4 or any(size not in (1, full) for size, full in zip(sizes, shape, strict=True)):
        raise InvalidProblemError(
            f"{name} must be broadcastable to [B, H, M, N] = {list(shape)}, got {list(tensor.shape)}"
        )
    return tensor[(None,) * (4 - tensor.dim())]
