"""What a small call costs the host, with and without gradients: `attention()` beside torch's SDPA."""

from __future__ import annotations

import functools

import autoflash
from autoflash.cli.options import Common
from autoflash.cli.output import Column, number, print_json, print_table
from autoflash.device import Device
from autoflash.evaluate import overhead


def run(common: Common, device: Device) -> None:
    """Time the calls in turns, and print."""
    q, k, v = overhead.small_inputs(device)
    attends: dict[str, overhead.Attend] = {
        'autoflash.attention(vendor="never")': lambda q, k, v: autoflash.attention(q, k, v, vendor="never"),
        "autoflash.attention()": autoflash.attention,
        "torch SDPA": overhead.sdpa,
    }
    forward = overhead.host_us([functools.partial(attend, q, k, v) for attend in attends.values()], device)
    steps = [overhead.step_of(attend, q, k, v) for attend in attends.values()]
    step = overhead.host_us(steps, device, training=True)
    if common.json:
        names = ("generated", "allow", "sdpa")
        times = {f"{name}_us": us for name, us in zip(names, forward, strict=True)}
        print_json(times | {f"{name}_step_us": us for name, us in zip(names, step, strict=True)})
        return
    rows = [
        [name, number(one), f"{one / forward[-1]:.2f}", number(both), f"{both / step[-1]:.2f}"]
        for name, one, both in zip(attends, forward, step, strict=True)
    ]
    titles = ("forward us", "to SDPA", "with gradients us", "to SDPA")
    columns = (Column(title="call"), *(Column(title=title, numeric=True) for title in titles))
    print_table(f"Host time of a call, B1 H2 S64 D64, on {device.name}", columns, rows)
