from __future__ import annotations

import pytest
import torch

from autoflash.device import Device, DeviceKind
from autoflash.evaluate import overhead
from tests.evaluate.clock import Clock

CPU = Device(kind=DeviceKind.CPU, name="Test CPU", arch="x86_64", multiprocessors=2, shared_bytes=0)


def test_host_time_is_the_median_per_call_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(overhead, "time", clock)
    # One sample of three is held up.
    last = 20 + 3 * overhead.CALLS - 1
    calls = [clock.call(3e-6), clock.call(50e-6, {last: 1.0})]

    assert overhead.host_us(calls, CPU, rounds=3) == pytest.approx([3.0, 50.0])


def test_calls_are_timed_without_autograd() -> None:
    modes: set[bool] = set()

    overhead.host_us([lambda: modes.add(torch.is_grad_enabled())], CPU, rounds=1)

    assert modes == {False}


def test_small_inputs_are_what_the_benchmark_names() -> None:
    q, k, v = overhead.small_inputs(CPU)

    assert q.shape == k.shape == v.shape == (1, 2, 64, 64)
    assert q.dtype is torch.float32
    assert overhead.sdpa(q, k, v).shape == q.shape
