"""Run kernels on CPU tensors in Triton's interpreter, to verify their numerics without a GPU.

Triton makes a kernel interpreted when its module is imported: ``TRITON_INTERPRET=1`` must be set before.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
from torch import Tensor

from autoflash.runtime.launch import KernelPlan, Launch, Layout, Number
from autoflash.trial import Resources


class InterpretedKernel:
    """A kernel in Triton's interpreter: descriptors are made at each call, and nothing is compiled."""

    resources: Resources | None = None

    def __init__(self, function: Any, plan: KernelPlan) -> None:
        """Take the interpreted function of a module."""
        _correct_bfloat16()
        self._function = function
        self._plan = plan

    def bind(self, layouts: Sequence[Layout | None], numbers: Sequence[Number], programs: int) -> Launch:
        """As :meth:`autoflash.runtime.launch.Kernel.bind`."""
        from triton.tools.tensor_descriptor import TensorDescriptor

        plan = self._plan
        scalars = dict(zip((argument.name for argument in plan.numbers), numbers, strict=True))
        constants = dict(plan.constants)

        def launch(*tensors: Tensor) -> None:
            arguments: dict[str, object] = {}
            for argument, layout, tensor in zip(plan.tensors, layouts, tensors, strict=True):
                arguments[argument.name] = (
                    tensor
                    if layout is None
                    else TensorDescriptor(tensor, list(layout.shape), list(layout.strides), list(argument.block))
                )
            # Rows without a key take the logarithm of 0, a hyperbolic tangent the exponential of much: both know it.
            with np.errstate(divide="ignore", over="ignore"), _language_patched_once():
                self._function[(programs,)](**arguments, **scalars, **constants)

        return launch


@contextlib.contextmanager
def _language_patched_once() -> Iterator[None]:
    """Exchange the functions of ``tl`` once for a whole launch.

    As of Triton 3.9 they are looked for again at each call of a device function, which takes a third of a launch.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    patch = interpreter._patch_lang
    # Kernels name the one module, functions of Triton's own library the other.
    scope = patch(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    interpreter._patch_lang = lambda _: interpreter._LangPatchScope()
    try:
        yield
    finally:
        interpreter._patch_lang = patch
        scope.restore()


@functools.cache
def _correct_bfloat16() -> None:
    """Teach the interpreter bfloat16, which numpy lacks: Triton keeps the bits as uint16.

    As of Triton 3.9 its dots multiply those bits as integers, and its conversions from float32 truncate where the
    hardware rounds to nearest even.
    """
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    cast, dot = InterpreterBuilder.cast_impl, InterpreterBuilder.create_dot

    def cast_impl(self: Any, src: Any, dst_type: Any) -> Any:
        types = (src.dtype.scalar, dst_type.scalar)
        if types == (tl.bfloat16, tl.float32):
            return TensorHandle(widen(src.data), tl.float32)
        if types == (tl.float32, tl.bfloat16):
            return TensorHandle(narrow(src.data), tl.bfloat16)
        return cast(self, src, dst_type)

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        a, b = (
            TensorHandle(widen(side.data), tl.float32) if side.dtype.scalar == tl.bfloat16 else side for side in (a, b)
        )
        return dot(self, a, b, *rest)

    InterpreterBuilder.cast_impl = cast_impl
    InterpreterBuilder.create_dot = create_dot


def widen(bits: np.ndarray) -> np.ndarray:
    """Bfloat16, given as uint16, in float32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def narrow(numbers: np.ndarray) -> np.ndarray:
    """Float32 rounded to the nearest bfloat16, ties to even, given as uint16."""
    bits = np.ascontiguousarray(numbers).view(np.uint32)
    nearest = (bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(numbers), 0x7FC0, nearest).astype(np.uint16)
