"""How the time of a kernel falls with the share of the blocks that a block mask shows."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass

from autoflash.cli.bench_grid import Grid, Timed, time_calls
from autoflash.cli.bench_report import problem_json, timed_json
from autoflash.cli.output import Column, number, print_table
from autoflash.device import Device, DeviceKind
from autoflash.dispatch.buckets import cell_of
from autoflash.dispatch.ladder import Here, VendorPolicy, inference_ladder
from autoflash.dispatch.table import Table
from autoflash.evaluate.benchmark import device_lock, make_call
from autoflash.evaluate.block_maps import shown_of_a_row
from autoflash.evaluate.cost import tflops
from autoflash.keys import Json
from autoflash.problem import Form, Mask, Problem
from autoflash.runtime.bind import bind
from autoflash.runtime.probe import environment
from autoflash.trial import Tier

SHARES = (1.0, 0.5, 0.25, 0.12, 0.06)


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A kernel on a map that shows a share of the blocks.

    Attributes:
        visible: The share, as far as whole blocks make it up.
        timed: TFLOP/s are over the blocks that are shown.
    """

    visible: float
    timed: Timed


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One problem with a block mask.

    Attributes:
        problem: What was computed.
        tier: Where the kernel comes from: the one that ``attention(block_mask=..., vendor="never")`` runs.
        without: The kernel of the problem without a block mask.
        points: One for each share, the largest first.
    """

    problem: Problem
    tier: Tier
    without: Timed
    points: tuple[Point, ...]


def default_grid(grid: Grid, device: Device, *, quick: bool) -> Grid:
    """Sequences of so many blocks that six of a hundred are some; of a CPU, what it does in seconds."""
    grid = dataclasses.replace(grid, masks=(Mask.FULL,))
    if device.kind is DeviceKind.CPU:
        return dataclasses.replace(grid, tokens=2048, model_dim=128, seqlens=(2048,), head_dims=(64,))
    return dataclasses.replace(grid, seqlens=(8192,), head_dims=(128,) if quick else (64, 128))


def run(grid: Grid, device: Device, table: Table, *, seed: int, on_row: Callable[[Row], None]) -> list[Row]:
    """Time each problem of the grid on maps that show less and less, and without one, in turns.

    Args:
        grid: Problems with a block mask.
        device: Where.
        table: The decisions that say which kernels run.
        seed: Of the inputs.
        on_row: Called after each row.
    """
    here = Here(device=device, environment=environment(device))
    rows = []
    for problem in grid.problems():
        rows.append(_row(problem, here, table, seed))
        on_row(rows[-1])
    return rows


def _row(problem: Problem, here: Here, table: Table, seed: int) -> Row:
    device, plain = here.device, problem.replace(block_size=0)
    chosen, dense = (
        inference_ladder(cell_of(asked, device), here, table, VendorPolicy.NEVER)[0] for asked in (problem, plain)
    )
    asked = [(plain, dense.variant, 1.0), *((problem, chosen.variant, share) for share in SHARES)]
    makers = [
        functools.partial(make_call, bind(Form.of(each), variant, device), each, device, seed=seed, shown=share)
        for each, variant, share in asked
    ]
    with device_lock(device):
        measured = time_calls(makers, device)
    timed = []
    for (each, variant, share), (measurement, reason) in zip(asked, measured, strict=True):
        visible = _visible(each, share)
        speed = None if measurement is None else tflops(each, measurement.median_us) * visible
        timed.append((visible, Timed(variant=variant, measurement=measurement, tflops=speed, reason=reason)))
    points = tuple(Point(visible=visible, timed=one) for visible, one in timed[1:])
    return Row(problem=problem, tier=chosen.tier, without=timed[0][1], points=points)


def _visible(problem: Problem, share: float) -> float:
    if not problem.block_size:
        return share
    shown, blocks = shown_of_a_row(problem, share)
    return shown / blocks


def row_json(row: Row) -> dict[str, Json]:
    """A row for machines."""
    return {
        **problem_json(row.problem),
        "block_size": row.problem.block_size,
        "tier": row.tier.value,
        "without": timed_json(row.without),
        "points": [{"visible": point.visible, **timed_json(point.timed)} for point in row.points],
    }


def print_row(row: Row) -> None:
    """A table of a row: time by visible share."""
    problem = row.problem
    columns = [Column(title="visible")]
    columns += [Column(title=title, numeric=True) for title in ("us", "of 100 %", "TFLOP/s")]
    whole = row.points[0].timed.measurement
    lines = [_line("no block mask", row.without, None if whole is None else whole.median_us)]
    lines += [
        _line(f"{100 * point.visible:.1f} %", point.timed, None if whole is None else whole.median_us)
        for point in row.points
    ]
    title = f"{problem.op.value}, {problem.mask.value}, D = {problem.head_dim}, S = {problem.seqlen_q}"
    print_table(f"{title}: {row.points[0].timed.variant} ({row.tier.value})", columns, lines)


def _line(name: str, timed: Timed, whole_us: float | None) -> list[str]:
    taken = None if timed.measurement is None else timed.measurement.median_us
    share = "-" if taken is None or not whole_us else f"{100 * taken / whole_us:.1f} %"
    return [name, number(taken), share, number(timed.tflops, 3)]
