"""Launches through the CUDA driver, up to the driver: what it is asked, and that threads do not disturb each other."""

from __future__ import annotations

import dataclasses
import os
import threading
import time
from types import SimpleNamespace

import pytest
import torch

from autoflash.codegen.render import render
from autoflash.device import Device
from autoflash.errors import NoKernelError
from autoflash.problem import Form
from autoflash.runtime import launch, native
from autoflash.runtime import libcuda as libcuda_module
from autoflash.runtime.launch import Layout, load_kernel
from autoflash.runtime.libcuda import Libcuda, libcuda
from autoflash.runtime.load import load
from autoflash.runtime.native import NativeKernel, is_plain
from autoflash.runtime.triton_forward import forward_plan
from autoflash.variant import Variant
from tests.factories import make_device, make_problem, make_variant
from tests.runtime.fake_gpu import STREAM, FakeGpu
from tests.runtime.fake_libcuda import CONTEXT, FUNCTION, FakeLibcuda

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("compiles kernels", allow_module_level=True)

SM_90 = make_device()
PROBLEM = make_problem(head_dim=64, heads=2, seqlen_q=64)
SMALL = {"BLOCK_M": 64, "BLOCK_N": 32, "num_stages": 1}
STRIDES = (8192, 4096, 64, 1)
LAYOUT = Layout(shape=(1, 2, 64, 64), strides=STRIDES)
POINTERS = ["pointer"] * 5 + ["i64"] * 12 + ["fp32"] + ["i32"] * 5
DESCRIPTORS = (["map"] + ["i32"] * 4 + ["i64"] * 4) * 4 + ["pointer", "fp32"] + ["i32"] * 5
NUMBERS = [0.1, 2, 1, 64, 64, -3]
METADATA = SimpleNamespace(
    num_ctas=1,
    shared=1024,
    global_scratch_size=0,
    profile_scratch_size=0,
    launch_cooperative_grid=False,
    launch_pdl=False,
)


