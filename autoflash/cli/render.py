"""``autoflash render``: the source of a kernel."""

from __future__ import annotations

import click

from autoflash.cli.features import FEATURE, with_features
from autoflash.cli.options import Common, ProblemOptions, common_options, problem_options
from autoflash.cli.output import print_json
from autoflash.cli.records import find_decision
from autoflash.cli.variants import VariantOptions, target, variant_options
from autoflash.codegen.render import render
from autoflash.device import Device
from autoflash.dispatch.buckets import cell_of
from autoflash.errors import RenderError
from autoflash.problem import Cell, Form
from autoflash.variant import Family, Variant


@click.command("render")
@common_options
@problem_options
@variant_options
@click.option("--feature", "features", type=FEATURE, multiple=True, help="With this feature; may be repeated.")
def command(wanted: VariantOptions, sizes: ProblemOptions, common: Common, features: tuple[str, ...]) -> None:
    """Print the source of a kernel.

    Without --family and --set it is the recorded winner of the problem's cell, or the default where nothing is
    recorded. --device also takes an architecture that is not here, such as sm_90 or gfx942.
    """
    device = target(common.device, wanted.family)
    cell = with_features(cell_of(sizes.problem(device), device), features)
    variant = wanted.variant(cell, device) if wanted.given else _winner(wanted, cell, device, common)
    if variant.family is Family.VENDOR:
        raise RenderError(f"{variant} is a kernel of torch's own: there is no source to render")
    source = render(Form.of(cell), variant.family, variant.structure)
    if common.json:
        print_json(
            {
                "variant": variant.to_dict(),
                "digest": source.digest,
                "template": source.template,
                "name": source.name,
                "text": source.text,
            }
        )
        return
    click.echo(source.text, nl=False)


def _winner(wanted: VariantOptions, cell: Cell, device: Device, common: Common) -> Variant:
    decision = find_decision(common, cell, device)
    if decision is not None and decision.choices:
        return decision.choices[0].variant
    common.progress.print(f"Nothing is recorded for {cell}; this is the default.", style="dim", markup=False)
    return wanted.variant(cell, device)
