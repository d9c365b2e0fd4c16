"""What a problem costs: floating-point operations and the bytes that must move."""

from __future__ import annotations

from autoflash.problem import Alignment, MaskTensor, Pass, Problem

BACKWARD_FACTOR = 2.5
"""Five matrix products of the backward (S, dP, dV, dK, dQ) for two of the forward."""


def visible_pairs(problem: Problem) -> float:
    """How many (query, key) pairs of one head of one sequence take part, as kernels are usually rated.

    A causal mask with Sq == Sk counts half of all pairs, as FlashAttention, cuDNN and Triton's tutorial count it;
    another causal mask, and a window, count exactly the pairs that they let through. What a mask tensor hides is
    computed all the same, and counts. Packed sequences are rated as if all had the mean length.
    """
    m, n = mean_lengths(problem)
    if not problem.has_window:
        if not problem.causal:
            return float(m * n)
        if m == n:
            return m * n / 2
    diagonal = n - m if problem.alignment is Alignment.BOTTOM_RIGHT else 0
    right = 0 if problem.causal else problem.window_right
    pairs = m * n if right is None else _pairs_up_to(diagonal + right, m, n)
    if problem.window_left is not None:
        pairs -= _pairs_up_to(diagonal - problem.window_left - 1, m, n)
    return float(pairs)


def mean_lengths(problem: Problem) -> tuple[int, int]:
    """Queries and keys of a sequence; of packed sequences, the mean."""
    if problem.packed_q is None or problem.packed_k is None:
        return problem.seqlen_q, problem.seqlen_k
    sequences = max(problem.batch, 1)
    return round(problem.packed_q / sequences), round(problem.packed_k / sequences)


def flops(problem: Problem) -> float:
    """Floating-point operations of the matrix products: 2 (D + D_V) for each visible pair, 2.5 times that backward."""
    forward = 2.0 * problem.batch * problem.heads * visible_pairs(problem) * (problem.head_dim + problem.head_dim_v)
    return forward * BACKWARD_FACTOR if problem.op is Pass.BACKWARD else forward


def tflops(problem: Problem, us: float) -> float:
    """Rate in TFLOP/s of a call that takes so many microseconds."""
    return flops(problem) / us * 1e-6


def mask_itemsize(problem: Problem) -> int:
    """Bytes that a mask tensor has for a pair, a float mask having the inputs' type; 0 without one."""
    return {MaskTensor.NONE: 0, MaskTensor.BOOL: 1, MaskTensor.FLOAT: problem.dtype.itemsize}[problem.mask_tensor]


def score_matrix_bytes(problem: Problem) -> int:
    """Bytes of one matrix of scores or probabilities [B, H, M, N] in the inputs' type: what is never materialised."""
    m, n = mean_lengths(problem)
    return problem.batch * problem.heads * m * n * problem.dtype.itemsize


def head_bytes(problem: Problem) -> int:
    """Bytes of the keys and values of one head of one sequence."""
    return mean_lengths(problem)[1] * (problem.head_dim + problem.head_dim_v) * problem.dtype.itemsize


def lse_bytes(problem: Problem) -> int:
    """Bytes of the log-sum-exp, float32 [B, H, M]: what a forward keeps for the backward beside its output."""
    return 4 * problem.tensor_batch * problem.heads * problem.rows_q


def least_bytes(problem: Problem) -> int:
    """Bytes that a call must at least move: every input read once, every output written once.

    A mask tensor is taken to be shared by the heads, and a float mask to have the inputs' type. With a window, keys
    that no query sees are counted like the others.
    """
    queries = problem.tensor_batch * problem.heads * problem.rows_q
    keys = problem.tensor_batch * problem.kv_heads * problem.rows_k
    item, row = problem.dtype.itemsize, problem.head_dim + problem.head_dim_v
    forward = (queries + keys) * row * item + 4 * queries + _extra_bytes(problem)
    if problem.op is Pass.FORWARD:
        return forward
    # q, k, v, out, LSE and the extra tensors again; dout read; dq, dk, dv written.
    return forward + queries * problem.head_dim_v * item + (queries * problem.head_dim + keys * row) * item


def _pairs_up_to(diagonal: int, m: int, n: int) -> int:
    """How many of m x n pairs (i, j) have j <= i + diagonal."""
    # Row i has the keys 0 .. i + diagonal, cut to [0, n].
    first, last = diagonal + 1, diagonal + m
    return _sum_to(min(last, n)) - _sum_to(min(first - 1, n)) + n * max(0, last - max(n, first - 1))


def _sum_to(last: int) -> int:
    """1 + 2 + ... + last; 0 where last is negative."""
    return last * (last + 1) // 2 if last > 0 else 0


def _extra_bytes(problem: Problem) -> int:
    pairs = problem.batch * problem.seqlen_q * problem.seqlen_k
    starts = 2 * 4 * (problem.batch + 1) if problem.is_varlen else 0
    terms = 4 * problem.heads * (problem.sinks + problem.alibi)
    if problem.bias:
        # Shared by the sequences, and written as a gradient too.
        elements = problem.heads * problem.seqlen_q * problem.seqlen_k * (2 if problem.bias_gradient else 1)
        terms += elements * problem.dtype.itemsize
    return pairs * mask_itemsize(problem) + starts + terms + (16 if problem.dropout_p else 0)
