"""The CUDA driver as Triton's own C code calls it, without a C compiler: load a kernel, encode a tensor map, launch.

Triton builds that code on each machine, with the compiler that it finds there; this needs the driver's library alone.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from collections.abc import Callable, Sequence
from ctypes import byref, c_char_p, c_int, c_uint, c_uint32, c_uint64, c_void_p
from dataclasses import dataclass
from typing import Any

from autoflash import paths

_LIBRARY = "libcuda.so.1"

# Values of cuda.h.
_MAX_THREADS, _STATIC_SHARED, _LOCAL_BYTES, _REGISTERS, _MAX_DYNAMIC_SHARED = 0, 1, 3, 4, 8
_SHARED_OF_MULTIPROCESSOR, _SHARED_OPT_IN = 81, 97
_PREFER_SHARED = 1
_INVALID_CONTEXT = 201
_NO_INTERLEAVE, _PROMOTE_L2_128B, _FILL_WITH_ZEROS = 0, 2, 0

_USUAL_SHARED_BYTES = 48 * 1024
"""Dynamic shared memory that a kernel may have without being allowed more."""

_TENSOR_MAP_BYTES, _TENSOR_MAP_ALIGNMENT = 128, 128
_TensorMapMemory = ctypes.c_char * (_TENSOR_MAP_BYTES + _TENSOR_MAP_ALIGNMENT)


class LaunchConfig(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        *((f"{name}_{axis}", c_uint) for name in ("grid", "block") for axis in "xyz"),
        ("shared_bytes", c_uint),
        ("stream", c_void_p),
        ("attributes", c_void_p),
        ("attribute_count", c_uint),
    )


@dataclass(frozen=True, slots=True)
class Function:
    """A kernel in the memory of a device.

    Attributes:
        handle: CUfunction.
        registers: Of a thread.
        local_bytes: That a thread spills to.
        max_threads: Of a block.
    """

    handle: int
    registers: int
    local_bytes: int
    max_threads: int


class TensorMap:
    """An encoded tensor map, aligned as kernels are passed it, and never written again."""

    __slots__ = ("_memory", "address")

    def __init__(self) -> None:
        self._memory = _TensorMapMemory()
        self.address = -(-ctypes.addressof(self._memory) // _TENSOR_MAP_ALIGNMENT) * _TENSOR_MAP_ALIGNMENT


class Libcuda:
    """The functions of the driver that launches need.

    Attributes:
        start: cuLaunchKernelEx, which gives a CUresult. It lets other threads run meanwhile, since a launch waits where
            the queue of the device is full, and what it waits for may be a callback in Python.
    """

    def __init__(self, library: Any) -> None:
        """Look for the functions in a loaded library.

        Raises:
            AttributeError: naming the first one that this driver lacks.
        """
        self.start = library.cuLaunchKernelEx
        self._encode_tiled = library.cuTensorMapEncodeTiled
        self._module_load = library.cuModuleLoadData
        self._module_function = library.cuModuleGetFunction
        self._function_value = library.cuFuncGetAttribute
        self._set_function_value = library.cuFuncSetAttribute
        self._set_cache_config = library.cuFuncSetCacheConfig
        self._device_value = library.cuDeviceGetAttribute
        self._device = library.cuDeviceGet
        self._current_context = library.cuCtxGetCurrent
        self._set_context = library.cuCtxSetCurrent
        self._primary_context = library.cuDevicePrimaryCtxRetain
        self._error_name = library.cuGetErrorName
        self._error_text = library.cuGetErrorString

    def load(self, cubin: bytes, name: str, shared_bytes: int, index: int) -> Function:
        """Load a kernel on a device, for good: a launch may still be queued when the last reference to it goes.

        Args:
            cubin: What ptxas made.
            name: Of the kernel.
            shared_bytes: Of dynamic shared memory of each block.
            index: Of the device.

        Raises:
            RuntimeError: where the driver refuses it.
        """
        self._make_current(index, always=False)
        module, function = c_void_p(), c_void_p()
        self._check("cuModuleLoadData", self._module_load(byref(module), cubin))
        self._check("cuModuleGetFunction", self._module_function(byref(function), module, name.encode()))
        opt_in = self._of_device(_SHARED_OPT_IN, index)
        if shared_bytes > _USUAL_SHARED_BYTES and opt_in > _USUAL_SHARED_BYTES:
            self._check("cuFuncSetCacheConfig", self._set_cache_config(function, _PREFER_SHARED))
            most = opt_in - self._of_function(_STATIC_SHARED, function)
            self._check("cuFuncSetAttribute", self._set_function_value(function, _MAX_DYNAMIC_SHARED, most))
        return Function(
            handle=function.value or 0,
            registers=self._of_function(_REGISTERS, function),
            local_bytes=self._of_function(_LOCAL_BYTES, function),
            max_threads=self._of_function(_MAX_THREADS, function),
        )

    def tensor_map_encoder(
        self,
        shape: Sequence[int],
        strides: Sequence[int],
        block: Sequence[int],
        *,
        swizzle: int,
        item_type: int,
        item_bytes: int,
    ) -> Callable[[int], TensorMap]:
        """What encodes a tiled tensor map for the address of a first element, a multiple of 16 bytes.

        Elements outside the tensor are read as 0. What it makes raises RuntimeError where the driver refuses the map.

        Args:
            shape: The last dimension is the innermost, here and below.
            strides: In elements; the last is 1.
            block: Shape of what one copy moves.
            swizzle: CUtensorMapSwizzle.
            item_type: CUtensorMapDataType.
            item_bytes: Of an element.
        """
        rank = len(shape)
        sizes, counts = c_uint64 * rank, c_uint32 * rank
        # The driver does not ask for the stride of the innermost dimension.
        steps = [item_bytes * stride for stride in reversed(strides[:-1])]
        before = (item_type, rank)
        behind = (
            sizes(*reversed(shape)),
            sizes(*steps),
            counts(*reversed(block)),
            counts(*[1] * rank),
            _NO_INTERLEAVE,
            swizzle,
            _PROMOTE_L2_128B,
            _FILL_WITH_ZEROS,
        )
        encode_tiled = self._encode_tiled

        def encode(address: int) -> TensorMap:
            made = TensorMap()
            result = encode_tiled(c_void_p(made.address), *before, c_void_p(address), *behind)
            if result:
                how = f"shape {tuple(shape)}, strides {tuple(strides)}, block {tuple(block)}, address {address:#x}"
                self._check(f"cuTensorMapEncodeTiled of {how}", result)
            return made

        return encode

    def start_again(self, result: int, index: int, *launch: object) -> None:
        """After a launch that failed: once more if its thread had no context yet.

        Args:
            result: What :attr:`start` gave.
            index: Of the device.
            launch: What it was given.

        Raises:
            RuntimeError: that names the error.
        """
        if result == _INVALID_CONTEXT:
            self._make_current(index, always=True)
            result = self.start(*launch)
        self._check("cuLaunchKernelEx", result)

    def _make_current(self, index: int, *, always: bool) -> None:
        """Give this thread the context that torch uses, where it has none (or the one that it has is none)."""
        context, device = c_void_p(), c_int()
        if not always:
            self._check("cuCtxGetCurrent", self._current_context(byref(context)))
        if not context:
            self._check("cuDeviceGet", self._device(byref(device), index))
            self._check("cuDevicePrimaryCtxRetain", self._primary_context(byref(context), device))
            self._check("cuCtxSetCurrent", self._set_context(context))

    def _of_function(self, attribute: int, function: c_void_p) -> int:
        value = c_int()
        self._check("cuFuncGetAttribute", self._function_value(byref(value), attribute, function))
        return value.value

    def _of_device(self, attribute: int, index: int) -> int:
        value, device = c_int(), c_int()
        self._check("cuDeviceGet", self._device(byref(device), index))
        self._check("cuDeviceGetAttribute", self._device_value(byref(value), attribute, device))
        return value.value

    def _check(self, what: str, result: int) -> None:
        if result:
            name, text = c_char_p(), c_char_p()
            self._error_name(result, byref(name))
            self._error_text(result, byref(text))
            said = [(known.value or b"unknown error").decode() for known in (name, text)]
            raise RuntimeError(f"CUDA driver: {what} failed with {said[0]} ({result}): {said[1]}")


@functools.cache
def libcuda() -> Libcuda | None:
    """The driver of this machine where ``AUTOFLASH_LAUNCHER=native``; None, said once, where it cannot be used."""
    if paths.launcher() != "native":
        return None
    try:
        return Libcuda(ctypes.CDLL(_LIBRARY))
    except (OSError, AttributeError) as error:
        logging.getLogger("autoflash").warning("kernels are launched by Triton, which takes longer: %s", error)
        return None
