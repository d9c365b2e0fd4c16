"""Kernels loaded and launched through the CUDA driver itself.

Triton's launcher reads each of some 40 Python objects at each launch: the tensor map, sizes and strides of every
descriptor, and the numbers. Here they are C values that lie ready, and a launch says where.

What a launch passes is written once and never again, so that threads may share it: other addresses have parameters of
their own, and another stream has a configuration of its own.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable, Mapping, Sequence
from ctypes import byref, c_int32, c_int64, c_uint64, c_void_p
from typing import Any

import torch
from torch import Tensor

from autoflash.device import Device
from autoflash.runtime.launch import KernelPlan, Launch, Layout, Number, Recent, check_programs, refuse_too_large
from autoflash.runtime.libcuda import LaunchConfig, Libcuda, TensorMap
from autoflash.trial import Resources

MAX_STREAMS = 64
"""Streams whose configuration a launch keeps; beyond it all are made anew."""

# More than this takes an attribute of the launch, as several thread blocks in a cluster do.
_MOST_SHARED_BYTES = 228 * 1024

_C_TYPES: dict[str, Any] = {"i32": c_int32, "i64": c_int64, "fp32": ctypes.c_float}

# What the driver is passed of one launch: where each parameter lies, and the memory that some of them lie in.
_Parameters = tuple[Any, tuple[object, ...]]


def is_plain(metadata: Any) -> bool:
    """Whether a compiled kernel takes nothing of a launch but its own parameters: no scratch memory, no attribute."""
    sizes = (getattr(metadata, f"{name}_scratch_size", 0) for name in ("global", "profile"))
    flags = (getattr(metadata, name, False) for name in ("launch_cooperative_grid", "launch_pdl"))
    return (
        metadata.num_ctas == 1
        and metadata.shared <= _MOST_SHARED_BYTES
        and not any(sizes)
        and not any(flags)
        and not getattr(metadata, "instrumentation_mode", "")
    )


class NativeKernel:
    """A kernel loaded on an NVIDIA GPU."""

    def __init__(self, compiled: Any, plan: KernelPlan, device: Device, cuda: Libcuda) -> None:
        """Load what Triton compiled.

        Raises:
            OutOfResources: Triton's, for more shared memory or threads than the device has.
            RuntimeError: where the driver refuses it.
        """
        metadata = compiled.metadata
        refuse_too_large(metadata.shared, device.shared_bytes, "shared memory")
        function = cuda.load(compiled.kernel, compiled.name, metadata.shared, device.index)
        threads = metadata.num_warps * device.warp_size
        refuse_too_large(threads, function.max_threads, "threads")
        self._cuda = cuda
        self._function = c_void_p(function.handle)
        self._threads = threads
        self._shared_bytes = metadata.shared
        self._descriptor_metadata = list(metadata.tensordesc_meta or ())
        self._numbers = plan.numbers
        self._index = device.index
        self.resources: Resources | None = Resources(
            shared_bytes=metadata.shared, registers=function.registers, spill_bytes=function.local_bytes
        )

    def bind(self, layouts: Sequence[Layout | None], numbers: Sequence[Number], programs: int) -> Launch:
        """As :meth:`autoflash.runtime.launch.Kernel.bind`.

        Raises:
            OverflowError: for a number that its parameter cannot hold.
        """
        check_programs(programs)
        recent = Recent(self._parameters_of(layouts, numbers))
        configs: dict[int, object] = {}
        start, function, index = self._cuda.start, self._function, self._index
        current_device = torch._C._cuda_getDevice
        current_stream = torch._C._cuda_getCurrentRawStream
        data_ptr = Tensor.data_ptr
        # Allocators give the same addresses again and again: the parameters of the launch before are often right.
        last: tuple[tuple[int, ...], _Parameters] = ((), (None, ()))

        def launch(*tensors: Tensor) -> None:
            nonlocal last
            if current_device() != index:
                with torch.cuda.device(index):
                    launch(*tensors)
                return
            addresses = tuple(map(data_ptr, tensors))
            known, parameters = last
            if addresses != known:
                parameters = recent.of(addresses)
                last = (addresses, parameters)
            stream = current_stream(index)
            config = configs.get(stream)
            if config is None:
                if len(configs) >= MAX_STREAMS:
                    configs.clear()
                config = configs[stream] = self._config(programs, stream)
            result = start(config, function, parameters[0], None)
            if result:
                self._cuda.start_again(result, index, config, function, parameters[0], None)

        return launch

    def _config(self, programs: int, stream: int) -> object:
        """A launch configuration as it is passed; what it points to lives as long."""
        return byref(
            LaunchConfig(
                grid_x=programs,
                grid_y=1,
                grid_z=1,
                block_x=self._threads,
                block_y=1,
                block_z=1,
                shared_bytes=self._shared_bytes,
                stream=stream,
            )
        )

    def _parameters_of(
        self, layouts: Sequence[Layout | None], numbers: Sequence[Number]
    ) -> Callable[[tuple[int, ...]], _Parameters]:
        """What makes the parameters of a launch of the addresses of its tensors.

        A kernel takes its tensors, each as an address or as tensor map, sizes and strides, then its numbers, and then
        two addresses of scratch memory, of which it needs none.
        """
        described = iter(self._descriptor_metadata)
        values: list[Any] = []
        tensors: list[tuple[int, Recent[int, TensorMap] | None]] = []
        for layout in layouts:
            tensors.append((len(values), None if layout is None else self._tensor_maps(layout, next(described))))
            values.append(c_uint64())
            if layout is not None:
                values += [_c_value(c_int32, size) for size in layout.shape]
                values += [_c_value(c_int64, stride) for stride in layout.strides]
        values += [
            _c_value(_C_TYPES[argument.type], number) for argument, number in zip(self._numbers, numbers, strict=True)
        ]
        values += [c_uint64(), c_uint64()]
        places = array("Q", map(ctypes.addressof, values))

        def parameters(addresses: tuple[int, ...]) -> _Parameters:
            plain, found, maps = array("Q", addresses), array("Q", places), []
            where = plain.buffer_info()[0]
            for address, (place, encoded) in zip(addresses, tensors, strict=True):
                if encoded is None:
                    found[place] = where
                else:
                    one = encoded.of(address)
                    found[place] = one.address
                    maps.append(one)
                where += plain.itemsize
            return c_void_p(found.buffer_info()[0]), (values, plain, found, *maps)

        return parameters

    def _tensor_maps(self, layout: Layout, metadata: Mapping[str, Any]) -> Recent[int, TensorMap]:
        from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST

        return Recent(
            self._cuda.tensor_map_encoder(
                layout.shape,
                layout.strides,
                metadata["block_size"],
                swizzle=metadata["swizzle"],
                item_type=TMA_DTYPE_DEVICE_TO_HOST[metadata["elem_type"]],
                item_bytes=metadata["elem_size"],
            )
        )


def _c_value(c_type: Any, number: Number) -> Any:
    """A number as C has it; ctypes would cut off what does not fit.

    Raises:
        OverflowError: for an integer outside the range of its type.
    """
    value = c_type(number)
    if c_type is not ctypes.c_float and value.value != number:
        raise OverflowError(f"{number} does not fit into {8 * ctypes.sizeof(c_type)} bits")
    return value
