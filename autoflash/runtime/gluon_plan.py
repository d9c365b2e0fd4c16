"""Which kernel a forward of the Hopper family launches, in which compiled form, with which numbers."""

from __future__ import annotations

import math

from autoflash.device import Device
from autoflash.problem import Problem
from autoflash.runtime.launch import Constant, KernelPlan, Number, NumberArgument, TensorArgument
from autoflash.runtime.layouts import ALIGNMENT_BYTES, UNBOUNDED, Operand, block_dim, reach
from autoflash.space import hopper
from autoflash.variant import Variant

CONSUMER_ROWS = 64
"""Rows of a consumer: the height of a wgmma tile."""

REGISTERS = {1: (232, 24), 2: (240, 24), 3: (160, 32)}
"""Registers of a consumer and of the producer, by consumers. FlashAttention-3's budget for two and three: the 65536 of
a multiprocessor. One consumer takes half of them, so that two thread blocks fit."""

_HALF_OF_THE_REGISTERS = 128

LOG2_E = math.log2(math.e)

SECTION_BYTES = 32 * 2**20
"""FlashAttention-3's budget: keys and values of the heads in flight stay in the 50 MB L2 of sm_90."""


def tile_width(head_dim: int) -> int:
    """Columns of a tile: at least one swizzled row of 128 bytes."""
    return block_dim(head_dim, 64)


def swizzled(block: tuple[int, ...]) -> str:
    """The layout in shared memory of a block of a 16-bit tensor, as Gluon spells it."""
    return (
        f"NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank={len(block)}, "
        "transposed=False, fp4_padded=False, cga_layout=[])"
    )


def tile(name: str, dtype: str, rows: int, width: int) -> TensorArgument:
    """A [B, H, S, D] tensor that a kernel sees in blocks of so many rows of one head."""
    block = (1, 1, rows, width)
    return TensorArgument(name=f"{name}_desc", dtype=dtype, block=block, shared_layout=swizzled(block))


def why_not(problem: Problem, device: Device, operands: dict[str, Operand]) -> str | None:
    """The precondition of the family that a call misses; None where it can run."""
    if device.arch != "sm_90":
        return f"the family is made for sm_90, the device is {device.arch}"
    lacking = hopper.lacking(problem.op, problem.features)
    if lacking:
        return f"the {problem.op.value} of the family has no {lacking[0].value}"
    if problem.dtype.itemsize != 2:
        return f"the family computes in fp16 and bf16, not {problem.dtype.value}"
    if problem.head_dim != problem.head_dim_v:
        return f"head_dim and head_dim_v must be equal, got {problem.head_dim} and {problem.head_dim_v}"
    if problem.head_dim % 8 or problem.head_dim > 256:
        return f"head_dim must be a multiple of 8 up to 256, got {problem.head_dim}"
    for name, operand in operands.items():
        if not operand.is_dense:
            return f"{name} needs a last stride of 1 and the rest aligned to 16 bytes"
        if operand.overlaps:
            return f"every element of {name} needs its own address, a stride is 0"
    return None


def diagonals(problem: Problem) -> dict[str, int]:
    """Which keys a query sees, by name: ``i + diagonal`` is its position, or its window goes from one to another."""
    if not problem.has_window:
        return {"diagonal": problem.diagonal}
    left, right = reach(problem)
    return {"left_diagonal": problem.diagonal - left, "right_diagonal": problem.diagonal + right}


def scales(problem: Problem, scale: float) -> dict[str, float]:
    """What makes scores of products q . k, by name. The sign of the scale is a constant of the kernel."""
    if problem.softcap:
        return {"qk_scale": problem.softcap * LOG2_E, "cap_steepness": abs(scale) / problem.softcap}
    return {"qk_scale": abs(scale) * LOG2_E if scale else 1.0}


