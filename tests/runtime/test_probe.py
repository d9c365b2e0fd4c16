from __future__ import annotations

import platform
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from autoflash.device import DeviceKind
from autoflash.errors import UnsupportedError
from autoflash.runtime import probe as probing
from autoflash.runtime.probe import CardState, card_state, environment, probe
from tests.factories import make_device

H200 = SimpleNamespace(
    name="NVIDIA H200 MIG 1g.18gb ",
    major=9,
    minor=0,
    multi_processor_count=16,
    shared_memory_per_block=49152,
    shared_memory_per_block_optin=232448,
    L2_cache_size=1 << 20,
    total_memory=1 << 34,
    warp_size=32,
    uuid="12345678-aaaa-bbbb-cccc-123456789abc",
    gcnArchName="",
)
MI300 = SimpleNamespace(
    name="AMD Instinct MI300X",
    major=9,
    minor=4,
    multi_processor_count=304,
    shared_memory_per_block=65536,
    L2_cache_size=1 << 22,
    total_memory=1 << 37,
    warp_size=64,
    uuid="00000000",
    gcnArchName="gfx942:sramecc+:xnack-",
)


@pytest.fixture
def gpus(monkeypatch):
    """Let torch see two cards with the given properties."""

    def see(properties, *, hip=None):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
        monkeypatch.setattr(torch.version, "hip", hip)

    return see


def test_the_cpu_is_described_by_its_model_and_its_threads():
    device = probe("cpu")

    assert device.kind is DeviceKind.CPU
    assert device.name
    assert device.name == device.name.strip()
    assert device.arch == platform.machine()
    assert device.multiprocessors == torch.get_num_threads()
    assert device.memory_bytes > 0
    assert (device.shared_bytes, device.warp_size, device.torch_device) == (0, 1, "cpu")


def test_the_best_device_is_the_current_gpu(gpus):
    gpus(H200)

    assert probe().torch_device == "cuda:1"
    assert probe("cuda").torch_device == "cuda:1"
    assert probe("cuda:0").torch_device == "cuda:0"
    assert probe(torch.device("cuda", 0)).index == 0


def test_without_a_gpu_the_best_device_is_the_cpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    assert probe().kind is DeviceKind.CPU


def test_a_slice_of_a_card_keeps_its_own_name_and_size(gpus):
    gpus(H200)

    device = probe("cuda:0")

    assert device.kind is DeviceKind.CUDA
    assert device.name == "NVIDIA H200 MIG 1g.18gb"
    assert device.arch == "sm_90"
    assert device.multiprocessors == 16
    assert device.shared_bytes == 232448
    assert device.uuid == H200.uuid


def test_an_amd_card_has_its_architecture_without_features(gpus):
    gpus(MI300, hip="6.4")

    device = probe("cuda:0")

    assert device.kind is DeviceKind.HIP
    assert device.arch == "gfx942"
    assert device.warp_size == 64
    assert device.shared_bytes == 65536


@pytest.mark.parametrize("name", ["cuda:2", "mps"])
def test_a_device_that_is_not_there_is_refused_by_name(gpus, name):
    gpus(H200)

    with pytest.raises(UnsupportedError, match=name):
        probe(name)


def test_cuda_is_refused_on_a_machine_without_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    with pytest.raises(UnsupportedError, match="0 GPU"):
        probe("cuda")


def test_the_environment_names_the_device_and_the_versions():
    device = probe("cpu")

    found = environment(device)

    assert found.device_name == device.name
    assert found.torch == torch.__version__
    assert found.driver == ""
    assert found.triton.count(".") == 1 or found.triton == ""


def test_probing_does_not_import_triton():
    code = (
        "import sys; from autoflash.runtime.probe import environment, probe; environment(probe('cpu'));"
        "sys.exit('triton' in sys.modules)"
    )

    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_importing_asks_no_device():
    code = (
        "import torch; torch.cuda.is_available = lambda: 1 / 0; import autoflash.runtime.probe, autoflash.runtime.bind"
    )

    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_driver_version_is_read_from_the_kernel_module(tmp_path):
    file = tmp_path / "version"
    file.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65.06  Sun Jul 27 06:26:38 UTC 2025\nGCC\n")

    assert probing._driver_version(file) == "580.65.06"
    assert probing._driver_version(tmp_path / "absent") == ""


def test_a_cpu_has_no_card_state():
    assert card_state(probe("cpu")) == CardState()


class FakeNvml:
    NVML_CLOCK_SM, NVML_TEMPERATURE_GPU = 1, 0

    class NVMLError(Exception):
        pass

    def nvmlInit(self):
        pass

    def nvmlDeviceGetHandleByUUID(self, uuid):
        if not uuid.startswith("GPU-"):
            raise self.NVMLError(uuid)
        return uuid

    def nvmlDeviceGetClockInfo(self, card, kind):
        return 1980

    def nvmlDeviceGetTemperature(self, card, kind):
        return 41

    def nvmlDeviceGetPowerUsage(self, card):
        return 120500

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, card):
        return 0x01 | 0x04 | 0x40


def test_the_card_state_comes_from_nvml_with_the_reasons_in_words(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml())

    state = card_state(make_device())

    assert state == CardState(
        sm_clock_mhz=1980, temperature_c=41, power_w=120.5, throttled="power cap, hardware thermal slowdown"
    )


def script(tmp_path, monkeypatch, body):
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{body}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setitem(sys.modules, "pynvml", None)


def test_without_nvml_the_card_state_comes_from_nvidia_smi(tmp_path, monkeypatch):
    script(tmp_path, monkeypatch, "echo '1830, 55, 640.25, 0x0000000000000004'")

    state = card_state(make_device())

    assert state == CardState(sm_clock_mhz=1830, temperature_c=55, power_w=640.25, throttled="power cap")


@pytest.mark.parametrize("body", ["exit 9", "echo '[N/A], [N/A], [N/A], [N/A]'"])
def test_a_card_that_does_not_say_has_an_unknown_state(tmp_path, monkeypatch, body):
    script(tmp_path, monkeypatch, body)

    assert card_state(make_device()) == CardState()
