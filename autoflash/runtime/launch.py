"""Compile for a target, load on a device, launch. With ``interpreter.py``, all that touches Triton's internals.

On NVIDIA GPUs ``native.py`` loads and launches what is compiled here; on others, and where it cannot, Triton does.

A launch is described in three steps, each made once and used often:

1. A :class:`KernelPlan` names the kernel of a rendered module, and says of which types its arguments are, what is
   promised of them, and which constants it is compiled with. Kernels list their parameters in this order: tensors,
   run-time numbers, constexpr; a plan lists tensors and numbers in that same order. A number that is known when
   compiling (a stride of 1) may be given as a constant instead.
2. :func:`load_kernel` makes it a :class:`Kernel`, loaded on one device. (:func:`compile_kernel` alone needs no GPU.)
3. ``kernel.bind(layouts, numbers, programs)`` gives a :class:`Launch`: a callable that takes only the tensors and does
   the least that a launch can do. Everything else, tensor maps included, was resolved beforehand or is remembered.

In Triton's interpreter (``TRITON_INTERPRET=1``) the same three steps run the kernel on CPU tensors.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
import threading
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from autoflash import paths
from autoflash.device import Device, DeviceKind
from autoflash.errors import NoKernelError
from autoflash.trial import Resources

MAX_PROGRAMS = 2**31 - 1
"""Programs of a one-dimensional grid."""

MAX_TENSOR_MAPS = 256
"""Encoded tensor maps that one tensor of one launch keeps, and sets of addresses that it keeps the parameters for; the
least recently used go first."""

Constant = int | bool | str
Number = int | float

_Key = TypeVar("_Key", bound=Hashable)
_Value = TypeVar("_Value")

_TARGETS = {DeviceKind.CUDA: "cuda", DeviceKind.HIP: "hip"}

# Triton's knobs are global to the process, and its compiler makes no promise to be thread-safe.
_compile_lock = threading.Lock()


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorArgument:
    """A tensor that a kernel reads or writes.

    Attributes:
        name: Of the parameter.
        dtype: ``fp16``, ``bf16``, ``fp32``, ``u8``, ``i32`` or ``i64``.
        block: Of the tensor descriptor that it is passed as; empty for a plain pointer.
        shared_layout: How Gluon lays the block out in shared memory, as it spells it; Triton chooses by itself.
        aligned: The pointer is a multiple of 16 bytes. Descriptors always are.
    """

    name: str
    dtype: str
    block: tuple[int, ...] = ()
    shared_layout: str = ""
    aligned: bool = True

    @property
    def triton_type(self) -> str:
        """The type in Triton's spelling."""
        if self.block:
            layout = f",{self.shared_layout}" if self.shared_layout else ""
            return f"tensordesc<{self.dtype}[{','.join(map(str, self.block))}]{layout}>"
        return f"*{self.dtype}"


@dataclass(frozen=True, slots=True, kw_only=True)
class NumberArgument:
    """A number that a kernel is given at launch.

    Attributes:
        name: Of the parameter.
        type: ``i32``, ``i64`` or ``fp32``.
        multiple_of: Promised divisor; 1 promises nothing.
    """

    name: str
    type: str = "i32"
    multiple_of: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelPlan:
    """One compiled form of a kernel.

    Attributes:
        function: Name of the kernel in its module.
        tensors, numbers: Run-time arguments, in the order of the kernel's parameters.
        constants: Name and value of every other parameter.
        num_warps, num_stages: Of the compiler.
        max_registers: Of a thread at launch; 0 leaves it to the compiler.
    """

    function: str
    tensors: tuple[TensorArgument, ...]
    numbers: tuple[NumberArgument, ...]
    constants: tuple[tuple[str, Constant], ...]
    num_warps: int
    num_stages: int
    max_registers: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Where the elements of a tensor lie. Launches through descriptors are bound to it.

    Attributes:
        shape: Sizes.
        strides: In elements; the last is 1 and the others are multiples of 16 bytes.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]


