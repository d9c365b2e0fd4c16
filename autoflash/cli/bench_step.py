"""A training step through autograd, with the host's part of it: `autoflash.attention()` beside its peers."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import autoflash
from autoflash.cli import bench_grid, peers
from autoflash.cli.bench_grid import GENERATED, Grid, Row, Timed, chosen_for, time_calls
from autoflash.cli.peers import Peers
from autoflash.device import Device, DeviceKind
from autoflash.dispatch.buckets import cell_of
from autoflash.dispatch.ladder import Here
from autoflash.dispatch.table import Table
from autoflash.evaluate.agreement import disagreement
from autoflash.evaluate.benchmark import Call, device_lock
from autoflash.evaluate.cost import flops
from autoflash.evaluate.overhead import Attend, step_of
from autoflash.evaluate.peer import Peer
from autoflash.evaluate.timed_inputs import timed_inputs
from autoflash.ops import CALLS
from autoflash.problem import Mask, Pass, Problem
from autoflash.runtime.executable import refuse_unable
from autoflash.runtime.vendor import Vendor
from autoflash.trial import Measurement
from autoflash.variant import Variant

_DISPATCHED = "attention()"


def default_grid(grid: Grid, device: Device) -> Grid:
    """Causal problems as language models train on: D = 128 and S = 2048 to 16384 on a GPU."""
    grid = dataclasses.replace(grid, ops=(Pass.BACKWARD,), masks=(Mask.CAUSAL,))
    if device.kind is DeviceKind.CPU:
        return grid
    return dataclasses.replace(grid, head_dims=(128,), seqlens=tuple(s for s in grid.seqlens if s >= 2048))


def run(
    grid: Grid,
    device: Device,
    table: Table,
    *,
    beside: Peers,
    seed: int,
    on_kernel: Callable[[Problem, str], None],
    on_row: Callable[[Row], None],
) -> list[Row]:
    """Time the steps of a grid whose problems are backward passes; arguments as those of :func:`bench_grid.run`."""
    with _deciding_by(table):
        return bench_grid.run(
            grid, device, table, beside=beside, seed=seed, on_kernel=on_kernel, on_row=on_row, make_row=_row
        )


@contextmanager
def _deciding_by(table: Table) -> Iterator[None]:
    """Let calls in this process be dispatched by a table."""
    CALLS.reset(table)
    try:
        yield
    finally:
        CALLS.reset()


def _row(
    problem: Problem, here: Here, table: Table, beside: Peers, seed: int, on_kernel: Callable[[Problem, str], None]
) -> Row:
    device = here.device
    generated, dispatched = chosen_for(problem, here, table)
    others = beside.variants(cell_of(problem, device), device)
    makers: dict[str, Callable[[], Call]] = {
        GENERATED: functools.partial(_own_step, problem, device, seed, "never"),
        _DISPATCHED: functools.partial(_own_step, problem, device, seed, "allow"),
    }
    makers |= {
        name: functools.partial(_step_of_peer, problem, variant, device, seed) for name, variant in others.items()
    }
    variants = {GENERATED: generated.variant, _DISPATCHED: dispatched, **others}

    def telling(name: str, make: Callable[[], Call]) -> Callable[[], Call]:
        def told() -> Call:
            on_kernel(problem, name)
            return make()

        return told

    with device_lock(device):
        measured = time_calls(
            [telling(name, make) for name, make in makers.items()],
            device,
            compare=functools.partial(disagreement, problem),
            with_host=True,
        )
    timed = {
        name: _timed(problem, variants[name], measurement, reason)
        for name, (measurement, reason) in zip(makers, measured, strict=True)
    }
    return Row(
        problem=problem,
        generated=timed[GENERATED],
        tier=generated.tier,
        dispatched=timed[_DISPATCHED],
        vendors={name: timed[name] for name in others},
        is_step=True,
    )


def _timed(problem: Problem, variant: Variant, measurement: Measurement | None, reason: str) -> Timed:
    """The rate over both passes; the variant is that of the backward."""
    operations = flops(problem) + flops(problem.replace(op=Pass.FORWARD))
    speed = None if measurement is None else operations / measurement.median_us * 1e-6
    return Timed(variant=variant, measurement=measurement, tflops=speed, reason=reason)


def _own_step(problem: Problem, device: Device, seed: int, vendor: str) -> Call:
    causal = problem.alignment.value if problem.causal else False
    return _step(functools.partial(autoflash.attention, causal=causal, vendor=vendor), problem, device, seed)


def _step_of_peer(problem: Problem, variant: Variant, device: Device, seed: int) -> Call:
    inputs = timed_inputs(problem, device, seed)
    peer = peers.executable(problem, variant, device)
    assert isinstance(peer, Peer | Vendor)
    refuse_unable(peer, problem, inputs.q, inputs.k, inputs.v)
    attend = peer.attend(problem, inputs.q, 1.0 / math.sqrt(problem.head_dim), inputs.extras)
    step = _step(attend, problem, device, seed)
    with peer.compiling() if isinstance(peer, Peer) else nullcontext():
        step()
    return step


def _step(attend: Attend, problem: Problem, device: Device, seed: int) -> Call:
    inputs = timed_inputs(problem, device, seed)
    return step_of(attend, inputs.q, inputs.k, inputs.v, inputs.dout)
