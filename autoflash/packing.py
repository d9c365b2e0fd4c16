"""Packed sequences as kernels take them."""

from __future__ import annotations

from torch import Tensor

from autoflash.arguments import check_cu_seqlens
from autoflash.calls import Triple
from autoflash.errors import InvalidProblemError
from autoflash.runtime.executable import Extras


def packed_extras(query: Tensor, key: Tensor, cu_seqlens_q: object, cu_seqlens_k: object) -> Extras:
    """Checked offsets of packed tensors [T, H, D].

    Raises:
        InvalidProblemError: for offsets that are none, or that describe different numbers of sequences.
    """
    offsets_q = check_cu_seqlens("cu_seqlens_q", cu_seqlens_q, query)
    offsets_k = check_cu_seqlens("cu_seqlens_k", cu_seqlens_k, key)
    if offsets_q.shape != offsets_k.shape:
        raise InvalidProblemError(
            "cu_seqlens_q and cu_seqlens_k must describe as many sequences, got "
            f"{offsets_q.shape[0] - 1} and {offsets_k.shape[0] - 1}"
        )
    return Extras(cu_seqlens_q=offsets_q, cu_seqlens_k=offsets_k)


def longest_of(max_seqlen_q: int | None, max_seqlen_k: int | None) -> tuple[int, int]:
    """What the caller knows of the longest packed sequence; 0 for nothing.

    Raises:
        InvalidProblemError: for a negative length.
    """
    for name, longest in (("max_seqlen_q", max_seqlen_q), ("max_seqlen_k", max_seqlen_k)):
        if longest is not None and longest < 0:
            raise InvalidProblemError(f"{name} must be None or not negative, got {longest}")
    return max_seqlen_q or 0, max_seqlen_k or 0


def packed(query: Tensor, key: Tensor, value: Tensor) -> Triple:
    """Views [1, H, T, D] of packed tensors [T, H, D]."""
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (query, key, value))
    return q, k, v
