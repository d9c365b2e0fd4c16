"""Which kernels a backward call of the Triton family launches, in which compiled form, with which numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autoflash.problem import Problem
from autoflash.runtime import backward_features, param_gradients
from autoflash.runtime.backward_sizes import (
    bias_sums_shape,
    key_knobs,
    padded_rows,
    padding_rows,
    row_knobs,
    slopes_sums_shape,
    stream_rows,
    term_rows,
    tiles_of,
)
from autoflash.runtime.launch import Constant, KernelPlan, Layout, Number, NumberArgument, TensorArgument
from autoflash.runtime.layouts import ALIGNMENT_BYTES, Operand, descriptor_layout, width_constants
from autoflash.space.cost import Side, column_blocks, splits_heads
from autoflash.variant import Choices, Variant

_PLAIN_TENSORS = ("q", "k", "v", "out", "lse", "dout", "dlse", "log2_sum", "delta", "acc", "dq", "dk", "dv")
_FEATURE_TENSORS = ("mask", "bias", "slopes", "rng", "cu_q", "cu_k", "query_blocks", "key_blocks")
TENSORS = (*_PLAIN_TENSORS, *_FEATURE_TENSORS, "dbias", "dslopes")
"""Every tensor of a backward call but the parameters of expressions, which come before ``dbias``, and what the kernels
of their gradients write, which comes last; a step names those that it takes by their position among them all."""

_GIVEN = TENSORS.index("dbias")

# The tiles of backward_sizes keep so many warps busy.
_STREAM_WARPS = 4
_TERM_WARPS = 4

_NO_CONSTANTS: Mapping[str, Constant] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One kernel of a backward call.

    Attributes:
        plan: What is compiled.
        tensors: Positions in :data:`TENSORS` with the parameters, in the order of the plan.
        layouts: Of the tensors that are passed as descriptors; None for the others.
        numbers: In the order of the plan.
        programs: How many are launched.
    """

    plan: KernelPlan
    tensors: tuple[int, ...]
    layouts: tuple[Layout | None, ...]
    numbers: tuple[Number, ...]
    programs: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Use:
    """A tensor as a parameter of a kernel: a descriptor of so many rows, or a pointer (rows 0) with its strides.

    Of a tensor whose vectors are held in two tiles, ``part`` says which the descriptor is for.
    """

    tensor: str
    parameter: str
    rows: int = 0
    part: int = 0


def backward_steps(
    problem: Problem,
    variant: Variant,
    operands: Mapping[str, Operand],
    scale: float,
    *,
    has_dlse: bool,
) -> tuple[Step, ...]:
    """The kernels of a backward call in launch order; those of the look-ups of parameters come last.

    Args:
        problem: With at least one query and one key.
        variant: Of the Triton family, backward.
        operands: How q, k, v, out, dout, dq, dk, dv and, if the problem has them, the mask and the bias lie in memory.
        scale: Factor of the scores.
        has_dlse: LSE was used, and its gradient is given.
    """
    planner = _Planner(problem, variant, operands, scale)
    first = planner.preprocess(has_dlse)
    terms = [planner.bias()] if problem.bias_gradient and not planner.stores_dbias else []
    terms += [planner.slopes()] if problem.alibi_gradient else []
    terms += [planner.look_up(number) for number in range(len(param_gradients.look_ups(problem)))]
    loop_order = variant.structure.text("loop_order")
    if loop_order == "split":
        return first, planner.keys(), planner.queries(), *terms
    if loop_order == "fused":
        return first, planner.fused(), *terms
    return first, planner.keys(), planner.postprocess(), *terms


