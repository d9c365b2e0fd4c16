"""Bytes that published algorithms for attention move between main memory (HBM) and the chip, counted exactly.

The model is that of Dao et al. (FlashAttention, 2022, arXiv:2205.14135): there is a fast memory of M elements on the
chip and nothing else; whatever an algorithm reads or writes outside of it is counted, each time. No cache helps, but
where a function says so. Each query head is computed by itself, so that heads that share keys read them separately.
"""

from __future__ import annotations

from dataclasses import dataclass

from autoflash.evaluate.cost import mask_itemsize, mean_lengths
from autoflash.evaluate.tiles import Blocks, visited
from autoflash.problem import Pass, Problem

RABE_STAATS_CHUNKS = Blocks(rows=1024, keys=4096)
"""Chunk sizes of the published implementation (Rabe and Staats, 2021, arXiv:2112.05682, figure 1)."""

# Running maxima, sums and log-sum-exps, and everything else that there is once for a row, are float32.
ROW_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """What is moved of one tensor, in bytes."""

    tensor: str
    read_bytes: int = 0
    written_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """What one algorithm moves.

    Attributes:
        algorithm: Its name.
        blocks: Of the score matrix, where it is cut into some.
        streams: By tensor.
        assumption: What the count rests on beside the model, in words.
    """

    algorithm: str
    blocks: Blocks | None
    streams: tuple[Stream, ...]
    assumption: str = ""

    @property
    def read_bytes(self) -> int:
        """Bytes read."""
        return sum(stream.read_bytes for stream in self.streams)

    @property
    def written_bytes(self) -> int:
        """Bytes written."""
        return sum(stream.written_bytes for stream in self.streams)

    @property
    def total_bytes(self) -> int:
        """Bytes moved."""
        return self.read_bytes + self.written_bytes


class Sizes:
    """Bytes of the tensors of a problem, those of keys as all query heads see them: a copy for each.

    ``q``, ``k``, ``v``, ``out`` are bytes of whole tensors, ``row`` of a float32 for each query, ``scores`` of one
    matrix of scores [B, H, M, N] in the inputs' type. Packed sequences are taken to have the mean length.
    """

    def __init__(self, problem: Problem) -> None:
        m, n = mean_lengths(problem)
        item = problem.dtype.itemsize
        self.heads = problem.batch * problem.heads
        self.group = problem.group
        self.item = item
        self.head_dim, self.head_dim_v = problem.head_dim, problem.head_dim_v
        self.q, self.out = (self.heads * m * width * item for width in (problem.head_dim, problem.head_dim_v))
        self.k, self.v = (self.heads * n * width * item for width in (problem.head_dim, problem.head_dim_v))
        self.row = self.heads * m * ROW_BYTES
        self.scores = self.heads * m * n * item
        self.mask = self.heads * m * n * mask_itemsize(problem)

    def of_rows(self, rows: int, width: int, item: int | None = None) -> int:
        """Bytes of so many vectors of each query head."""
        return self.heads * rows * width * (self.item if item is None else item)


def theta_standard(problem: Problem) -> float:
    """Theta(N d + N^2) of standard attention (Dao et al., Theorem 2), in bytes, its constant taken to be 1."""
    sizes = Sizes(problem)
    return float(sizes.q + sizes.scores)


def theta_flash(problem: Problem, on_chip_bytes: int) -> float:
    """Theta(N^2 d^2 / M) of FlashAttention (Dao et al., Theorem 2), in bytes, its constant taken to be 1.

    It holds for d <= M <= N d, where M is the on-chip memory in elements.
    """
    return Sizes(problem).scores * problem.head_dim**2 / (on_chip_bytes / problem.dtype.itemsize)


def holds_theta_flash(problem: Problem, on_chip_bytes: int) -> bool:
    """Whether the on-chip memory lies where Theorem 2 holds: d <= M <= N d."""
    elements = on_chip_bytes / problem.dtype.itemsize
    return problem.head_dim <= elements <= mean_lengths(problem)[1] * problem.head_dim


