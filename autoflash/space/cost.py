"""What a Triton variant will need of a multiprocessor, and a score that orders candidates before any is timed.

The shared-memory formula agrees with Triton 3.6's metadata for sm_90 to within barriers and row statistics (a
kilobyte); elsewhere it is an estimate, and only its lower bound rejects.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache

from autoflash.device import Device, DeviceKind
from autoflash.problem import Cell, DType, Feature, Mask, Pass
from autoflash.space import hopper, softmax
from autoflash.trial import Resources
from autoflash.variant import Choices, Family, Variant

# The second cache level of a server core; how many heads "all at once" usually is.
_CORE_CACHE_BYTES = 2**20
_USUAL_HEADS = 8
_ROW_STATISTICS_BYTES = 1024
_PAIR_BYTES = {Feature.BIAS: 4, Feature.FLOAT_MASK: 4, Feature.BOOL_MASK: 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """One kind of program: it owns ``rows`` rows of its sequence and steps over the other in ``step`` rows.

    Attributes:
        rows, step: Lengths of the owned block and of one step.
        accumulators: How many float32 tiles of ``rows`` live through the loop.
        accumulated: Their columns in all.
        resident: Columns of the operand tiles of ``rows`` that stay in shared memory through the loop.
        staged: Columns of the operand tiles of ``step`` that are loaded in each step.
        at_once: Those of them that are alive together where nothing is pipelined.
        mask_bytes: Of a mask's element for one pair; 0 without a mask tensor.
        extra_bytes: Shared memory for a product that goes back to a dot as its operand.
        stages, warps: Of the launch.
        rows_there_are, steps_there_are: Top of the cell's bucket of each sequence.
    """

    rows: int
    step: int
    accumulators: int
    accumulated: int
    resident: int
    staged: int
    at_once: int
    mask_bytes: int
    extra_bytes: int
    stages: int
    warps: int
    rows_there_are: int
    steps_there_are: int

    def accumulator_registers(self, warp_size: int) -> int:
        """Registers per thread that the accumulators alone need: a lower bound."""
        return self.rows * self.accumulated // (self.warps * warp_size)

    def shared_bytes(self, itemsize: int) -> int:
        """What the program keeps in shared memory."""
        staged = self.at_once if self.stages == 1 else self.staged * self.stages
        operands = self.resident * self.rows + staged * self.step
        # A tile of the mask passes through shared memory to the layout of the scores; pipelined, it also waits there.
        masks = max(1, self.stages - 1) * self.mask_bytes * self.rows * self.step
        return operands * itemsize + masks + self.extra_bytes

    def shared_floor(self, dtype: DType) -> int:
        """Shared memory that no compiler can do without: what the program must have in flight between stages."""
        # Operands of FMA products need not be staged at all.
        return 0 if dtype is DType.FP32 else self.staged * (self.stages - 1) * self.step * dtype.itemsize

    def registers(self, warp_size: int, itemsize: int) -> int:
        """A guess of the registers per thread: accumulators, the score tile twice, its mask, and addresses."""
        threads = self.warps * warp_size
        each = (1.0 + itemsize / 4) * (1.0 if self.accumulators == 1 else 1.2) + self.mask_bytes / 4
        return min(255, 32 + self.accumulator_registers(warp_size) + round(self.rows * self.step * each / threads))


_shared_tile = lru_cache(maxsize=4096)(Tile)
"""Thousands of variants share a few kinds of programs."""


def padded(head_dim: int) -> int:
    """Head dimension as a tile sees it: a power of two, at least 16."""
    return max(16, 1 << (head_dim - 1).bit_length())


class Side(str, Enum):
    """Vectors of one length: queries, keys and their gradients; or values, outputs and theirs."""

    QK = "qk"
    V = "v"


def splits_heads(structure: Choices, side: Side) -> bool:
    """Whether kernels of a structure hold vectors in two tiles; one that holds all in one does not say so."""
    return structure.get("head_dim_tiles") in ("split", f"split_{side.value}")


def column_blocks(head_dim: int, structure: Choices, side: Side) -> tuple[int, ...]:
    """Columns of the one or two tiles that hold vectors of this length; the first of two is full."""
    return _parts(head_dim) if splits_heads(structure, side) else (padded(head_dim),)


def in_parts(head_dim: int) -> int:
    """Columns of both tiles of vectors in two."""
    return sum(_parts(head_dim))


def _parts(head_dim: int) -> tuple[int, int]:
    """A power of two, and what is left as a tile of its own."""
    first = padded(head_dim) // 2
    return first, padded(head_dim - first)


def tiling_in_parts(cell: Cell) -> str | None:
    """What ``head_dim_tiles`` is where all vectors that take fewer columns in two tiles are in two; None if none do."""
    gain, gain_v = (in_parts(dim) < padded(dim) for dim in (cell.head_dim, cell.head_dim_v))
    if gain and gain_v:
        return "split"
    return "split_qk" if gain else "split_v" if gain_v else None


def columns(variant: Variant, cell: Cell) -> tuple[int, int]:
    """Columns of the tiles that hold queries and keys, and of those of values and outputs."""
    structure = variant.structure
    of_qk = column_blocks(cell.head_dim, structure, Side.QK)
    return sum(of_qk), sum(column_blocks(cell.head_dim_v, structure, Side.V))


def tiles(variant: Variant, cell: Cell) -> tuple[Tile, ...]:
    """The kinds of program that a Triton variant launches for its main work."""
    if variant.family is not Family.TRITON:
        return ()
    config, structure = variant.config, variant.structure
    width, width_v = columns(variant, cell)
    queries, keys = 2**cell.q_bucket, 2**cell.k_bucket
    block_m, block_n = config.number("BLOCK_M"), config.number("BLOCK_N")
    pair_bytes = mask_bytes(cell)
    stages, warps = config.number("num_stages"), config.number("num_warps")
    if cell.op is Pass.FORWARD:
        waits = structure["pv_order"] == "under_next_softmax"
        return (
            _shared_tile(
                rows=block_m,
                step=block_n,
                accumulators=1,
                accumulated=width_v,
                resident=width,
                staged=width + width_v,
                # Without pipelining K and V are never alive together.
                at_once=max(width, width_v),
                mask_bytes=pair_bytes,
                extra_bytes=block_m * block_n * cell.dtype.itemsize if waits else 0,
                stages=stages,
                warps=warps,
                rows_there_are=queries,
                steps_there_are=keys,
            ),
        )
    key_program = _shared_tile(
        rows=block_n,
        step=block_m,
        accumulators=2,
        accumulated=width + width_v,
        resident=width + width_v,
        staged=width + width_v,
        at_once=width + width_v,
        mask_bytes=pair_bytes,
        extra_bytes=0,
        stages=stages,
        warps=warps,
        rows_there_are=keys,
        steps_there_are=queries,
    )
    if structure["loop_order"] == "key_outer":
        return (key_program,)
    query_program = _shared_tile(
        rows=config.number("BLOCK_M2"),
        step=config.number("BLOCK_N2"),
        accumulators=1,
        accumulated=width,
        resident=width + width_v,
        staged=width + width_v,
        at_once=width + width_v,
        mask_bytes=pair_bytes,
        extra_bytes=0,
        stages=config.number("num_stages2"),
        warps=config.number("num_warps2") if structure["loop_order"] == "split" else warps,
        rows_there_are=queries,
        steps_there_are=keys,
    )
    return (key_program, query_program)


def mask_bytes(cell: Cell) -> int:
    """Bytes of the elements of a mask tensor and a bias for one pair: numbers may be float32. 0 without any."""
    return sum(_PAIR_BYTES.get(feature, 0) for feature in cell.features)


def shared_bytes(variant: Variant, cell: Cell) -> int:
    """Shared memory per block, as estimated: the largest of the variant's programs. 0 for other families."""
    return max((tile.shared_bytes(cell.dtype.itemsize) for tile in tiles(variant, cell)), default=0)


