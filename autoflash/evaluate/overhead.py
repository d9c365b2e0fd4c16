"""Host time of a small call: what a kernel launch costs before the kernel matters."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from autoflash.device import Device, DeviceKind

CALLS = 200
"""Calls in a row that one sample is averaged over; a GPU's queue holds more than that without blocking."""

STEPS = 100
"""Likewise of a forward and a backward pass, which launch about five kernels."""

Attend = Callable[..., Any]
"""Attention of q, k and v, which gives the output."""


def small_inputs(device: Device) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v of [1, 2, 64, 64]: bf16 on a GPU, fp32 on a CPU."""
    dtype = torch.float32 if device.kind is DeviceKind.CPU else torch.bfloat16
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(1, 2, 64, 64, generator=generator).to(device=device.torch_device, dtype=dtype) for _ in range(3)
    )
    return q, k, v


def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Torch's own dispatch, as a user would call it."""
    return functional.scaled_dot_product_attention(q, k, v)


def step_of(
    attend: Attend, q: Tensor, k: Tensor, v: Tensor, dout: Tensor | None = None
) -> Callable[[], tuple[Tensor, ...]]:
    """A forward pass that autograd records, and the gradients of its three inputs from that of its output.

    Args:
        attend: What is differentiated.
        q: Of this and the next two, views are the leaves.
        k: Likewise.
        v: Likewise.
        dout: Gradient of the output; None for random numbers in the shape of q.
    """
    leaves = tuple(x.detach().requires_grad_() for x in (q, k, v))
    dout = torch.randn_like(q) if dout is None else dout

    def step() -> tuple[Tensor, ...]:
        return torch.autograd.grad(attend(*leaves), leaves, dout)

    return step


def host_us(
    calls: Sequence[Callable[[], object]],
    device: Device,
    *,
    rounds: int = 15,
    training: bool = False,
) -> list[float]:
    """Microseconds of host time per call, for each of several calls taken in turns.

    On a GPU the calls are queued without waiting for the device, which is idle at the start of each sample; so this
    is the time that the Python thread is held. On a CPU it is the whole time of the call.

    Args:
        calls: What to time.
        device: Where they run.
        rounds: Samples of each call; the median is returned.
        training: They are steps of :func:`step_of`; else autograd is off.
    """
    count = STEPS if training else CALLS
    samples: list[list[float]] = [[] for _ in calls]
    with torch.set_grad_enabled(training):
        for call in calls:
            for _ in range(20):
                call()
        for _ in range(rounds):
            for call, times in zip(calls, samples, strict=True):
                _wait(device)
                start = time.perf_counter()
                for _ in range(count):
                    call()
                times.append((time.perf_counter() - start) / count * 1e6)
        _wait(device)
    return [statistics.median(times) for times in samples]


def _wait(device: Device) -> None:
    if device.kind is not DeviceKind.CPU:
        torch.cuda.synchronize(device.index)
