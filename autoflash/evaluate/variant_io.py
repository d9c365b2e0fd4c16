"""Bytes that autoflash's own kernels move, in the model of :mod:`autoflash.evaluate.io_model`.

A kernel is counted as its template has it, with the blocks of its variant. Rows that pad a workspace are left out.
"""

from __future__ import annotations

from autoflash.evaluate.cost import mask_itemsize, mean_lengths
from autoflash.evaluate.io_model import ROW_BYTES, Sizes, Stream, Traffic, flash_attention_2, standard
from autoflash.evaluate.tiles import Blocks, visited
from autoflash.problem import Pass, Problem
from autoflash.space import hopper
from autoflash.variant import Family, Variant

# Factors and sums of every family are float32, and so are the workspaces that hold them.
_SUM_BYTES = 4

# Rows of a consumer of the Hopper family (``runtime.gluon_plan``).
_CONSUMER_ROWS = 64


def blocks_of(variant: Variant) -> Blocks | None:
    """The blocks of a forward, or of a backward's programs that own keys; None for a vendor's kernel."""
    config = variant.config
    if variant.family is Family.TORCH_TILED:
        return Blocks(rows=config.number("block_m"), keys=config.number("block_n"))
    if variant.family is Family.TRITON:
        return Blocks(rows=config.number("BLOCK_M"), keys=config.number("BLOCK_N"))
    if variant.family is Family.GLUON_SM90:
        if "BLOCK_N" in config:
            rows = variant.structure.number("consumers") * _CONSUMER_ROWS
            return Blocks(rows=rows, keys=config.number("BLOCK_N"))
        return Blocks(rows=config.number("BLOCK_M"), keys=hopper.keys_per_program(variant.structure))
    return None


def traffic_of(problem: Problem, variant: Variant) -> Traffic | None:
    """What a kernel moves; None where its algorithm is not known: a vendor's, but for SDPA's math backend.

    Args:
        problem: Of the variant's pass.
        variant: Of any family.
    """
    if variant.family is Family.VENDOR:
        return standard(problem) if variant.structure.get("backend") in ("math", "standard") else None
    blocks = blocks_of(variant)
    assert blocks is not None
    if variant.family is Family.TORCH_TILED:
        return _in_torch(problem, blocks)
    if problem.op is Pass.FORWARD:
        if variant.structure.get("loop_order") == "key_outer":
            return _key_outer_forward(problem, blocks)
        return flash_attention_2(problem, blocks)
    if variant.structure.get("loop_order", "key_outer") == "key_outer":
        return _key_outer_backward(problem, blocks)
    rows = 2 * _CONSUMER_ROWS if variant.family is Family.GLUON_SM90 else variant.config.number("BLOCK_M2")
    queries = Blocks(rows=rows, keys=variant.config.number("BLOCK_N2"))
    return _two_programs_backward(problem, blocks, queries)


def _key_outer_forward(problem: Problem, blocks: Blocks) -> Traffic:
    """FlashAttention-1's order with the running output unnormalised in float32, and a last pass over it."""
    size, seen = Sizes(problem), visited(problem, blocks)
    m, _ = mean_lengths(problem)
    sums = size.of_rows(m, size.head_dim_v, _SUM_BYTES)
    sums_seen = size.of_rows(seen.query_rows, size.head_dim_v, _SUM_BYTES)
    rows_seen = 2 * size.of_rows(seen.query_rows, 1, ROW_BYTES)
    return Traffic(
        algorithm="FlashAttention-1 order",
        blocks=blocks,
        streams=(
            Stream(tensor="q", read_bytes=size.of_rows(seen.query_rows, size.head_dim)),
            Stream(tensor="k", read_bytes=size.k),
            Stream(tensor="v", read_bytes=size.v),
            Stream(tensor="acc", read_bytes=sums_seen + sums, written_bytes=sums + sums_seen),
            Stream(tensor="l, m", read_bytes=rows_seen + 2 * size.row, written_bytes=2 * size.row + rows_seen),
            Stream(tensor="out", written_bytes=size.out),
            Stream(tensor="lse", written_bytes=size.row),
        ),
        assumption="the running output is float32, and divided in a last pass",
    )


def _preprocessing(size: Sizes) -> tuple[Stream, ...]:
    """Of a backward: from the output, its gradient and the log-sum-exp to what its programs read of each row."""
    return (
        Stream(tensor="out", read_bytes=size.out),
        Stream(tensor="dout", read_bytes=size.out),
        Stream(tensor="lse", read_bytes=size.row),
        Stream(tensor="log2_sum, delta", written_bytes=2 * size.row),
    )