def most_shared_bytes(variant: Variant, cell: Cell, device: Device) -> int:
    """Shared memory per block that the compiler takes at most for small tiles without pipelining, of any head.

    Measured from 64 to 576 columns: with the matrix units of single warps a backward keeps dO a second time,
    transposed; on CDNA operands pass through shared memory one after the other, on their way to registers.
    """
    itemsize = cell.dtype.itemsize
    width, width_v = columns(variant, cell)
    widest = max(width, width_v)
    most = 0
    for tile in tiles(variant, cell):
        if device.kind is DeviceKind.HIP:
            alone = max(tile.rows, tile.step) * widest * itemsize
            most = max(most, alone + tile.mask_bytes * tile.rows * tile.step)
        else:
            twice = width_v * tile.step * itemsize if tile.accumulators == 2 else 0
            most = max(most, tile.shared_bytes(itemsize) + twice + _ROW_STATISTICS_BYTES)
    return most


def score(variant: Variant, cell: Cell, device: Device, resources: Resources | None = None) -> float:
    """A rank for candidates before any of them is timed: higher is tried first, the unit means nothing.

    Args:
        variant: The candidate.
        cell: What it would compute.
        device: Where.
        resources: What the compiler said, which replaces the estimates.
    """
    if variant.family is Family.TORCH_TILED:
        return _portable_score(variant, cell)
    if variant.family is Family.GLUON_SM90:
        return hopper.score(variant, cell, resources)
    itemsize, bucket = cell.dtype.itemsize, cell.window_bucket
    parts = [_tile_score(tile, itemsize, bucket, device, resources) for tile in tiles(variant, cell)]
    if not parts:
        return 0.0
    # TMA loads are about 10 % faster than pointers forward, 3 % backward (measured on sm_90).
    bonus = (0.25 if cell.op is Pass.FORWARD else 0.15) if variant.structure.get("loads") == "tma" else 0.0
    bonus += softmax.score(variant.structure)
    # Half of the matrix work that parts save, since each has loads and issues of its own; not measured.
    bonus += 0.5 * math.log2((padded(cell.head_dim) + padded(cell.head_dim_v)) / sum(columns(variant, cell)))
    if cell.op is Pass.BACKWARD:
        # One launch overlaps the tail of one kind of program with the other; atomics take one program per
        # multiprocessor and wait on each other. Forward key-outer writes its state to memory in every step.
        bonus += {"fused": 0.4, "split": 0.2, "key_outer": -0.6}[variant.structure.text("loop_order")]
    elif variant.structure["loop_order"] == "key_outer":
        bonus -= 4.0
    return sum(parts) / len(parts) + bonus


