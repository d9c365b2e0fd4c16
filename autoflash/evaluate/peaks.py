"""What devices can do at most, as their makers publish it. One that is not listed is unknown: nothing is guessed."""

from __future__ import annotations

from dataclasses import dataclass

from autoflash.device import Device
from autoflash.problem import DType, Problem


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """Peak rates of a device for one type; None where unknown.

    Attributes:
        tflops: Dense matrix products with float32 accumulation, in 10^12 floating point operations per second.
        bandwidth_gb_s: Of the main memory, in 10^9 bytes per second.
        source: Where the numbers are from.
    """

    tflops: float | None
    bandwidth_gb_s: float | None
    source: str

    @property
    def balance(self) -> float | None:
        """Operations per byte at which both limits meet; None where one is unknown."""
        if self.tflops is None or self.bandwidth_gb_s is None:
            return None
        return 1e3 * self.tflops / self.bandwidth_gb_s


@dataclass(frozen=True, slots=True)
class _Published:
    """In the order of the columns: fp16 and bf16, TF32, fp32 (TFLOP/s), memory (GB/s)."""

    half: float
    tf32: float | None
    fp32: float
    bandwidth_gb_s: float
    source: str


# Data sheets quote matrix units with 2:4 sparsity; these are the dense rates, half of that. By the name that the driver
# gives: a MIG slice, a laptop's chip or a sibling with fewer units has another name, and other numbers.
_TABLE: dict[str, _Published] = {
    # NVIDIA H200 Tensor Core GPU data sheet: SXM and NVL.
    "NVIDIA H200": _Published(989.5, 494.5, 67.0, 4800.0, "NVIDIA H200 data sheet (SXM)"),
    "NVIDIA H200 NVL": _Published(835.5, 417.5, 60.0, 4800.0, "NVIDIA H200 data sheet (NVL)"),
    # NVIDIA H100 Tensor Core GPU data sheet: SXM, PCIe (2022 edition) and NVL.
    "NVIDIA H100 80GB HBM3": _Published(989.5, 494.5, 67.0, 3350.0, "NVIDIA H100 data sheet (SXM)"),
    "NVIDIA H100 PCIe": _Published(756.5, 378.0, 51.0, 2000.0, "NVIDIA H100 data sheet (PCIe)"),
    "NVIDIA H100 NVL": _Published(835.5, 417.5, 60.0, 3900.0, "NVIDIA H100 data sheet (NVL)"),
    # NVIDIA A100 Tensor Core GPU data sheets: 40 GB (2020) and 80 GB (2021), SXM and PCIe.
    "NVIDIA A100-SXM4-40GB": _Published(312.0, 156.0, 19.5, 1555.0, "NVIDIA A100 data sheet (40 GB)"),
    "NVIDIA A100-PCIE-40GB": _Published(312.0, 156.0, 19.5, 1555.0, "NVIDIA A100 data sheet (40 GB)"),
    "NVIDIA A100-SXM4-80GB": _Published(312.0, 156.0, 19.5, 2039.0, "NVIDIA A100 data sheet (80 GB SXM)"),
    "NVIDIA A100 80GB PCIe": _Published(312.0, 156.0, 19.5, 1935.0, "NVIDIA A100 data sheet (80 GB PCIe)"),
    # NVIDIA HGX platform data sheet, Blackwell: an eighth of HGX B200.
    "NVIDIA B200": _Published(2250.0, 1100.0, 75.0, 7700.0, "NVIDIA HGX B200 data sheet"),
    # NVIDIA L40S, L40, L4 and A10 data sheets.
    "NVIDIA L40S": _Published(362.05, 183.0, 91.6, 864.0, "NVIDIA L40S data sheet"),
    "NVIDIA L40": _Published(181.05, 90.5, 90.5, 864.0, "NVIDIA L40 data sheet"),
    "NVIDIA L4": _Published(121.0, 60.0, 30.3, 300.0, "NVIDIA L4 data sheet"),
    "NVIDIA A10": _Published(125.0, 62.5, 31.2, 600.0, "NVIDIA A10 data sheet"),
    # NVIDIA architecture white papers, peak rates with FP32 accumulate: Ampere GA102, Ada, RTX Blackwell.
    "NVIDIA GeForce RTX 3090": _Published(71.0, 35.6, 35.6, 936.0, "NVIDIA Ampere GA102 white paper"),
    "NVIDIA GeForce RTX 4090": _Published(165.2, 82.6, 82.6, 1008.0, "NVIDIA Ada white paper"),
    "NVIDIA GeForce RTX 5090": _Published(209.5, 104.8, 104.8, 1792.0, "NVIDIA RTX Blackwell white paper"),
    # AMD Instinct data sheets; CDNA 4 has no TF32.
    "AMD Instinct MI300X": _Published(1307.4, 653.7, 163.4, 5300.0, "AMD Instinct MI300X data sheet"),
    "AMD Instinct MI355X": _Published(2516.6, None, 157.3, 8000.0, "AMD Instinct MI355X data sheet"),
}

DEVICES = tuple(_TABLE)
"""Names of the devices whose peaks are known."""


def known_peak(device: Device, problem: Problem) -> Peak:
    """The published peak of a device for the type of a problem; unknown of every CPU, and of what is not listed.

    float32 is true float32, which matrix units do not compute, unless the problem allows TF32.
    """
    found = _TABLE.get(device.name)
    if found is None:
        return Peak(tflops=None, bandwidth_gb_s=None, source="")
    tflops: float | None = found.half
    if problem.dtype is DType.FP32:
        tflops = found.tf32 if problem.tf32 else found.fp32
    return Peak(tflops=tflops, bandwidth_gb_s=found.bandwidth_gb_s, source=found.source)


def given_peak(known: Peak, tflops: float | None, bandwidth_gb_s: float | None) -> Peak:
    """A peak with what a person said of it in place of what is published."""
    if tflops is None and bandwidth_gb_s is None:
        return known
    is_whole = tflops is not None and bandwidth_gb_s is not None
    return Peak(
        tflops=known.tflops if tflops is None else tflops,
        bandwidth_gb_s=known.bandwidth_gb_s if bandwidth_gb_s is None else bandwidth_gb_s,
        source="as given" if is_whole or not known.source else f"{known.source}, and as given",
    )
