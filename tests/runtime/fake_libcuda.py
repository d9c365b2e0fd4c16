"""A CUDA driver that only writes down what it is asked to do: C functions that call Python."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from ctypes import CFUNCTYPE, POINTER, c_char_p, c_int, c_uint32, c_uint64, c_void_p
from dataclasses import dataclass, field
from typing import Any

from autoflash.runtime.libcuda import LaunchConfig

FUNCTION = 2**40 + 4242
CONTEXT = 2**40 + 1
_ATTRIBUTES = {0: 1024, 1: 1000, 3: 12, 4: 100}
_DEVICE_ATTRIBUTES = {81: 228 * 1024, 97: 227 * 1024}
_NAMES = {201: (b"CUDA_ERROR_INVALID_CONTEXT", b"invalid device context"), 700: (b"CUDA_ERROR_ILLEGAL_ADDRESS", b"boo")}

C_TYPES: dict[str, Any] = {"i32": ctypes.c_int32, "i64": ctypes.c_int64, "fp32": ctypes.c_float}


@dataclass
class Launched:
    """One launch.

    Attributes:
        grid, block: Sizes.
        parameters: Values of them all, scratch memory at the end; of a tensor map what was encoded, of fp32 a float.
    """

    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_bytes: int
    stream: int
    attribute_count: int
    function: int
    parameters: list[Any]


@dataclass
class FakeLibcuda:
    """Has the attributes of a ctypes library.

    Attributes:
        types: Of the parameters of the kernels that are launched, as Triton names them; ``map`` for a tensor map.
        launches, encoded: What happened, in order; of an encoding (address, type, rank, sizes, strides, block, rest).
        allowed_shared: Dynamic shared memory that kernels were allowed.
        results: Results of the next launches; then 0.
        contexts: Devices whose context was made current.
        context: Of every thread.
        on_launch: Called within each launch.
    """

    types: Sequence[str] = ()
    launches: list[Launched] = field(default_factory=list)
    encoded: list[tuple[Any, ...]] = field(default_factory=list)
    allowed_shared: list[int] = field(default_factory=list)
    results: list[int] = field(default_factory=list)
    contexts: list[int] = field(default_factory=list)
    context: int = CONTEXT
    on_launch: Callable[[], None] = lambda: None
    _encoding: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        for name, (arguments, function) in {
            "cuLaunchKernelEx": ((POINTER(LaunchConfig), c_void_p, c_void_p, c_void_p), self._launch),
            "cuTensorMapEncodeTiled": (
                (c_void_p, c_int, c_uint32, c_void_p, *[POINTER(c_uint64)] * 2, *[POINTER(c_uint32)] * 2, *[c_int] * 4),
                self._encode,
            ),
            "cuModuleLoadData": ((POINTER(c_void_p), c_char_p), self._load),
            "cuModuleGetFunction": ((POINTER(c_void_p), c_void_p, c_char_p), self._get_function),
            "cuFuncGetAttribute": ((POINTER(c_int), c_int, c_void_p), self._function_attribute),
            "cuFuncSetAttribute": ((c_void_p, c_int, c_int), self._allow),
            "cuFuncSetCacheConfig": ((c_void_p, c_int), lambda function, config: 0),
            "cuDeviceGetAttribute": ((POINTER(c_int), c_int, c_int), self._device_attribute),
            "cuDeviceGet": ((POINTER(c_int), c_int), self._device),
            "cuCtxGetCurrent": ((POINTER(c_void_p),), self._current),
            "cuCtxSetCurrent": ((c_void_p,), self._set_current),
            "cuDevicePrimaryCtxRetain": ((POINTER(c_void_p), c_int), self._retain),
            "cuGetErrorName": ((c_int, POINTER(c_char_p)), self._error_name),
            "cuGetErrorString": ((c_int, POINTER(c_char_p)), self._error_text),
        }.items():
            setattr(self, name, CFUNCTYPE(c_int, *arguments)(function))

    def _launch(self, config: Any, function: int, parameters: int, extra: object) -> int:
        how = config.contents
        places = (c_uint64 * (len(self.types) + 2)).from_address(parameters)
        self.on_launch()
        values = [self._value(kind, place) for kind, place in zip([*self.types, "i64", "i64"], places, strict=True)]
        result = self.results.pop(0) if self.results else 0
        self.launches.append(
            Launched(
                grid=(how.grid_x, how.grid_y, how.grid_z),
                block=(how.block_x, how.block_y, how.block_z),
                shared_bytes=how.shared_bytes,
                stream=how.stream or 0,
                attribute_count=how.attribute_count,
                function=function,
                parameters=values,
            )
        )
        return result

    def _value(self, kind: str, place: int) -> object:
        if kind == "map":
            assert place % 128 == 0
            return self.encoded[c_uint64.from_address(place).value]
        return C_TYPES.get(kind, c_uint64).from_address(place).value

    def _encode(self, made: int, *arguments: Any) -> int:
        item_type, rank, address, *lists, interleave, swizzle, promotion, fill = arguments
        sizes, strides, block, steps = lists
        encoding = (
            address,
            item_type,
            tuple(sizes[:rank]),
            tuple(strides[: rank - 1]),
            tuple(block[:rank]),
            tuple(steps[:rank]),
            (interleave, swizzle, promotion, fill),
        )
        with self._encoding:
            # Into the map goes its place here.
            c_uint64.from_address(made).value = len(self.encoded)
            self.encoded.append(encoding)
        return 0

    def _load(self, module: Any, cubin: bytes) -> int:
        assert cubin.startswith(b"\x7fELF")
        module.contents.value = 2**40
        return 0

    def _get_function(self, function: Any, module: int, name: bytes) -> int:
        assert (module, name) == (2**40, b"forward")
        function.contents.value = FUNCTION
        return 0

    def _function_attribute(self, value: Any, attribute: int, function: int) -> int:
        assert function == FUNCTION
        value.contents.value = _ATTRIBUTES[attribute]
        return 0

    def _allow(self, function: int, attribute: int, value: int) -> int:
        assert (function, attribute) == (FUNCTION, 8)
        self.allowed_shared.append(value)
        return 0

    def _device_attribute(self, value: Any, attribute: int, device: int) -> int:
        value.contents.value = _DEVICE_ATTRIBUTES[attribute]
        return 0

    def _device(self, device: Any, index: int) -> int:
        device.contents.value = index
        return 0

    def _current(self, context: Any) -> int:
        context.contents.value = self.context
        return 0

    def _set_current(self, context: int) -> int:
        self.context = context
        return 0

    def _retain(self, context: Any, device: int) -> int:
        self.contexts.append(device)
        context.contents.value = CONTEXT
        return 0

    def _error_name(self, result: int, name: Any) -> int:
        name.contents.value = _NAMES[result][0]
        return 0

    def _error_text(self, result: int, text: Any) -> int:
        text.contents.value = _NAMES[result][1]
        return 0
