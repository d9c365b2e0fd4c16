"""Peak memory of calls, against what they are known to allocate."""

from __future__ import annotations

import pytest
import torch

from autoflash.evaluate.memory import peak_bytes, peaks_of_trace
from tests.factories import make_device
from tests.runtime.live_bytes import peak_bytes as live_bytes

CPU = make_device("cpu")
MIB = 2**20


def test_peaks_are_those_of_each_call_alone() -> None:
    x = torch.zeros(MIB, dtype=torch.uint8)

    def two_at_once() -> torch.Tensor:
        first = x + x
        return first * first

    def one_after_the_other() -> torch.Tensor:
        first = x + x
        del first
        return x * x

    def nothing() -> torch.Tensor:
        return x.view(2, -1).add_(x.view(2, -1))

    calls = [two_at_once, one_after_the_other, nothing, two_at_once]
    assert peak_bytes(calls, CPU) == [2 * MIB, MIB, 0, 2 * MIB] == [live_bytes(call) for call in calls]


def test_buffers_inside_of_torchs_kernels_count() -> None:
    q = torch.randn(1, 2, 512, 32)
    attend = torch.nn.functional.scaled_dot_product_attention

    (peak,) = peak_bytes([lambda: attend(q, q, q)], CPU)

    out, lse = q.nbytes, 2 * 512 * 4
    assert peak > out + lse
    assert peak < 2 * 512 * 512 * 4


def test_the_first_call_is_not_measured() -> None:
    kept: list[torch.Tensor] = []

    def keeps_one() -> None:
        if not kept:
            kept.append(torch.zeros(MIB, dtype=torch.uint8))

    assert peak_bytes([keeps_one], CPU) == [0]
    assert len(kept) == 1


def test_of_no_calls_there_are_no_peaks() -> None:
    assert peak_bytes([], CPU) == []


def _memory(at: float, size: int, device: int = 0) -> dict[str, object]:
    return {"name": "[memory]", "ph": "i", "ts": at, "args": {"Bytes": size, "Device Type": device}}


def test_a_trace_is_read_in_the_order_of_time() -> None:
    span = {"ph": "X", "dur": 10}
    events = [
        {**span, "name": "autoflash memory 0", "ts": 100},
        {**span, "name": "autoflash memory 1", "ts": 200},
        _memory(103, -7),
        _memory(101, 7),
        _memory(104, 5),
        _memory(105, 999, device=1),
        _memory(150, 1000),
        _memory(205, -40),
        _memory(206, 41),
    ]

    assert peaks_of_trace(events, 2) == [7, 1]


def test_a_span_that_is_missing_is_an_error() -> None:
    with pytest.raises(KeyError):
        peaks_of_trace([], 1)
