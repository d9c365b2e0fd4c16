"""A description of the machine that a kernel is made for. It describes; ``runtime.probe`` asks."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class DeviceKind(str, Enum):
    """Which Triton backend, if any, can make code for the device."""

    CPU = "cpu"
    CUDA = "cuda"
    HIP = "hip"


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """What tuning and compilation need to know of a device.

    Attributes:
        kind: CPU, CUDA or HIP.
        name: As the driver gives it, stripped, for example ``NVIDIA H200``; the processor's model on a CPU.
        arch: ``sm_90``, ``gfx942``, or the machine type (``x86_64``) of a CPU.
        multiprocessors: Streaming multiprocessors or compute units; threads that torch uses on a CPU.
        shared_bytes: Largest shared memory of one block after opt-in; 0 on a CPU.
        l2_bytes: Size of the last cache level; 0 where unknown.
        memory_bytes: Size of the device's memory.
        warp_size: Threads per warp; 1 on a CPU.
        index: Ordinal in this process. Not part of the identity.
        uuid: Names the physical card, for locks. Not part of the identity.
    """

    kind: DeviceKind
    name: str
    arch: str
    multiprocessors: int
    shared_bytes: int
    l2_bytes: int = 0
    memory_bytes: int = 0
    warp_size: int = 32
    index: int = 0
    uuid: str = ""

    @property
    def torch_device(self) -> str:
        """What ``torch.device()`` takes."""
        return "cpu" if self.kind is DeviceKind.CPU else f"cuda:{self.index}"

    @property
    def capability(self) -> int:
        """CUDA compute capability as one number (90 for sm_90); 0 elsewhere."""
        return int(self.arch.removeprefix("sm_")) if self.kind is DeviceKind.CUDA else 0

    @property
    def has_tma(self) -> bool:
        """Whether tensor descriptors are executed by a copy engine (sm_90 and newer)."""
        return self.capability >= 90


def _gpu(kind: DeviceKind, name: str, arch: str, units: int, shared_kib: int, warp_size: int) -> Device:
    return Device(
        kind=kind,
        name=name,
        arch=arch,
        multiprocessors=units,
        shared_bytes=shared_kib * 1024,
        warp_size=warp_size,
    )


# Shared memory per block after opt-in: CUDA C++ Programming Guide, "Technical Specifications per Compute
# Capability"; LDS per workgroup: AMD CDNA3 and CDNA4 ISA guides.
CROSS_TARGETS: dict[str, Device] = {
    "sm_80": _gpu(DeviceKind.CUDA, "NVIDIA A100-SXM4-80GB", "sm_80", 108, 163, 32),
    "sm_86": _gpu(DeviceKind.CUDA, "NVIDIA GeForce RTX 3090", "sm_86", 82, 99, 32),
    "sm_89": _gpu(DeviceKind.CUDA, "NVIDIA L40S", "sm_89", 142, 99, 32),
    "sm_90": _gpu(DeviceKind.CUDA, "NVIDIA H200", "sm_90", 132, 227, 32),
    "sm_100": _gpu(DeviceKind.CUDA, "NVIDIA B200", "sm_100", 148, 227, 32),
    "sm_120": _gpu(DeviceKind.CUDA, "NVIDIA GeForce RTX 5090", "sm_120", 170, 99, 32),
    "gfx942": _gpu(DeviceKind.HIP, "AMD Instinct MI300X", "gfx942", 304, 64, 64),
    "gfx950": _gpu(DeviceKind.HIP, "AMD Instinct MI355X", "gfx950", 256, 160, 64),
}
"""Devices that code can be compiled for without owning one."""
