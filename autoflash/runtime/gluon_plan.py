"""Which kernels a call of the Hopper family launches, in which compiled form, with which numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from autoflash.device import Device
from autoflash.problem import Problem
from autoflash.runtime.backward_plan import TENSORS, Step
from autoflash.runtime.launch import Constant, KernelPlan, Layout, Number, NumberArgument, TensorArgument
from autoflash.runtime.layouts import ALIGNMENT_BYTES, Operand, block_dim, descriptor_layout
from autoflash.variant import Variant

CONSUMER_ROWS = 64
"""Rows of a consumer: the height of a wgmma tile."""

# Registers of a consumer and of the producer, by consumers. FlashAttention-3's budget for two and three: the 65536 of
# a multiprocessor. One consumer takes half of them, so that two thread blocks fit.
_REGISTERS = {1: (232, 24), 2: (240, 24), 3: (160, 32)}
_BACKWARD_CONSUMERS = 2
_HALF_OF_THE_REGISTERS = 128

_LOG2_E = math.log2(math.e)

# FlashAttention-3's budget: keys and values of the heads in flight stay in the 50 MB L2 of sm_90.
_SECTION_BYTES = 32 * 2**20
_BACKWARD_SECTION_BYTES = 40 * 2**20

_ROW_MULTIPLE = 128
_STREAM_ROWS = 32


def keys_per_program(variant: Variant) -> int:
    """Keys whose gradients a program of the backward accumulates: 64 by each consumer, or 64 by both together."""
    return CONSUMER_ROWS if owns_columns(variant) else _BACKWARD_CONSUMERS * CONSUMER_ROWS


def owns_columns(variant: Variant) -> bool:
    """Whether a consumer of the backward accumulates half of the columns of dK and dV; else half of the keys."""
    return variant.structure.get("consumer_owns") == "columns"


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
    if problem.features:
        return f"the family has no {problem.features[0].value}"
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
        "CONSUMER_REGISTERS": _REGISTERS[consumers][0],
        "PRODUCER_REGISTERS": _REGISTERS[consumers][1],
        "RAGGED_N": problem.seqlen_k % block_n != 0,
        # A row block starts at a multiple of 64, which BLOCK_N is a multiple of.
        "EVERY_ROW_SEES": not problem.causal or (problem.diagonal % block_n == 0 and problem.diagonal >= 0),
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
            *(NumberArgument(name=name) for name in ("n_q", "n_k", "n_heads", "group", "diagonal")),
            *(NumberArgument(name=name) for name in ("n_bh", "n_row_blocks", "n_tiles", "heads_per_section")),
            NumberArgument(name="qk_scale", type="fp32"),
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
        problem.diagonal,
        problem.batch * problem.heads,
        n_tiles // (problem.batch * problem.heads),
        n_tiles,
        min(max(1, _SECTION_BYTES // bytes_per_head), problem.batch * problem.heads),
        abs(scale) * _LOG2_E if scale else 1.0,
    )


def padded_rows(problem: Problem) -> int:
    """Rows of the workspaces of a backward for each head: whole tiles of every kernel."""
    return -(-problem.seqlen_q // _ROW_MULTIPLE) * _ROW_MULTIPLE


def accumulator_shape(problem: Problem) -> tuple[int, ...]:
    """Of the float32 accumulator of dQ, in fragment order."""
    return (problem.batch * problem.heads * padded_rows(problem) * tile_width(problem.head_dim) // 128, 128)


def backward_steps(
    problem: Problem, variant: Variant, operands: Mapping[str, Operand], scale: float, *, has_dlse: bool
) -> tuple[Step, ...]:
    """The kernels of a backward call in launch order; arguments as in :func:`backward_plan.backward_steps`."""
    rows_per_head = padded_rows(problem)
    width = tile_width(problem.head_dim)
    block_m = variant.config.number("BLOCK_M")
    chunk_width = width // 2 if block_m == CONSUMER_ROWS else width
    heads = problem.batch * problem.heads
    head = {"HEAD_DIM": problem.head_dim, "BLOCK_D": width}
    preprocess = _pointer_step(
        "preprocess",
        problem,
        ("out", "dout", "lse", "dlse", "log2_sum", "delta", "acc"),
        [
            *_strides(operands, problem, o="out", do="dout"),
            (NumberArgument(name="n_heads"), problem.heads),
            (NumberArgument(name="n_q"), problem.seqlen_q),
            (NumberArgument(name="n_q_padded", multiple_of=16), rows_per_head),
            (NumberArgument(name="has_dlse"), int(has_dlse)),
        ],
        {**head, "ROWS": _STREAM_ROWS},
        heads * rows_per_head // _STREAM_ROWS,
    )
    postprocess = _pointer_step(
        "postprocess",
        problem,
        ("acc", "dq"),
        [
            *_strides(operands, problem, dq="dq"),
            (NumberArgument(name="n_heads"), problem.heads),
            (NumberArgument(name="n_q"), problem.seqlen_q),
            (NumberArgument(name="n_q_padded", multiple_of=16), rows_per_head),
            (NumberArgument(name="scale", type="fp32"), scale),
        ],
        {**head, "BLOCK_M": block_m, "N": chunk_width},
        heads * rows_per_head * width // (CONSUMER_ROWS * chunk_width),
    )
    return (preprocess, _backward_main(problem, variant, operands, scale, chunk_width), postprocess)


def _backward_main(
    problem: Problem, variant: Variant, operands: Mapping[str, Operand], scale: float, chunk_width: int
) -> Step:
    config, dtype = variant.config, problem.dtype.value
    width, block_m = tile_width(problem.head_dim), config.number("BLOCK_M")
    by_columns = owns_columns(variant)
    keys = keys_per_program(variant)
    rows = {"q": block_m, "do": block_m, "k": keys // 2, "v": keys // 2, "dk": CONSUMER_ROWS, "dv": CONSUMER_ROWS}
    names = {"q": "q", "do": "dout", "k": "k", "v": "v", "dk": "dk", "dv": "dv"}
    owned = {"dk": width // 2, "dv": width // 2} if by_columns else {}
    tiles = {name: tile(name, dtype, rows[name], owned.get(name, width)) for name in rows}
    layouts = {
        name: descriptor_layout(operands[names[name]].shape, operands[names[name]].strides, problem.dtype.itemsize)
        for name in rows
    }
    flat_rows = problem.batch * problem.heads * padded_rows(problem)
    flat = Layout(shape=(flat_rows,), strides=(1,))
    row = {
        name: TensorArgument(name=f"{name}_desc", dtype="fp32", block=(block_m,), shared_layout=_plain(1))
        for name in ("lse", "delta")
    }
    acc = (
        TensorArgument(name="acc_ptr", dtype="fp32")
        if by_columns
        else TensorArgument(name="acc_desc", dtype="fp32", block=(chunk_width // 2, 128), shared_layout=_plain(2))
    )
    key_blocks = -(-problem.seqlen_k // keys)
    n_heads = problem.batch * problem.kv_heads
    # Query, its gradient's source and the accumulator of the group's heads stay in L2.
    bytes_per_head = problem.group * problem.seqlen_q * width * (2 * problem.dtype.itemsize + 4)
    constants: dict[str, Constant] = {
        "GROUP": problem.group,
        "BLOCK_M": block_m,
        "BLOCK_D": width,
        "Q_STAGES": config.number("q_stages"),
        "DO_STAGES": config.number("do_stages"),
        "CONSUMER_REGISTERS": _REGISTERS[_BACKWARD_CONSUMERS][0],
        "PRODUCER_REGISTERS": _REGISTERS[_BACKWARD_CONSUMERS][1],
        "RAGGED_N": problem.seqlen_k % keys != 0,
    }
    numbers: list[tuple[NumberArgument, Number]] = [
        (NumberArgument(name="n_q"), problem.seqlen_q),
        (NumberArgument(name="n_q_padded", multiple_of=16), padded_rows(problem)),
        (NumberArgument(name="n_k"), problem.seqlen_k),
        (NumberArgument(name="n_heads_kv"), problem.kv_heads),
        (NumberArgument(name="diagonal"), problem.diagonal),
        (NumberArgument(name="n_key_blocks"), key_blocks),
        (NumberArgument(name="heads_per_section"), min(max(1, _BACKWARD_SECTION_BYTES // bytes_per_head), n_heads)),
        (NumberArgument(name="scale", type="fp32"), scale),
        (NumberArgument(name="qk_scale", type="fp32"), scale * _LOG2_E),
    ]
    plan = KernelPlan(
        function="attention_backward",
        tensors=(
            *(tiles[name] for name in ("q", "do", "k", "v")),
            *row.values(),
            tiles["dk"],
            tiles["dv"],
            acc,
        ),
        numbers=tuple(argument for argument, _ in numbers),
        constants=tuple(sorted(constants.items())),
        num_warps=4,
        num_stages=1,
    )
    return Step(
        plan=plan,
        tensors=tuple(TENSORS.index(name) for name in ("q", "dout", "k", "v", "log2_sum", "delta", "dk", "dv", "acc")),
        layouts=(
            *(layouts[name] for name in ("q", "do", "k", "v")),
            flat,
            flat,
            layouts["dk"],
            layouts["dv"],
            None if by_columns else Layout(shape=accumulator_shape(problem), strides=(128, 1)),
        ),
        numbers=tuple(number for _, number in numbers),
        programs=n_heads * key_blocks,
    )


def _pointer_step(
    function: str,
    problem: Problem,
    names: tuple[str, ...],
    numbers: Sequence[tuple[NumberArgument, Number]],
    constants: Mapping[str, Constant],
    programs: int,
) -> Step:
    """A kernel that moves memory: pointers only."""
    short = {"out": "o", "dout": "do", "log2_sum": "lse2"}
    half = ("out", "dout", "dq")
    return Step(
        plan=KernelPlan(
            function=function,
            tensors=tuple(
                TensorArgument(
                    name=f"{short.get(name, name)}_ptr",
                    dtype=problem.dtype.value if name in half else "fp32",
                    aligned=name not in ("lse", "dlse"),
                )
                for name in names
            ),
            numbers=tuple(argument for argument, _ in numbers),
            constants=tuple(sorted(constants.items())),
            num_warps=4,
            num_stages=1,
        ),
        tensors=tuple(TENSORS.index(name) for name in names),
        layouts=(None,) * len(names),
        numbers=tuple(number for _, number in numbers),
        programs=programs,
    )


def _strides(operands: Mapping[str, Operand], problem: Problem, **tensors: str) -> list[tuple[NumberArgument, Number]]:
    """Batch, head and row strides of the named tensors, as parameters ``stride_<short name><dim>``."""
    multiple = ALIGNMENT_BYTES // problem.dtype.itemsize
    return [
        (NumberArgument(name=f"stride_{short}{dim}", type="i64", multiple_of=multiple), stride)
        for short, name in tensors.items()
        for dim, stride in zip("bhm", operands[name].kernel_strides()[:3], strict=True)
    ]


def _plain(rank: int) -> str:
    """Rows one after the other in shared memory, float32, as Gluon spells it."""
    return (
        f"NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank={rank}, "
        "transposed=False, fp4_padded=False, cga_layout=[])"
    )


def backward_plans(problem: Problem, variant: Variant) -> tuple[KernelPlan, ...]:
    """Every kernel that a backward of contiguous tensors launches, in order."""
    queries = (problem.batch, problem.heads, problem.seqlen_q, problem.head_dim)
    keys = (problem.batch, problem.kv_heads, problem.seqlen_k, problem.head_dim)
    shapes = {name: keys if name in ("k", "v", "dk", "dv") else queries for name in TENSORS}
    operands = {
        name: Operand.planned(shape, (shape[1] * shape[2] * shape[3], shape[2] * shape[3], shape[3], 1), 2)
        for name, shape in shapes.items()
    }
    return tuple(step.plan for step in backward_steps(problem, variant, operands, 1.0, has_dlse=False))