def standard(problem: Problem) -> Traffic:
    """Standard attention: Algorithms 0 and 3 of Dao et al., by matrix products and a softmax of whole matrices.

    Forward: Q, K in, S out; S in, P out; P, V in, O out. Backward, with P of the forward: P, dO in, dV out; dO, V in,
    dP out; P, dP in, dS out; dS, K in, dQ out; dS, Q in, dK out. A mask is applied where S is read, and all pairs are
    computed.
    """
    size = Sizes(problem)
    if problem.op is Pass.FORWARD:
        return Traffic(
            algorithm="standard attention",
            blocks=None,
            streams=(
                Stream(tensor="q", read_bytes=size.q),
                Stream(tensor="k", read_bytes=size.k),
                Stream(tensor="v", read_bytes=size.v),
                *_mask_stream(size.mask),
                Stream(tensor="scores", read_bytes=size.scores, written_bytes=size.scores),
                Stream(tensor="probabilities", read_bytes=size.scores, written_bytes=size.scores),
                Stream(tensor="out", written_bytes=size.out),
            ),
            assumption="matrix products read each operand once",
        )
    return Traffic(
        algorithm="standard attention",
        blocks=None,
        streams=(
            Stream(tensor="q", read_bytes=size.q),
            Stream(tensor="k", read_bytes=size.k),
            Stream(tensor="v", read_bytes=size.v),
            Stream(tensor="dout", read_bytes=2 * size.out),
            Stream(tensor="probabilities", read_bytes=2 * size.scores),
            Stream(tensor="dprobabilities", read_bytes=size.scores, written_bytes=size.scores),
            Stream(tensor="dscores", read_bytes=2 * size.scores, written_bytes=size.scores),
            Stream(tensor="dq", written_bytes=size.q),
            Stream(tensor="dk", written_bytes=size.k),
            Stream(tensor="dv", written_bytes=size.v),
        ),
        assumption="the probabilities of the forward were kept; matrix products read each operand once",
    )