class Launch(Protocol):
    """A kernel with everything bound but its tensors."""

    def __call__(self, *tensors: Tensor) -> None:
        """Enqueue it on the current stream of its device."""
        ...


class Kernel(Protocol):
    """A kernel ready to be launched on one device."""

    @property
    def resources(self) -> Resources | None:
        """What the compiler said of it; None where nothing was compiled."""
        ...

    def bind(self, layouts: Sequence[Layout | None], numbers: Sequence[Number], programs: int) -> Launch:
        """Bind what does not change between calls.

        Args:
            layouts: One for each tensor of the plan; None for plain pointers.
            numbers: In the order of the plan.
            programs: How many programs are launched, at least one.
        """
        ...


def is_interpreted() -> bool:
    """Whether kernels run in Triton's interpreter (``TRITON_INTERPRET=1``)."""
    from triton import knobs

    return bool(knobs.runtime.interpret)


def compile_kernel(module: ModuleType, plan: KernelPlan, device: Device) -> Any:
    """Compile for the architecture of ``device``, which need not be there; a cache hit where that was done before.

    Returns:
        Triton's CompiledKernel.

    Raises:
        Exception: whatever Triton raises for a kernel that it cannot compile.
    """
    import triton
    from triton import knobs
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    function = getattr(module, plan.function)
    source_class: Any = ASTSource
    if function.is_gluon():
        from triton.experimental.gluon._runtime import GluonASTSource

        source_class = GluonASTSource
    constants = dict(plan.constants)
    types = {argument.name: argument.triton_type for argument in plan.tensors}
    types |= {argument.name: argument.type for argument in plan.numbers}
    given = [name for name in function.arg_names if name not in constants]
    if given != list(types) or len(given) + len(constants) != len(function.arg_names):
        raise TypeError(f"the plan of {plan.function} names {[*types, *constants]}, it takes {function.arg_names}")
    promises = {argument.name: 16 for argument in plan.tensors if argument.aligned and not argument.block}
    promises |= {argument.name: argument.multiple_of for argument in plan.numbers if argument.multiple_of > 1}
    source = source_class(
        function,
        {name: types.get(name, "constexpr") for name in function.arg_names},
        constexprs=constants,
        attrs={(function.arg_names.index(name),): [["tt.divisibility", by]] for name, by in promises.items()},
    )
    arch = device.capability if device.kind is DeviceKind.CUDA else device.arch
    target = GPUTarget(_TARGETS[device.kind], arch, device.warp_size)
    with _compile_lock, knobs.cache.scope():
        knobs.cache.dir = str(paths.triton_cache_dir())
        # Fusion is named because its default changes between releases of Triton.
        options = {"num_warps": plan.num_warps, "num_stages": plan.num_stages, "enable_fp_fusion": True}
        options |= {"maxnreg": plan.max_registers} if plan.max_registers else {}
        return triton.compile(source, target=target, options=options)


def compiled_resources(compiled: Any) -> Resources:
    """Shared memory, registers and spills of a compiled kernel, without a GPU."""
    shared_bytes = int(compiled.metadata.shared)
    if "cubin" in compiled.asm:
        registers, spill_bytes = _cubin_usage(compiled.asm["cubin"])
    else:
        text = compiled.asm["amdgcn"]
        registers = _number_after(r"\.vgpr_count:", text)
        spill_bytes = 4 * _number_after(r"\.vgpr_spill_count:", text)
    return Resources(shared_bytes=shared_bytes, registers=registers, spill_bytes=spill_bytes)


def most_of(kernels: Iterable[Kernel]) -> Resources | None:
    """The most that any of these kernels takes; None where nothing was compiled."""
    known = [kernel.resources for kernel in list(kernels) if kernel.resources is not None]
    if not known:
        return None
    return Resources(
        shared_bytes=max(one.shared_bytes for one in known),
        registers=max(one.registers for one in known),
        spill_bytes=max(one.spill_bytes for one in known),
    )


