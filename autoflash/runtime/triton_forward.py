"""The forward pass of the Triton family: which kernel a call needs, and the call itself."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from autoflash.device import Device
from autoflash.errors import NoKernelError
from autoflash.problem import Form, Problem
from autoflash.runtime import launch
from autoflash.runtime.compiled import CompiledExecutable
from autoflash.runtime.executable import NO_EXTRAS, Extras, ForwardCall
from autoflash.runtime.launch import KernelPlan, Launch, Layout, Number, NumberArgument, TensorArgument
from autoflash.runtime.layouts import (
    ALIGNMENT_BYTES,
    TORCH_TYPES,
    Operand,
    block_dim,
    descriptor_layout,
    strides_in_order_of,
)
from autoflash.runtime.trivial import empty_forward
from autoflash.variant import Variant

_LOG2_E = math.log2(math.e)
_TENSORS = ("q", "k", "v", "out")
_ROW_NAMES = ("m", "n", "n", "m")

_Operands = tuple[Operand, Operand, Operand, Operand]


def forward_plan(problem: Problem, variant: Variant, *, dense: bool = True, scale_sign: int = 1) -> KernelPlan:
    """The compiled form that a forward call needs.

    Args:
        problem: Its type, head dims and divisibility count; no other size does.
        variant: Of the Triton family.
        dense: Every tensor has a last stride of 1, and its address and other strides are multiples of 16 bytes.
        scale_sign: -1, 0 or 1.
    """
    structure, config = variant.structure, variant.config
    block_m, block_n = config.number("BLOCK_M"), config.number("BLOCK_N")
    block_d, block_dv = block_dim(problem.head_dim), block_dim(problem.head_dim_v)
    dtype = problem.dtype.value
    constants: dict[str, launch.Constant] = {
        "HEAD_DIM": problem.head_dim,
        "HEAD_DIM_V": problem.head_dim_v,
        "BLOCK_M": block_m,
        "BLOCK_N": block_n,
        "BLOCK_D": block_d,
        "BLOCK_DV": block_dv,
        "EVEN_M": problem.seqlen_q % block_m == 0,
        "EVEN_N": problem.seqlen_k % block_n == 0,
        "HAS_MASK": problem.causal or problem.seqlen_k % block_n != 0,
        "SCALE_SIGN": scale_sign,
        "PRECISION": "tf32" if problem.tf32 else "ieee",
    }
    numbers: list[NumberArgument] = []
    if structure.text("loads") == "tma":
        shapes = ((block_m, block_d), (block_n, block_d), (block_n, block_dv), (block_m, block_dv))
        tensors = [
            TensorArgument(name=f"{name}_desc", dtype=dtype, block=(1, 1, *shape))
            for name, shape in zip(_TENSORS, shapes, strict=True)
        ]
    else:
        tensors = [TensorArgument(name=f"{name}_ptr", dtype=dtype, aligned=dense) for name in _TENSORS]
        multiple_of = ALIGNMENT_BYTES // problem.dtype.itemsize if dense else 1
        for name, row in zip(_TENSORS, _ROW_NAMES, strict=True):
            strides = [f"stride_{name[0]}{dim}" for dim in ("b", "h", row, "d")]
            if dense:
                constants[strides.pop()] = 1
            numbers += [NumberArgument(name=stride, type="i64", multiple_of=multiple_of) for stride in strides]
    tensors.append(TensorArgument(name="lse_ptr", dtype="fp32", aligned=False))
    if structure.text("loop_order") == "key_outer":
        tensors += [TensorArgument(name=f"{name}_ptr", dtype="fp32", aligned=False) for name in ("m", "l", "acc")]
    numbers.append(NumberArgument(name="scale_log2", type="fp32"))
    numbers += [NumberArgument(name=name) for name in ("n_heads", "group", "n_q", "n_kv", "diagonal")]
    return KernelPlan(
        function="forward",
        tensors=tuple(tensors),
        numbers=tuple(numbers),
        constants=tuple(sorted(constants.items())),
        num_warps=config.number("num_warps"),
        num_stages=config.number("num_stages"),
    )


class TritonForward(CompiledExecutable):
    """Executable of the forward templates of the Triton family.

    Each prepared call is bound to one of a few compiled forms, chosen from the tensors: ``dense`` or ``strided``,
    rows and keys that fill their blocks or do not, and the sign of the scale.
    """

    def __init__(self, form: Form, variant: Variant, device: Device) -> None:
        """Render and import the kernel; compile nothing yet.

        Raises:
            RenderError: for a structure that the templates do not have.
            ImportError: without Triton.
        """
        super().__init__(form, variant, device)
        self._uses_tma = variant.structure.text("loads") == "tma"
        self._is_key_outer = variant.structure.text("loop_order") == "key_outer"
        self._block_m = variant.config.number("BLOCK_M")

    def why_not(self, problem: Problem, *tensors: Tensor) -> str | None:
        """The precondition that these tensors (q, k, v) miss; None if it can run them."""
        if self._programs(problem) > launch.MAX_PROGRAMS:
            return f"{self._programs(problem)} tiles of queries are more than one launch has"
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

    def is_loaded(self, problem: Problem, *tensors: Tensor) -> bool:
        """Whether a prepared call with a positive scale would compile and load nothing."""
        if problem.is_empty:
            return True
        operands = self._operands(problem, tensors)
        return self._plan(problem, operands, scale_sign=1) in self._kernels

    def prepare_forward(
        self, problem: Problem, q: Tensor, k: Tensor, v: Tensor, scale: float, extras: Extras = NO_EXTRAS
    ) -> ForwardCall:
        """Compile and load what the call needs, and bind everything that does not change between calls.

        Raises:
            NoKernelError: where :meth:`why_not` has something to say.
        """
        reason = self.why_not(problem, q, k, v)
        if reason is not None:
            raise NoKernelError(reason)
        operands = self._operands(problem, (q, k, v))
        if problem.is_empty:
            return empty_forward(operands[3])
        return self._prepare(problem, operands, scale)

    def _prepare(self, problem: Problem, operands: _Operands, scale: float) -> ForwardCall:
        run = self._bind(problem, operands, scale)
        planned = operands[3]
        shape, strides, dtype = planned.shape, planned.strides, TORCH_TYPES[problem.dtype]
        is_like_q = (shape, strides) == (operands[0].shape, operands[0].strides)
        needs_state = self._is_key_outer
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
                return call_into(out, q, k, v, lse)
            if lse is None:
                lse = torch.empty(shape[:3], dtype=torch.float32, device=q.device)
            elif not lse.is_contiguous():
                return out, lse.copy_(call(q, k, v, out)[1])
            if needs_state:
                run(q, k, v, out, lse, torch.empty_like(lse), torch.empty_like(lse), lse.new_empty(shape))
            else:
                run(q, k, v, out, lse)
            return out, lse

        def call_into(out: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor | None) -> tuple[Tensor, Tensor]:
            given = Operand.of(out)
            if self._uses_tma and not given.is_dense:
                made, lse = call(q, k, v, None, lse)
                return out.copy_(made), lse
            if given not in others:
                others[given] = self._prepare(problem, (*operands[:3], given), scale)
            return others[given](q, k, v, out, lse)

        return call

    def _bind(self, problem: Problem, operands: _Operands, scale: float) -> Launch:
        scale_sign = -1 if scale < 0 else 0 if scale == 0 else 1
        plan = self._plan(problem, operands, scale_sign)
        layouts: list[Layout | None] = [None] * len(plan.tensors)
        numbers: list[Number] = []
        for index, operand in enumerate(operands):
            if self._uses_tma:
                layouts[index] = descriptor_layout(operand.shape, operand.strides, problem.dtype.itemsize)
            else:
                numbers += operand.kernel_strides()[: 3 if _are_dense(operands) else 4]
        # A scale of 0 has gone into the queries whole.
        numbers.append(abs(scale) * _LOG2_E if scale_sign else 1.0)
        numbers += [problem.heads, problem.group, problem.seqlen_q, problem.seqlen_k, problem.diagonal]
        return self._kernel(plan).bind(layouts, numbers, self._programs(problem))

    def _plan(self, problem: Problem, operands: _Operands, scale_sign: int) -> KernelPlan:
        return forward_plan(problem, self._variant, dense=_are_dense(operands), scale_sign=scale_sign)

    def _operands(self, problem: Problem, tensors: Sequence[Tensor]) -> _Operands:
        """Of q, k, v as they lie, and of the output that would be allocated."""
        q, k, v = tensors[:3]
        shape = (problem.batch, problem.heads, problem.seqlen_q, problem.head_dim_v)
        out = Operand.planned(shape, strides_in_order_of(shape, q), problem.dtype.itemsize)
        return Operand.of(q), Operand.of(k), Operand.of(v), out

    def _programs(self, problem: Problem) -> int:
        heads = problem.batch * problem.heads
        return heads if self._is_key_outer else heads * -(-problem.seqlen_q // self._block_m)


def _are_dense(operands: _Operands) -> bool:
    return all(operand.is_dense for operand in operands)
