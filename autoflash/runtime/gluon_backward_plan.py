"""Which kernels a backward of the Hopper family launches, in which compiled form, with which numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from autoflash.problem import Problem
from autoflash.runtime.backward_plan import TENSORS, Step
from autoflash.runtime.gluon_plan import CONSUMER_ROWS, LOG2_E, REGISTERS, SECTION_BYTES, tile, tile_width
from autoflash.runtime.launch import Constant, KernelPlan, Layout, Number, NumberArgument, TensorArgument
from autoflash.runtime.layouts import ALIGNMENT_BYTES, Operand, descriptor_layout
from autoflash.space.hopper import is_split, keys_per_program, owns_columns
from autoflash.variant import Variant

_CONSUMERS = 2

# Query, its gradient's source and the accumulator of the group's heads stay in L2.
_QUERY_SECTION_BYTES = 40 * 2**20

_ROW_MULTIPLE = 128
_STREAM_ROWS = 32

_Numbers = Sequence[tuple[NumberArgument, Number]]


def padded_rows(problem: Problem) -> int:
    """Rows of the workspaces of a backward for each head: whole tiles of every kernel."""
    return -(-problem.seqlen_q // _ROW_MULTIPLE) * _ROW_MULTIPLE


def accumulator_shape(problem: Problem, variant: Variant) -> tuple[int, ...] | None:
    """Of the float32 accumulator of dQ, in fragment order; None where dQ has a kernel of its own."""
    if is_split(variant.structure):
        return None
    return (problem.batch * problem.heads * padded_rows(problem) * tile_width(problem.head_dim) // 128, 128)


def backward_steps(
    problem: Problem, variant: Variant, operands: Mapping[str, Operand], scale: float, *, has_dlse: bool
) -> tuple[Step, ...]:
    """The kernels of a backward call in launch order; arguments as in :func:`backward_plan.backward_steps`."""
    preprocess = _preprocess(problem, variant, operands, has_dlse=has_dlse)
    keys = _key_kernel(problem, variant, operands, scale)
    if is_split(variant.structure):
        return preprocess, keys, _query_kernel(problem, variant, operands, scale)
    return preprocess, keys, _postprocess(problem, variant, operands, scale)


def _preprocess(problem: Problem, variant: Variant, operands: Mapping[str, Operand], *, has_dlse: bool) -> Step:
    rows_per_head = padded_rows(problem)
    names = ("out", "dout", "lse", "dlse", "log2_sum", "delta", *(() if is_split(variant.structure) else ("acc",)))
    return _pointer_step(
        "preprocess",
        problem,
        names,
        [
            *_strides(operands, problem, o="out", do="dout"),
            (NumberArgument(name="n_heads"), problem.heads),
            (NumberArgument(name="n_q"), problem.seqlen_q),
            (NumberArgument(name="n_q_padded", multiple_of=16), rows_per_head),
            (NumberArgument(name="has_dlse"), int(has_dlse)),
        ],
        {"HEAD_DIM": problem.head_dim, "BLOCK_D": tile_width(problem.head_dim), "ROWS": _STREAM_ROWS},
        problem.batch * problem.heads * rows_per_head // _STREAM_ROWS,
    )


def _postprocess(problem: Problem, variant: Variant, operands: Mapping[str, Operand], scale: float) -> Step:
    rows_per_head, width = padded_rows(problem), tile_width(problem.head_dim)
    block_m, chunk_width = variant.config.number("BLOCK_M"), _chunk_width(problem, variant)
    return _pointer_step(
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
        {"HEAD_DIM": problem.head_dim, "BLOCK_D": width, "BLOCK_M": block_m, "N": chunk_width},
        problem.batch * problem.heads * rows_per_head * width // (CONSUMER_ROWS * chunk_width),
    )


def _chunk_width(problem: Problem, variant: Variant) -> int:
    """Columns of the part of a tile of dQ that one consumer adds up."""
    width = tile_width(problem.head_dim)
    return width // 2 if variant.config.number("BLOCK_M") == CONSUMER_ROWS else width


def _key_kernel(problem: Problem, variant: Variant, operands: Mapping[str, Operand], scale: float) -> Step:
    """Gradients of keys and values, and what they add to dQ."""
    config, dtype = variant.config, problem.dtype.value
    width, block_m, keys = tile_width(problem.head_dim), config.number("BLOCK_M"), keys_per_program(variant.structure)
    owned = width // 2 if owns_columns(variant.structure) else width
    tiles = {
        "q": tile("q", dtype, block_m, width),
        "dout": tile("do", dtype, block_m, width),
        "k": tile("k", dtype, keys // _CONSUMERS, width),
        "v": tile("v", dtype, keys // _CONSUMERS, width),
        "log2_sum": TensorArgument(name="lse_desc", dtype="fp32", block=(block_m,), shared_layout=_plain(1)),
        "delta": TensorArgument(name="delta_desc", dtype="fp32", block=(block_m,), shared_layout=_plain(1)),
        "dk": tile("dk", dtype, CONSUMER_ROWS, owned),
        "dv": tile("dv", dtype, CONSUMER_ROWS, owned),
    }
    flat = Layout(shape=(problem.batch * problem.heads * padded_rows(problem),), strides=(1,))
    layouts: dict[str, Layout | None] = {
        name: flat if name in ("log2_sum", "delta") else _layout(operands[name], problem) for name in tiles
    }
    if (accumulator := accumulator_shape(problem, variant)) is not None:
        if owns_columns(variant.structure):
            tiles["acc"], layouts["acc"] = TensorArgument(name="acc_ptr", dtype="fp32"), None
        else:
            block = (_chunk_width(problem, variant) // 2, 128)
            tiles["acc"] = TensorArgument(name="acc_desc", dtype="fp32", block=block, shared_layout=_plain(2))
            layouts["acc"] = Layout(shape=accumulator, strides=(128, 1))
    key_blocks = -(-problem.seqlen_k // keys)
    n_heads = problem.batch * problem.kv_heads
    bytes_per_head = problem.group * problem.seqlen_q * width * (2 * problem.dtype.itemsize + 4)
    return _descriptor_step(
        "attention_backward",
        tiles,
        layouts,
        [
            (NumberArgument(name="n_q"), problem.seqlen_q),
            (NumberArgument(name="n_q_padded", multiple_of=16), padded_rows(problem)),
            (NumberArgument(name="n_k"), problem.seqlen_k),
            (NumberArgument(name="n_heads_kv"), problem.kv_heads),
            (NumberArgument(name="diagonal"), problem.diagonal),
            (NumberArgument(name="n_key_blocks"), key_blocks),
            (NumberArgument(name="heads_per_section"), min(max(1, _QUERY_SECTION_BYTES // bytes_per_head), n_heads)),
            (NumberArgument(name="scale", type="fp32"), scale),
            (NumberArgument(name="qk_scale", type="fp32"), scale * LOG2_E),
        ],
        {
            "GROUP": problem.group,
            "BLOCK_M": block_m,
            "BLOCK_D": width,
            "Q_STAGES": config.number("q_stages"),
            "DO_STAGES": config.number("do_stages"),
            "RAGGED_N": problem.seqlen_k % keys != 0,
        },
        n_heads * key_blocks,
    )


def _query_kernel(problem: Problem, variant: Variant, operands: Mapping[str, Operand], scale: float) -> Step:
    """Gradients of queries by programs of their own, each of 128 rows."""
    config, dtype, width = variant.config, problem.dtype.value, tile_width(problem.head_dim)
    block_n = config.number("BLOCK_N2")
    tiles = {
        "q": tile("q", dtype, CONSUMER_ROWS, width),
        "dout": tile("do", dtype, CONSUMER_ROWS, width),
        "k": tile("k", dtype, block_n, width),
        "v": tile("v", dtype, block_n, width),
        "log2_sum": TensorArgument(name="lse_ptr", dtype="fp32"),
        "delta": TensorArgument(name="delta_ptr", dtype="fp32"),
        "dq": tile("dq", dtype, CONSUMER_ROWS, width),
    }
    layouts = {name: None if name in ("log2_sum", "delta") else _layout(operands[name], problem) for name in tiles}
    row_blocks = -(-problem.seqlen_q // (_CONSUMERS * CONSUMER_ROWS))
    n_heads = problem.batch * problem.heads
    bytes_per_head = 2 * problem.seqlen_k * width * problem.dtype.itemsize
    return _descriptor_step(
        "attention_backward_dq",
        tiles,
        layouts,
        [
            (NumberArgument(name="n_q_padded", multiple_of=16), padded_rows(problem)),
            (NumberArgument(name="n_k"), problem.seqlen_k),
            (NumberArgument(name="n_heads"), problem.heads),
            (NumberArgument(name="diagonal"), problem.diagonal),
            (NumberArgument(name="n_row_blocks"), row_blocks),
            (NumberArgument(name="heads_per_section"), min(max(1, SECTION_BYTES // bytes_per_head), n_heads)),
            (NumberArgument(name="scale", type="fp32"), scale),
            (NumberArgument(name="qk_scale", type="fp32"), scale * LOG2_E),
        ],
        {
            "GROUP": problem.group,
            "BLOCK_N": block_n,
            "BLOCK_D": width,
            "K_STAGES": config.number("k_stages2"),
            "V_STAGES": config.number("v_stages2"),
            "RAGGED_N": problem.seqlen_k % block_n != 0,
        },
        n_heads * row_blocks,
    )


def _layout(operand: Operand, problem: Problem) -> Layout:
    return descriptor_layout(operand.shape, operand.strides, problem.dtype.itemsize)


def _descriptor_step(
    function: str,
    tensors: Mapping[str, TensorArgument],
    layouts: Mapping[str, Layout | None],
    numbers: _Numbers,
    constants: Mapping[str, Constant],
    programs: int,
) -> Step:
    """A kernel of two consumers and a producer; tensors by their names in :data:`TENSORS`."""
    consumer_registers, producer_registers = REGISTERS[_CONSUMERS]
    registers = {"CONSUMER_REGISTERS": consumer_registers, "PRODUCER_REGISTERS": producer_registers}
    return Step(
        plan=KernelPlan(
            function=function,
            tensors=tuple(tensors.values()),
            numbers=tuple(argument for argument, _ in numbers),
            constants=tuple(sorted({**constants, **registers}.items())),
            num_warps=4,
            num_stages=1,
        ),
        tensors=tuple(TENSORS.index(name) for name in tensors),
        layouts=tuple(layouts[name] for name in tensors),
        numbers=tuple(number for _, number in numbers),
        programs=programs,
    )


def _pointer_step(
    function: str,
    problem: Problem,
    names: tuple[str, ...],
    numbers: _Numbers,
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
