"""What the tiled torch family allocates, as its templates do it (``templates/torch``).

Python frees a tensor when its name is bound anew, so that while a tile is made, those of the step before still live.
"""

from __future__ import annotations

from dataclasses import dataclass

from autoflash.problem import Alignment, Feature, MaskTensor, Pass, Problem
from autoflash.runtime.workspace import Buffer, Workspace
from autoflash.variant import Variant

# Products are formed and added in float32: ``factor_type`` of the templates.
_FACTOR_BYTES = 4

# Bytes for each pair that the rounds of a dropout's random numbers, int64 of which each serves four keys, hold at once.
_RANDOM_BYTES = {Pass.FORWARD: 12, Pass.BACKWARD: 16}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shape:
    """Sizes that a call works on. Row i * GROUP + g of a matrix is query i of the g-th head of its group.

    Attributes:
        matrices: B * H_KV, or those of the packed sequences that are worked on together.
        at_once: Those of a step.
        rows: M * GROUP.
        keys: N.
        tile_rows, tile_keys: Of a tile.
        width, width_v: D and D_V.
        group: Query heads of a matrix.
        item: Bytes of an element of the inputs.
        is_key_outer: The inner loop runs over queries.
        skips: Some tiles are hidden and left out.
    """

    matrices: int
    at_once: int
    rows: int
    keys: int
    tile_rows: int
    tile_keys: int
    width: int
    width_v: int
    group: int
    item: int
    is_key_outer: bool
    skips: bool

    @property
    def scores(self) -> int:
        """Bytes of the largest tile of scores."""
        return self.at_once * self.tile_rows * self.tile_keys * _FACTOR_BYTES

    @property
    def scores_before(self) -> int:
        """Bytes of the tile that still lives while the next one is made, at most; 0 where there is one tile."""
        along_keys = self.tile_rows * _second(self.keys, self.tile_keys)
        along_rows = self.tile_keys * _second(self.rows, self.tile_rows)
        next_heads = self.tile_rows * self.tile_keys if self.at_once < self.matrices else 0
        inner, outer = (along_rows, along_keys) if self.is_key_outer else (along_keys, along_rows)
        pairs = max(inner, outer, next_heads) if self.skips else inner or outer or next_heads
        return self.at_once * pairs * _FACTOR_BYTES

    def tile(self, rows: int, width: int) -> int:
        """Bytes of so many vectors of the matrices of a step, as factors."""
        return self.at_once * rows * width * _FACTOR_BYTES

    def copied(self, vectors: int) -> int:
        """Bytes of a step's elements as factors, where the inputs are not such already."""
        return self.at_once * vectors * _FACTOR_BYTES if self.item < _FACTOR_BYTES else 0

    def whole(self, rows: int, width: int, item: int = _FACTOR_BYTES) -> int:
        """Bytes of so many vectors of all matrices."""
        return self.matrices * rows * width * item


def _second(length: int, block: int) -> int:
    """Length of the second longest block of a sequence; 0 where there is one."""
    return min(block, length - block)


def workspace(problem: Problem, variant: Variant) -> Workspace:
    """What a call holds at most beside its inputs and outputs, for contiguous inputs.

    Where many whole tiles follow each other and nothing is asked for, it is exact but for a few vectors of a tile;
    where few do, it may be a fifth too much. With features it is an estimate: a mask is taken to be another one for
    each head, and packed sequences to have the mean length.
    """
    if problem.is_empty:
        return ()
    shape = _shape(problem, variant)
    kept, loop = (_forward if problem.op is Pass.FORWARD else _backward)(problem, shape)
    return (
        Buffer(name="sums and copies of whole rows", size_bytes=kept),
        Buffer(name="tiles", size_bytes=loop),
    )


