"""``autoflash explain``: which kernel a call would run, and why."""

from __future__ import annotations

import click

import autoflash
from autoflash.cli.options import Common, ProblemOptions, common_options, problem_options, vendor_option
from autoflash.cli.output import print_json
from autoflash.dispatch import table
from autoflash.evaluate.blank import blank_inputs, call_arguments
from autoflash.ops import CALLS
from autoflash.runtime.probe import probe


@click.command("explain")
@common_options
@problem_options
@vendor_option
def command(sizes: ProblemOptions, common: Common, vendor: str | None) -> None:
    """Say which kernel a call of attention would run, and why.

    With --pass backward, what a call that asks for gradients would run in both passes. Nothing is compiled or run.
    """
    device = probe(common.device)
    problem = sizes.problem(device)
    CALLS.reset(table.load(common.db, common.table))
    q, k, v = blank_inputs(problem, device)
    explanation = autoflash.explain(q, k, v, vendor=vendor, **call_arguments(problem, device))
    if common.json:
        print_json(explanation.to_dict())
        return
    click.echo(str(explanation))
