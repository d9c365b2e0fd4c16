"""The forward pass of the Triton family: which kernel a call needs, and the call itself."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from autoflash.device import Device
from autoflash.errors import InvalidProblemError
from autoflash.problem import Alignment, Form, MaskTensor, Problem
from autoflash.runtime import dropout, launch
from autoflash.runtime.backward_features import blocks_strides, knows_layouts, slopes_stride
from autoflash.runtime.compiled import CompiledExecutable
from autoflash.runtime.executable import NO_EXTRAS, Extras, ForwardCall, refuse_unable
from autoflash.runtime.launch import KernelPlan, Launch, Layout, Number, NumberArgument, TensorArgument
from autoflash.runtime.layouts import (
    ALIGNMENT_BYTES,
    TORCH_TYPES,
    MaskOperand,
    Operand,
    descriptor_layout,
    reach,
    slots,
    strides_in_order_of,
    why_not_structure,
    width_constants,
)
from autoflash.runtime.params import ParamOperand, as_kernels_read, has_params, param_operands, usual_params
from autoflash.runtime.trivial import empty_forward
from autoflash.runtime.workspace import Buffer, Workspace
from autoflash.space.cost import Side, column_blocks, splits_heads
from autoflash.variant import Variant

_LOG2_E = math.log2(math.e)
_TENSORS = ("q", "k", "v", "out")
_ROWS = ("BLOCK_M", "BLOCK_N", "BLOCK_N", "BLOCK_M")
_SIDES = (Side.QK, Side.QK, Side.V, Side.V)

_Operands = tuple[Operand, Operand, Operand, Operand]
_Added = tuple[MaskOperand | None, MaskOperand | None]


def forward_plan(
    problem: Problem,
    variant: Variant,
    *,
    dense: bool = True,
    scale_sign: int = 1,
    mask: MaskOperand | None = None,
    bias: MaskOperand | None = None,
    params: tuple[ParamOperand, ...] | None = None,
) -> KernelPlan:
    """The compiled form that a forward call needs.

    Args:
        problem: Its form, type, head dims and divisibility count; no other size does.
        variant: Of the Triton family.
        dense: Every tensor but the mask and the bias has a last stride of 1, and its address and other strides are
            multiples of 16 bytes.
        scale_sign: -1, 0 or 1.
        mask: How the mask tensor lies, where the problem has one; None is the usual way.
        bias: Likewise of the bias.
        params: How the parameters of expressions lie; None is the usual way.
    """
    params = usual_params(problem) if params is None else params
    mask = MaskOperand.usual(problem) if mask is None else mask
    bias = MaskOperand.usual_bias(problem) if bias is None else bias
    constants = _constants(problem, variant, scale_sign)
    dtype = problem.dtype.value
    if variant.structure.text("loads") == "tma":
        widths = (problem.head_dim, problem.head_dim, problem.head_dim_v, problem.head_dim_v)
        blocks = [column_blocks(width, variant.structure, side) for width, side in zip(widths, _SIDES, strict=True)]
        # Vectors in two tiles have a descriptor for each.
        tensors = [
            TensorArgument(name=f"{name}{part}_desc", dtype=dtype, block=(1, 1, int(constants[rows]), columns[index]))
            for index, part in enumerate(("", "_rest"))
            for name, rows, columns in zip(_TENSORS, _ROWS, blocks, strict=True)
            if index < len(columns)
        ]
        strides = []
    else:
        tensors = [TensorArgument(name=f"{name}_ptr", dtype=dtype, aligned=dense) for name in _TENSORS]
        dims = ("h",) if problem.is_varlen else ("b", "h")
        names = [
            [f"stride_{name[0]}{dim}" for dim in (*dims, row, "d")] for name, row in zip(_TENSORS, "mnnm", strict=True)
        ]
        strides = [
            stride for of_tensor in names for stride in _strides(of_tensor, problem.dtype.itemsize, dense, constants)
        ]
    tensors.append(TensorArgument(name="lse_ptr", dtype="fp32", aligned=False))
    if variant.structure.text("loop_order") == "key_outer":
        tensors += [TensorArgument(name=f"{name}_ptr", dtype="fp32", aligned=False) for name in ("m", "l", "acc")]
    for operand in (mask, bias):
        if operand is not None:
            tensors.append(TensorArgument(name=f"{operand.name}_ptr", dtype=operand.dtype, aligned=operand.is_aligned))
            strides += operand.numbers()
            constants |= operand.constants()
    if problem.alibi:
        tensors.append(TensorArgument(name="slopes_ptr", dtype="fp32", aligned=False))
        strides.append(NumberArgument(name="stride_slopes_b"))
    if problem.block_size:
        strides += [NumberArgument(name=f"stride_blocks_{dim}") for dim in "bh"]
    if problem.sinks:
        tensors.append(TensorArgument(name="sinks_ptr", dtype="fp32", aligned=False))
    for param in params:
        tensors.append(param.tensor)
        strides += param.numbers()
        constants |= param.constants()
    if problem.block_size:
        tensors.append(TensorArgument(name="blocks_ptr", dtype="i32", aligned=False))
    if problem.dropout_p:
        tensors.append(TensorArgument(name="rng_ptr", dtype="i64", aligned=False))
    if problem.is_varlen:
        tensors += [TensorArgument(name=name, dtype="i32", aligned=False) for name in ("cu_q_ptr", "cu_k_ptr")]
    return KernelPlan(
        function="forward",
        tensors=tuple(tensors),
        numbers=(*strides, *_numbers(problem, scale=1.0)),
        constants=tuple(sorted(constants.items())),
        num_warps=variant.config.number("num_warps"),
        num_stages=variant.config.number("num_stages"),
    )


def workspace(problem: Problem, variant: Variant) -> Workspace:
    """What a call allocates for itself: with key_outer, the running state of every row in float32; else nothing."""
    if problem.is_empty or variant.structure["loop_order"] != "key_outer":
        return ()
    rows = problem.tensor_batch * problem.heads * problem.rows_q
    return (
        Buffer(name="running maximum and sum, float32", size_bytes=2 * 4 * rows),
        Buffer(name="running output, float32", size_bytes=4 * rows * problem.head_dim_v),
    )


def _constants(problem: Problem, variant: Variant, scale_sign: int) -> dict[str, launch.Constant]:
    block_m, block_n = variant.config.number("BLOCK_M"), variant.config.number("BLOCK_N")
    even_m = not problem.is_varlen and problem.seqlen_q % block_m == 0
    # The last block of a block mask is visited to its end.
    even_n = not problem.is_varlen and problem.seqlen_k % (problem.block_size or block_n) == 0
    constants: dict[str, launch.Constant] = {
        **width_constants(problem, variant.structure),
        "BLOCK_M": block_m,
        "BLOCK_N": block_n,
        "EVEN_M": even_m,
        "EVEN_N": even_n,
        "HAS_MASK": problem.causal or problem.has_window or not even_n,
        "SCALE_SIGN": scale_sign,
        "PRECISION": "tf32" if problem.tf32 else "ieee",
    }
    if problem.block_size:
        constants["SPARSE_BLOCK"] = problem.block_size
    if problem.is_varlen:
        constants["BOTTOM_RIGHT"] = problem.alignment is Alignment.BOTTOM_RIGHT
    return constants


def _strides(
    names: list[str], itemsize: int, dense: bool, constants: dict[str, launch.Constant]
) -> list[NumberArgument]:
    """The strides of a tensor that are given at launch; a last one of 1 becomes a constant."""
    if dense:
        constants[names.pop()] = 1
    multiple_of = ALIGNMENT_BYTES // itemsize if dense else 1
    return [NumberArgument(name=name, type="i64", multiple_of=multiple_of) for name in names]


def _numbers(problem: Problem, scale: float) -> dict[NumberArgument, Number]:
    """The numbers behind the strides, in the order of the kernel's parameters."""
    integers = {"n_heads": problem.heads, "group": problem.group}
    behind: dict[NumberArgument, Number] = {}
    # The sign of the scale has gone into the queries, and a scale of 0 whole.
    if problem.softcap:
        floats = {"cap_steepness": abs(scale) / problem.softcap, "cap_height": problem.softcap * _LOG2_E}
    else:
        floats = {"scale_log2": abs(scale) * _LOG2_E if scale else 1.0}
    if problem.is_varlen:
        integers |= {"n_rows": problem.rows_q, "n_sequences": problem.batch}
    else:
        integers |= {"n_q": problem.seqlen_q, "n_kv": problem.seqlen_k, "diagonal": problem.diagonal}
    if problem.has_window:
        left, right = reach(problem)
        integers |= {"window_left": left, "window_right": right}
    if problem.dropout_p:
        behind = {
            NumberArgument(name="dropout_threshold", type="i64"): dropout.threshold(problem.dropout_p),
            NumberArgument(name="keep_scale", type="fp32"): dropout.keep_scale(problem.dropout_p),
        }
    return {
        **{NumberArgument(name=name, type="fp32"): number for name, number in floats.items()},
        **{NumberArgument(name=name): number for name, number in integers.items()},
        **behind,
    }


