"""Compile, load and launch, up to the driver; and what we rely on in the installed release of Triton."""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
import os
from collections.abc import Iterator

import pytest
import torch

from autoflash.codegen.render import render
from autoflash.device import Device
from autoflash.errors import NoKernelError
from autoflash.problem import Form
from autoflash.runtime import launch
from autoflash.runtime.launch import KernelPlan, Layout, compile_kernel, compiled_resources, load_kernel
from autoflash.runtime.load import load
from autoflash.runtime.triton_forward import forward_plan
from autoflash.variant import Variant
from tests.factories import make_device, make_problem, make_variant
from tests.runtime.fake_gpu import FUNCTION, STREAM, FakeGpu

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("compiles kernels", allow_module_level=True)

SM_90 = make_device()
PROBLEM = make_problem(head_dim=64, heads=2, seqlen_q=64)
SMALL = {"BLOCK_M": 64, "BLOCK_N": 32, "num_stages": 1}
STRIDES = (8192, 4096, 64, 1)


def plan_of(variant: Variant) -> KernelPlan:
    return forward_plan(PROBLEM, variant)


def load_forward(variant: Variant, device: Device = SM_90) -> launch.Kernel:
    module = load(render(Form.of(PROBLEM), variant.family, variant.structure))
    return load_kernel(module, plan_of(variant), device)


def tensors() -> list[torch.Tensor]:
    return [torch.zeros(1, 2, 64, 64, dtype=torch.bfloat16) for _ in range(4)] + [torch.zeros(1, 2, 64)]


def test_plan_that_does_not_name_every_parameter_is_refused() -> None:
    variant = make_variant(**SMALL)
    module = load(render(Form.of(PROBLEM), variant.family, variant.structure))
    plan = plan_of(variant)
    plan = dataclasses.replace(plan, numbers=plan.numbers[:-1])

    with pytest.raises(TypeError, match="the plan of forward names"):
        compile_kernel(module, plan, SM_90)


def test_resources_are_known_without_a_gpu() -> None:
    variant = make_variant(**SMALL)
    module = load(render(Form.of(PROBLEM), variant.family, variant.structure))

    resources = compiled_resources(compile_kernel(module, plan_of(variant), SM_90))

    # One tile of queries, or of keys and values, at the least; registers of 64 x 64 floats over 128 threads.
    assert 64 * 64 * 2 <= resources.shared_bytes <= 64 * 1024
    assert 32 < resources.registers <= 255
    assert resources.spill_bytes == 0


def test_pointer_launch_passes_addresses_then_numbers(gpu: FakeGpu) -> None:
    kernel = load_forward(make_variant(**SMALL))
    given = tensors()

    kernel.bind([None] * 5, list(range(18)), 7)(*given)

    assert gpu.signatures == [["*bf16"] * 4 + ["*fp32"] + ["i64"] * 12 + ["fp32"] + ["i32"] * 5]
    (arguments,) = gpu.launches
    assert arguments[:5] == (7, 1, 1, STREAM, FUNCTION)
    assert arguments[6:9] == (None, None, None)
    assert arguments[9:] == (*(tensor.data_ptr() for tensor in given), *range(18))


def test_descriptor_launch_passes_map_sizes_and_strides_for_each(gpu: FakeGpu) -> None:
    kernel = load_forward(make_variant(loads="tma", **SMALL))
    layout = Layout(shape=(1, 2, 64, 64), strides=STRIDES)
    given = tensors()

    kernel.bind([layout] * 4 + [None], [0.5, 2, 1, 64, 64, 0], 2)(*given)

    described = ["nvTmaDesc"] + ["i32"] * 4 + ["i64"] * 4
    assert gpu.signatures == [described * 4 + ["*fp32", "fp32"] + ["i32"] * 5]
    (arguments,) = gpu.launches
    expanded = [f"map{index}" for index in (1, 2, 3, 4)]
    assert arguments[9:45] == tuple(value for name in expanded for value in (name, 1, 2, 64, 64, *STRIDES))
    assert arguments[45:] == (given[4].data_ptr(), 0.5, 2, 1, 64, 64, 0)
    pointers = [encoding[0] for encoding in gpu.encoded]
    assert pointers == [tensor.data_ptr() for tensor in given[:4]]
    assert {tuple(encoding[5]) for encoding in gpu.encoded} == {(1, 2, 64, 64)}
    assert {tuple(encoding[6]) for encoding in gpu.encoded} == {STRIDES}


def test_tensor_maps_are_encoded_once_for_each_address(gpu: FakeGpu) -> None:
    kernel = load_forward(make_variant(loads="tma", **SMALL))
    layout = Layout(shape=(1, 2, 64, 64), strides=STRIDES)
    run = kernel.bind([layout] * 4 + [None], [0.5, 2, 1, 64, 64, 0], 2)
    first, second = tensors(), tensors()

    for given in (first, first, second, first):
        run(*given)

    assert len(gpu.encoded) == 8
    assert gpu.launches[0] == gpu.launches[1] == gpu.launches[3] != gpu.launches[2]


