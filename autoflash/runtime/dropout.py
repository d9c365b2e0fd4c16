"""The numbers that kernels are given for dropout. Which pairs they keep is said in ``templates/README.md``."""

from __future__ import annotations


def threshold(dropout_p: float) -> int:
    """The least 32-bit word that keeps its pair: a share of dropout_p of all words lies below."""
    return min(round(dropout_p * 2**32), 2**32 - 1)


def keep_scale(dropout_p: float) -> float:
    """What the probabilities that are kept are multiplied with."""
    return 1.0 / (1.0 - dropout_p)