def load_kernel(module: ModuleType, plan: KernelPlan, device: Device) -> Kernel:
    """Compile a plan and load it on a device of this process.

    Raises:
        NoKernelError: if the device is none that kernels run on here.
        Exception: whatever Triton raises for a kernel that it cannot compile or load.
    """
    if is_interpreted():
        from autoflash.runtime.interpreter import InterpretedKernel

        return InterpretedKernel(getattr(module, plan.function), plan)
    if device.kind is DeviceKind.CPU:
        raise NoKernelError("Triton kernels do not run on a CPU, except in its interpreter (TRITON_INTERPRET=1)")
    with torch.cuda.device(device.index):
        compiled = compile_kernel(module, plan, device)
        if device.kind is DeviceKind.CUDA:
            from autoflash.runtime.libcuda import libcuda
            from autoflash.runtime.native import NativeKernel, is_plain

            cuda = libcuda()
            if cuda is not None and is_plain(compiled.metadata):
                return NativeKernel(compiled, plan, device, cuda)
        return _LoadedKernel(compiled, plan, device)


def check_programs(programs: int) -> None:
    """Refuse a grid that a launch cannot have.

    Raises:
        NoKernelError: for less than 1 or more than :data:`MAX_PROGRAMS` programs.
    """
    if not 0 < programs <= MAX_PROGRAMS:
        raise NoKernelError(f"a launch has 1 to {MAX_PROGRAMS} programs, this one {programs}")


def refuse_too_large(needed: int, limit: int, what: str) -> None:
    """Refuse a kernel that needs more of something than there is.

    Raises:
        OutOfResources: Triton's.
    """
    from triton.runtime.errors import OutOfResources

    if needed > limit:
        raise OutOfResources(needed, limit, what)


@dataclass(frozen=True, slots=True, kw_only=True)
class _LauncherSource:
    """What Triton's launcher wants to know of a kernel: types by position. The constants are compiled in."""

    signature: Mapping[int, str]
    constants: Mapping[int, Constant]


class _LoadedKernel:
    """A kernel loaded on a GPU by Triton, with a launcher of its own.

    Triton's own launcher for descriptors encodes a tensor map for each of them at each call. Ours is made for the
    expanded signature (tensor map, sizes, strides), so that encoded maps can be passed again.
    """

    def __init__(self, compiled: Any, plan: KernelPlan, device: Device) -> None:
        from triton.runtime import driver

        metadata = compiled.metadata
        refuse_too_large(metadata.shared, device.shared_bytes, "shared memory")
        _, function, registers, spills, max_threads = driver.active.utils.load_binary(
            compiled.name, compiled.kernel, metadata.shared, device.index
        )
        refuse_too_large(metadata.num_warps * device.warp_size, max_threads, "threads")
        types: list[str] = []
        for argument in plan.tensors:
            rank = len(argument.block)
            types += ["nvTmaDesc"] + ["i32"] * rank + ["i64"] * rank if rank else [argument.triton_type]
        types += [argument.type for argument in plan.numbers]
        self._run = driver.active.launcher_cls(
            _LauncherSource(signature=dict(enumerate(types)), constants={}), metadata._replace(tensordesc_meta=None)
        )
        # The module lives as long as the process: a launch may still be queued when the last reference goes.
        self._function = function
        self._packed_metadata = compiled.packed_metadata
        self._descriptor_metadata = list(metadata.tensordesc_meta or ())
        self._index = device.index
        self.resources: Resources | None = Resources(
            shared_bytes=metadata.shared, registers=registers, spill_bytes=4 * spills
        )

    def bind(self, layouts: Sequence[Layout | None], numbers: Sequence[Number], programs: int) -> Launch:
        check_programs(programs)
        described = iter(self._descriptor_metadata)
        maps = tuple(
            None if layout is None else Recent(_tensor_map_encoder(layout, next(described))) for layout in layouts
        )
        start, fixed, function, index = *_start_of(self._run, self._packed_metadata), self._function, self._index
        scalars = tuple(numbers)
        current_device = torch._C._cuda_getDevice
        current_stream = torch._C._cuda_getCurrentRawStream
        # Allocators give the same addresses again and again: the arguments of the launch before are often right.
        last: tuple[list[int], tuple[object, ...]] = ([], ())

        def launch(*tensors: Tensor) -> None:
            nonlocal last
            pointers = [tensor.data_ptr() for tensor in tensors]
            known, arguments = last
            if pointers != known:
                arguments = (*_expanded(pointers, maps), *scalars)
                last = (pointers, arguments)
            if current_device() == index:
                start(programs, 1, 1, current_stream(index), function, *fixed, *arguments)
                return
            with torch.cuda.device(index):
                start(programs, 1, 1, current_stream(index), function, *fixed, *arguments)

        return launch


