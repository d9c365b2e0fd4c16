"""What a problem costs: floating-point operations and the bytes that must move."""

from __future__ import annotations

from autoflash.problem import Pass, Problem

BACKWARD_FACTOR = 2.5
"""Five matrix products of the backward (S, dP, dV, dK, dQ) for two of the forward."""


def visible_pairs(problem: Problem) -> float:
    """How many (query, key) pairs of one head take part, as kernels are usually rated.

    A causal mask with Sq == Sk counts half of all pairs, as FlashAttention, cuDNN and Triton's tutorial count it;
    another causal mask counts exactly the pairs that it lets through.
    """
    m, n = problem.seqlen_q, problem.seqlen_k
    if not problem.causal:
        return float(m * n)
    if m == n:
        return m * n / 2
    # Row i sees keys 0 .. i + diagonal, cut to [0, n].
    first, last = problem.diagonal + 1, problem.diagonal + m
    return float(_sum_to(min(last, n)) - _sum_to(min(first - 1, n)) + n * max(0, last - max(n, first - 1)))


def flops(problem: Problem) -> float:
    """Floating-point operations of the matrix products: 2 (D + D_V) for each visible pair, 2.5 times that backward."""
    forward = 2.0 * problem.batch * problem.heads * visible_pairs(problem) * (problem.head_dim + problem.head_dim_v)
    return forward * BACKWARD_FACTOR if problem.op is Pass.BACKWARD else forward


def tflops(problem: Problem, us: float) -> float:
    """Rate in TFLOP/s of a call that takes so many microseconds."""
    return flops(problem) / us * 1e-6


def least_bytes(problem: Problem) -> int:
    """Bytes that a call must at least move: every input read once, every output written once."""
    queries = problem.batch * problem.heads * problem.seqlen_q
    keys = problem.batch * problem.kv_heads * problem.seqlen_k
    item, row = problem.dtype.itemsize, problem.head_dim + problem.head_dim_v
    forward = (queries + keys) * row * item + 4 * queries
    if problem.op is Pass.FORWARD:
        return forward
    # q, k, v, out and LSE again; dout read; dq, dk, dv written.
    return forward + queries * problem.head_dim_v * item + (queries * problem.head_dim + keys * row) * item


def _sum_to(last: int) -> int:
    """1 + 2 + ... + last; 0 where last is negative."""
    return last * (last + 1) // 2 if last > 0 else 0
