"""How the score matrix of a problem is cut into blocks, and which hold a pair that takes part. Pure counting."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from autoflash.errors import InvalidProblemError
from autoflash.evaluate.cost import mean_lengths
from autoflash.problem import Alignment, Problem

_AT_ONCE = 2**20
"""Rows of blocks that are counted together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """Lengths of a block of the score matrix.

    Attributes:
        rows: Queries in it (B_r of the FlashAttention papers).
        keys: Keys in it (B_c).
    """

    rows: int
    keys: int

    def __str__(self) -> str:
        """Such as ``128 x 64``."""
        return f"{self.rows} x {self.keys}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Visits:
    """The blocks of one head of one sequence that hold a visible pair, all others being skipped.

    Attributes:
        blocks: How many there are.
        query_rows: Queries of each, added up: what is read of Q where each block reads its own.
        key_rows: Likewise of the keys.
        pairs: Elements of each, added up: what is computed, visible or not.
    """

    blocks: int
    query_rows: int
    key_rows: int
    pairs: int


def visited(problem: Problem, blocks: Blocks) -> Visits:
    """Count the blocks that a kernel visits which skips those that a causal mask or a window hides whole.

    Blocks lie on a grid that begins at the first query and key; the last of each may be shorter. What a mask tensor
    hides is visited all the same. Packed sequences are taken to have the mean length.

    Raises:
        InvalidProblemError: for blocks without a row or a key.
    """
    if blocks.rows < 1 or blocks.keys < 1:
        raise InvalidProblemError(f"a block has at least one query and one key, got {blocks}")
    m, n = mean_lengths(problem)
    diagonal = n - m if problem.alignment is Alignment.BOTTOM_RIGHT else 0
    right = 0 if problem.causal else problem.window_right
    count = query_rows = key_rows = pairs = 0
    for begin in range(0, m, blocks.rows * _AT_ONCE):
        starts = torch.arange(begin, min(begin + blocks.rows * _AT_ONCE, m), blocks.rows)
        rows = (m - starts).clamp(max=blocks.rows)
        # What some row of the block sees: the intervals of neighbouring rows overlap or touch.
        first = torch.zeros_like(starts)
        if problem.window_left is not None:
            first = (starts + (diagonal - min(problem.window_left, m + n))).clamp(min=0)
        end = torch.full_like(starts, n)
        if right is not None:
            end = (starts + rows + (diagonal + min(right, m + n))).clamp(max=n)
        low, high = first // blocks.keys, -(-end // blocks.keys)
        sees = (end > first).long()
        keys = ((high * blocks.keys).clamp(max=n) - low * blocks.keys) * sees
        count += int(((high - low) * sees).sum())
        query_rows += int(((high - low) * rows * sees).sum())
        key_rows += int(keys.sum())
        pairs += int((rows * keys).sum())
    return Visits(blocks=count, query_rows=query_rows, key_rows=key_rows, pairs=pairs)


def algorithm_1_blocks(problem: Problem, on_chip_bytes: int) -> Blocks:
    """Block sizes of FlashAttention's Algorithm 1: B_c = ceil(M / 4d), B_r = min(B_c, d), cut to the sequences.

    M is the on-chip memory in elements of the inputs' type (Dao et al., 2022, arXiv:2205.14135); d is the longer of
    the head dimensions.

    Args:
        problem: Gives the type, the head dimensions and the lengths.
        on_chip_bytes: Fast memory of one processor, in bytes.

    Raises:
        InvalidProblemError: for a memory that does not hold one vector, where the algorithm means nothing.
    """
    d = max(problem.head_dim, problem.head_dim_v)
    elements = on_chip_bytes // problem.dtype.itemsize
    if elements < d:
        raise InvalidProblemError(
            f"on-chip memory of {on_chip_bytes} bytes does not hold one {problem.dtype.value} vector of {d}; "
            "give the bytes of one processor's fast memory"
        )
    m, n = mean_lengths(problem)
    keys = -(-elements // (4 * d))
    return Blocks(rows=max(1, min(keys, d, m)), keys=max(1, min(keys, n)))
