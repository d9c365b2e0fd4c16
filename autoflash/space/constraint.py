"""Rules that refuse a variant before anything is rendered. Each gives its reason in words."""

from __future__ import annotations

from functools import lru_cache

from autoflash.device import Device, DeviceKind
from autoflash.expression.sharing import scattered_parameters
from autoflash.problem import LEAST_BLOCK, Cell, DType, Feature, Pass, features_text
from autoflash.space import cost, hopper
from autoflash.variant import Family, Variant

# A thread of an NVIDIA GPU has 255 registers, one of CDNA 512 (256 of them accumulators).
_REGISTERS = {DeviceKind.CUDA: 255, DeviceKind.HIP: 512, DeviceKind.CPU: 0}

TERM_GRADIENTS = frozenset({Feature.ALIBI_GRADIENT, Feature.BIAS_GRADIENT, Feature.PARAMS_GRADIENT})
"""What has kernels of its own in a backward."""


def why_not(variant: Variant, cell: Cell, device: Device) -> str | None:
    """Why a variant cannot be right or fast for a cell on a device; None where nothing speaks against it."""
    unable = why_unable(variant, cell)
    if unable is not None:
        return unable
    if variant.family is Family.TRITON:
        return _loads(variant, cell, device) or _determinism(variant, cell) or _tiles(variant, cell, device)
    if variant.family is Family.GLUON_SM90:
        return hopper.why_not(variant, cell, device.shared_bytes)
    if variant.family is Family.TORCH_TILED:
        return _rows(variant, cell)
    return None


def is_left_to_torch(features: tuple[Feature, ...]) -> bool:
    """Whether only tiled torch does it: gradients of terms beside a block mask: their kernels walk no lists."""
    return Feature.BLOCK_MASK in features and not TERM_GRADIENTS.isdisjoint(features)


def why_unable(variant: Variant, cell: Cell) -> str | None:
    """Why a variant's templates do not do what a cell asks for beyond plain attention; None where they do."""
    if not cell.features:
        return None
    if variant.family is Family.VENDOR:
        return f"{variant.family.value} kernels do plain attention, not {features_text(cell.features)}"
    if variant.family is Family.GLUON_SM90:
        lacking = hopper.lacking(cell.op, cell.features)
        return f"the {cell.op.value} of {variant.family.value} has no {features_text(lacking)}" if lacking else None
    if variant.family is not Family.TRITON:
        return None
    if cell.op is Pass.FORWARD and variant.structure.get("loop_order") == "key_outer":
        return f"the forward with keys outside does plain attention, not {features_text(cell.features)}"
    if is_left_to_torch(cell.features):
        return f"triton kernels do not do {features_text(cell.features)} together"
    if Feature.VARLEN in cell.features and variant.structure.get("loads") == "tma":
        return "a tensor descriptor knows no ends of packed sequences"
    if cell.deterministic and Feature.PARAMS_GRADIENT in cell.features:
        scattered = scattered_parameters(cell.score_mod)
        if scattered:
            return f"atomic additions to the gradient of {scattered[0]} are not deterministic"
    if Feature.BLOCK_MASK in cell.features:
        return _block_lists(variant)
    return None


def _block_lists(variant: Variant) -> str | None:
    """Why a variant does not walk over the blocks of a block mask; None where it does."""
    if variant.structure.get("pv_order") == "under_next_softmax":
        return "a forward that works ahead does not walk over the lists of a block mask"
    for name, number in variant.config.items():
        if name.startswith("BLOCK_") and isinstance(number, int) and LEAST_BLOCK % number:
            return f"{name}={number} does not divide the blocks of a block mask, which are {LEAST_BLOCK} or more"
    return None


def _loads(variant: Variant, cell: Cell, device: Device) -> str | None:
    if variant.structure.get("loads") != "tma":
        return None
    if not device.has_tma:
        return f"{device.arch} has no copy engine for tensor descriptors"
    for dim in (cell.head_dim, cell.head_dim_v):
        if dim * cell.dtype.itemsize % 16:
            return f"a row of {dim} {cell.dtype.value} elements is not a multiple of 16 bytes"
    return None


def _determinism(variant: Variant, cell: Cell) -> str | None:
    if cell.op is Pass.BACKWARD and cell.deterministic and variant.structure.get("loop_order") == "key_outer":
        return "atomic additions to dQ are not deterministic"
    return None


def _tiles(variant: Variant, cell: Cell, device: Device) -> str | None:
    tiles = cost.tiles(variant, cell)
    # True float32 products run on FMA units, which want small tiles: larger ones spill by the kilobyte.
    on_fma = cell.dtype is DType.FP32 and not cell.tf32
    for tile in tiles:
        reason = _tile(tile, cell.op, on_fma, device)
        if reason is not None:
            return reason
    floor = max(tile.shared_floor(cell.dtype) for tile in tiles)
    if floor > device.shared_bytes:
        return f"needs at least {floor} bytes of shared memory, {device.arch} has {device.shared_bytes}"
    return None


@lru_cache(maxsize=4096)
def _tile(tile: cost.Tile, op: Pass, on_fma: bool, device: Device) -> str | None:
    """Why no program is like this. Thousands of variants share a few kinds of programs."""
    if tile.warps * 16 > max(tile.rows, 64) and tile.warps > 4 and op is Pass.FORWARD:
        return f"{tile.warps} warps share {tile.rows} rows: fewer than 16 for each"
    if (limit := _round_up(tile.rows_there_are)) < tile.rows:
        return f"a block of {tile.rows} for a sequence of at most {limit}"
    if (limit := _round_up(tile.steps_there_are)) < tile.step:
        return f"a step of {tile.step} for a sequence of at most {limit}"
    registers = tile.accumulator_registers(device.warp_size)
    if registers >= _REGISTERS[device.kind]:
        return f"the accumulators need {registers} registers per thread, {_REGISTERS[device.kind]} exist"
    if on_fma and tile.rows * tile.accumulated > 64 * 64 * 2 * tile.accumulators:
        return "float32 without TF32 needs smaller tiles"
    return None


def _rows(variant: Variant, cell: Cell) -> str | None:
    for name, bucket in (("block_m", cell.q_bucket), ("block_n", cell.k_bucket)):
        block, limit = variant.config.number(name), max(64, 2**bucket)
        if block > limit:
            return f"{name}={block} for a sequence of at most {limit}"
    return None


def _round_up(length: int) -> int:
    """The longest block that a short sequence may use: some spaces have none below 32."""
    return max(32, length)
