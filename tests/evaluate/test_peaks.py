"""What is known of devices, and that nothing else is guessed."""

from __future__ import annotations

import dataclasses

import pytest

from autoflash.device import CROSS_TARGETS
from autoflash.evaluate.peaks import DEVICES, Peak, given_peak, known_peak
from autoflash.problem import DType
from tests.factories import make_device, make_problem

H200 = CROSS_TARGETS["sm_90"]
UNKNOWN = Peak(tflops=None, bandwidth_gb_s=None, source="")


@pytest.mark.parametrize(
    ("dtype", "tf32", "tflops"),
    [(DType.BF16, False, 989.5), (DType.FP16, False, 989.5), (DType.FP32, False, 67.0), (DType.FP32, True, 494.5)],
)
def test_the_peak_follows_the_type(dtype: DType, tf32: bool, tflops: float) -> None:
    peak = known_peak(H200, make_problem(dtype=dtype, tf32=tf32))

    assert (peak.tflops, peak.bandwidth_gb_s) == (tflops, 4800.0)
    assert "H200" in peak.source


def test_operations_per_byte_at_which_both_limits_meet() -> None:
    assert known_peak(H200, make_problem()).balance == pytest.approx(989.5e12 / 4.8e12)
    assert UNKNOWN.balance is None


@pytest.mark.parametrize("name", ["NVIDIA H200 MIG 1g.18gb", "NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA H20", ""])
def test_a_device_that_is_not_listed_is_unknown(name: str) -> None:
    assert known_peak(dataclasses.replace(H200, name=name), make_problem()) == UNKNOWN


def test_a_cpu_is_unknown() -> None:
    assert known_peak(make_device("cpu"), make_problem()) == UNKNOWN


@pytest.mark.parametrize("device", CROSS_TARGETS.values(), ids=str)
def test_every_device_that_code_is_made_for_is_listed(device) -> None:  # type: ignore[no-untyped-def]  # a device
    assert device.name in DEVICES


@pytest.mark.parametrize("name", DEVICES)
def test_matrix_units_are_fastest_in_16_bits(name: str) -> None:
    device = dataclasses.replace(H200, name=name)
    half, tf32, fp32 = (
        known_peak(device, make_problem(dtype=dtype, tf32=tf32)).tflops
        for dtype, tf32 in ((DType.BF16, False), (DType.FP32, True), (DType.FP32, False))
    )

    assert half is not None
    assert fp32 is not None
    assert half > fp32 > 0.0
    assert tf32 is None or half / 2.1 < tf32 < half / 1.9


def test_what_is_given_replaces_what_is_published() -> None:
    known = known_peak(H200, make_problem())

    assert given_peak(known, None, None) == known
    assert given_peak(known, 900.0, None) == Peak(
        tflops=900.0, bandwidth_gb_s=4800.0, source=f"{known.source}, and as given"
    )
    assert given_peak(known, 900.0, 4000.0).source == "as given"
    assert given_peak(UNKNOWN, 1.5, None) == Peak(tflops=1.5, bandwidth_gb_s=None, source="as given")
