"""What a Triton variant will need of a multiprocessor, and a score that orders candidates before any is timed.

The shared-memory formula agrees with Triton 3.6's metadata for sm_90 to within barriers and row statistics (a
kilobyte); elsewhere it is an estimate, and only its lower bound rejects.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from autoflash.device import Device, DeviceKind
from autoflash.problem import Cell, DType, Mask, Pass
from autoflash.space import hopper
from autoflash.trial import Resources
from autoflash.variant import Family, Variant

# The second cache level of a server core; how many heads "all at once" usually is.
_CORE_CACHE_BYTES = 2**20
_USUAL_HEADS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """One kind of program: it owns ``rows`` rows of its sequence and steps over the other in ``step`` rows.

    Attributes:
        rows, step: Lengths of the owned block and of one step.
        width: Head dimension, padded to a power of two.
        accumulators: How many [rows, width] float32 tiles live through the loop.
        resident: How many [rows, width] operand tiles stay in shared memory through the loop.
        staged: How many [step, width] operand tiles are loaded in each step.
        extra_bytes: Shared memory for a product that goes back to a dot as its operand.
        stages, warps: Of the launch.
        rows_there_are, steps_there_are: Top of the cell's bucket of each sequence.
    """

    rows: int
    step: int
    width: int
    accumulators: int
    resident: int
    staged: int
    extra_bytes: int
    stages: int
    warps: int
    rows_there_are: int
    steps_there_are: int

    def accumulator_registers(self, warp_size: int) -> int:
        """Registers per thread that the accumulators alone need: a lower bound."""
        return self.accumulators * self.rows * self.width // (self.warps * warp_size)

    def shared_bytes(self, itemsize: int) -> int:
        """What the program keeps in shared memory."""
        # Without pipelining a forward's K and V tiles are never alive together.
        staged = 1 if self.stages == 1 and self.resident == 1 else self.staged * self.stages
        tiles = self.resident * self.rows + staged * self.step
        return tiles * self.width * itemsize + self.extra_bytes

    def registers(self, warp_size: int, itemsize: int) -> int:
        """A guess of the registers per thread: accumulators, the score tile twice, and addresses."""
        threads = self.warps * warp_size
        scores = self.rows * self.step * (1.0 + itemsize / 4) * (1.0 if self.accumulators == 1 else 1.2)
        return min(255, 32 + self.accumulator_registers(warp_size) + round(scores / threads))


def padded(head_dim: int) -> int:
    """Head dimension as a tile sees it: a power of two, at least 16."""
    return max(16, 1 << (head_dim - 1).bit_length())


def tiles(variant: Variant, cell: Cell) -> tuple[Tile, ...]:
    """The kinds of program that a Triton variant launches for its main work."""
    if variant.family is not Family.TRITON:
        return ()
    config, structure = variant.config, variant.structure
    width = padded(max(cell.head_dim, cell.head_dim_v))
    queries, keys = 2**cell.q_bucket, 2**cell.k_bucket
    block_m, block_n = config.number("BLOCK_M"), config.number("BLOCK_N")
    stages, warps = config.number("num_stages"), config.number("num_warps")
    if cell.op is Pass.FORWARD:
        waits = structure["pv_order"] == "under_next_softmax"
        return (
            Tile(
                rows=block_m,
                step=block_n,
                width=width,
                accumulators=1,
                resident=1,
                staged=2,
                extra_bytes=block_m * block_n * cell.dtype.itemsize if waits else 0,
                stages=stages,
                warps=warps,
                rows_there_are=queries,
                steps_there_are=keys,
            ),
        )
    key_program = Tile(
        rows=block_n,
        step=block_m,
        width=width,
        accumulators=2,
        resident=2,
        staged=2,
        extra_bytes=0,
        stages=stages,
        warps=warps,
        rows_there_are=keys,
        steps_there_are=queries,
    )
    if structure["loop_order"] == "key_outer":
        return (key_program,)
    query_program = Tile(
        rows=config.number("BLOCK_M2"),
        step=config.number("BLOCK_N2"),
        width=width,
        accumulators=1,
        resident=2,
        staged=2,
        extra_bytes=0,
        stages=config.number("num_stages2"),
        warps=config.number("num_warps2") if structure["loop_order"] == "split" else warps,
        rows_there_are=queries,
        steps_there_are=keys,
    )
    return (key_program, query_program)


def shared_bytes(variant: Variant, cell: Cell) -> int:
    """Shared memory per block, as estimated: the largest of the variant's programs. 0 for other families."""
    return max((tile.shared_bytes(cell.dtype.itemsize) for tile in tiles(variant, cell)), default=0)


def shared_floor(variant: Variant, cell: Cell) -> int:
    """Shared memory per block that no compiler can do without: what it must have in flight between stages."""
    if cell.dtype is DType.FP32:
        # Operands of FMA products need not be staged at all.
        return 0
    return max(
        (
            tile.staged * (tile.stages - 1) * tile.step * tile.width * cell.dtype.itemsize
            for tile in tiles(variant, cell)
        ),
        default=0,
    )


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
    parts = [_tile_score(tile, cell, device, resources) for tile in tiles(variant, cell)]
    if not parts:
        return 0.0
    # TMA loads are about 10 % faster than pointers forward, 3 % backward (measured on sm_90).
    bonus = (0.25 if cell.op is Pass.FORWARD else 0.15) if variant.structure.get("loads") == "tma" else 0.0
    if cell.op is Pass.BACKWARD:
        # One launch overlaps the tail of one kind of program with the other; atomics take one program per
        # multiprocessor and wait on each other. Forward key-outer writes its state to memory in every step.
        bonus += {"fused": 0.4, "split": 0.2, "key_outer": -0.6}[variant.structure.text("loop_order")]
    elif variant.structure["loop_order"] == "key_outer":
        bonus -= 4.0
    return sum(parts) / len(parts) + bonus


def occupancy(registers: int, shared: int, warps: int, device: Device) -> int:
    """Blocks that fit on one multiprocessor at once; 0 where not even one does."""
    threads = warps * device.warp_size
    file = 65536 if device.kind is DeviceKind.CUDA else 131072
    by_shared = (device.shared_bytes + 1024) // (shared + 1024)
    return min(file // (max(registers, 16) * threads), by_shared, 2048 // threads)


def _tile_score(tile: Tile, cell: Cell, device: Device, resources: Resources | None) -> float:
    itemsize = cell.dtype.itemsize
    shared = resources.shared_bytes if resources else tile.shared_bytes(itemsize)
    registers = resources.registers if resources else tile.registers(device.warp_size, itemsize)
    spills = resources.spill_bytes if resources else 0
    return schedule_score(
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

    Under a causal mask, large blocks also compute what the mask throws away.
    """
    rows = variant.config.number("block_m")
    step = variant.config.number("block_n")
    heads = variant.config.number("heads_per_step") or _USUAL_HEADS
    # From half the cache to four times it, nothing is lost (measured).
    fit = -0.5 * max(0.0, abs(math.log2(heads * rows * step * 4 / (1.5 * _CORE_CACHE_BYTES))) - 1.5)
    waste = math.log2(1.0 + (rows + step) / 2.0**cell.k_bucket) if cell.mask is Mask.CAUSAL else 0.0
    order = 0.0 if variant.structure["loop_order"] == "query_outer" else 0.2
    steps = 0.1 * math.log2(2.0 ** (cell.q_bucket + cell.k_bucket) / (heads * rows * step))
    return fit - 1.5 * waste - order - steps