def _shape(problem: Problem, variant: Variant) -> _Shape:
    config = variant.config
    block_m = config.number("block_m")
    batch, m, n = problem.batch, problem.seqlen_q, problem.seqlen_k
    if problem.is_varlen:
        m, n = (max(1, round(rows / max(batch, 1))) for rows in (problem.rows_q, problem.rows_k))
        # Sequences of equal lengths are worked on together while they fill no more than a tile.
        batch = max(1, min(batch, block_m // m))
    rows_seen, keys_seen = m, n
    if problem.causal and not problem.has_window:
        # Tiles begin at the first query that sees a key, and end with the last key that one sees.
        diagonal = n - m if problem.alignment is Alignment.BOTTOM_RIGHT else 0
        rows_seen, keys_seen = m - max(-diagonal, 0), min(m + diagonal, n)
    is_key_outer = variant.structure["loop_order"] == "key_outer"
    matrices = batch * problem.kv_heads
    return _Shape(
        matrices=matrices,
        at_once=min(matrices, config.number("heads_per_step") or matrices),
        rows=m * problem.group,
        keys=n,
        tile_rows=min(block_m, rows_seen if is_key_outer else m) * problem.group,
        tile_keys=min(config.number("block_n"), n if is_key_outer else keys_seen),
        width=problem.head_dim,
        width_v=problem.head_dim_v,
        group=problem.group,
        item=problem.dtype.itemsize,
        is_key_outer=is_key_outer,
        skips=problem.causal or problem.has_window,
    )


def _forward(problem: Problem, shape: _Shape) -> tuple[int, int]:
    """Bytes that live through the call, and the most that its loops add."""
    rows, keys, width, width_v = shape.rows, shape.keys, shape.width, shape.width_v
    kept = shape.whole(rows, width_v + 1)  # o_rows, lse_rows
    kept += shape.whole(rows, width, shape.item) if shape.group > 1 else 0  # q_rows
    casts = shape.copied(rows * width + keys * (width + width_v))
    scores = shape.scores
    both = scores + shape.scores_before
    if shape.is_key_outer:
        casts = shape.tile(rows, width) + shape.copied(keys * (width + width_v))  # queries are scaled
        state = shape.tile(rows, 2 + width_v)
        stepping = state + both + shape.tile(shape.tile_rows, 3) + _extra(problem, shape)
        finishing = state + scores + shape.tile(rows, width_v + 1)
        loop = max(stepping, finishing)
    else:
        state = shape.tile(shape.tile_rows, width + 2 + width_v)
        stepping = state + both + shape.tile(shape.tile_rows, 3) + _extra(problem, shape)
        finishing = state + scores + shape.tile(shape.tile_rows, width_v + 1)
        beginning = state + shape.tile(shape.tile_rows, max(width, width_v + 2)) + shape.scores_before
        loop = max(stepping, finishing, beginning)
    if shape.at_once < shape.matrices:
        # The next heads' factors are made while the last ones' live, and so does what was made of these.
        loop = max(loop, casts + state + scores)
        if shape.is_key_outer:
            # Views of the last tile hold its keys and values.
            loop = max(loop, shape.copied(keys * (width + width_v)) + 2 * state + scores)
    return kept + casts, loop


def _backward(problem: Problem, shape: _Shape) -> tuple[int, int]:
    """As :func:`_forward`."""
    rows, keys, width, width_v = shape.rows, shape.keys, shape.width, shape.width_v
    copies = shape.whole(rows, width + width_v, shape.item) if shape.group > 1 else 0  # q_rows, do_rows
    kept = copies + shape.whole(rows, 2 + width) + shape.whole(keys, width + width_v)  # lse, delta; dq, dk, dv
    casts = shape.copied((rows + keys) * (width + width_v))
    # Of two neighbours, the scores and their gradients, of which one is still to be made.
    both = 2 * shape.scores + shape.scores_before
    if Feature.SOFTCAP in problem.features:
        # The slope is made of the scores, by way of another tile.
        both = 3 * shape.scores + 3 * shape.scores_before
    tile = shape.tile(shape.tile_keys, width + width_v) if shape.is_key_outer else shape.tile(shape.tile_rows, width)
    loop = tile + max(both + _extra(problem, shape), tile + 2 * shape.scores_before)
    if shape.at_once < shape.matrices:
        loop = max(loop, casts + tile + 2 * shape.scores)
    # delta is the sum of a product of whole tensors.
    product = (3 if shape.item < _FACTOR_BYTES else 1) * shape.whole(rows, width_v)
    return kept + casts, max(loop, copies + product - kept - casts)


def _extra(problem: Problem, shape: _Shape) -> int:
    """What masks and dropout take of a tile beside the scores."""
    positions = shape.tile_rows // shape.group * shape.tile_keys
    pairs = shape.at_once * shape.tile_rows * shape.tile_keys
    extra = 0
    if problem.has_window:
        # A distance in int64, which is added to.
        extra = 16 * positions
    elif problem.causal:
        extra = positions
    if problem.mask_tensor is not MaskTensor.NONE:
        # The mask's elements of the tile, and those of a boolean one negated.
        extra = max(extra, pairs * (2 if problem.mask_tensor is MaskTensor.BOOL else problem.dtype.itemsize))
    if problem.dropout_p:
        extra = max(extra, pairs * _RANDOM_BYTES[problem.op])
    return extra
