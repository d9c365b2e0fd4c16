"""How much memory calls take while they run, as the allocators of torch count it."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from autoflash.device import Device, DeviceKind

_MARK = "autoflash memory "


def peak_bytes(calls: Sequence[Callable[[], object]], device: Device) -> list[int]:
    """The most that each call holds at once of what it allocates, results and internal buffers included, in bytes.

    Each is called once before, so that nothing is counted that is kept for the next call. On a GPU it is what the
    caching allocator hands out; on a CPU, what torch's profiler sees allocated, in one session for all calls.

    Args:
        calls: Each launches its kernel once; what it returns is dropped.
        device: Where they run.
    """
    for call in calls:
        call()
    return _on_cpu(calls) if device.kind is DeviceKind.CPU else [_on_gpu(call, device) for call in calls]


def release_cached(device: Device) -> None:
    """Give back to a device what torch's allocator keeps of its memory for later; other processes may need it."""
    if device.kind is not DeviceKind.CPU:
        torch.cuda.empty_cache()


def _on_gpu(call: Callable[[], object], device: Device) -> int:
    torch.cuda.synchronize(device.index)
    before = torch.cuda.memory_allocated(device.index)
    torch.cuda.reset_peak_memory_stats(device.index)
    call()
    torch.cuda.synchronize(device.index)
    return int(torch.cuda.max_memory_allocated(device.index)) - before


def _on_cpu(calls: Sequence[Callable[[], object]]) -> list[int]:
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        for index, call in enumerate(calls):
            with record_function(f"{_MARK}{index}"):
                call()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(file))
        events = json.loads(file.read_text(encoding="utf-8"))["traceEvents"]
    return peaks_of_trace(events, len(calls))


def peaks_of_trace(events: Sequence[dict[str, Any]], count: int) -> list[int]:
    """The highest sum of allocations and frees within each marked span of a profile in Chrome's format."""
    spans: dict[int, tuple[float, float]] = {}
    sizes: list[tuple[float, int]] = []
    for event in events:
        name = str(event.get("name", ""))
        if name == "[memory]" and event["args"]["Device Type"] == 0:
            sizes.append((float(event["ts"]), int(event["args"]["Bytes"])))
        elif name.startswith(_MARK) and event.get("ph") == "X":
            start = float(event["ts"])
            spans[int(name.removeprefix(_MARK))] = (start, start + float(event["dur"]))
    sizes.sort(key=lambda size: size[0])
    peaks = []
    for index in range(count):
        start, end = spans[index]
        held = peak = 0
        for at, size in sizes:
            if start <= at <= end:
                held += size
                peak = max(peak, held)
        peaks.append(peak)
    return peaks
