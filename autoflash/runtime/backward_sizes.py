"""How long the tiles of a backward call of the Triton family are, and what its kernels leave between them."""

from __future__ import annotations

from collections.abc import Sequence

from autoflash.problem import DType, Problem
from autoflash.runtime import param_gradients
from autoflash.runtime.layouts import block_dim, slots, width_constants
from autoflash.variant import Variant

# The kernels before and after move memory: a tile of 8192 elements keeps 4 warps busy and few registers.
_STREAM_ELEMENTS = 8192

# The kernels of the gradients of terms: four tiles of 16 KiB fit every class of shared memory.
_TERM_BYTES = 16 * 1024
_TERM_ROWS = 64
# On FMA units, which true float32 takes, 64 rows spill by 2 to 11 KB a thread on sm_90.
_TERM_ROWS_ON_FMA = 32


def padded_rows(problem: Problem, variant: Variant) -> int:
    """Rows of the workspaces log2_sum and delta for each head: whole tiles of every kernel.

    Of packed sequences, each has whole tiles of its own, at a place that is known without looking at the others.
    """
    rows = padding_rows(problem, variant)
    return tiles_of(problem, problem.rows_q, rows) * rows


def bias_sums_shape(problem: Problem, bias: Sequence[int]) -> tuple[int, ...] | None:
    """Of the float32 sums of each head that a kernel leaves of a gradient of this shape; None where it leaves none."""
    heads = (problem.batch, problem.heads)
    if bias[3] != problem.seqlen_k:
        return (*heads, problem.seqlen_q, 1)
    return None if bias[2] == problem.seqlen_q else (*heads, 1, problem.seqlen_k)


def slopes_sums_shape(problem: Problem, variant: Variant) -> tuple[int, int, int]:
    """Of the float32 shares of the gradient of the slopes, [B, H, tiles]; packed sequences have one each."""
    tiles = 1 if problem.is_varlen else -(-problem.seqlen_q // term_rows(problem, variant))
    return problem.batch, problem.heads, tiles


def param_sums_shapes(problem: Problem, variant: Variant) -> tuple[tuple[int, ...], ...]:
    """Of the float32 sums that the kernel of each look-up of a parameter leaves; empty where it leaves none."""
    rows = term_rows(problem, variant)
    return tuple(param_gradients.sums_shape(problem, one, rows) for one in param_gradients.look_ups(problem))


def row_knobs(variant: Variant) -> tuple[str, ...]:
    """The knobs of the lengths of tiles of queries."""
    return ("BLOCK_M",) if variant.structure.text("loop_order") == "key_outer" else ("BLOCK_M", "BLOCK_M2")


def key_knobs(variant: Variant) -> tuple[str, ...]:
    """Likewise of keys."""
    return tuple(name.replace("_M", "_N") for name in row_knobs(variant))


def stream_rows(problem: Problem) -> int:
    """Rows of each tile of a kernel before or after: all of a head are a multiple of them."""
    widest = max(block_dim(problem.head_dim), block_dim(problem.head_dim_v))
    return min(128, _STREAM_ELEMENTS // widest)


def padding_rows(problem: Problem, variant: Variant) -> int:
    """Rows of the largest tile of queries of any kernel, or of the blocks of a block mask; all are powers of two."""
    has_terms = problem.bias_gradient or problem.alibi_gradient or problem.params_gradient
    terms = [term_rows(problem, variant)] if has_terms else []
    return max(
        stream_rows(problem),
        problem.block_size,
        *terms,
        *(variant.config.number(name) for name in row_knobs(variant)),
    )


def term_rows(problem: Problem, variant: Variant) -> int:
    """Rows of each of the four tiles of vectors in a kernel of the gradient of a term: of so many bytes at most."""
    widths = width_constants(problem, variant.structure)
    widest = max(int(widths["BLOCK_D"]), int(widths["BLOCK_DV"]))
    on_fma = problem.dtype is DType.FP32 and not problem.tf32
    rows = min(_TERM_ROWS_ON_FMA if on_fma else _TERM_ROWS, _TERM_BYTES // (widest * problem.dtype.itemsize))
    return max(16, 1 << (rows.bit_length() - 1))


def tiles_of(problem: Problem, length: int, rows: int) -> int:
    """Tiles of a head; of packed sequences, each may begin and end within a tile, and so do the rows behind them."""
    return slots(length, problem.batch, rows) if problem.is_varlen else -(-length // rows)
