"""Every family, structure and feature against float64, beside torch's own attention."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Generator, Sequence
from concurrent.futures import as_completed
from pathlib import Path

import click
from rich.progress import Progress, TimeElapsedColumn

from autoflash.cli.options import Common
from autoflash.cli.output import check_folder, print_json, print_table
from autoflash.cli.verify_kernels import CASES, Selection, kernels
from autoflash.cli.verify_table import Row, cells, columns, markdown, name, row_json
from autoflash.deploy.export import write_table
from autoflash.device import Device
from autoflash.evaluate.accuracy import accuracy, accuracy_cases
from autoflash.evaluate.worker import Failure, Worker
from autoflash.evaluate.worker_pool import WorkerPool
from autoflash.problem import Form, Problem
from autoflash.runtime.bind import bind
from autoflash.variant import Variant

# Compiling what is verified, too.
_TIMEOUT_S = 300.0

_Kernel = tuple[Problem, Variant]


def verify_all(common: Common, device: Device, selection: Selection, out: Path | None = None) -> None:
    """Measure and print, and write the table to a file; exit code 1 if the gate rejects a kernel or one is left out.

    Where it is interrupted, what was found is printed and written, too.

    Raises:
        KeyboardInterrupt: on Ctrl-C and SIGTERM.
    """
    if out is not None:
        check_folder(out.parent)
    chosen = list(kernels(device, selection))
    rows: dict[int, Row] = {}
    progress = Progress(*Progress.get_default_columns(), TimeElapsedColumn(), console=common.progress)
    try:
        with progress, contextlib.closing(_measured(chosen, device, selection)) as measured:
            task = progress.add_task("verifying", total=len(chosen))
            for place, row in measured:
                rows[place] = row
                progress.update(task, advance=1, description=f"verifying {name(row.problem)}")
    finally:
        _report([rows[place] for place in sorted(rows)], len(chosen), common, device, selection, out)
    if len(rows) < len(chosen) or any(row.is_wrong for row in rows.values()):
        raise click.exceptions.Exit(1)


def _report(
    rows: Sequence[Row], wanted: int, common: Common, device: Device, selection: Selection, out: Path | None
) -> None:
    """Print and write what was found, in the order of the kernels."""
    if common.json:
        print_json([row_json(row) for row in rows])
    else:
        print_table(f"{len(rows)} kernels: largest errors against float64", columns(rows), cells(rows))
    if out is not None:
        write_table(out, markdown(rows, wanted, device, selection), force=True)
    if len(rows) < wanted:
        click.echo(f"Stopped: {wanted - len(rows)} of {wanted} kernels were not verified.", err=True)


def _measured(chosen: Sequence[_Kernel], device: Device, selection: Selection) -> Generator[tuple[int, Row]]:
    """Rows with the places of their kernels, as they are found; none of kernels that the budget leaves no time for."""
    deadline = None if selection.budget_s is None else time.monotonic() + selection.budget_s
    if selection.jobs is None:
        for place, kernel in enumerate(chosen):
            if _is_over(deadline):
                return
            yield place, _measure(*kernel, device, selection.cases, selection.is_bare)
        return
    with WorkerPool(selection.jobs, name="verify") as pool:
        futures = {
            pool.submit(functools.partial(_measure_in, kernel, device, selection, deadline)): place
            for place, kernel in enumerate(chosen)
        }
        for future in as_completed(futures):
            row = future.result()
            if row is not None:
                yield futures[future], row
        pool.finish()


def _measure_in(
    kernel: _Kernel, device: Device, selection: Selection, deadline: float | None, worker: Worker
) -> Row | None:
    """The row of a kernel that is measured in a process of its own; None where it is too late to begin."""
    if _is_over(deadline):
        return None
    problem, variant = kernel
    found = worker.call(_measure, _TIMEOUT_S, problem, variant, device, selection.cases, selection.is_bare)
    if isinstance(found, Failure):
        return Row(problem=problem, variant=variant, reason=found.detail, has_raised=True)
    if found.has_raised:
        # An illegal access leaves the process without a device: the next kernel begins in another.
        worker.restart()
    return found


def _is_over(deadline: float | None) -> bool:
    return deadline is not None and time.monotonic() >= deadline


def _measure(problem: Problem, variant: Variant, device: Device, names: Sequence[str], is_bare: bool) -> Row:
    results, refusal = [], ""
    cases = dict(zip(CASES, accuracy_cases(problem), strict=True))
    try:
        executable = bind(Form.of(problem), variant, device)
        for result in (accuracy(executable, cases[one], device, is_bare) for one in names):
            if isinstance(result, str):
                refusal = result
            else:
                results.append(result)
    except Exception as error:
        # Whatever torch, Triton or the driver throws is this kernel's result, and the next one is still asked.
        return Row(problem=problem, variant=variant, reason=f"{type(error).__name__}: {error}", has_raised=True)
    return Row(problem=problem, variant=variant, results=tuple(results), reason="" if results else refusal)
