"""``autoflash tune``: search for the fastest correct kernels on this device."""

from __future__ import annotations

import click

from autoflash.cli.features import feature_options
from autoflash.cli.options import DTYPE, PASS, Common, Duration, common_options
from autoflash.cli.output import Column, number, print_json, print_table
from autoflash.cli.progress import TuneProgress, rate
from autoflash.cli.records import counted, decision_json
from autoflash.db.repository import Repository
from autoflash.device import Device, DeviceKind
from autoflash.keys import Json
from autoflash.problem import Cell, DType, Mask, Pass
from autoflash.runtime.probe import probe
from autoflash.search.presets import Asked, Axes, Preset, cells, default_preset, effort
from autoflash.search.request import CellPlan, CellSummary, TuneRequest, TuneSummary
from autoflash.search.tuner import plan, tune

PLAN_COLUMNS = (
    Column(title="cell"),
    Column(title="variants", numeric=True),
    Column(title="recorded", numeric=True),
    Column(title="to do", numeric=True),
    Column(title="about", numeric=True),
)

SUMMARY_COLUMNS = (
    Column(title="cell"),
    Column(title="winner"),
    Column(title="us", numeric=True),
    Column(title="TFLOP/s", numeric=True),
    Column(title="vs default", numeric=True),
    Column(title="vs SDPA", numeric=True),
    Column(title="trials", numeric=True),
    Column(title="note"),
)

PRESETS = [preset.value for preset in Preset]

# Seconds, as measured on two CPU cores and on an H200: a trial is compiled, verified and timed; a cell ends with the
# full verification of its finalists.
TRIAL_S = {DeviceKind.CPU: 0.4, DeviceKind.CUDA: 2.0, DeviceKind.HIP: 2.0}
FINALS_S = {DeviceKind.CPU: 5.0, DeviceKind.CUDA: 15.0, DeviceKind.HIP: 15.0}


@click.command("tune")
@common_options
@click.option("--preset", type=click.Choice(PRESETS), help="Which cells (default: quick on a CPU, llm on a GPU).")
@click.option("--pass", "ops", type=PASS, multiple=True, help="Only this pass; may be repeated.")
@click.option("--head-dim", "head_dims", type=click.IntRange(1), multiple=True, help="Only this one; may be repeated.")
@click.option("--head-dim-v", type=click.IntRange(1), help="Length of a value vector (default: as --head-dim).")
@click.option("--group", "groups", type=click.IntRange(1), multiple=True, help="Query heads per key and value head.")
@click.option("--dtype", "dtypes", type=DTYPE, multiple=True, help="Only this type; may be repeated.")
@click.option("--causal/--full", default=None, help="Only this mask.")
@click.option("--seqlen", "seqlens", type=click.IntRange(1), multiple=True, help="Only this one; may be repeated.")
@feature_options
@click.option("--trials", type=click.IntRange(1), help="Per cell, in all (default: the preset's).")
@click.option("--more", type=click.IntRange(1), help="Instead: so many more per cell.")
@click.option("--budget", type=Duration(), help="Stop searching after so long, such as 10m (default: the preset's).")
@click.option("--dry-run", is_flag=True, help="Only say what would be done.")
def command(
    asked: Asked,
    common: Common,
    preset: str | None,
    ops: tuple[str, ...],
    head_dims: tuple[int, ...],
    head_dim_v: int | None,
    groups: tuple[int, ...],
    dtypes: tuple[str, ...],
    causal: bool | None,
    seqlens: tuple[int, ...],
    trials: int | None,
    more: int | None,
    budget: float | None,
    dry_run: bool,
) -> None:
    """Search for the fastest correct kernels on this device.

    Every candidate is compiled, verified against a float64 reference, timed and recorded, in processes of its own.
    Features such as --window are asked of every cell. Interrupt it at will: the same command goes on where it
    stopped. Exit code 1 if a cell is left without a kernel.
    """
    if trials is not None and more is not None:
        raise click.UsageError("--trials is a total and --more adds to it: give one of them")
    device = probe(common.device)
    chosen = Preset(preset) if preset else default_preset(device)
    axes = Axes(
        passes=tuple(Pass(op) for op in ops) or None,
        dtypes=tuple(DType(dtype) for dtype in dtypes) or None,
        head_dims=head_dims or None,
        head_dims_v=None if head_dim_v is None else (head_dim_v,),
        groups=groups or None,
        masks=None if causal is None else (Mask.CAUSAL if causal else Mask.FULL,),
        seqlens=seqlens or None,
        asked=None if asked == Asked() else (asked,),
    )
    usual = effort(chosen, device)
    request = TuneRequest(
        cells=cells(chosen, device, axes),
        device=device,
        trials=trials or usual.trials,
        more=more,
        # Who says how many trials wants them all.
        budget_s=budget or (usual.budget_s if trials is None and more is None else None),
        seed=common.seed,
    )
    if dry_run:
        _say_plan(common, device, _plans(common, request))
        return
    with Repository.open(common.db) as repository:
        progress = TuneProgress(common.progress, plan(request, repository))
        try:
            with progress:
                summary = tune(request, repository, on_event=progress)
        except KeyboardInterrupt:
            click.echo(f"Stopped: {progress.recorded} new trials are recorded; the same command goes on.", err=True)
            raise
        location = repository.location
    if common.json:
        print_json(_summary_json(summary))
    else:
        _say_summary(summary, device, location)
    if _failed(summary):
        raise click.exceptions.Exit(1)


