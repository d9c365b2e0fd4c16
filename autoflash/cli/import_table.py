"""``autoflash import``: an exported table into the database."""

from __future__ import annotations

from pathlib import Path

import click

from autoflash.cli.options import Common, common_options
from autoflash.cli.output import print_json
from autoflash.db.repository import Repository
from autoflash.deploy.export import import_table
from autoflash.dispatch.table import load_decisions, other_device
from autoflash.runtime.probe import environment, probe


@click.command("import")
@common_options
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
def command(common: Common, file: Path) -> None:
    """Read an exported table into the database.

    Doing so again changes nothing. Rows of another device are kept for machines that have it, and never used on
    this one.
    """
    text = file.read_text(encoding="utf-8", errors="replace")
    # A damaged table must not even make a database.
    decisions = load_decisions(text)
    with Repository.open(common.db) as repository:
        done = import_table(text, repository)
    here = environment(probe(common.device))
    foreign = [decision for decision in decisions if other_device(decision.environment, here) is not None]
    names = sorted({decision.environment.device_name for decision in foreign})
    if common.json:
        content = {"decisions": done.read, "added": done.added, "for_other_devices": len(foreign)}
        print_json({**content, "devices": list(names)})
        return
    click.echo(f"Read {done.read} decisions from {file}; {done.added} are new.")
    if foreign:
        click.echo(f"{len(foreign)} of them are for other devices and not used here: {', '.join(names)}.")
