from __future__ import annotations

import time

import torch

from autoflash.device import Device, DeviceKind
from autoflash.evaluate import overhead

CPU = Device(kind=DeviceKind.CPU, name="Test CPU", arch="x86_64", multiprocessors=2, shared_bytes=0)


def test_host_time_is_per_call_and_in_order() -> None:
    fast, slow = overhead.host_us([lambda: None, lambda: time.sleep(50e-6)], CPU, rounds=3)

    assert fast < 10 < 50 <= slow < 5000


def test_calls_are_timed_without_autograd() -> None:
    modes: set[bool] = set()

    overhead.host_us([lambda: modes.add(torch.is_grad_enabled())], CPU, rounds=1)

    assert modes == {False}


def test_small_inputs_are_what_the_benchmark_names() -> None:
    q, k, v = overhead.small_inputs(CPU)

    assert q.shape == k.shape == v.shape == (1, 2, 64, 64)
    assert q.dtype is torch.float32
    assert overhead.sdpa(q, k, v).shape == q.shape