def test_tensor_maps_are_bounded_and_the_least_recent_go_first(
    gpu: FakeGpu,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(launch, "MAX_TENSOR_MAPS", 2)
    kernel = load_forward(make_variant(loads="tma", **SMALL))
    layout = Layout(shape=(1, 2, 64, 64), strides=STRIDES)
    run = kernel.bind([layout] * 4 + [None], [0.5, 2, 1, 64, 64, 0], 2)
    first, second, third = tensors(), tensors(), tensors()

    for given in (first, second, first, third, first, second):
        run(*given)

    # `third` pushed `second` out, not `first`, which had been used since.
    assert len(gpu.encoded) == 4 * 4


def test_launch_goes_to_the_device_of_the_kernel(gpu: FakeGpu) -> None:
    device = dataclasses.replace(SM_90, index=1)
    kernel = load_forward(make_variant(**SMALL), device)
    run = kernel.bind([None] * 5, [0] * 18, 1)
    gpu.entered.clear()

    run(*tensors())
    gpu.current = 1
    run(*tensors())

    assert gpu.entered == [1]
    assert [arguments[3] for arguments in gpu.launches] == [STREAM + 1, STREAM + 1]


def test_resources_of_a_loaded_kernel_are_the_drivers(gpu: FakeGpu) -> None:
    resources = load_forward(make_variant(**SMALL)).resources

    assert resources is not None
    assert (resources.registers, resources.spill_bytes) == (100, 12)


def test_kernel_that_does_not_fit_is_refused(gpu: FakeGpu) -> None:
    with pytest.raises(Exception, match=r"shared memory, Required: [0-9]+, Hardware limit: 1024"):
        load_forward(make_variant(**SMALL), dataclasses.replace(SM_90, shared_bytes=1024))

    gpu.max_threads = 64
    with pytest.raises(Exception, match="threads, Required: 128, Hardware limit: 64"):
        load_forward(make_variant(**SMALL))


@pytest.mark.parametrize("programs", [0, 2**31])
def test_impossible_number_of_programs_is_refused(programs: int, gpu: FakeGpu) -> None:
    kernel = load_forward(make_variant(**SMALL))

    with pytest.raises(NoKernelError, match=f"this one {programs}"):
        kernel.bind([None] * 5, [0] * 18, programs)


def test_cpu_runs_kernels_only_in_the_interpreter() -> None:
    with pytest.raises(NoKernelError, match="TRITON_INTERPRET=1"):
        load_forward(make_variant(**SMALL), make_device("cpu"))


def test_installed_triton_has_what_launches_rely_on() -> None:
    from triton import knobs
    from triton.backends.nvidia import driver
    from triton.compiler import CompiledKernel
    from triton.compiler.compiler import ASTSource

    assert list(inspect.signature(ASTSource).parameters) == ["fn", "signature", "constexprs", "attrs"]
    assert isinstance(knobs.runtime.interpret, bool)
    assert os.access(knobs.nvidia.cuobjdump.path, os.X_OK)
    assert inspect.isdatadescriptor(CompiledKernel.run)
    assert {"kernel", "metadata", "packed_metadata", "asm"} <= set(
        inspect.getsource(CompiledKernel.__init__).replace("self.", " ").split()
    )
    source = inspect.getsource(driver.CudaUtils)
    assert "self.load_binary" in source
    assert "self.fill_tma_descriptor_tiled" in source or "self.fill_tma_descriptor " in source
    launching = list(inspect.signature(driver.CudaLauncher.__call__).parameters)
    assert launching[1:6] == ["gridX", "gridY", "gridZ", "stream", "function"]
    assert driver.TMA_DTYPE_DEVICE_TO_HOST[10] == 9


def test_launcher_for_the_expanded_signature_is_tritons_own() -> None:
    """What Triton makes of a descriptor is what we ask for by name: a tensor map, sizes and strides."""
    meta = [{"swizzle": 3}]
    described = ["tensordesc<bf16[1,1,64,64]>", "i32"]
    expanded = ["nvTmaDesc"] + ["i32"] * 4 + ["i64"] * 4 + ["i32"]
    if importlib.util.find_spec("triton.backends.driver") and hasattr(
        importlib.import_module("triton.backends.driver"), "expand_signature"
    ):
        from triton.backends.driver import expand_signature

        assert expand_signature(described, meta, "nvTmaDesc") == expanded
        assert expand_signature(expanded, None, "nvTmaDesc") == expanded
    else:
        from triton.backends.nvidia.driver import make_launcher

        assert make_launcher({}, dict(enumerate(described)), meta) == make_launcher({}, dict(enumerate(expanded)), None)


def test_metadata_of_a_descriptor_says_how_to_encode_it() -> None:
    variant = make_variant(loads="tma", **SMALL)
    module = load(render(Form.of(PROBLEM), variant.family, variant.structure))

    metadata = compile_kernel(module, plan_of(variant), SM_90).metadata

    assert len(metadata.tensordesc_meta) == 4
    for described in metadata.tensordesc_meta:
        assert {"swizzle", "elem_size", "elem_type", "block_size"} <= set(described)
    assert metadata._replace(tensordesc_meta=None).tensordesc_meta is None


def test_what_is_remembered_may_be_taken_out_by_others_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    class Emptied(dict[int, int]):
        """Another thread takes everything out as soon as one looks at what there is."""

        def __iter__(self) -> Iterator[int]:
            self.clear()
            return iter(())

    monkeypatch.setattr(launch, "MAX_TENSOR_MAPS", 2)
    recent = launch.Recent(lambda key: 10 * key)
    recent._made = Emptied({1: 10, 2: 20})

    assert recent.of(3) == 30