@pytest.fixture
def cuda(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> FakeLibcuda:
    """A driver that is not there; torch's part of the GPU is the fake one too."""
    fake = FakeLibcuda()
    driver = Libcuda(fake)
    monkeypatch.setattr(libcuda_module, "libcuda", lambda: driver)
    return fake


def load_forward(variant: Variant, device: Device = SM_90) -> launch.Kernel:
    module = load(render(Form.of(PROBLEM), variant.family, variant.structure))
    return load_kernel(module, forward_plan(PROBLEM, variant), device)


def bind_pointers(cuda: FakeLibcuda, device: Device = SM_90, programs: int = 7) -> launch.Launch:
    cuda.types = POINTERS
    return load_forward(make_variant(**SMALL), device).bind([None] * 5, [2**40, *range(11), *NUMBERS], programs)


def bind_descriptors(cuda: FakeLibcuda) -> launch.Launch:
    cuda.types = DESCRIPTORS
    return load_forward(make_variant(loads="tma", **SMALL)).bind([LAYOUT] * 4 + [None], NUMBERS, 2)


def tensors() -> list[torch.Tensor]:
    return [torch.zeros(1, 2, 64, 64, dtype=torch.bfloat16) for _ in range(4)] + [torch.zeros(1, 2, 64)]


def test_pointer_launch_passes_addresses_numbers_and_no_scratch(cuda: FakeLibcuda) -> None:
    given = tensors()

    bind_pointers(cuda)(*given)

    (launched,) = cuda.launches
    assert (launched.grid, launched.block) == ((7, 1, 1), (128, 1, 1))
    assert (launched.stream, launched.function, launched.attribute_count) == (STREAM, FUNCTION, 0)
    assert launched.shared_bytes > 0
    addresses, numbers = launched.parameters[:5], launched.parameters[5:]
    assert addresses == [tensor.data_ptr() for tensor in given]
    assert numbers == [2**40, *range(11), pytest.approx(0.1), 2, 1, 64, 64, -3, 0, 0]


def test_descriptor_launch_passes_map_sizes_and_strides_for_each(cuda: FakeLibcuda) -> None:
    given = tensors()

    bind_descriptors(cuda)(*given)

    (launched,) = cuda.launches
    found = [launched.parameters[9 * index : 9 * index + 9] for index in range(4)]
    assert [one[0][0] for one in found] == [tensor.data_ptr() for tensor in given[:4]]
    assert [one[1:] for one in found] == [[1, 2, 64, 64, *STRIDES]] * 4
    assert launched.parameters[36:] == [given[4].data_ptr(), pytest.approx(0.1), 2, 1, 64, 64, -3, 0, 0]


def test_tensor_map_is_encoded_innermost_dimension_first_and_strides_in_bytes(cuda: FakeLibcuda) -> None:
    given = tensors()

    bind_descriptors(cuda)(*given)

    address, item_type, sizes, strides, block, steps, (interleave, _, promotion, fill) = cuda.encoded[1]
    assert (address, item_type) == (given[1].data_ptr(), 9)
    assert (sizes, strides) == ((64, 64, 2, 1), (128, 8192, 16384))
    assert (block, steps) == ((64, 32, 1, 1), (1, 1, 1, 1))
    assert (interleave, promotion, fill) == (0, 2, 0)


def test_tensor_maps_are_encoded_once_for_each_address(cuda: FakeLibcuda) -> None:
    run = bind_descriptors(cuda)
    first, second = tensors(), tensors()

    for given in (first, first, second, first):
        run(*given)

    assert len(cuda.encoded) == 8
    parameters = [launched.parameters for launched in cuda.launches]
    assert parameters[0] == parameters[1] == parameters[3] != parameters[2]


def test_one_new_address_leaves_the_other_tensor_maps_alone(cuda: FakeLibcuda) -> None:
    run = bind_descriptors(cuda)
    given = tensors()
    run(*given)

    run(*tensors()[:1], *given[1:])

    assert len(cuda.encoded) == 5


@pytest.mark.parametrize(("order", "encoded"), [([0, 1, 2, 0], 16), ([0, 1, 0, 2, 0], 12)])
def test_parameters_are_bounded_and_the_least_recent_go_first(
    order: list[int], encoded: int, cuda: FakeLibcuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "MAX_TENSOR_MAPS", 2)
    run = bind_descriptors(cuda)
    sets = [tensors() for _ in range(3)]

    for index in order:
        run(*sets[index])

    assert len(cuda.encoded) == encoded
    assert [one.parameters[0][0] for one in cuda.launches] == [sets[index][0].data_ptr() for index in order]


def test_launch_goes_to_the_device_of_the_kernel_and_its_current_stream(
    cuda: FakeLibcuda, gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = bind_pointers(cuda, dataclasses.replace(SM_90, index=1))
    gpu.entered.clear()

    run(*tensors())
    gpu.current = 1
    run(*tensors())

    assert gpu.entered == [1]
    assert [launched.stream for launched in cuda.launches] == [STREAM + 1] * 2


def test_every_stream_has_a_configuration_of_its_own(cuda: FakeLibcuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "MAX_STREAMS", 2)
    streams = [0, 5, 2**40, 5, 0]
    left = streams.copy()
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: left.pop(0))
    run = bind_pointers(cuda)
    given = tensors()

    for _ in streams:
        run(*given)

    assert [launched.stream for launched in cuda.launches] == streams


def test_threads_that_share_a_launch_pass_their_own_tensors_on_their_own_streams(
    cuda: FakeLibcuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The driver lets others run before it looks at the parameters.
    cuda.on_launch = lambda: time.sleep(0)
    own = threading.local()
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: own.stream)
    # Fewer than there are sets of addresses, so that parameters go while others use them.
    monkeypatch.setattr(launch, "MAX_TENSOR_MAPS", 3)
    run = bind_descriptors(cuda)
    expected: dict[int, set[int]] = {}

    def work(stream: int) -> None:
        own.stream = stream
        sets = [tensors() for _ in range(3)]
        expected[stream] = {given[0].data_ptr() for given in sets}
        alive.append(sets)
        for _ in range(100):
            for given in sets:
                run(*given)

    alive: list[object] = []
    threads = [threading.Thread(target=work, args=(stream,)) for stream in (1, 2, 3, 4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len(cuda.launches) == 4 * 300
    assert all(launched.parameters[0][0] in expected[launched.stream] for launched in cuda.launches)
    by_first = {given[0].data_ptr(): given for sets in alive for given in sets}  # type: ignore[attr-defined]
    for launched in cuda.launches:
        given = by_first[launched.parameters[0][0]]
        assert [launched.parameters[9 * index][0] for index in range(4)] == [one.data_ptr() for one in given[:4]]
        assert launched.parameters[36] == given[4].data_ptr()


def test_thread_without_a_context_gets_that_of_the_device(cuda: FakeLibcuda, gpu: FakeGpu) -> None:
    run = bind_pointers(cuda, dataclasses.replace(SM_90, index=1))
    cuda.context, cuda.results = 0, [201]

    run(*tensors())

    assert (cuda.contexts, cuda.context) == ([1], CONTEXT)
    assert len(cuda.launches) == 2
    assert cuda.launches[0] == cuda.launches[1]


@pytest.mark.parametrize(
    ("results", "message"),
    [
        ([700], r"cuLaunchKernelEx failed with CUDA_ERROR_ILLEGAL_ADDRESS \(700\): boo"),
        ([201, 201], r"cuLaunchKernelEx failed with CUDA_ERROR_INVALID_CONTEXT \(201\): invalid device context"),
    ],
)
def test_failed_launch_names_the_error(results: list[int], message: str, cuda: FakeLibcuda) -> None:
    run = bind_pointers(cuda)
    cuda.results = results

    with pytest.raises(RuntimeError, match=message):
        run(*tensors())

    run(*tensors())


def test_resources_are_the_drivers_and_large_kernels_are_allowed_their_memory(cuda: FakeLibcuda) -> None:
    small = load_forward(make_variant(**SMALL))
    large = make_variant(BLOCK_M=128, BLOCK_N=128, num_stages=3)

    resources = load_forward(large).resources

    assert small.resources is not None
    assert (small.resources.registers, small.resources.spill_bytes) == (100, 12)
    assert resources is not None
    assert resources.shared_bytes > 48 * 1024
    assert cuda.allowed_shared == [227 * 1024 - 1000]


def test_kernel_that_does_not_fit_is_refused(cuda: FakeLibcuda) -> None:
    with pytest.raises(Exception, match=r"shared memory, Required: [0-9]+, Hardware limit: 1024"):
        load_forward(make_variant(**SMALL), dataclasses.replace(SM_90, shared_bytes=1024))
    with pytest.raises(Exception, match="threads, Required: 2048, Hardware limit: 1024"):
        load_forward(make_variant(**SMALL), dataclasses.replace(SM_90, warp_size=512))


@pytest.mark.parametrize("programs", [0, 2**31])
def test_impossible_number_of_programs_is_refused(programs: int, cuda: FakeLibcuda) -> None:
    with pytest.raises(NoKernelError, match=f"this one {programs}"):
        bind_pointers(cuda, programs=programs)


def test_number_that_its_parameter_cannot_hold_is_refused(cuda: FakeLibcuda) -> None:
    kernel = load_forward(make_variant(**SMALL))

    with pytest.raises(OverflowError, match="2147483648 does not fit into 32 bits"):
        kernel.bind([None] * 5, [0] * 12 + [0.5, 2**31, 1, 64, 64, 0], 1)


def test_kernel_that_takes_nothing_of_a_launch_is_plain() -> None:
    assert is_plain(METADATA)


@pytest.mark.parametrize(
    "changed",
    [
        {"num_ctas": 2},
        {"shared": 229 * 1024},
        {"global_scratch_size": 1},
        {"profile_scratch_size": 1},
        {"launch_cooperative_grid": True},
        {"launch_pdl": True},
        {"instrumentation_mode": "gsan"},
    ],
)
def test_kernel_that_asks_more_of_a_launch_is_tritons(
    changed: dict[str, object], cuda: FakeLibcuda, gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not is_plain(SimpleNamespace(**{**vars(METADATA), **changed}))

    monkeypatch.setattr(native, "is_plain", lambda metadata: False)
    load_forward(make_variant(**SMALL))

    assert len(gpu.signatures) == 1


def test_native_kernels_are_loaded_without_tritons_driver(cuda: FakeLibcuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which takes a C compiler to make."""
    from triton.runtime import driver

    monkeypatch.delattr(type(driver), "active")

    bind_descriptors(cuda)(*tensors())

    assert len(cuda.launches) == 1


def test_variable_asks_for_tritons_launcher(monkeypatch: pytest.MonkeyPatch, gpu: FakeGpu) -> None:
    monkeypatch.setattr(libcuda_module.ctypes, "CDLL", lambda name: FakeLibcuda())
    libcuda.cache_clear()

    monkeypatch.setenv("AUTOFLASH_LAUNCHER", "native")
    assert isinstance(load_forward(make_variant(**SMALL)), NativeKernel)

    libcuda.cache_clear()
    monkeypatch.setenv("AUTOFLASH_LAUNCHER", "triton")
    assert not isinstance(load_forward(make_variant(**SMALL)), NativeKernel)


@pytest.mark.parametrize(
    ("library", "reason"),
    [(None, "no such library"), (SimpleNamespace(cuLaunchKernelEx=None), "cuTensorMapEncodeTiled")],
)
def test_driver_that_cannot_be_used_is_said_once_and_tritons_launcher_serves(
    library: object,
    reason: str,
    gpu: FakeGpu,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def load_library(name: str) -> object:
        if library is None:
            raise OSError("no such library")
        return library

    monkeypatch.setenv("AUTOFLASH_LAUNCHER", "native")
    monkeypatch.setattr(libcuda_module.ctypes, "CDLL", load_library)
    libcuda.cache_clear()

    for _ in range(2):
        load_forward(make_variant(**SMALL)).bind([None] * 5, [0] * 18, 1)(*tensors())

    assert len(gpu.launches) == 2
    (record,) = [record for record in caplog.records if record.name == "autoflash"]
    assert reason in record.getMessage()