def rabe_staats(problem: Problem, chunks: Blocks = RABE_STAATS_CHUNKS) -> Traffic:
    """Rabe and Staats (2021): the score matrix in chunks, each by standard attention, then one sum over the chunks.

    Memory is linear, but a chunk of scores is much larger than the chip: it is written and read like a whole matrix.
    Each chunk of keys leaves an output, a maximum and a sum for each row, in float32, which are read to be combined.

    Args:
        problem: A forward.
        chunks: Cut to the sequences.
    """
    size = Sizes(problem)
    m, n = mean_lengths(problem)
    blocks = Blocks(rows=max(1, min(chunks.rows, m)), keys=max(1, min(chunks.keys, n)))
    steps_q, steps_k = -(-m // blocks.rows), -(-n // blocks.keys)
    partial = steps_k * size.of_rows(m, problem.head_dim_v, ROW_BYTES)
    return Traffic(
        algorithm="Rabe-Staats",
        blocks=blocks,
        streams=(
            Stream(tensor="q", read_bytes=steps_k * size.q),
            Stream(tensor="k", read_bytes=steps_q * size.k),
            Stream(tensor="v", read_bytes=steps_q * size.v),
            *_mask_stream(size.mask),
            Stream(tensor="scores", read_bytes=size.scores, written_bytes=size.scores),
            Stream(tensor="probabilities", read_bytes=size.scores, written_bytes=size.scores),
            Stream(tensor="partial out", read_bytes=partial, written_bytes=partial),
            Stream(tensor="partial sums", read_bytes=2 * steps_k * size.row, written_bytes=2 * steps_k * size.row),
            Stream(tensor="out", written_bytes=size.out),
        ),
        assumption="a chunk of scores does not fit on the chip; no chunk is skipped",
    )


def flash_attention_1(problem: Problem, blocks: Blocks) -> Traffic:
    """FlashAttention's order (Dao et al., Algorithms 1 and 4): a block of keys at a time, each shown to all queries.

    Forward: each block of keys reads Q, and reads and writes O, l and m, of every query that sees it. Backward: it
    reads Q, O, dO, l and m, and reads and writes dQ. What is written more than once is also written once to begin with.
    O and dQ have the inputs' type. Blocks that are hidden whole are skipped (appendix B of the paper).
    """
    size, seen = Sizes(problem), visited(problem, blocks)
    q, out = (size.of_rows(seen.query_rows, width) for width in (size.head_dim, size.head_dim_v))
    row = size.of_rows(seen.query_rows, 1, ROW_BYTES)
    mask = size.of_rows(seen.pairs, 1, mask_itemsize(problem))
    if problem.op is Pass.FORWARD:
        return Traffic(
            algorithm="FlashAttention-1 order",
            blocks=blocks,
            streams=(
                Stream(tensor="q", read_bytes=q),
                Stream(tensor="k", read_bytes=size.k),
                Stream(tensor="v", read_bytes=size.v),
                *_mask_stream(mask),
                Stream(tensor="out", read_bytes=out, written_bytes=size.out + out),
                Stream(tensor="l, m", read_bytes=2 * row, written_bytes=2 * (size.row + row)),
            ),
        )
    return Traffic(
        algorithm="FlashAttention-1 order",
        blocks=blocks,
        streams=(
            Stream(tensor="q", read_bytes=q),
            Stream(tensor="k", read_bytes=size.k // size.group),
            Stream(tensor="v", read_bytes=size.v // size.group),
            *_mask_stream(mask),
            Stream(tensor="out", read_bytes=out),
            Stream(tensor="dout", read_bytes=out),
            Stream(tensor="l, m", read_bytes=2 * row),
            Stream(tensor="dq", read_bytes=q, written_bytes=size.q + q),
            Stream(tensor="dk", written_bytes=size.k // size.group),
            Stream(tensor="dv", written_bytes=size.v // size.group),
        ),
        assumption="the query heads of a group are shown one copy of their keys" if size.group > 1 else "",
    )


def flash_attention_2(problem: Problem, blocks: Blocks, *, in_l2: bool = False) -> Traffic:
    """FlashAttention-2's order (Dao, 2023, arXiv:2307.08691, Algorithms 1 and 2).

    Forward: a block of queries at a time walks over the keys that it sees; Q is read and O and the log-sum-exp written
    once, K and V are read again for each block of queries. Backward: delta = rowsum(dO * O) comes first; then a block
    of keys at a time reads Q, dO, the log-sum-exp and delta, and reads and writes dQ, of every query that sees it.

    Args:
        problem: Either pass.
        blocks: Of the score matrix.
        in_l2: What is read again is found in the second cache level, and counted once: K and V forward (once for all
            heads that share them), the rows' tensors backward. True of a device whose L2 holds the heads that are being
            worked on.
    """
    size, seen = Sizes(problem), visited(problem, blocks)
    mask = size.of_rows(seen.pairs, 1, mask_itemsize(problem))
    name = "FlashAttention-2 order" + (", L2" if in_l2 else "")
    if problem.op is Pass.FORWARD:
        k, v = (size.of_rows(seen.key_rows, width) for width in (size.head_dim, size.head_dim_v))
        return Traffic(
            algorithm=name,
            blocks=blocks,
            streams=(
                Stream(tensor="q", read_bytes=size.q),
                Stream(tensor="k", read_bytes=size.k // size.group if in_l2 else k),
                Stream(tensor="v", read_bytes=size.v // size.group if in_l2 else v),
                *_mask_stream(mask),
                Stream(tensor="out", written_bytes=size.out),
                Stream(tensor="lse", written_bytes=size.row),
            ),
            assumption="L2 holds K and V of the heads in flight" if in_l2 else "no cache holds K and V",
        )
    rows = seen.query_rows
    q, dout = (size.of_rows(rows, width) for width in (size.head_dim, size.head_dim_v))
    row = size.of_rows(rows, 1, ROW_BYTES)
    if in_l2:
        q, dout, row = size.q, size.out, size.row
    return Traffic(
        algorithm=name,
        blocks=blocks,
        streams=(
            Stream(tensor="out", read_bytes=size.out),
            Stream(tensor="dout", read_bytes=size.out + dout),
            Stream(tensor="delta", read_bytes=row, written_bytes=size.row),
            Stream(tensor="lse", read_bytes=row),
            Stream(tensor="q", read_bytes=q),
            Stream(tensor="k", read_bytes=size.k // size.group),
            Stream(tensor="v", read_bytes=size.v // size.group),
            *_mask_stream(mask),
            Stream(tensor="dq", read_bytes=q, written_bytes=size.q + q),
            Stream(tensor="dk", written_bytes=size.k // size.group),
            Stream(tensor="dv", written_bytes=size.v // size.group),
        ),
        assumption="L2 holds Q, dO and dQ of the heads in flight" if in_l2 else "no cache holds Q, dO and dQ",
    )


def published(problem: Problem, blocks: Blocks | None) -> tuple[Traffic, ...]:
    """Every algorithm of this module for the pass of a problem; without blocks, those that have their own or none."""
    unblocked = (standard(problem), *((rabe_staats(problem),) if problem.op is Pass.FORWARD else ()))
    if blocks is None:
        return unblocked
    return (
        *unblocked,
        flash_attention_1(problem, blocks),
        flash_attention_2(problem, blocks),
        flash_attention_2(problem, blocks, in_l2=True),
    )


def _mask_stream(read_bytes: int) -> tuple[Stream, ...]:
    return (Stream(tensor="mask", read_bytes=read_bytes),) if read_bytes else ()