class TritonForward(CompiledExecutable):
    """Executable of the forward templates of the Triton family.

    Each prepared call is bound to one of a few compiled forms, chosen from the tensors: ``dense`` or ``strided``,
    rows and keys that fill their blocks or do not, how mask and bias lie, and the sign of the scale.
    """

    def __init__(self, form: Form, variant: Variant, device: Device) -> None:
        """Render and import the kernel; compile nothing yet.

        Raises:
            RenderError: for a structure that the templates do not have.
            ImportError: without Triton.
        """
        super().__init__(form, variant, device)
        self._uses_tma = variant.structure.text("loads") == "tma"
        # Tensors with a descriptor for each of two parts, by their places.
        self._described_twice = tuple(
            place for place, side in enumerate(_SIDES) if self._uses_tma and splits_heads(variant.structure, side)
        )
        self._is_key_outer = variant.structure.text("loop_order") == "key_outer"
        self._block_m = variant.config.number("BLOCK_M")

    def why_not(self, problem: Problem, *tensors: Tensor) -> str | None:
        """The precondition that these tensors (q, k, v) miss; None if it can run them."""
        if self._programs(problem) > launch.MAX_PROGRAMS:
            return f"{self._programs(problem)} tiles of queries are more than one launch has"
        if (reason := why_not_structure(problem, self._variant.structure)) is not None:
            return reason
        if not self._uses_tma or problem.is_empty:
            return None
        if not self._device.has_tma and not launch.is_interpreted():
            return f"loads=tma needs a copy engine (sm_90 or newer), the device is {self._device.arch}"
        for name, head_dim in (("head_dim", problem.head_dim), ("head_dim_v", problem.head_dim_v)):
            if head_dim * problem.dtype.itemsize % ALIGNMENT_BYTES:
                return f"loads=tma needs vectors of a multiple of 16 bytes, {name} is {head_dim}"
        for name, tensor in zip(_TENSORS, tensors, strict=False):
            operand = Operand.of(tensor)
            if not operand.is_dense:
                return f"loads=tma needs {name} with a last stride of 1 and the rest aligned to 16 bytes"
            if operand.overlaps:
                return f"loads=tma needs every element of {name} at its own address, a stride is 0"
        return None

    def is_loaded(self, problem: Problem, *tensors: Tensor, extras: Extras = NO_EXTRAS) -> bool:
        """Whether a prepared call with a positive scale would compile and load nothing.

        That depends on how a mask and a bias lie: where they are not given, nothing is known to be loaded.
        """
        if problem.is_empty:
            return True
        if not knows_layouts(problem, extras):
            return False
        operands = self._operands(problem, tensors)
        return (
            self._plan(problem, operands, *_added_of(problem, extras), param_operands(problem, extras), scale_sign=1)
            in self._kernels
        )

    def prepare_forward(
        self, problem: Problem, q: Tensor, k: Tensor, v: Tensor, scale: float, extras: Extras = NO_EXTRAS
    ) -> ForwardCall:
        """Compile and load what the call needs, and bind everything that does not change between calls.

        Raises:
            NoKernelError: where :meth:`why_not` has something to say.
            InvalidProblemError: where a tensor is missing that the problem asks for.
        """
        refuse_unable(self, problem, q, k, v)
        operands = self._operands(problem, (q, k, v))
        if problem.is_empty:
            _given(extras, _wanted_extras(problem))
            return empty_forward(operands[3])
        numbers: tuple[int, ...] = (slopes_stride(problem, extras),) if problem.alibi else ()
        if extras.query_blocks is not None:
            numbers += blocks_strides(extras.query_blocks)
        params = param_operands(problem, extras)
        return self._prepare(problem, operands, _added_of(problem, extras), params, scale, numbers)

    def _prepare(
        self,
        problem: Problem,
        operands: _Operands,
        added: _Added,
        params: tuple[ParamOperand, ...],
        scale: float,
        numbers: tuple[int, ...],
    ) -> ForwardCall:
        run = self._bind(problem, operands, added, params, scale, numbers)
        if self._described_twice:
            run = _described_twice(run, self._described_twice)
        planned = operands[3]
        shape, strides, dtype = planned.shape, planned.strides, TORCH_TYPES[problem.dtype]
        is_like_q = (shape, strides) == (operands[0].shape, operands[0].strides)
        needs_state = self._is_key_outer
        wanted = _wanted_extras(problem)
        others: dict[Operand, ForwardCall] = {}

        def call(
            q: Tensor,
            k: Tensor,
            v: Tensor,
            out: Tensor | None = None,
            lse: Tensor | None = None,
            extras: Extras = NO_EXTRAS,
        ) -> tuple[Tensor, Tensor]:
            if out is None:
                # The same memory, asked for in the way that takes torch the least time.
                out = (
                    torch.empty_like(q)
                    if is_like_q
                    else torch.empty_strided(shape, strides, dtype=dtype, device=q.device)
                )
            elif Operand.of(out) != planned:
                return call_into(out, q, k, v, lse, extras)
            if lse is None:
                lse = torch.empty(shape[:3], dtype=torch.float32, device=q.device)
            elif not lse.is_contiguous():
                return out, lse.copy_(call(q, k, v, out, None, extras)[1])
            if needs_state:
                run(q, k, v, out, lse, torch.empty_like(lse), torch.empty_like(lse), lse.new_empty(shape))
            elif wanted:
                run(q, k, v, out, lse, *_given(extras, wanted))
            else:
                run(q, k, v, out, lse)
            return out, lse

        def call_into(
            out: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor | None, extras: Extras
        ) -> tuple[Tensor, Tensor]:
            given = Operand.of(out)
            if self._uses_tma and not given.is_dense:
                made, lse = call(q, k, v, None, lse, extras)
                return out.copy_(made), lse
            if given not in others:
                others[given] = self._prepare(problem, (*operands[:3], given), added, params, scale, numbers)
            return others[given](q, k, v, out, lse, extras)

        return call

    def _bind(
        self,
        problem: Problem,
        operands: _Operands,
        added: _Added,
        params: tuple[ParamOperand, ...],
        scale: float,
        given: tuple[int, ...],
    ) -> Launch:
        plan = self._plan(problem, operands, *added, params, scale_sign=-1 if scale < 0 else 0 if scale == 0 else 1)
        layouts: list[Layout | None] = [None] * len(plan.tensors)
        numbers: list[Number] = []
        for index, operand in enumerate(operands):
            if self._uses_tma:
                layout = descriptor_layout(operand.shape, operand.strides, problem.dtype.itemsize)
                layouts[index] = layout
                if index in self._described_twice:
                    layouts[len(operands) + self._described_twice.index(index)] = layout
            else:
                first, last = 1 if problem.is_varlen else 0, 3 if _are_dense(operands) else 4
                numbers += operand.kernel_strides()[first:last]
        for one in added:
            numbers += one.numbers().values() if one is not None else ()
        numbers += given
        for param in params:
            numbers += param.numbers().values()
        return self._kernel(plan).bind(layouts, [*numbers, *_numbers(problem, scale).values()], self._programs(problem))

    def _plan(
        self,
        problem: Problem,
        operands: _Operands,
        mask: MaskOperand | None,
        bias: MaskOperand | None,
        params: tuple[ParamOperand, ...],
        scale_sign: int,
    ) -> KernelPlan:
        return forward_plan(
            problem,
            self._variant,
            dense=_are_dense(operands),
            scale_sign=scale_sign,
            mask=mask,
            bias=bias,
            params=params,
        )

    def _operands(self, problem: Problem, tensors: Sequence[Tensor]) -> _Operands:
        """Of q, k, v as they lie, and of the output that would be allocated."""
        q, k, v = tensors[:3]
        shape = (problem.tensor_batch, problem.heads, problem.rows_q, problem.head_dim_v)
        out = Operand.planned(shape, strides_in_order_of(shape, q), problem.dtype.itemsize)
        return Operand.of(q), Operand.of(k), Operand.of(v), out

    def _programs(self, problem: Problem) -> int:
        if self._is_key_outer:
            return problem.batch * problem.heads
        if problem.is_varlen:
            return problem.heads * slots(problem.rows_q, problem.batch, self._block_m)
        return problem.batch * problem.heads * -(-problem.seqlen_q // self._block_m)


def _described_twice(run: Launch, places: Sequence[int]) -> Launch:
    """The launch of a kernel with a descriptor for each of two parts of some tensors, given every tensor once."""
    count = len(_TENSORS)

    def launch(*tensors: Tensor) -> None:
        run(*tensors[:count], *(tensors[place] for place in places), *tensors[count:])

    return launch


def _are_dense(operands: _Operands) -> bool:
    return all(operand.is_dense for operand in operands)


def _added_of(problem: Problem, extras: Extras) -> _Added:
    """How the mask and the bias lie, as far as there are any.

    Raises:
        InvalidProblemError: where an extra is missing that the problem asks for.
    """
    _given(extras, _wanted_extras(problem))
    mask, bias = extras.mask, extras.bias
    return (
        None if problem.mask_tensor is MaskTensor.NONE or mask is None else MaskOperand.of(mask),
        None if not problem.bias or bias is None else MaskOperand.of(bias, "bias"),
    )


def _wanted_extras(problem: Problem) -> tuple[str, ...]:
    """Which extras the kernel takes, in the order of its parameters."""
    mask = () if problem.mask_tensor is MaskTensor.NONE else ("mask",)
    bias = ("bias",) if problem.bias else ()
    slopes = ("alibi_slopes",) if problem.alibi else ()
    sinks = ("sinks",) if problem.sinks else ()
    params = ("params",) if has_params(problem) else ()
    blocks = ("query_blocks",) if problem.block_size else ()
    rng = ("rng",) if problem.dropout_p else ()
    offsets = ("cu_seqlens_q", "cu_seqlens_k") if problem.is_varlen else ()
    return (*mask, *bias, *slopes, *sinks, *params, *blocks, *rng, *offsets)


def _given(extras: Extras, names: Sequence[str]) -> list[Tensor]:
    """The extras of these names; a boolean mask as bytes.

    Raises:
        InvalidProblemError: where one is missing.
    """
    tensors: list[Tensor] = []
    for name in names:
        if name == "params":
            tensors += as_kernels_read(extras.params)
            continue
        tensor: Tensor | None = getattr(extras, name)
        if tensor is None:
            raise InvalidProblemError(f"the problem asks for {name}, which the call does not give")
        tensors.append(tensor.view(torch.uint8) if tensor.dtype == torch.bool else tensor)
    return tensors
