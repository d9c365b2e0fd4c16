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


def test_steps_are_timed_with_autograd_and_in_shorter_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(overhead, "time", clock)
    modes: set[bool] = set()
    last = 20 + 3 * overhead.STEPS - 1
    timed = clock.call(3e-6, {last: 1.0})

    def call() -> None:
        modes.add(torch.is_grad_enabled())
        timed()

    assert overhead.host_us([call], CPU, rounds=3, training=True) == pytest.approx([3.0])
    assert modes == {True}


def test_a_step_is_a_forward_pass_and_all_three_gradients() -> None:
    q, k, v = overhead.small_inputs(CPU)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    asked: list[bool] = []

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        asked.extend(x.requires_grad for x in (q, k, v))
        return overhead.sdpa(q, k, v)

    torch.manual_seed(0)
    gradients = overhead.step_of(attend, q, k, v)()

    torch.manual_seed(0)
    expected = torch.autograd.grad(overhead.sdpa(*leaves), leaves, torch.randn_like(q))
    assert asked == [True] * 3
    torch.testing.assert_close(gradients, expected, rtol=0, atol=0)


def test_small_inputs_are_what_the_benchmark_names() -> None:
    q, k, v = overhead.small_inputs(CPU)

    assert q.shape == k.shape == v.shape == (1, 2, 64, 64)
    assert q.dtype is torch.float32
    assert overhead.sdpa(q, k, v).shape == q.shape
