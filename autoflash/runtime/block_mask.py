"""Block masks: which blocks of queries and keys an attention visits, and what hides pairs within them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from autoflash.codegen.expressions import expression_of
from autoflash.errors import InvalidProblemError
from autoflash.expression.expression import Expression
from autoflash.expression.nodes import Input, Variable, walk
from autoflash.problem import LEAST_BLOCK
from autoflash.runtime.block_map import (
    BlockLists,
    blocks_in,
    blocks_of_mask,
    expanded_blocks,
    lists_of,
    pairs_seen,
    shown_blocks,
)
from autoflash.runtime.modifiers import Modified, modified_by


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class BlockMask:
    """Which blocks of pairs are hidden, shown in part, or shown as a whole; :func:`block_mask` makes one.

    It lies on one device, and never changes: what its expression reads was copied.

    Attributes:
        lists: What kernels walk over.
        batch, heads: B and H; None where all batch entries, or all heads, share a map, however many there are.
        seqlen_q, seqlen_k: M and N.
        block_size: Queries and keys of a block.
        mask_mod: What hides pairs of the blocks that are shown in part; None for nothing.
        params: What it reads, by name.
    """

    lists: BlockLists
    batch: int | None
    heads: int | None
    seqlen_q: int
    seqlen_k: int
    block_size: int
    mask_mod: str | None = None
    params: Mapping[str, Tensor] = field(default_factory=lambda: MappingProxyType({}))

    def __reduce__(self) -> tuple[Callable[..., BlockMask], tuple[dict[str, object]]]:
        """To pickle and to copy: the view that keeps ``params`` from changing can be neither."""
        content = {each.name: getattr(self, each.name) for each in fields(self)}
        return _restored, (content | {"params": dict(self.params)},)

    @classmethod
    def from_blocks(cls, blocks: Tensor, seqlen_q: int, seqlen_k: int, block_size: int = LEAST_BLOCK) -> BlockMask:
        """A block mask of blocks that are hidden or shown as a whole, as in block-sparse attention.

        Args:
            blocks: [B or 1, H or 1, ceil(M / block_size), ceil(N / block_size)], bool: True is shown. Dimensions on
                the left may be missing.
            seqlen_q: M.
            seqlen_k: N.
            block_size: Queries and keys of a block, a power of two from 128 on.

        Raises:
            InvalidProblemError: for blocks of another type or shape, and sizes that mean nothing.
        """
        _check_sizes(seqlen_q, seqlen_k, block_size)
        if not isinstance(blocks, Tensor) or blocks.dtype is not torch.bool:
            kind = blocks.dtype if isinstance(blocks, Tensor) else type(blocks).__name__
            raise InvalidProblemError(f"blocks must be a bool tensor (True is shown), got {kind}")
        wanted = (blocks_in(seqlen_q, block_size), blocks_in(seqlen_k, block_size))
        if not 2 <= blocks.ndim <= 4 or tuple(blocks.shape[-2:]) != wanted:
            raise InvalidProblemError(
                f"blocks must have shape (B or 1, H or 1, {wanted[0]}, {wanted[1]}) for {seqlen_q} queries and "
                f"{seqlen_k} keys in blocks of {block_size}, got {tuple(blocks.shape)}"
            )
        blocks = blocks[(None,) * (4 - blocks.ndim)]
        return cls(
            lists=lists_of(blocks, torch.ones_like(blocks), seqlen_k, block_size),
            batch=None if blocks.shape[0] == 1 else blocks.shape[0],
            heads=None if blocks.shape[1] == 1 else blocks.shape[1],
            seqlen_q=seqlen_q,
            seqlen_k=seqlen_k,
            block_size=block_size,
        )

    @property
    def device(self) -> torch.device:
        """Where it lies."""
        return self.lists.queries.device

    @property
    def blocks(self) -> Tensor:
        """Which blocks are not hidden, [B or 1, H or 1, ceil(M / block_size), ceil(N / block_size)] bool."""
        return shown_blocks(self.lists.queries)

    def dense(self) -> Tensor:
        """Which pairs take part, [B or 1, H or 1, M, N] bool: the mask that means the same, M * N elements of it."""
        pairs = expanded_blocks(self.blocks, self.seqlen_q, self.seqlen_k, self.block_size)
        if self.mask_mod is None:
            return pairs
        asked = modified_by(None, self.mask_mod, self.params, self.device)
        return pairs & pairs_seen(asked.mask_mod, asked.params, tuple(pairs.shape), 0, str(self.device))


def _restored(content: dict[str, Any]) -> BlockMask:
    return BlockMask(**content | {"params": MappingProxyType(content["params"])})


def block_mask(
    mask_mod: str | Callable[..., object],
    batch: int | None,
    heads: int | None,
    seqlen_q: int,
    seqlen_k: int,
    *,
    params: Mapping[str, Tensor | float] | None = None,
    block_size: int = LEAST_BLOCK,
    device: str | torch.device | None = None,
) -> BlockMask:
    """The block mask of a ``mask_mod``: blocks that it hides are not visited, and others are partial or whole.

    A kernel asks it of the pairs of partial blocks alone. The map is computed on the device, which nothing waits for,
    and serves every call of its sizes.

    Args:
        mask_mod: Which keys take part, as for :func:`autoflash.attention`.
        batch: B; None will do where it does not look at ``b``, and one map serves any batch.
        heads: H, query heads; None will do where it does not look at ``h``, and one map serves all heads.
        seqlen_q: M.
        seqlen_k: N.
        params: What it reads, by name, as ``score_params`` of :func:`autoflash.attention`. It is copied.
        block_size: Queries and keys of a block, a power of two from 128 on.
        device: Where; None is the current GPU, or the CPU where there is none.

    Raises:
        ExpressionError: (an InvalidProblemError) for what is not of the language.
        InvalidProblemError: for sizes that mean nothing, and parameters that do not fit.
    """
    _check_sizes(seqlen_q, seqlen_k, block_size)
    if mask_mod is None:
        raise InvalidProblemError("mask_mod must be an expression such as 'q_idx >= kv_idx', got None")
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    # With its number, as tensors say it.
    place = torch.empty(0, device=device).device
    asked = modified_by(None, mask_mod, params, place)
    expression = expression_of(asked.mask_mod)
    batch = _looked_at(expression, Variable.B, "batch", batch)
    heads = _looked_at(expression, Variable.H, "heads", heads)
    kept = tuple(param.detach().clone() for param in asked.params)
    shape = (batch or 1, heads or 1, seqlen_q, seqlen_k)
    shown, whole = blocks_of_mask(asked.mask_mod, kept, shape, block_size, str(place))
    names = (parameter.name for parameter in expression.parameters)
    return BlockMask(
        lists=lists_of(shown, whole, seqlen_k, block_size),
        batch=batch,
        heads=heads,
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        block_size=block_size,
        mask_mod=expression.text,
        params=MappingProxyType(dict(zip(names, kept, strict=True))),
    )


def beside_blocks(
    given: object, score_mod: object, mask_mod: object, score_params: object, query: Tensor, key: Tensor
) -> tuple[BlockMask | None, Modified]:
    """A checked block mask, and what a call asks of its scores, the block mask's expression included.

    Args:
        given: A block mask; None for none.
        score_mod: As :func:`autoflash.attention` takes it, like the next two.
        mask_mod: See there.
        score_params: See there.
        query: [B, H, M, D].
        key: [B, H_KV, N, D].

    Raises:
        InvalidProblemError: where it was made for other sizes or another device, or stands beside another mask_mod.
    """
    if given is None:
        return None, modified_by(score_mod, mask_mod, score_params, query.device)
    if not isinstance(given, BlockMask):
        raise InvalidProblemError(
            f"block_mask must be an autoflash.BlockMask or None, got {type(given).__name__}: autoflash.block_mask "
            "makes one of a mask_mod, and autoflash.BlockMask.from_blocks of a bool tensor"
        )
    if mask_mod is not None:
        raise InvalidProblemError("block_mask has a mask_mod of its own: make it of both, and leave mask_mod out")
    if given.device != query.device:
        raise InvalidProblemError(f"block_mask must be on the device of query, got {given.device} and {query.device}")
    batch, heads, seqlen_q, seqlen_k = *query.shape[:3], key.shape[2]
    if (given.seqlen_q, given.seqlen_k) != (seqlen_q, seqlen_k):
        raise InvalidProblemError(
            f"block_mask was made for {given.seqlen_q} queries and {given.seqlen_k} keys, got {seqlen_q} and {seqlen_k}"
        )
    for name, made_for, size in (("B", given.batch, batch), ("H", given.heads, heads)):
        if made_for not in (None, size):
            raise InvalidProblemError(f"block_mask was made for {name} = {made_for}, got {size}")
    if score_params is not None and not isinstance(score_params, Mapping):
        raise InvalidProblemError(f"score_params must be a dict of names, got {type(score_params).__name__}")
    named = dict(score_params or {})
    if both := sorted(set(named) & set(given.params)):
        raise InvalidProblemError(f"block_mask has {both[0]} already: name that of score_params otherwise")
    return given, modified_by(score_mod, given.mask_mod, {**named, **given.params} or None, query.device)


def _looked_at(expression: Expression, variable: Variable, name: str, size: int | None) -> int | None:
    """The size, if the expression looks at the variable; else None."""
    if size is not None and (not isinstance(size, int) or size < 1):
        raise InvalidProblemError(f"{name} must be None or a whole number from 1 on, got {size!r}")
    if Input(variable) not in walk(expression.root):
        return None
    if size is None:
        raise InvalidProblemError(f"the mask_mod looks at {variable.value}: give {name}")
    return size


def _check_sizes(seqlen_q: int, seqlen_k: int, block_size: int) -> None:
    for name, size in (("seqlen_q", seqlen_q), ("seqlen_k", seqlen_k), ("block_size", block_size)):
        if not isinstance(size, int):
            raise InvalidProblemError(f"{name} must be a whole number, got {size!r}")
    if min(seqlen_q, seqlen_k) < 0:
        raise InvalidProblemError(f"seqlen_q and seqlen_k must not be negative, got {seqlen_q} and {seqlen_k}")
    if block_size < LEAST_BLOCK or block_size & (block_size - 1):
        raise InvalidProblemError(f"block_size must be a power of two from {LEAST_BLOCK} on, got {block_size}")
