"""``autoflash show``: the decisions and trials of the database, or the decisions of a table."""

from __future__ import annotations

from collections.abc import Iterable

import click

from autoflash import paths
from autoflash.cli.features import FEATURE
from autoflash.cli.options import DTYPE, PASS, Common, common_options
from autoflash.cli.output import print_json, print_table
from autoflash.cli.records import (
    DECISION_COLUMNS,
    TRIAL_COLUMNS,
    counted,
    decision_json,
    decision_row,
    trial_json,
    trial_row,
)
from autoflash.db.repository import Repository
from autoflash.dispatch import table
from autoflash.problem import Cell, features_text
from autoflash.trial import Decision, Status, Trial


@click.command("show")
@common_options
@click.option("--trials", is_flag=True, help="List trials, not decisions.")
@click.option("--status", type=click.Choice([member.value for member in Status]), help="Only trials that ended so.")
@click.option("--pass", "op", type=PASS, help="Only this pass.")
@click.option("--dtype", type=DTYPE, help="Only this type.")
@click.option("--head-dim", type=int, help="Only this head dimension.")
@click.option("--causal/--full", default=None, help="Only this mask.")
@click.option("--feature", "features", type=FEATURE, multiple=True, help="Only with this feature; may be repeated.")
@click.option("--shipped", is_flag=True, help="Also the tables that come with autoflash.")
@click.option("--limit", type=click.IntRange(1), help="At most so many rows, the newest.")
def command(
    common: Common,
    trials: bool,
    status: str | None,
    op: str | None,
    dtype: str | None,
    head_dim: int | None,
    causal: bool | None,
    features: tuple[str, ...],
    shipped: bool,
    limit: int | None,
) -> None:
    """List the recorded decisions, or with --trials the trials.

    TFLOP/s counts only what the mask leaves visible; the error is in units of what the gate allows.
    """

    def is_asked_for(cell: Cell) -> bool:
        asked = ((op, cell.op.value), (dtype, cell.dtype.value), (head_dim, cell.head_dim))
        return (
            all(want is None or want == has for want, has in asked)
            and causal in (None, cell.mask.value == "causal")
            and set(features) <= {feature.value for feature in cell.features}
        )

    if trials or status is not None:
        found = [trial for trial in _trials(common, status) if is_asked_for(trial.cell)]
        _show_trials(common, found[-limit:] if limit else found)
        return
    decisions = [decision for decision in _decisions(common, shipped) if is_asked_for(decision.cell)]
    decisions.sort(key=lambda decision: (decision.environment.device_name, _order(decision.cell), decision.cell.key))
    _show_decisions(common, decisions[-limit:] if limit else decisions)


def _trials(common: Common, status: str | None) -> list[Trial]:
    if not Repository.exists(common.db):
        return []
    with Repository.open(common.db, read_only=True) as repository:
        return list(repository.trials(status=Status(status) if status else None))


def _decisions(common: Common, shipped: bool) -> Iterable[Decision]:
    if shipped or paths.table_file(common.table) is not None:
        return table.load(common.db, common.table).decisions()
    if not Repository.exists(common.db):
        return []
    with Repository.open(common.db, read_only=True) as repository:
        return list(repository.decisions())


def _order(cell: Cell) -> tuple[str, str, int, str, str, int, int]:
    return (
        cell.op.value,
        cell.dtype.value,
        cell.head_dim,
        cell.mask.value,
        features_text(cell.features),
        cell.q_bucket,
        cell.k_bucket,
    )


def _show_trials(common: Common, trials: list[Trial]) -> None:
    if common.json:
        print_json([trial_json(trial) for trial in trials])
        return
    summary = counted([trial.status.value for trial in trials])
    print_table(
        f"{len(trials)} trials" + (f": {summary}" if trials else ""),
        TRIAL_COLUMNS,
        [trial_row(trial) for trial in trials],
    )


def _show_decisions(common: Common, decisions: list[Decision]) -> None:
    if common.json:
        print_json([decision_json(decision) for decision in decisions])
        return
    if not decisions:
        click.echo("Nothing is recorded yet: run `autoflash tune`.")
        return
    rows = [decision_row(decision) for decision in decisions]
    print_table(f"{len(decisions)} decisions", DECISION_COLUMNS, rows)