def window_waste(rows: int, step: int, window_bucket: int) -> float:
    """How many times the keys of a window, in powers of two, blocks of these lengths make a program visit."""
    return math.log2(1.0 + (rows + step) / 2.0**window_bucket) if window_bucket else 0.0


def occupancy(registers: int, shared: int, warps: int, device: Device) -> int:
    """Blocks that fit on one multiprocessor at once; 0 where not even one does."""
    threads = warps * device.warp_size
    file = 65536 if device.kind is DeviceKind.CUDA else 131072
    by_shared = (device.shared_bytes + 1024) // (shared + 1024)
    return min(file // (max(registers, 16) * threads), by_shared, 2048 // threads)


@lru_cache(maxsize=4096)
def _tile_score(tile: Tile, itemsize: int, window_bucket: int, device: Device, resources: Resources | None) -> float:
    """Thousands of variants share a few kinds of programs."""
    shared = resources.shared_bytes if resources else tile.shared_bytes(itemsize)
    registers = resources.registers if resources else tile.registers(device.warp_size, itemsize)
    spills = resources.spill_bytes if resources else 0
    return -window_waste(tile.rows, tile.step, window_bucket) + schedule_score(
        rows=tile.rows,
        step=tile.step,
        warps=tile.warps,
        stages=tile.stages,
        registers=registers,
        shared=shared,
        spills=spills,
        device=device,
    )


def schedule_score(
    *,
    rows: int,
    step: int,
    warps: int,
    stages: int,
    registers: int,
    shared: int,
    spills: int,
    device: Device,
) -> float:
    """Score of one kind of program from its tile and what it takes of a multiprocessor.

    Softmax is hidden only by other programs on the multiprocessor, so their number counts most; then the work per
    byte loaded, which grows with the tile; spills cost in proportion to their number.
    """
    blocks = occupancy(registers, shared, warps, device)
    if blocks == 0:
        return -10.0
    resident = math.log2(min(blocks, 4))
    reuse = 0.5 * math.log2(rows * step / (64 * 64)) - 0.25 * abs(math.log2(rows * step / (96 * 64)))
    spilled = 0.0 if spills == 0 else 0.2 + 0.15 * math.log2(1 + spills / 16)
    warp_rows = 0.6 if warps > 4 else 0.0
    unpipelined = 0.1 if stages == 1 else 0.0
    return resident + reuse - spilled - warp_rows - unpipelined - 0.1 * max(0, stages - 3)


def _portable_score(variant: Variant, cell: Cell) -> float:
    """Score tiles of about a core's own cache are best: smaller ones pay the interpreter, larger ones are read anew.

    Under a causal mask or a window, large blocks also compute what is thrown away.
    """
    rows = variant.config.number("block_m")
    step = variant.config.number("block_n")
    heads = variant.config.number("heads_per_step") or _USUAL_HEADS
    # From half the cache to four times it, nothing is lost (measured).
    fit = -0.5 * max(0.0, abs(math.log2(heads * rows * step * 4 / (1.5 * _CORE_CACHE_BYTES))) - 1.5)
    waste = math.log2(1.0 + (rows + step) / 2.0**cell.k_bucket) if cell.mask is Mask.CAUSAL else 0.0
    waste = window_waste(rows, step, cell.window_bucket) or waste
    order = 0.0 if variant.structure["loop_order"] == "query_outer" else 0.2
    steps = 0.1 * math.log2(2.0 ** (cell.q_bucket + cell.k_bucket) / (heads * rows * step))
    return fit - 1.5 * waste - order - steps
