"""``autoflash warmup``: compile and load the kernels of a problem ahead of its first call."""

from __future__ import annotations

import click

import autoflash
from autoflash.cli.options import Common, ProblemOptions, common_options, problem_options, vendor_option
from autoflash.cli.output import print_json
from autoflash.dispatch import table
from autoflash.evaluate.blank import blank_shapes, call_arguments, torch_dtype
from autoflash.ops import CALLS
from autoflash.problem import Pass
from autoflash.runtime.probe import probe


@click.command("warmup")
@common_options
@problem_options
@vendor_option
def command(sizes: ProblemOptions, common: Common, vendor: str | None) -> None:
    """Compile the kernels of a problem ahead of its first call.

    They are kept in the cache that later processes read. In the process that makes the calls, autoflash.warmup()
    also loads them: needed before a CUDA graph is captured.
    """
    device = probe(common.device)
    problem = sizes.problem(device)
    CALLS.reset(table.load(common.db, common.table))
    explanation = autoflash.warmup(
        *blank_shapes(problem),
        dtype=torch_dtype(problem.dtype),
        device=device.torch_device,
        backward=problem.op is Pass.BACKWARD,
        vendor=vendor,
        **call_arguments(problem, device),
    )
    if common.json:
        print_json(explanation.to_dict())
        return
    click.echo(str(explanation))
