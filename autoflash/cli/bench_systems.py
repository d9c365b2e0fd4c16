"""``autoflash bench --systems``: the systems for attention side by side, on the same problems."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from autoflash.cli.analysis_json import problem_json, traffic_json
from autoflash.cli.bench_grid import Grid
from autoflash.cli.output import Column, number, print_table, size_text
from autoflash.cli.records import first_line
from autoflash.device import Device, DeviceKind
from autoflash.dispatch.buckets import cell_of
from autoflash.dispatch.table import Table
from autoflash.evaluate import systems
from autoflash.evaluate.accuracy import Accuracy
from autoflash.evaluate.benchmark import Call, device_lock, interleaved
from autoflash.evaluate.cost import tflops
from autoflash.evaluate.io_model import Traffic
from autoflash.evaluate.memory import peak_bytes
from autoflash.evaluate.systems import System
from autoflash.keys import Json
from autoflash.problem import Form, Problem
from autoflash.runtime.probe import environment
from autoflash.trial import Measurement

COLUMNS = (
    Column(title="system"),
    Column(title="us", numeric=True),
    Column(title="TFLOP/s", numeric=True),
    Column(title="peak memory", numeric=True),
    Column(title="kept", numeric=True),
    Column(title="HBM bytes (model)", numeric=True),
    Column(title="error", numeric=True),
    Column(title="gate", numeric=True),
    Column(title="kernel"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One system on one problem.

    Attributes:
        system: Which.
        traffic: What the IO model says that it moves; None where its algorithm is not known.
        measurement: Its time; None where it did not run.
        peak_bytes: The most that a call holds beside its inputs, outputs included; None where it did not run.
        kept_bytes: What a backward finds kept by its forward beside that; None where a vendor does not say.
        accuracy: Errors against float64; None where it refuses the case.
        reason: Why it did not run; empty where it did.
    """

    system: System
    traffic: Traffic | None
    measurement: Measurement | None = None
    peak_bytes: int | None = None
    kept_bytes: int | None = None
    accuracy: Accuracy | None = None
    reason: str = ""

    @property
    def error(self) -> float | None:
        """Largest error of all outputs."""
        return None if self.accuracy is None else max(errors.kernel for errors in self.accuracy.errors)


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """All systems on one problem."""

    problem: Problem
    results: tuple[Result, ...]


def default_grid(grid: Grid, device: Device, *, quick: bool) -> Grid:
    """Fewer problems than for a table of speeds: standard attention takes memory, and a CPU its time."""
    if device.kind is DeviceKind.CPU:
        seqlen = 256 if quick else 512
        return replace(grid, tokens=seqlen, seqlens=(seqlen,), head_dims=(64,))
    return replace(grid, seqlens=(1024, 4096) if quick else (1024, 4096, 16384), head_dims=(64, 128))


def run(
    grid: Grid, device: Device, table: Table, *, seed: int, on_problem: Callable[[Problem], None]
) -> list[Comparison]:
    """Compare the systems on each problem of a grid.

    Args:
        grid: Which problems.
        device: Where.
        table: The decisions, whose variants stand for their loop orders.
        seed: Of the inputs.
        on_problem: Called before each.
    """
    here = environment(device)
    compared = []
    for problem in grid.problems():
        on_problem(problem)
        cell = cell_of(problem, device)
        recorded = tuple(
            choice.variant for hit in table.hits(cell, here) if hit.is_exact for choice in hit.decision.choices
        )
        with device_lock(device):
            results = compare(problem, device, systems.systems(cell, device, recorded), seed)
        compared.append(Comparison(problem=problem, results=results))
    return compared


def compare(problem: Problem, device: Device, which: Sequence[System], seed: int) -> tuple[Result, ...]:
    """Errors of each system first, then memory, then time, in turns."""
    results: list[Result] = []
    timed: list[Call] = []
    allocating: list[Call] = []
    for system in which:
        result = Result(system=system, traffic=systems.model_of(system, problem))
        try:
            executable = systems.executable_of(system, problem, device)
            found = systems.error_of(executable, problem, device)
            calls = systems.calls_of(executable, problem, device, seed)
            for call in calls:
                call()
        except Exception as error:
            # A kernel may fail in any way that torch, Triton or the driver has: it is a line with a reason.
            results.append(replace(result, reason=f"{type(error).__name__}: {error}"))
            continue
        timed.append(calls[0])
        allocating.append(calls[1])
        kept = systems.kept_for_backward(system, problem)
        results.append(replace(result, accuracy=None if isinstance(found, str) else found, kept_bytes=kept))
    peaks = iter(peak_bytes(allocating, device))
    allocating.clear()
    times = iter(interleaved(timed, device, run=uuid.uuid4().hex[:12]) if timed else [])
    return tuple(
        result if result.reason else replace(result, peak_bytes=next(peaks), measurement=next(times))
        for result in results
    )


def print_comparison(comparison: Comparison, device: Device) -> None:
    """One table for a problem."""
    problem = comparison.problem
    sizes = f"B{problem.batch} H{problem.heads} S{problem.seqlen_q} D{problem.head_dim}"
    title = f"{Form.of(problem)}/{problem.dtype.value}, {sizes}, on {device.name}"
    print_table(title, COLUMNS, [_row(problem, result) for result in comparison.results])


def _row(problem: Problem, result: Result) -> list[str]:
    measured = result.measurement
    moved = None if result.traffic is None else result.traffic.total_bytes
    return [
        result.system.name,
        number(None if measured is None else measured.median_us),
        number(None if measured is None else tflops(problem, measured.median_us), 3),
        size_text(result.peak_bytes),
        size_text(result.kept_bytes),
        size_text(moved),
        "-" if result.error is None else f"{result.error:.2e}",
        number(None if result.accuracy is None else result.accuracy.gate, 2),
        first_line(result.reason) if result.reason else str(result.system.variant),
    ]


def comparison_json(comparison: Comparison) -> dict[str, Json]:
    """One problem for machines."""
    problem = comparison.problem
    return {
        "problem": problem_json(problem),
        "systems": [_result_json(problem, result) for result in comparison.results],
    }


def _result_json(problem: Problem, result: Result) -> dict[str, Json]:
    measured, found = result.measurement, result.accuracy
    return {
        "system": result.system.name,
        "variant": result.system.variant.to_dict(),
        "median_us": None if measured is None else measured.median_us,
        "p20_us": None if measured is None else measured.p20_us,
        "p80_us": None if measured is None else measured.p80_us,
        "tflops": None if measured is None else tflops(problem, measured.median_us),
        "peak_bytes": result.peak_bytes,
        "kept_bytes": result.kept_bytes,
        "traffic": None if result.traffic is None else traffic_json(result.traffic),
        "errors": None if found is None else {errors.output: _finite(errors.kernel) for errors in found.errors},
        "error_case": None if found is None else str(found.case),
        "gate": None if found is None else _finite(found.gate),
        "reason": result.reason,
    }


def _finite(value: float) -> float | None:
    """JSON has neither infinity nor NaN."""
    return value if abs(value) < float("inf") else None
