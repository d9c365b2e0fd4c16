"""What device is this, and what state is it in? Asks torch and the driver; ``device.py`` only describes."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import os
import platform
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import torch

from autoflash.device import CROSS_TARGETS, Device, DeviceKind
from autoflash.errors import UnsupportedError
from autoflash.trial import Environment

_TRITON_DISTRIBUTIONS = ("triton", "triton-rocm", "pytorch-triton-rocm", "pytorch-triton")

# NVML: nvmlClocksEventReasons. Idle, application clocks and display settings are choices, not faults, and left out.
_THROTTLE_REASONS = {
    0x04: "power cap",
    0x08: "hardware slowdown",
    0x10: "sync boost",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class CardState:
    """Clock, heat and power of a card at one moment; zeros and an empty text where the driver does not say."""

    sm_clock_mhz: int = 0
    temperature_c: int = 0
    power_w: float = 0.0
    throttled: str = ""


def probe(device: str | torch.device | None = None) -> Device:
    """Describe a device of this machine.

    Args:
        device: ``"cpu"``, ``"cuda"`` (the current one) or ``"cuda:1"``; None is the current GPU, or the CPU where
            there is none.

    Raises:
        UnsupportedError: if torch does not see the device, or it is neither a CPU nor a CUDA or HIP device.
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        chosen = torch.device(device)
    except RuntimeError:
        # torch's own message lists every backend that it was ever built for.
        raise UnsupportedError(f"device {str(device)!r} is not supported: use 'cpu', 'cuda' or 'cuda:N'") from None
    if chosen.type == "cpu":
        return _cpu()
    if chosen.type != "cuda":
        raise UnsupportedError(f"device {str(device)!r} is not supported: use 'cpu', 'cuda' or 'cuda:N'")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if (chosen.index is not None and chosen.index >= count) or not count:
        raise UnsupportedError(
            f"device {str(device)!r} is not there: torch {torch.__version__} sees {count} GPU(s); "
            "check the driver and that torch is not a CPU build"
        )
    return _gpu(torch.cuda.current_device() if chosen.index is None else chosen.index)


def environment(device: Device) -> Environment:
    """The environment that results of this process on ``device`` hold in."""
    return Environment.of(
        device,
        triton=triton_version(),
        torch=torch.__version__,
        driver=_driver_version() if device.kind is DeviceKind.CUDA else "",
        cuda=torch.version.cuda or torch.version.hip or "",
    )


@functools.cache
def triton_version() -> str:
    """``major.minor`` of the installed Triton, empty without one. Does not import it."""
    for name in _TRITON_DISTRIBUTIONS:
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        return ".".join(version.split(".")[:2])
    return ""


def card_state(device: Device) -> CardState:
    """Clock, temperature, power and throttling of a card now.

    Uses pynvml where it is installed (microseconds), else ``nvidia-smi`` (a tenth of a second or more), else knows
    nothing: always so on a CPU and on AMD.
    """
    if device.kind is not DeviceKind.CUDA:
        return CardState()
    state = _state_from_nvml(device.uuid)
    return state if state is not None else _state_from_smi(device.uuid)


def _gpu(index: int) -> Device:
    properties = torch.cuda.get_device_properties(index)
    is_hip = torch.version.hip is not None
    arch = (
        properties.gcnArchName.split(":")[0]  # without features such as ":sramecc+:xnack-"
        if is_hip
        else f"sm_{properties.major}{properties.minor}"
    )
    shared_bytes = getattr(properties, "shared_memory_per_block_optin", properties.shared_memory_per_block)
    if is_hip and arch in CROSS_TARGETS:
        # HIP's properties tell the limit without opt-in only.
        shared_bytes = CROSS_TARGETS[arch].shared_bytes
    return Device(
        kind=DeviceKind.HIP if is_hip else DeviceKind.CUDA,
        name=properties.name.strip(),
        arch=arch,
        multiprocessors=properties.multi_processor_count,
        shared_bytes=shared_bytes,
        l2_bytes=properties.L2_cache_size,
        memory_bytes=properties.total_memory,
        warp_size=properties.warp_size,
        index=index,
        uuid=str(properties.uuid),
    )


def _cpu() -> Device:
    return Device(
        kind=DeviceKind.CPU,
        name=_cpu_name(),
        arch=platform.machine(),
        multiprocessors=torch.get_num_threads(),
        shared_bytes=0,
        l2_bytes=_last_cache_bytes(),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 0,
        warp_size=1,
    )


@functools.cache
def _cpu_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    if cpuinfo.is_file():
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()


@functools.cache
def _last_cache_bytes(folder: Path = Path("/sys/devices/system/cpu/cpu0/cache")) -> int:
    sizes = [0]
    for size in folder.glob("index*/size"):
        text = size.read_text(encoding="ascii").strip()
        unit = {"K": 1 << 10, "M": 1 << 20}.get(text[-1:], 1)
        sizes.append(int(text.rstrip("KM")) * unit)
    return max(sizes)


@functools.cache
def _driver_version(file: Path = Path("/proc/driver/nvidia/version")) -> str:
    """Such as ``580.65.06``, from the line ``NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65.06  ...``."""
    if not file.is_file():
        return ""
    words = file.read_text(encoding="utf-8", errors="replace").split("\n")[0].split()
    return next((word for word in words if word.replace(".", "").isdigit() and "." in word), "")


def _state_from_nvml(uuid: str) -> CardState | None:
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        return None
    try:
        nvml.nvmlInit()
        card = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
        return CardState(
            sm_clock_mhz=nvml.nvmlDeviceGetClockInfo(card, nvml.NVML_CLOCK_SM),
            temperature_c=nvml.nvmlDeviceGetTemperature(card, nvml.NVML_TEMPERATURE_GPU),
            power_w=nvml.nvmlDeviceGetPowerUsage(card) / 1000.0,
            throttled=_throttle_words(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(card)),
        )
    except nvml.NVMLError:
        return None


def _state_from_smi(uuid: str) -> CardState:
    program = shutil.which("nvidia-smi")
    if program is None:
        return CardState()
    query = "clocks.sm,temperature.gpu,power.draw,clocks_throttle_reasons.active"
    try:
        answer = subprocess.run(
            [program, f"--id=GPU-{uuid}", f"--query-gpu={query}", "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
        clock, temperature, power, reasons = answer.stdout.strip().split(", ")
        return CardState(
            sm_clock_mhz=int(clock),
            temperature_c=int(temperature),
            power_w=float(power),
            throttled=_throttle_words(int(reasons, 16)),
        )
    except (OSError, subprocess.SubprocessError, ValueError):
        # A slice of a card (MIG), or a driver that answers "[N/A]": the state is unknown, which is no fault.
        return CardState()


def _throttle_words(reasons: int) -> str:
    return ", ".join(words for bit, words in _THROTTLE_REASONS.items() if reasons & bit)