def _plans(common: Common, request: TuneRequest) -> tuple[CellPlan, ...]:
    """What would be done; a database that is not there is not made."""
    if not Repository.exists(common.db):
        return plan(request, None)
    with Repository.open(common.db, read_only=True) as repository:
        return plan(request, repository)


def _seconds(cell_plan: CellPlan, device: Device) -> float:
    return cell_plan.to_do * TRIAL_S[device.kind] + FINALS_S[device.kind] if cell_plan.to_do else 0.0


def _time(seconds: float) -> str:
    minutes = round(seconds / 60)
    return f"{seconds:.0f} s" if seconds < 90 else f"{minutes} min" if minutes < 90 else f"{minutes / 60:.1f} h"


def _say_plan(common: Common, device: Device, plans: tuple[CellPlan, ...]) -> None:
    total = sum(_seconds(one, device) for one in plans)
    if common.json:
        planned: list[Json] = [
            {
                "cell": one.cell.to_dict(),
                "name": str(one.cell),
                "variants": one.variants,
                "recorded": one.recorded,
                "to_do": one.to_do,
                "estimated_s": _seconds(one, device),
            }
            for one in plans
        ]
        print_json({"device": device.name, "estimated_s": total, "cells": planned})
        return
    rows = [
        [str(one.cell), str(one.variants), str(one.recorded), str(one.to_do), _time(_seconds(one, device))]
        for one in plans
    ]
    print_table(f"{len(plans)} cells on {device.name}", PLAN_COLUMNS, rows)
    click.echo(f"About {_time(total)} in all; nothing was run.")


def _failed(summary: TuneSummary) -> list[CellSummary]:
    """Cells that were searched in vain. One that the budget left without a single trial was not reached."""
    return [cell for cell in summary.failed if cell.total or not cell.plan.to_do]


def _unreached(summary: TuneSummary) -> list[Cell]:
    untried = [cell.cell for cell in summary.failed if cell not in _failed(summary)]
    return [*untried, *summary.unreached]


def _say_summary(summary: TuneSummary, device: Device, location: str) -> None:
    print_table(f"Tuned on {device.name}", SUMMARY_COLUMNS, [_summary_row(cell) for cell in summary.cells])
    added = [status.value for cell in summary.cells for status, count in cell.added.items() for _ in range(count)]
    click.echo(f"{len(added)} new trials ({counted(added)})" if added else "Nothing new was tried.")
    unreached = _unreached(summary)
    if unreached:
        click.echo(f"The budget ended before {len(unreached)} cells: {_names(unreached)}; the same command goes on.")
    for cell in _failed(summary):
        click.echo(f"No kernel for {cell.cell}: {cell.note}; calls use the default or a vendor kernel.", err=True)
    click.echo(f"Recorded in {location}; {_time(summary.seconds)}, seed {summary.seed}.")


def _names(cells: list[Cell]) -> str:
    shown = ", ".join(str(cell) for cell in cells[:3])
    return shown + (", ..." if len(cells) > 3 else "")


def _summary_row(cell: CellSummary) -> list[str]:
    decision = cell.decision
    if decision is None or not decision.choices:
        return [str(cell.cell), "-", "-", "-", "-", "-", str(cell.total), cell.note]
    first = decision.choices[0]
    default = None if cell.default_us is None else cell.default_us / first.median_us
    vendor = None if decision.vendor is None else decision.vendor.median_us / first.median_us
    return [
        str(cell.cell),
        str(first.variant),
        number(first.median_us),
        rate(cell.plan.problem, first.median_us),
        "-" if default is None else f"{default:.2f}x",
        "-" if vendor is None else f"{vendor:.2f}x",
        str(cell.total),
        cell.note,
    ]


def _summary_json(summary: TuneSummary) -> dict[str, Json]:
    tuned: list[Json] = [
        {
            "name": str(cell.cell),
            "cell": cell.cell.to_dict(),
            "added": {status.value: count for status, count in cell.added.items()},
            "total": cell.total,
            "decision": None if cell.decision is None else decision_json(cell.decision),
            "is_new": cell.is_new,
            "default_us": cell.default_us,
            "note": cell.note,
            "seconds": cell.seconds,
        }
        for cell in summary.cells
    ]
    unreached: list[Json] = [str(cell) for cell in _unreached(summary)]
    return {"seed": summary.seed, "seconds": summary.seconds, "cells": tuned, "unreached": unreached}
