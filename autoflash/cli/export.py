"""``autoflash export``: decisions as a table for machines that must not tune."""

from __future__ import annotations

from pathlib import Path

import click

from autoflash.cli.options import Common, common_options
from autoflash.cli.output import print_json
from autoflash.db.repository import Repository
from autoflash.deploy.export import export_table, write_table
from autoflash.deploy.shipped import export_shipped
from autoflash.paths import database_url
from autoflash.runtime.probe import environment, probe


@click.command("export")
@common_options
@click.option("--out", type=click.Path(path_type=Path), help="File to write (default: standard output).")
@click.option("--force", is_flag=True, help="Replace a file that is no table, or has rows that would be lost.")
@click.option("--here", is_flag=True, help="Only this device's decisions, not all of the database.")
@click.option("--shipped", type=click.Path(path_type=Path), help="Merge them into the text files of this folder.")
def command(common: Common, out: Path | None, force: bool, here: bool, shipped: Path | None) -> None:
    """Write a table for machines that must not tune.

    It has the decisions of the database, as sorted JSON with a checksum; equal content gives equal bytes. Use it with
    AUTOFLASH_TABLE=FILE, or merge it into another database with `autoflash import`.
    """
    if not Repository.exists(common.db):
        raise click.ClickException(f"there is no database at {database_url(common.db)}; `autoflash tune` makes one")
    chosen = environment(probe(common.device)) if here else None
    with Repository.open(common.db, read_only=True) as repository:
        if shipped is not None:
            _report(common, [str(file) for file in export_shipped(repository, shipped, chosen)])
            return
        text = export_table(repository, chosen)
    if out is None:
        click.echo(text, nl=not text.endswith("\n"))
        return
    write_table(out, text, force=force)
    _report(common, [str(out)])


def _report(common: Common, files: list[str]) -> None:
    if common.json:
        print_json({"files": files})
        return
    for file in files:
        click.echo(f"Wrote {file}")
