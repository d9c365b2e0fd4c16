"""Launch kernels by Triton's launcher and by ours, with a driver that writes down what it is given; print both as JSON.

A program of its own, since the driver is found by its name. Its argument is the library of ``fake_libcuda.c``.
"""

from __future__ import annotations

import ctypes
import json
import sys
from types import SimpleNamespace
from typing import Any

import torch
from triton.backends.nvidia.driver import CudaLauncher, CudaUtils
from triton.runtime import driver

from autoflash.codegen.render import render
from autoflash.problem import Form
from autoflash.runtime import gluon_plan, launch
from autoflash.runtime.launch import KernelPlan, Layout
from autoflash.runtime.libcuda import Libcuda
from autoflash.runtime.load import load
from autoflash.runtime.native import NativeKernel, is_plain
from autoflash.runtime.triton_forward import forward_plan
from autoflash.variant import Family
from tests.factories import make_device, make_problem, make_variant

PROBLEM = make_problem(head_dim=64, heads=2, seqlen_q=64)
SMALL = {"BLOCK_M": 64, "BLOCK_N": 32, "num_stages": 1}
LAYOUT = Layout(shape=(1, 2, 64, 64), strides=(8192, 4096, 64, 1))
SIZES = {"i32": 4, "i64": 8, "fp32": 4}


def sizes_of(plan: KernelPlan) -> list[int]:
    """Bytes of each parameter of a kernel, as its ABI has them."""
    sizes: list[int] = []
    for argument in plan.tensors:
        rank = len(argument.block)
        sizes += [128, *[4] * rank, *[8] * rank] if rank else [8]
    return [*sizes, *(SIZES[argument.type] for argument in plan.numbers), 8, 8]


def seen_by(library: Any, kernel: launch.Kernel, plan: KernelPlan, tensors: list[torch.Tensor]) -> dict[str, object]:
    """What the driver is given by a launch of the kernel."""
    sizes = sizes_of(plan)
    ctypes.c_int.in_dll(library, "parameter_count").value = len(sizes)
    (ctypes.c_uint32 * 256).in_dll(library, "parameter_sizes")[: len(sizes)] = sizes
    layouts = [LAYOUT if argument.block else None for argument in plan.tensors]
    numbers = [0.1 + index if argument.type == "fp32" else -7 + index for index, argument in enumerate(plan.numbers)]
    kernel.bind(layouts, numbers, 5)(*tensors)
    count = ctypes.c_int.in_dll(library, "parameter_bytes").value
    return {
        "launched": list((ctypes.c_uint64 * 11).in_dll(library, "launched")),
        "parameters": bytes((ctypes.c_ubyte * 16384).in_dll(library, "parameters")[:count]).hex(),
        "expected_bytes": sum(sizes),
    }


def main() -> None:
    """Each kernel by both launchers."""
    library = ctypes.CDLL(sys.argv[1], mode=ctypes.RTLD_GLOBAL)
    setattr(type(driver), "active", SimpleNamespace(utils=CudaUtils(), launcher_cls=CudaLauncher))  # noqa: B010
    torch._C._cuda_getDevice = lambda: 0  # type: ignore[attr-defined]
    torch._C._cuda_getCurrentRawStream = lambda index: 2**40 + 77  # type: ignore[attr-defined]
    device = make_device()
    pointers, descriptors = make_variant(**SMALL), make_variant(loads="tma", **SMALL)
    hopper = make_variant(Family.GLUON_SM90)
    results = {}
    for name, variant, plan in (
        ("pointers", pointers, forward_plan(PROBLEM, pointers)),
        ("descriptors", descriptors, forward_plan(PROBLEM, descriptors)),
        ("gluon", hopper, gluon_plan.forward_plan(PROBLEM, hopper)),
    ):
        module = load(render(Form.of(PROBLEM), variant.family, variant.structure))
        compiled = launch.compile_kernel(module, plan, device)
        assert is_plain(compiled.metadata)
        tensors = [torch.zeros(1, 2, 64, 64, dtype=torch.bfloat16) for _ in plan.tensors]
        results[name] = [
            seen_by(library, kernel, plan, tensors)
            for kernel in (
                launch._LoadedKernel(compiled, plan, device),
                NativeKernel(compiled, plan, device, Libcuda(library)),
            )
        ]
    print(json.dumps(results))


if __name__ == "__main__":
    main()
