"""What a search tries first: the winners of the cells most like its own."""

from __future__ import annotations

from collections.abc import Iterable

from autoflash.problem import Cell
from autoflash.trial import Decision
from autoflash.variant import Family, Variant

_CELLS = 3
_PER_CELL = 4


def neighbours_winners(cell: Cell, decisions: Iterable[Decision]) -> list[Variant]:
    """The first few choices of the decided cells nearest to a cell, nearest first, without vendor kernels."""
    near = sorted(
        (d for d in decisions if _is_related(cell, d.cell)), key=lambda d: (_distance(cell, d.cell), d.cell.key)
    )
    winners: dict[Variant, None] = {}
    for decision in near[:_CELLS]:
        for ranked in decision.choices[:_PER_CELL]:
            if ranked.variant.family is not Family.VENDOR:
                winners[ranked.variant] = None
    return list(winners)


def _is_related(cell: Cell, other: Cell) -> bool:
    """Whether winners carry over: not from one pass, element size or head dimension to another (measured)."""
    return (cell.op, cell.dtype.itemsize, cell.tf32, cell.head_dim, cell.head_dim_v) == (
        other.op,
        other.dtype.itemsize,
        other.tf32,
        other.head_dim,
        other.head_dim_v,
    )


def _distance(cell: Cell, other: Cell) -> int:
    """Small for another length or one feature more, larger for another mask: tile order changes with it."""
    return (
        abs(cell.q_bucket - other.q_bucket)
        + abs(cell.k_bucket - other.k_bucket)
        + abs(cell.window_bucket - other.window_bucket)
        + 2 * len(set(cell.features) ^ set(other.features))
        + 4 * (cell.mask is not other.mask)
        + 2 * (cell.parallelism is not other.parallelism)
        + 2 * (cell.deterministic is not other.deterministic)
        + (cell.dtype is not other.dtype)
        + (cell.group != other.group)
    )