def _every_row_sees(problem: Problem, block_n: int) -> bool:
    """Whether each row sees a key of the first block that its consumer visits; without a window, no other is masked."""
    if not problem.has_window:
        # A row block starts at a multiple of 64, which BLOCK_N is a multiple of.
        return not problem.causal or (problem.diagonal % block_n == 0 and problem.diagonal >= 0)
    left, right = reach(problem)
    # The last keys of a consumer's rows, so far as they exist, stand in one block, and none is to the left of a window.
    ends_in_one_block = right == UNBOUNDED or (
        problem.diagonal + right >= 0 and (problem.diagonal + right) % CONSUMER_ROWS == 0
    )
    return ends_in_one_block and problem.diagonal + problem.seqlen_q - 1 - left < problem.seqlen_k


def forward_plan(problem: Problem, variant: Variant, scale_sign: int = 1) -> KernelPlan:
    """The compiled form that a forward call needs; ``scale_sign`` is -1, 0 or 1."""
    structure, config = variant.structure, variant.config
    consumers, block_n = structure.number("consumers"), config.number("BLOCK_N")
    width, dtype = tile_width(problem.head_dim), problem.dtype.value
    constants: dict[str, Constant] = {
        "CONSUMERS": consumers,
        "BLOCK_N": block_n,
        "BLOCK_D": width,
        "HEAD_DIM": problem.head_dim,
        "STAGES": config.number("num_stages"),
        "CONSUMER_REGISTERS": REGISTERS[consumers][0],
        "PRODUCER_REGISTERS": REGISTERS[consumers][1],
        "RAGGED_N": problem.seqlen_k % block_n != 0,
        "EVERY_ROW_SEES": _every_row_sees(problem, block_n),
        "SCALE_SIGN": scale_sign,
    }
    stride_multiple = ALIGNMENT_BYTES // problem.dtype.itemsize
    return KernelPlan(
        function="attention_forward",
        tensors=(
            tile("q", dtype, CONSUMER_ROWS, width),
            tile("k", dtype, block_n, width),
            tile("v", dtype, block_n, width),
            tile("o", dtype, CONSUMER_ROWS, width),
            TensorArgument(name="o_ptr", dtype=dtype),
            TensorArgument(name="lse_ptr", dtype="fp32", aligned=False),
            TensorArgument(name="ticket_ptr", dtype="i32", aligned=False),
        ),
        numbers=(
            *(NumberArgument(name=f"stride_o{dim}", type="i64", multiple_of=stride_multiple) for dim in "bhm"),
            *(NumberArgument(name=name) for name in ("n_q", "n_k", "n_heads", "group", *diagonals(problem))),
            *(NumberArgument(name=name) for name in ("n_bh", "n_row_blocks", "n_tiles", "heads_per_section")),
            *(NumberArgument(name=name, type="fp32") for name in scales(problem, 1.0)),
        ),
        constants=tuple(sorted(constants.items())),
        num_warps=4,
        num_stages=1,
        max_registers=_HALF_OF_THE_REGISTERS if consumers == 1 else 0,
    )


def forward_programs(problem: Problem, variant: Variant, device: Device) -> int:
    """How many programs a forward launch has: one for each tile, or as many as run at once."""
    n_tiles = forward_tiles(problem, variant)
    if not variant.config.number("persistent"):
        return n_tiles
    return min(n_tiles, device.multiprocessors * (2 if variant.structure.number("consumers") == 1 else 1))


def forward_tiles(problem: Problem, variant: Variant) -> int:
    """How many tiles of consumers x 64 query rows there are."""
    rows = variant.structure.number("consumers") * CONSUMER_ROWS
    return problem.batch * problem.heads * -(-problem.seqlen_q // rows)


def forward_numbers(problem: Problem, variant: Variant, out: Operand, scale: float) -> tuple[Number, ...]:
    """The numbers of a forward launch, in the order of its plan."""
    n_tiles = forward_tiles(problem, variant)
    bytes_per_head = 2 * problem.seqlen_k * tile_width(problem.head_dim) * problem.dtype.itemsize
    return (
        *out.kernel_strides()[:3],
        problem.seqlen_q,
        problem.seqlen_k,
        problem.heads,
        problem.group,
        *diagonals(problem).values(),
        problem.batch * problem.heads,
        n_tiles // (problem.batch * problem.heads),
        n_tiles,
        min(max(1, SECTION_BYTES // bytes_per_head), problem.batch * problem.heads),
        *scales(problem, scale).values(),
    )
