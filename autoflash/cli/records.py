"""What is recorded, as commands print it."""

from __future__ import annotations

from collections.abc import Sequence

from autoflash.cli.options import Common
from autoflash.cli.output import Column, number
from autoflash.device import Device
from autoflash.dispatch import table
from autoflash.dispatch.buckets import problem_of
from autoflash.evaluate.cost import tflops
from autoflash.keys import Json
from autoflash.problem import Cell
from autoflash.runtime.probe import environment
from autoflash.trial import Decision, Ranked, Trial

DECISION_COLUMNS = (
    Column(title="cell"),
    Column(title="kernel"),
    Column(title="us", numeric=True),
    Column(title="TFLOP/s", numeric=True),
    Column(title="vs vendor", numeric=True),
    Column(title="error", numeric=True),
    Column(title="device"),
)

TRIAL_COLUMNS = (
    Column(title="id", numeric=True),
    Column(title="status"),
    Column(title="cell"),
    Column(title="kernel"),
    Column(title="us", numeric=True),
    Column(title="verified"),
    Column(title="detail"),
)


def find_decision(common: Common, cell: Cell, device: Device) -> Decision | None:
    """The recorded decision for exactly a cell on a device; None where there is none."""
    hits = table.load(common.db, common.table).hits(cell, environment(device))
    return next((hit.decision for hit in hits if hit.is_exact), None)


def speedup(decision: Decision) -> float | None:
    """How many times faster the first choice is than the fastest vendor kernel; None without either."""
    if decision.vendor is None or not decision.choices:
        return None
    return decision.vendor.median_us / decision.choices[0].median_us


def decision_row(decision: Decision) -> list[str]:
    """Cells of a table with :data:`DECISION_COLUMNS`."""
    problem = problem_of(decision.cell, decision.environment.device)
    ratio = speedup(decision)
    first = decision.choices[0] if decision.choices else decision.vendor
    if first is None:
        return [str(decision.cell), "-", "-", "-", "-", "-", decision.environment.device_name]
    return [
        str(decision.cell),
        str(first.variant),
        number(first.median_us),
        number(tflops(problem, first.median_us), 1 if decision.environment.arch.startswith(("sm_", "gfx")) else 3),
        "-" if ratio is None else f"{ratio:.2f}x",
        number(first.worst_ratio, 2),
        decision.environment.device_name,
    ]


def decision_json(decision: Decision) -> dict[str, Json]:
    """A decision for machines."""
    return {
        "cell": decision.cell.to_dict(),
        "key": decision.cell.key,
        "environment": decision.environment.identity(),
        "choices": [ranked_json(choice) for choice in decision.choices],
        "vendor": None if decision.vendor is None else ranked_json(decision.vendor),
        "reason": decision.reason,
        "decided_at": decision.decided_at,
    }


def ranked_json(ranked: Ranked) -> dict[str, Json]:
    """One choice of a decision for machines."""
    return {
        "variant": ranked.variant.to_dict(),
        "source_digest": ranked.source_digest,
        "trial": ranked.trial_id,
        "median_us": ranked.median_us,
        "worst_ratio": ranked.worst_ratio,
    }


def trial_row(trial: Trial) -> list[str]:
    """Cells of a table with :data:`TRIAL_COLUMNS`."""
    return [
        str(trial.id),
        trial.status.value,
        str(trial.cell),
        str(trial.variant),
        number(None if trial.measurement is None else trial.measurement.median_us),
        trial.level.name.lower(),
        first_line(trial.detail),
    ]


def trial_json(trial: Trial) -> dict[str, Json]:
    """A trial for machines."""
    measured, verified, resources = trial.measurement, trial.verification, trial.resources
    return {
        "id": trial.id,
        "status": trial.status.value,
        "detail": trial.detail,
        "cell": trial.cell.to_dict(),
        "variant": trial.variant.to_dict(),
        "environment": trial.environment.identity(),
        "source_digest": trial.source_digest,
        "level": trial.level.name.lower(),
        "worst_ratio": None if verified is None else verified.worst_ratio,
        "stage": None if measured is None else measured.stage.value,
        "median_us": None if measured is None else measured.median_us,
        "shared_bytes": None if resources is None else resources.shared_bytes,
        "registers": None if resources is None else resources.registers,
        "spill_bytes": None if resources is None else resources.spill_bytes,
        "seed": trial.seed,
    }


def first_line(text: str, width: int = 100) -> str:
    """The first line of a text, cut to a width, for tables."""
    line = next(iter(text.strip().splitlines()), "")
    return line if len(line) <= width else line[: width - 3] + "..."


def counted(names: Sequence[str]) -> str:
    """Such as ``correct 12, compile 3``, most frequent first."""
    counts = {name: names.count(name) for name in dict.fromkeys(names)}
    return ", ".join(f"{name} {count}" for name, count in sorted(counts.items(), key=lambda item: (-item[1], item[0])))