class _Planner:
    """The facts that the steps of one call share."""

    def __init__(
        self,
        problem: Problem,
        variant: Variant,
        operands: Mapping[str, Operand],
        scale: float,
    ) -> None:
        self._problem = problem
        self._structure = variant.structure
        self._config = variant.config
        self._operands = operands
        self._uses_tma = variant.structure.text("loads") == "tma"
        self._is_key_outer = variant.structure.text("loop_order") == "key_outer"
        self._padded_q = padded_rows(problem, variant)
        self._stream_rows = stream_rows(problem)
        self._term_rows = term_rows(problem, variant)
        self._slopes_sums = slopes_sums_shape(problem, variant)
        # The kernels before and after hold vectors in one tile, whatever the others do.
        self._widths = width_constants(problem, Choices())
        padding = padding_rows(problem, variant)
        self._features = backward_features.feature_arguments(problem, scale, operands, padding)
        params = backward_features.placed_params(operands.values())
        self._look_ups = param_gradients.look_ups(problem)
        written = [f"{name}_{one.number}" for one in self._look_ups for name in param_gradients.tensor_names(one)]
        self._names = (*TENSORS[:_GIVEN], *(param.name for param in params), *TENSORS[_GIVEN:], *written)
        self._packing = backward_features.packed_arguments(problem, padding)
        pairs = (problem.batch, problem.heads, problem.seqlen_q, problem.seqlen_k)
        self.stores_dbias = problem.bias_gradient and not self._is_key_outer and operands["bias"].shape == pairs
        fills = not problem.is_varlen
        # The last block of a block mask is visited to its end.
        rows, keys = (
            [problem.block_size or self._config.number(name) for name in knobs]
            for knobs in (row_knobs(variant), key_knobs(variant))
        )
        even_m = fills and all(problem.seqlen_q % length == 0 for length in rows)
        even_n = fills and all(problem.seqlen_k % length == 0 for length in keys)
        self._shared_constants: dict[str, Constant] = {
            **width_constants(problem, self._structure),
            **dict(self._features.constants),
            "GROUP": problem.group,
            "EVEN_M": even_m,
            "EVEN_N": even_n,
            "PRECISION": "tf32" if problem.tf32 else "ieee",
        }
        # What EVEN_* promise holds for the lengths themselves.
        self._shared_numbers: list[tuple[NumberArgument, Number]] = [
            (NumberArgument(name="scale", type="fp32"), scale),
            (NumberArgument(name="log2_scale", type="fp32"), backward_features.log2_scale(problem, scale)),
            (NumberArgument(name="kv_heads"), problem.kv_heads),
            (NumberArgument(name="n_q", multiple_of=16 if even_m else 1), problem.rows_q),
            (NumberArgument(name="n_kv", multiple_of=16 if even_n else 1), problem.rows_k),
            (NumberArgument(name="padded_q", multiple_of=16), self._padded_q),
            (NumberArgument(name="diagonal"), backward_features.diagonal(problem)),
            *self._features.numbers,
        ]

    def preprocess(self, has_dlse: bool) -> Step:
        """Base-2 LSE and delta of every row; zeroes the accumulator, if there is one."""
        problem = self._problem
        names = ["HEAD_DIM_V", "BLOCK_DV", *(["HEAD_DIM", "BLOCK_D"] if self._is_key_outer else [])]
        return self._step(
            "backward_preprocess",
            [_Use(tensor=name, parameter=f"{name}_ptr") for name in ("out", "dout", "lse", "dlse", "log2_sum", "delta")]
            + ([_Use(tensor="acc", parameter="acc_ptr")] if self._is_key_outer else [])
            + [_Use(tensor=name, parameter=argument.name) for name, argument in self._packing.tensors],
            [
                (NumberArgument(name="heads"), problem.heads),
                (NumberArgument(name="n_q"), problem.rows_q),
                (NumberArgument(name="padded_q", multiple_of=16), self._padded_q),
                (NumberArgument(name="has_dlse"), int(has_dlse)),
                *self._packing.numbers,
            ],
            {name: self._widths[name] for name in names} | {"ROWS": self._stream_rows} | dict(self._packing.constants),
            problem.tensor_batch * problem.heads * (self._padded_q // self._stream_rows),
            _STREAM_WARPS,
            1,
        )

    def keys(self) -> Step:
        """The programs that own keys; with key_outer, they add to the accumulator too."""
        rows, block_n = self._config.number("BLOCK_M"), self._config.number("BLOCK_N")
        uses = [*self._inputs(rows, block_n), *self._key_outputs(block_n), *self._row_inputs()]
        uses += [_Use(tensor="acc", parameter="acc_ptr")] if self._is_key_outer else []
        uses += self._feature_inputs()
        return self._step(
            "backward_keys",
            uses,
            self._shared_numbers,
            self._shared_constants | self._tile("") | {"STAGES": self._config.number("num_stages")},
            self._problem.tensor_batch * self._problem.kv_heads * self._tiles(self._problem.rows_k, block_n),
            self._config.number("num_warps"),
            self._config.number("num_stages"),
        )

    def queries(self) -> Step:
        """The programs that own queries, as a kernel of their own."""
        rows, block_n = self._config.number("BLOCK_M2"), self._config.number("BLOCK_N2")
        return self._step(
            "backward_queries",
            [*self._inputs(rows, block_n), *self._query_outputs(rows), *self._feature_inputs()],
            self._shared_numbers,
            self._query_constants() | self._tile("2") | {"STAGES2": self._config.number("num_stages2")},
            self._problem.tensor_batch * self._problem.heads * self._tiles(self._problem.rows_q, rows),
            self._config.number("num_warps2"),
            self._config.number("num_stages2"),
        )

    def fused(self) -> Step:
        """Both kinds of program in one kernel."""
        problem, config = self._problem, self._config
        rows, block_n = config.number("BLOCK_M"), config.number("BLOCK_N")
        rows2, block_n2 = config.number("BLOCK_M2"), config.number("BLOCK_N2")
        uses = self._inputs(rows, block_n) + self._key_outputs(block_n)
        uses += self._inputs(rows2, block_n2, "2") if self._uses_tma else []
        tiles = self._tiles(problem.rows_k, block_n) + problem.group * self._tiles(problem.rows_q, rows2)
        stages: dict[str, Constant] = {
            "STAGES": config.number("num_stages"),
            "STAGES2": config.number("num_stages2"),
        }
        return self._step(
            "backward_fused",
            [*uses, *self._query_outputs(rows2), *self._feature_inputs()],
            [(NumberArgument(name="batches"), problem.tensor_batch), *self._shared_numbers],
            self._query_constants() | self._tile("") | self._tile("2") | stages,
            problem.tensor_batch * problem.kv_heads * tiles,
            config.number("num_warps"),
            config.number("num_stages"),
        )

    def postprocess(self) -> Step:
        """From the accumulator to dq."""
        problem = self._problem
        return self._step(
            "backward_postprocess",
            [_Use(tensor="acc", parameter="acc_ptr"), _Use(tensor="dq", parameter="dq_ptr")],
            [
                self._shared_numbers[0],
                (NumberArgument(name="heads"), problem.heads),
                (NumberArgument(name="n_q"), problem.rows_q),
            ],
            {
                "HEAD_DIM": self._widths["HEAD_DIM"],
                "BLOCK_D": self._widths["BLOCK_D"],
                "ROWS": self._stream_rows,
            },
            problem.tensor_batch * problem.heads * -(-problem.rows_q // self._stream_rows),
            _STREAM_WARPS,
            1,
        )

    def bias(self) -> Step:
        """The gradient of the bias, or the sums of each head that make it up."""
        problem, rows = self._problem, self._term_rows
        shape = self._operands["bias"].shape
        owns_rows, owns_columns = shape[2] == problem.seqlen_q, shape[3] == problem.seqlen_k
        tiles_m, tiles_n = -(-problem.seqlen_q // rows), -(-problem.seqlen_k // rows)
        if owns_rows and owns_columns:
            programs = shape[0] * shape[1] * tiles_m * tiles_n
        else:
            programs = problem.batch * problem.heads * (tiles_n if owns_columns else tiles_m)
        repeats_h = problem.heads // shape[1]
        return self._term_step(
            "backward_bias",
            [_Use(tensor="dbias", parameter="dbias_ptr")],
            programs,
            [
                (NumberArgument(name="bias_heads"), shape[1]),
                (NumberArgument(name="repeats"), problem.batch // shape[0] * repeats_h),
                (NumberArgument(name="repeats_h"), repeats_h),
            ],
            {"OWN_ROWS": owns_rows, "OWN_COLUMNS": owns_columns},
        )

    def slopes(self) -> Step:
        """Shares of the gradient of the slopes of ALiBi."""
        written = [_Use(tensor="dslopes", parameter="dslopes_ptr")]
        return self._term_step("backward_slopes", written, math.prod(self._slopes_sums))

    def look_up(self, number: int) -> Step:
        """Sums of the gradient of a parameter, or what is added to it."""
        look_up = self._look_ups[number]
        return self._term_step(
            f"backward_parameter_{number}",
            [
                _Use(tensor=f"{name}_{number}", parameter=f"{name}_ptr")
                for name in param_gradients.tensor_names(look_up)
            ],
            param_gradients.programs(self._problem, look_up, self._term_rows),
        )

    def _term_step(
        self,
        function: str,
        written: Sequence[_Use],
        programs: int,
        numbers: Sequence[tuple[NumberArgument, Number]] = (),
        constants: Mapping[str, Constant] = _NO_CONSTANTS,
    ) -> Step:
        """A kernel of the gradient of a term."""
        rows = self._term_rows
        return self._step(
            function,
            [*self._inputs(rows, rows), *self._row_inputs(), *written, *self._feature_inputs()],
            [*self._shared_numbers, *numbers],
            self._shared_constants | self._term_tile() | dict(constants),
            programs,
            _TERM_WARPS,
            self._config.number("num_stages_term") if "num_stages_term" in self._config else 1,
        )

    def _term_tile(self) -> dict[str, Constant]:
        problem, rows = self._problem, self._term_rows
        fills = not problem.is_varlen
        return {
            "BLOCK_M": rows,
            "BLOCK_N": rows,
            "EVEN_M": fills and problem.seqlen_q % rows == 0,
            "EVEN_N": fills and problem.seqlen_k % rows == 0,
        }

    def _tiles(self, length: int, rows: int) -> int:
        return tiles_of(self._problem, length, rows)

    def _tile(self, which: str) -> dict[str, Constant]:
        return {name + which: self._config.number(name + which) for name in ("BLOCK_M", "BLOCK_N")}

    def _uses(self, tensor: str, rows: int, suffix: str = "") -> list[_Use]:
        if not self._uses_tma:
            return [_Use(tensor=tensor, parameter=f"{tensor}_ptr")]
        whole = _Use(tensor=tensor, parameter=tensor + suffix, rows=rows)
        if not splits_heads(self._structure, _side(tensor)):
            return [whole]
        return [whole, _Use(tensor=tensor, parameter=f"{tensor}{suffix}_rest", rows=rows, part=1)]

    def _inputs(self, rows: int, block_n: int, suffix: str = "") -> list[_Use]:
        sides = {"q": rows, "k": block_n, "v": block_n, "dout": rows}
        return [use for tensor, side in sides.items() for use in self._uses(tensor, side, suffix)]

    def _key_outputs(self, block_n: int) -> list[_Use]:
        return [*self._uses("dk", block_n), *self._uses("dv", block_n)]

    def _query_outputs(self, rows: int) -> list[_Use]:
        """What programs that own queries write, and what they read of the rows in between."""
        dbias = [_Use(tensor="dbias", parameter="dbias_ptr")] if self._problem.bias_gradient else []
        return [*self._uses("dq", rows), *self._row_inputs(), *dbias]

    def _query_constants(self) -> dict[str, Constant]:
        stores: dict[str, Constant] = {"STORE_DBIAS": self.stores_dbias} if self._problem.bias_gradient else {}
        return self._shared_constants | stores

    def _row_inputs(self) -> list[_Use]:
        return [_Use(tensor=name, parameter=f"{name}_ptr") for name in ("log2_sum", "delta")]

    def _feature_inputs(self) -> list[_Use]:
        return [_Use(tensor=name, parameter=argument.name) for name, argument in self._features.tensors]

    def _step(
        self,
        function: str,
        uses: Sequence[_Use],
        numbers: Sequence[tuple[NumberArgument, Number]],
        constants: Mapping[str, Constant],
        programs: int,
        num_warps: int,
        num_stages: int,
    ) -> Step:
        item_bytes = self._problem.dtype.itemsize
        constants = dict(constants)
        strides: list[tuple[NumberArgument, Number]] = []
        tensors: list[TensorArgument] = []
        layouts: list[Layout | None] = []
        given = dict(self._features.tensors)
        for use in uses:
            if use.tensor in given:
                tensors.append(given[use.tensor])
                layouts.append(None)
                continue
            if use.tensor == "dbias":
                # Of the bias' own type where it is the gradient itself.
                is_done = bias_sums_shape(self._problem, self._operands["bias"].shape) is None
                dtype = given["bias"].dtype if is_done else "fp32"
                tensors.append(TensorArgument(name=use.parameter, dtype=dtype, aligned=False))
                layouts.append(None)
                continue
            operand = self._operands.get(use.tensor)
            if operand is None:
                # LSE and its gradient may come from anywhere, the workspaces from torch's allocator.
                aligned = use.tensor not in ("lse", "dlse")
                dtype = "i64" if use.parameter == "places_ptr" else "fp32"
                tensors.append(TensorArgument(name=use.parameter, dtype=dtype, aligned=aligned))
                layouts.append(None)
                continue
            dtype = self._problem.dtype.value
            if use.rows:
                width = column_blocks(operand.shape[3], self._structure, _side(use.tensor))[use.part]
                tensors.append(TensorArgument(name=use.parameter, dtype=dtype, block=(1, 1, use.rows, width)))
                layouts.append(descriptor_layout(operand.shape, operand.strides, item_bytes))
                continue
            tensors.append(TensorArgument(name=use.parameter, dtype=dtype, aligned=operand.is_dense))
            layouts.append(None)
            multiple_of = ALIGNMENT_BYTES // item_bytes if operand.is_dense else 1
            for dim, stride in zip("bhsd", operand.kernel_strides(), strict=True):
                name = f"stride_{use.tensor}_{dim}"
                if operand.is_dense and dim == "d":
                    constants[name] = 1
                else:
                    strides.append((NumberArgument(name=name, type="i64", multiple_of=multiple_of), stride))
        passed = [*strides, *numbers]
        plan = KernelPlan(
            function=function,
            tensors=tuple(tensors),
            numbers=tuple(argument for argument, _ in passed),
            constants=tuple(sorted(constants.items())),
            num_warps=num_warps,
            num_stages=num_stages,
        )
        return Step(
            plan=plan,
            tensors=tuple(self._names.index(use.tensor) for use in uses),
            layouts=tuple(layouts),
            numbers=tuple(value for _, value in passed),
            programs=programs,
        )


def _side(tensor: str) -> Side:
    return Side.V if tensor in ("v", "dout", "dv") else Side.QK
