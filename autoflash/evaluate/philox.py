"""Which probabilities a dropout keeps, by plain integer arithmetic: the specification of the kernels' generators.

Philox-4x32-10 of Salmon, Moraes, Dror, Shaw: "Parallel Random Numbers: As Easy as 1, 2, 3" (SC 2011). Written apart
from the generators that kernels use, so that a mistake in one of them shows.
"""

from __future__ import annotations

import torch
from torch import Tensor

Rng = Tensor | tuple[int, int]
"""Seed and offset of a dropout, as a tensor [2] of int64 or two numbers."""

ROUNDS = 10

_WORD = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)


def philox(
    key: tuple[int, int], counter: tuple[Tensor, Tensor, Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The four 32-bit words that a key and a counter of four words give.

    Args:
        key: Two words.
        counter: Four int64 tensors of words, broadcastable to one shape.

    Returns:
        Four int64 tensors, of words 0 <= w < 2**32.
    """
    low, high = key
    c0, c1, c2, c3 = counter
    for _ in range(ROUNDS):
        high_0, low_0 = _product(c0, _MULTIPLIERS[0])
        high_1, low_1 = _product(c2, _MULTIPLIERS[1])
        c0, c1, c2, c3 = high_1 ^ c1 ^ low, low_1, high_0 ^ c3 ^ high, low_0
        low, high = (low + _KEY_STEPS[0]) & _WORD, (high + _KEY_STEPS[1]) & _WORD
    return c0, c1, c2, c3


def dropout_keep(
    rng: Rng,
    dropout_p: float,
    batch: int,
    heads: int,
    rows: slice,
    seqlen_k: int,
    device: torch.device | str,
    *,
    first_batch: int = 0,
) -> Tensor:
    """Which probabilities of some rows are kept, a function of seed, offset, batch, query head, row and column only.

    Args:
        rng: Seed and offset.
        dropout_p: Share that is dropped.
        batch: How many batch entries.
        heads: Query heads.
        rows: Which rows (queries), with a start and a stop.
        seqlen_k: Columns (keys).
        device: Where to compute.
        first_batch: Index of the first batch entry; of packed sequences, that of the sequence.

    Returns:
        Boolean [batch, heads, rows, seqlen_k], True where the probability is kept.
    """
    seed, offset = (int(number) for number in (rng.tolist() if isinstance(rng, Tensor) else rng))
    key = (seed & _WORD, seed >> 32 & _WORD)

    def numbers(start: int, stop: int, *shape: int) -> Tensor:
        return torch.arange(start, stop, device=device).view(shape)

    batches = numbers(first_batch, first_batch + batch, -1, 1, 1, 1)
    counter = (
        numbers(0, -(-seqlen_k // 4), 1, 1, 1, -1),
        numbers(rows.start, rows.stop, 1, 1, -1, 1),
        (batches * heads + numbers(0, heads, 1, -1, 1, 1)) & _WORD,
        torch.full((1, 1, 1, 1), offset & _WORD, device=device),
    )
    words = torch.stack(philox(key, counter), dim=-1).flatten(-2)  # four columns of each counter, side by side
    return words[..., :seqlen_k] >= min(round(dropout_p * 2**32), _WORD)


def _product(words: Tensor, multiplier: int) -> tuple[Tensor, Tensor]:
    """High and low word of a product of words. It wraps around in int64, which leaves its 64 bits as they are."""
    product = words * multiplier
    return product >> 32 & _WORD, product & _WORD