def _start_of(launcher: Any, packed_metadata: object) -> tuple[Callable[..., None], tuple[object, ...]]:
    """What starts a kernel, and its arguments between the function and the kernel's own.

    Triton 3.6's launcher is a Python function that looks for scratch memory and calls into C; without any to look for,
    its C function may be called at once, which takes a microsecond less.
    """
    hooks = (packed_metadata, None, None, None)
    sizes = (getattr(launcher, name, 1) for name in ("global_scratch_size", "profile_scratch_size"))
    if any(sizes) or hasattr(launcher, "arg_annotations") or not hasattr(launcher, "launch"):
        return launcher, hooks
    return launcher.launch, (launcher.launch_cooperative_grid, launcher.launch_pdl, None, None, *hooks)


def _expanded(pointers: Sequence[int], maps: Sequence[Recent[int, tuple[object, ...]] | None]) -> list[object]:
    """Addresses as a kernel is passed them: plain, or as tensor map, sizes and strides."""
    arguments: list[object] = []
    for pointer, tensor_maps in zip(pointers, maps, strict=True):
        if tensor_maps is None:
            arguments.append(pointer)
        else:
            arguments += tensor_maps.of(pointer)
    return arguments


class Recent(Generic[_Key, _Value]):
    """What was made of keys, such as the tensor map of an address: a bounded LRU.

    Two threads may make the same thing twice; no lock is needed for that to be right.
    """

    def __init__(self, make: Callable[[_Key], _Value]) -> None:
        """Remember nothing yet."""
        self._make = make
        self._made: dict[_Key, _Value] = {}

    def of(self, key: _Key) -> _Value:
        """What was made of a key, or is now."""
        found = self._made.pop(key, None)
        if found is None:
            found = self._make(key)
            while len(self._made) >= MAX_TENSOR_MAPS:
                # Other threads may have taken the last ones out meanwhile, to put them back behind.
                self._made.pop(next(iter(list(self._made)), key), None)
        self._made[key] = found
        return found


def _tensor_map_encoder(layout: Layout, metadata: Mapping[str, Any]) -> Callable[[int], tuple[object, ...]]:
    """What makes tensor map, sizes and strides of an address: what a kernel is passed for one descriptor."""
    from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST
    from triton.runtime import driver

    utils = driver.active.utils
    # Triton 3.6 has one kind of tensor map; newer releases name the tiled kind.
    encode = (
        utils.fill_tma_descriptor_tiled if hasattr(utils, "fill_tma_descriptor_tiled") else utils.fill_tma_descriptor
    )
    swizzle, item_bytes, block = metadata["swizzle"], metadata["elem_size"], metadata["block_size"]
    item_type = TMA_DTYPE_DEVICE_TO_HOST[metadata["elem_type"]]
    shape, strides = list(layout.shape), list(layout.strides)

    def encoded(pointer: int) -> tuple[object, ...]:
        return encode(pointer, swizzle, item_bytes, item_type, block, shape, strides, 0), *shape, *strides

    return encoded


def _cubin_usage(cubin: bytes) -> tuple[int, int]:
    """Registers per thread, and bytes of local memory that it spills to."""
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        listing = subprocess.run(
            [knobs.nvidia.cuobjdump.path, "-res-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    return _number_after("REG:", listing), _number_after("STACK:", listing)


def _number_after(label: str, text: str) -> int:
    """The number that follows a label, or 0."""
    found = re.search(label + r"\s*(\d+)", text)
    return int(found[1]) if found else 0
