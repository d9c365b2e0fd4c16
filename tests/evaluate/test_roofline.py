"""The roofline's arithmetic."""

from __future__ import annotations

import pytest

from autoflash.evaluate.peaks import Peak
from autoflash.evaluate.roofline import Roofline

PEAK = Peak(tflops=100.0, bandwidth_gb_s=1000.0, source="test")


def test_work_of_high_intensity_is_bound_by_compute() -> None:
    roofline = Roofline(flops=1e12, bytes_moved=10**9, peak=PEAK)

    assert roofline.intensity == 1000.0
    assert roofline.compute_us == pytest.approx(10_000.0)
    assert roofline.memory_us == pytest.approx(1000.0)
    assert roofline.bound_us == roofline.compute_us
    assert roofline.limit == "compute"
    assert roofline.attainable_tflops == pytest.approx(100.0)


def test_work_of_low_intensity_is_bound_by_memory() -> None:
    roofline = Roofline(flops=1e10, bytes_moved=10**9, peak=PEAK)

    assert roofline.bound_us == pytest.approx(1000.0)
    assert roofline.limit == "memory"
    assert roofline.attainable_tflops == pytest.approx(10.0)


def test_both_limits_meet_at_the_balance() -> None:
    balance = PEAK.balance
    assert balance is not None
    roofline = Roofline(flops=balance * 10**9, bytes_moved=10**9, peak=PEAK)

    assert roofline.compute_us == pytest.approx(roofline.memory_us)


@pytest.mark.parametrize(("tflops", "bandwidth"), [(None, None), (100.0, None), (None, 1000.0)])
def test_half_a_peak_bounds_nothing(tflops: float | None, bandwidth: float | None) -> None:
    peak = Peak(tflops=tflops, bandwidth_gb_s=bandwidth, source="")
    roofline = Roofline(flops=1e10, bytes_moved=10**9, peak=peak)

    assert (roofline.bound_us, roofline.limit, roofline.attainable_tflops) == (None, None, None)
    assert (roofline.compute_us is None) == (tflops is None)
    assert (roofline.memory_us is None) == (bandwidth is None)
    assert roofline.intensity == 10.0


def test_nothing_takes_no_time() -> None:
    roofline = Roofline(flops=0.0, bytes_moved=0, peak=PEAK)

    assert (roofline.intensity, roofline.bound_us, roofline.attainable_tflops) == (None, 0.0, None)