def _key_program(problem: Problem, size: Sizes, blocks: Blocks) -> tuple[Stream, ...]:
    """Programs that own keys: they read the rows of every query that sees them, and write dK and dV."""
    seen = visited(problem, blocks)
    return (
        Stream(tensor="q", read_bytes=size.of_rows(seen.query_rows, size.head_dim)),
        Stream(tensor="dout", read_bytes=size.of_rows(seen.query_rows, size.head_dim_v)),
        Stream(tensor="log2_sum, delta", read_bytes=2 * size.of_rows(seen.query_rows, 1, ROW_BYTES)),
        Stream(tensor="k", read_bytes=size.k // size.group),
        Stream(tensor="v", read_bytes=size.v // size.group),
        *_masked(problem, size, seen.pairs),
        Stream(tensor="dk", written_bytes=size.k // size.group),
        Stream(tensor="dv", written_bytes=size.v // size.group),
    )


def _key_outer_backward(problem: Problem, blocks: Blocks) -> Traffic:
    """Programs that own keys add to dQ in a float32 workspace, which is zeroed before and rounded afterwards."""
    size = Sizes(problem)
    m, _ = mean_lengths(problem)
    sums = size.of_rows(m, size.head_dim, _SUM_BYTES)
    added = size.of_rows(visited(problem, blocks).query_rows, size.head_dim, _SUM_BYTES)
    return Traffic(
        algorithm="FlashAttention-2 backward, key outer",
        blocks=blocks,
        streams=_merged(
            *_preprocessing(size),
            *_key_program(problem, size, blocks),
            Stream(tensor="dq sums", read_bytes=added + sums, written_bytes=sums + added),
            Stream(tensor="dq", written_bytes=size.q),
        ),
        assumption="an atomic addition is a read and a write",
    )


def _two_programs_backward(problem: Problem, blocks: Blocks, query_blocks: Blocks) -> Traffic:
    """Programs that own keys write dK and dV, and others that own queries compute the scores again and write dQ."""
    size, seen = Sizes(problem), visited(problem, query_blocks)
    return Traffic(
        algorithm="FlashAttention-2 backward, split",
        blocks=blocks,
        streams=_merged(
            *_preprocessing(size),
            *_key_program(problem, size, blocks),
            Stream(tensor="q", read_bytes=size.q),
            Stream(tensor="dout", read_bytes=size.out),
            Stream(tensor="log2_sum, delta", read_bytes=2 * size.row),
            Stream(tensor="k", read_bytes=size.of_rows(seen.key_rows, size.head_dim)),
            Stream(tensor="v", read_bytes=size.of_rows(seen.key_rows, size.head_dim_v)),
            *_masked(problem, size, seen.pairs),
            Stream(tensor="dq", written_bytes=size.q),
        ),
        assumption=f"programs that own queries have blocks of {query_blocks}",
    )


def _in_torch(problem: Problem, blocks: Blocks) -> Traffic:
    """Tiles in plain torch, in either loop order: each operation streams its operands through memory.

    What the templates do with a tile of scores, forward: product, maximum, subtraction, exponential, sum, product, of
    which three write it and five read it. Backward: product and exponential of the scores, product and multiplication
    of their gradients, three products: four writes and six reads. What an operation does to mask, cap or drop, and row
    vectors, are left out.
    """
    size, seen = Sizes(problem), visited(problem, blocks)
    pairs = size.of_rows(seen.pairs, 1, _SUM_BYTES)
    q, out = (size.of_rows(seen.query_rows, width, _SUM_BYTES) for width in (size.head_dim, size.head_dim_v))
    # A tile of keys is read for the queries of all heads that share it.
    k, v = (size.of_rows(seen.key_rows, width, _SUM_BYTES) // size.group for width in (size.head_dim, size.head_dim_v))
    mask = _masked(problem, size, seen.pairs)
    assumption = "every operation of torch reads and writes main memory; on a CPU, its caches save most of it"
    if problem.op is Pass.FORWARD:
        return Traffic(
            algorithm="tiles in plain torch",
            blocks=blocks,
            streams=(
                Stream(tensor="q", read_bytes=q),
                Stream(tensor="k", read_bytes=k),
                Stream(tensor="v", read_bytes=v),
                *mask,
                Stream(tensor="scores", read_bytes=5 * pairs, written_bytes=3 * pairs),
                # Rescaled, then added to.
                Stream(tensor="acc", read_bytes=2 * out, written_bytes=2 * out),
                Stream(tensor="out", written_bytes=size.out),
                Stream(tensor="lse", written_bytes=size.row),
            ),
            assumption=assumption,
        )
    return Traffic(
        algorithm="tiles in plain torch",
        blocks=blocks,
        streams=(
            # The scores, and dK.
            Stream(tensor="q", read_bytes=2 * q),
            # The scores, and dQ.
            Stream(tensor="k", read_bytes=2 * k),
            Stream(tensor="v", read_bytes=v),
            # The gradients of the probabilities, and dV.
            Stream(tensor="dout", read_bytes=2 * out),
            *mask,
            Stream(tensor="scores", read_bytes=3 * pairs, written_bytes=2 * pairs),
            Stream(tensor="dscores", read_bytes=3 * pairs, written_bytes=2 * pairs),
            Stream(tensor="dq", read_bytes=q, written_bytes=q),
            Stream(tensor="dk", read_bytes=k, written_bytes=k),
            Stream(tensor="dv", read_bytes=v, written_bytes=v),
        ),
        assumption=assumption,
    )


def _masked(problem: Problem, size: Sizes, pairs: int) -> tuple[Stream, ...]:
    item = mask_itemsize(problem)
    return (Stream(tensor="mask", read_bytes=size.of_rows(pairs, 1, item)),) if item else ()


def _merged(*streams: Stream) -> tuple[Stream, ...]:
    """One stream for each tensor, in the order in which they are first named."""
    merged: dict[str, Stream] = {}
    for stream in streams:
        before = merged.get(stream.tensor, Stream(tensor=stream.tensor))
        merged[stream.tensor] = Stream(
            tensor=stream.tensor,
            read_bytes=before.read_bytes + stream.read_bytes,
            written_bytes=before.written_bytes + stream.written_bytes,
        )
    return tuple(merged.values())
