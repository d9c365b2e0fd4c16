"""The forward pass of the Triton family: which kernel a call needs, and the call itself."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from autoflash.codegen.render import Form, render
from autoflash.device import Device
from autoflash.errors import NoKernelError, UnsupportedError
from autoflash.problem import DType, Problem
from autoflash.runtime import launch
from autoflash.runtime.executable import BackwardCall, ForwardCall
from autoflash.runtime.launch import Kernel, KernelPlan, Layout, NumberArgument, TensorArgument
from autoflash.runtime.load import load
from autoflash.trial import Resources
from autoflash.variant import Variant

_ALIGNMENT_BYTES = 16
_LOG2_E = math.log2(math.e)
_TENSORS = ("q", "k", "v", "out")
_ROW_NAMES = ("m", "n", "n", "m")
_TORCH_TYPES = {DType.FP16: torch.float16, DType.BF16: torch.bfloat16, DType.FP32: torch.float32}


def block_dim(head_dim: int) -> int:
    """Columns of the tile that holds vectors of this length: a power of two that a matrix unit can take."""
    return max(16, 1 << (head_dim - 1).bit_length())


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
        multiple_of = _ALIGNMENT_BYTES // problem.dtype.itemsize if dense else 1
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


def forward_plans(problem: Problem, variant: Variant) -> tuple[KernelPlan, ...]:
    """Every kernel that the regular dense specialisation of a problem launches, in order."""
    return (forward_plan(problem, variant),)


def output_strides(shape: Sequence[int], q: Tensor) -> tuple[int, ...]:
    """Strides of a dense tensor [B, H, M, D_V] in the memory order of q; its last dimension is always innermost."""
    strides = [0, 0, 0, 1]
    step = shape[3]
    for dim in sorted(range(3), key=lambda dim: (q.stride(dim), -dim)):
        strides[dim] = step
        step *= max(shape[dim], 1)
    return tuple(strides)


class TritonForward:
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
        source = render(form, variant.family, variant.structure)
        self._module = load(source)
        self._variant = variant
        self._digest = source.digest
        self._device = device
        self._uses_tma = variant.structure.text("loads") == "tma"
        self._rows_per_program = (
            0 if variant.structure.text("loop_order") == "key_outer" else variant.config.number("BLOCK_M")
        )
        self._kernels: dict[KernelPlan, Kernel] = {}
        self._lock = threading.Lock()

    @property
    def variant(self) -> Variant:
        """What it runs."""
        return self._variant

    @property
    def source_digest(self) -> str:
        """Digest of the rendered text."""
        return self._digest

    def why_not(self, problem: Problem, *tensors: Tensor) -> str | None:
        """The precondition that these tensors (q, k, v) miss; None if it can run them."""
        if self._programs(problem) > launch.MAX_PROGRAMS:
            return f"{self._programs(problem)} tiles of queries are more than one launch has"
        if not self._uses_tma or _is_trivial(problem):
            return None
        if not self._device.has_tma and not launch.is_interpreted():
            return f"loads=tma needs a copy engine (sm_90 or newer), the device is {self._device.arch}"
        for name, head_dim in (("head_dim", problem.head_dim), ("head_dim_v", problem.head_dim_v)):
            if head_dim * problem.dtype.itemsize % _ALIGNMENT_BYTES:
                return f"loads=tma needs vectors of a multiple of 16 bytes, {name} is {head_dim}"
        for name, tensor in zip(_TENSORS, tensors, strict=False):
            if not _is_dense(tensor):
                return f"loads=tma needs {name} with a last stride of 1 and the rest aligned to 16 bytes"
            if any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
                return f"loads=tma needs every element of {name} at its own address, a stride is 0"
        return None

    def is_loaded(self, problem: Problem, *tensors: Tensor) -> bool:
        """Whether a prepared call with a positive scale would compile and load nothing."""
        if _is_trivial(problem):
            return True
        out_shape = (*tensors[0].shape[:3], problem.head_dim_v)
        dense = self._is_dense_call(problem, tensors[:3], output_strides(out_shape, tensors[0]), 0)
        return forward_plan(problem, self._variant, dense=dense) in self._kernels

    def resources(self) -> Resources | None:
        """The most that any of the loaded kernels takes; None before the first."""
        known = [kernel.resources for kernel in self._kernels.values() if kernel.resources is not None]
        if not known:
            return None
        return Resources(
            shared_bytes=max(one.shared_bytes for one in known),
            registers=max(one.registers for one in known),
            spill_bytes=max(one.spill_bytes for one in known),
        )

    def prepare_forward(self, problem: Problem, q: Tensor, k: Tensor, v: Tensor, scale: float) -> ForwardCall:
        """Compile and load what the call needs, and bind everything that does not change between calls.

        Raises:
            NoKernelError: where :meth:`why_not` has something to say.
        """
        reason = self.why_not(problem, q, k, v)
        if reason is not None:
            raise NoKernelError(reason)
        shape = (problem.batch, problem.heads, problem.seqlen_q, problem.head_dim_v)
        strides = output_strides(shape, q)
        if _is_trivial(problem):
            return _trivial_call(shape, strides)
        return self._prepare(problem, q, k, v, scale, strides, 0)

    def prepare_backward(
        self, problem: Problem, q: Tensor, k: Tensor, v: Tensor, out: Tensor, dout: Tensor, scale: float
    ) -> BackwardCall:
        """Refuse: these are forward templates.

        Raises:
            UnsupportedError: always.
        """
        raise UnsupportedError(f"a {problem.op.value} pass was asked of a forward kernel")

    def _prepare(
        self,
        problem: Problem,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float,
        out_strides: tuple[int, ...],
        out_offset: int,
    ) -> ForwardCall:
        shape = (problem.batch, problem.heads, problem.seqlen_q, problem.head_dim_v)
        out_dtype = _TORCH_TYPES[problem.dtype]
        dense = self._is_dense_call(problem, (q, k, v), out_strides, out_offset)
        scale_sign = (scale > 0) - (scale < 0) if scale == scale else 1
        plan = forward_plan(problem, self._variant, dense=dense, scale_sign=scale_sign)
        layouts = [(tuple(tensor.shape), tensor.stride()) for tensor in (q, k, v)] + [(shape, out_strides)]
        described: list[Layout | None] = [None] * len(plan.tensors)
        numbers: list[launch.Number] = []
        for index, (sizes, strides) in enumerate(layouts):
            if self._uses_tma:
                described[index] = _descriptor_layout(sizes, strides, problem.dtype.itemsize)
            else:
                numbers += [0 if size == 1 else stride for size, stride in zip(sizes[:3], strides[:3], strict=True)]
                numbers += [] if dense else [strides[3]]
        numbers.append(abs(scale) * _LOG2_E if scale_sign else 1.0)
        numbers += [problem.heads, problem.group, problem.seqlen_q, problem.seqlen_k, problem.diagonal]
        run = self._kernel(plan).bind(described, numbers, self._programs(problem))

        lse_shape = shape[:3]
        needs_state = self._rows_per_program == 0
        like_q = out_dtype == q.dtype and shape == tuple(q.shape) and torch.empty_like(q).stride() == out_strides
        other_outputs: dict[tuple[tuple[int, ...], int], ForwardCall] = {}

        def call(
            q: Tensor, k: Tensor, v: Tensor, out: Tensor | None = None, lse: Tensor | None = None
        ) -> tuple[Tensor, Tensor]:
            if out is None:
                out = (
                    torch.empty_like(q)
                    if like_q
                    else torch.empty_strided(shape, out_strides, dtype=out_dtype, device=q.device)
                )
            elif out.stride() != out_strides or out.data_ptr() % _ALIGNMENT_BYTES != out_offset:
                return call_with_other_output(q, k, v, out, lse)
            if lse is None:
                lse = torch.empty(lse_shape, dtype=torch.float32, device=q.device)
            elif not lse.is_contiguous():
                _, dense_lse = call(q, k, v, out)
                lse.copy_(dense_lse)
                return out, lse
            if needs_state:
                run(q, k, v, out, lse, torch.empty_like(lse), torch.empty_like(lse), lse.new_empty(shape))
            else:
                run(q, k, v, out, lse)
            return out, lse

        def call_with_other_output(
            q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor | None
        ) -> tuple[Tensor, Tensor]:
            if self._uses_tma and not _is_dense(out):
                made, lse = call(q, k, v, None, lse)
                return out.copy_(made), lse
            key = (out.stride(), out.data_ptr() % _ALIGNMENT_BYTES)
            if key not in other_outputs:
                other_outputs[key] = self._prepare(problem, q, k, v, scale, *key)
            return other_outputs[key](q, k, v, out, lse)

        return call

    def _kernel(self, plan: KernelPlan) -> Kernel:
        with self._lock:
            if plan not in self._kernels:
                self._kernels[plan] = launch.load_kernel(self._module, plan, self._device)
            return self._kernels[plan]

    def _programs(self, problem: Problem) -> int:
        tiles = -(-problem.seqlen_q // self._rows_per_program) if self._rows_per_program else 1
        return problem.batch * problem.heads * tiles

    def _is_dense_call(
        self, problem: Problem, inputs: Sequence[Tensor], out_strides: Sequence[int], out_offset: int
    ) -> bool:
        item_bytes = problem.dtype.itemsize
        out_shape = (problem.batch, problem.heads, problem.seqlen_q, problem.head_dim_v)
        return (
            all(_is_dense(tensor) for tensor in inputs)
            and out_offset == 0
            and _has_dense_strides(out_shape, out_strides, item_bytes)
        )


def _is_trivial(problem: Problem) -> bool:
    """Whether there is nothing to launch: no query, or no key to see."""
    return problem.batch * problem.seqlen_q * problem.seqlen_k == 0


def _is_dense(tensor: Tensor) -> bool:
    return tensor.data_ptr() % _ALIGNMENT_BYTES == 0 and _has_dense_strides(
        tensor.shape, tensor.stride(), tensor.element_size()
    )


def _has_dense_strides(shape: Sequence[int], strides: Sequence[int], item_bytes: int) -> bool:
    """Last stride 1, the others multiples of 16 bytes; where there is one element, its stride is of no account."""
    return (strides[3] == 1 or shape[3] == 1) and all(
        size == 1 or stride * item_bytes % _ALIGNMENT_BYTES == 0
        for size, stride in zip(shape[:3], strides[:3], strict=True)
    )


def _descriptor_layout(shape: Sequence[int], strides: Sequence[int], item_bytes: int) -> Layout:
    """What a tensor map may be told: strides of dimensions with one element are made lawful."""
    multiple = _ALIGNMENT_BYTES // item_bytes
    lawful = [1] * 4
    above = -(-shape[3] // multiple) * multiple
    for dim in (2, 1, 0):
        lawful[dim] = above if shape[dim] == 1 else strides[dim]
        above = max(above, lawful[dim] * shape[dim])
    return Layout(shape=tuple(shape), strides=tuple(lawful))


def _trivial_call(shape: tuple[int, ...], strides: tuple[int, ...]) -> ForwardCall:
    """Answer without a launch: no row sees a key."""

    def call(
        q: Tensor, k: Tensor, v: Tensor, out: Tensor | None = None, lse: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        out = torch.empty_strided(shape, strides, dtype=q.dtype, device=q.device) if out is None else out
        lse = torch.empty(shape[:3], dtype=torch.float32, device=q.device) if lse is None else lse
        return out.zero_(), lse.fill_(-math.inf)

    return call
