"""``autoflash bench --systems``: the systems for attention side by side, on the same problems."""

from __future__ import annotations

import functools
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
from autoflash.evaluate import dram, systems
from autoflash.evaluate.accuracy import Accuracy
from autoflash.evaluate.benchmark import Call, device_lock
from autoflash.evaluate.cost import tflops
from autoflash.evaluate.dram_main import Work
from autoflash.evaluate.io_model import Traffic
from autoflash.evaluate.ncu import DramBytes
from autoflash.evaluate.systems import System
from autoflash.keys import Json
from autoflash.problem import Form, Mask, Problem
from autoflash.runtime.probe import environment
from autoflash.trial import Measurement

# A call that takes longer is said to, and not timed: a dozen of them would take longer than everything else.
_SLOWEST_S = 5.0

_DRAM_TITLE = "DRAM bytes (ncu)"
_COLUMNS = (
    Column(title="system"),
    Column(title="us", numeric=True),
    Column(title="TFLOP/s", numeric=True),
    Column(title="peak memory", numeric=True),
    Column(title="kept", numeric=True),
    Column(title="HBM bytes (model)", numeric=True),
    Column(title=_DRAM_TITLE, numeric=True),
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
        dram: What it moves, as the GPU counted it; None where nobody asked.
        reason: Why it did not run; empty where it did.
    """

    system: System
    traffic: Traffic | None
    measurement: Measurement | None = None
    peak_bytes: int | None = None
    kept_bytes: int | None = None
    accuracy: Accuracy | None = None
    dram: dram.Count | None = None
    reason: str = ""

    @property
    def error(self) -> float | None:
        """Largest error of all outputs."""
        return None if self.accuracy is None else max(errors.kernel for errors in self.accuracy.errors)

    @property
    def moved(self) -> DramBytes | None:
        """What the GPU counted; None without a count."""
        return None if self.dram is None else self.dram.moved


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """All systems on one problem."""

    problem: Problem
    results: tuple[Result, ...]


def default_grid(grid: Grid, device: Device, *, quick: bool) -> Grid:
    """Fewer problems than for a table of speeds: standard attention takes memory, and a CPU its time.

    None has a mask, which only some of the systems make use of.
    """
    grid = replace(grid, masks=(Mask.FULL,))
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
    asked = [(problem, _systems(problem, device, table)) for problem in grid.problems()]
    systems.compile_ahead(asked, device)
    compared = []
    for problem, which in asked:
        on_problem(problem)
        with device_lock(device):
            results = compare(problem, device, which, seed)
        compared.append(Comparison(problem=problem, results=results))
    return compared


def _systems(problem: Problem, device: Device, table: Table) -> tuple[System, ...]:
    cell = cell_of(problem, device)
    hits = table.hits(cell, environment(device))
    recorded = tuple(choice.variant for hit in hits if hit.is_exact for choice in hit.decision.choices)
    return systems.systems(cell, device, recorded)


def compare(problem: Problem, device: Device, which: Sequence[System], seed: int) -> tuple[Result, ...]:
    """Errors and memory of each system by itself first, then times, in turns."""
    results = [_alone(system, problem, device, seed) for system in which]
    makers = [
        functools.partial(_make_call, result.system, problem, device, seed) for result in results if not result.reason
    ]
    times = iter(systems.times(makers, device, run=uuid.uuid4().hex[:12]))
    return tuple(result if result.reason else _timed(result, next(times)) for result in results)


def _timed(result: Result, time: Measurement | str) -> Result:
    return replace(result, reason=time) if isinstance(time, str) else replace(result, measurement=time)


def _alone(system: System, problem: Problem, device: Device, seed: int) -> Result:
    result = Result(system=system, traffic=systems.model_of(system, problem))
    try:
        executable = systems.executable_of(system, problem, device)
        found = systems.error_of(system, problem, device)
        call = systems.allocating_call(executable, problem, device, seed)
        peak, seconds = systems.peak_and_seconds(call, device)
    except Exception as error:
        # A kernel may fail in any way that torch, Triton or the driver has: it is a line with a reason.
        return replace(result, reason=f"{type(error).__name__}: {error}")
    return replace(
        result,
        accuracy=None if isinstance(found, str) else found,
        peak_bytes=peak,
        kept_bytes=systems.kept_for_backward(system, problem),
        reason=f"a call takes {seconds:.1f} s: not timed" if seconds > _SLOWEST_S else "",
    )


def _make_call(system: System, problem: Problem, device: Device, seed: int) -> Call:
    return systems.timed_call(systems.executable_of(system, problem, device), problem, device, seed)


def with_dram(compared: Sequence[Comparison], device: Device, *, seed: int) -> list[Comparison]:
    """The same with the bytes that the GPU counts for each system that ran.

    Raises:
        CounterError: as :func:`autoflash.evaluate.dram.count`.
    """
    work = [
        Work(problem=one.problem, system=result.system)
        for one in compared
        for result in one.results
        if not result.reason
    ]
    with device_lock(device):
        counts = iter(dram.count(work, device, seed=seed))
    return [
        replace(
            one,
            results=tuple(result if result.reason else replace(result, dram=next(counts)) for result in one.results),
        )
        for one in compared
    ]


def print_comparison(comparison: Comparison, device: Device) -> None:
    """One table for a problem."""
    columns, rows = table_of(comparison)
    print_table(f"{title_of(comparison.problem)}, on {device.name}", columns, rows)


def title_of(problem: Problem) -> str:
    """A problem in words."""
    sizes = f"B{problem.batch} H{problem.heads} S{problem.seqlen_q} D{problem.head_dim}"
    return f"{Form.of(problem)}/{problem.dtype.value}, {sizes}"


def table_of(comparison: Comparison) -> tuple[list[Column], list[list[str]]]:
    """A line for each system; bytes of DRAM only where they were counted."""
    shown = [column for column in _COLUMNS if column.title != _DRAM_TITLE or any(r.dram for r in comparison.results)]
    rows = [_row(comparison.problem, result) for result in comparison.results]
    return shown, [[row[column.title] for column in shown] for row in rows]


def _row(problem: Problem, result: Result) -> dict[str, str]:
    measured = result.measurement
    reason = result.reason or (result.dram.reason if result.dram else "")
    cells = (
        result.system.name,
        number(None if measured is None else measured.median_us),
        number(None if measured is None else tflops(problem, measured.median_us), 3),
        size_text(result.peak_bytes),
        size_text(result.kept_bytes),
        size_text(None if result.traffic is None else result.traffic.total_bytes),
        size_text(None if result.moved is None else result.moved.total_bytes),
        "-" if result.error is None else f"{result.error:.2e}",
        number(None if result.accuracy is None else result.accuracy.gate, 2),
        first_line(reason) if reason else str(result.system.variant),
    )
    return {column.title: cell for column, cell in zip(_COLUMNS, cells, strict=True)}


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
        "dram_read_bytes": None if result.moved is None else result.moved.read_bytes,
        "dram_write_bytes": None if result.moved is None else result.moved.written_bytes,
        "dram_reason": "" if result.dram is None else result.dram.reason,
        "errors": None if found is None else {errors.output: _finite(errors.kernel) for errors in found.errors},
        "error_case": None if found is None else str(found.case),
        "gate": None if found is None else _finite(found.gate),
        "reason": result.reason,
    }


def _finite(value: float) -> float | None:
    """JSON has neither infinity nor NaN."""
    return value if abs(value) < float("inf") else None
