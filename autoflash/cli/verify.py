"""``autoflash verify``: kernels against the float64 reference."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import click
from click.core import ParameterSource
from rich.markup import escape

from autoflash.cli.options import Common, Duration, ProblemOptions, common_options, problem_options
from autoflash.cli.output import Column, number, print_json, print_table
from autoflash.cli.records import first_line
from autoflash.cli.variants import VariantOptions, variant_options
from autoflash.cli.verify_all import verify_all
from autoflash.cli.verify_kernels import CASES, FORMS, HEAD_DIMS, Selection
from autoflash.device import Device
from autoflash.dispatch import table
from autoflash.dispatch.buckets import cell_of, inside_of
from autoflash.dispatch.table import other_device
from autoflash.errors import InvalidProblemError
from autoflash.evaluate.verify import verify
from autoflash.keys import Json
from autoflash.problem import DType, Form, Pass, Problem
from autoflash.runtime.bind import bind
from autoflash.runtime.probe import environment, probe
from autoflash.space import catalog
from autoflash.trial import Level, Verification
from autoflash.variant import Variant

_ONLY_OF_ALL = {"features", "case", "bare", "jobs", "budget", "out"}
_OPTIONS_OF_ALL = _ONLY_OF_ALL | {"everything", "family", "dtype", "op", "head_dim", "quick"}
_OPTIONS_OF_ALL |= {"db", "table", "device", "as_json", "seed", "verbose"}

COLUMNS = (
    Column(title="problem"),
    Column(title="kernel"),
    Column(title="result"),
    Column(title="error", numeric=True),
    Column(title="checks", numeric=True),
    Column(title="detail"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """One kernel and what became of it; ``verification`` is None where it cannot do the problem at all."""

    cell: str
    variant: Variant
    verification: Verification | None
    reason: str = ""


@click.command("verify")
@common_options
@problem_options
@variant_options
@click.option("--all", "everything", is_flag=True, help="Every structure of every family, with every feature.")
@click.option("--feature", "features", multiple=True, type=click.Choice(list(FORMS)), help="Of --all; may be repeated.")
@click.option("--case", type=click.Choice(CASES), help="Of --all: only this one of the two problems.")
@click.option("--bare", is_flag=True, help="Of --all: tensors without margins, no torch beside (scripts/sanitize).")
@click.option("--jobs", type=click.IntRange(1), help="Of --all: processes that share the device.")
@click.option("--budget", type=Duration(), help="Of --all: begin no kernel after so long, such as 9m.")
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="Of --all: write the table as Markdown.")
@click.option("--recorded", is_flag=True, help="Every recorded or shipped kernel of this device.")
@click.option("--quick", is_flag=True, help="The problem itself and one irregular shape, not the full grid.")
def command(
    wanted: VariantOptions,
    sizes: ProblemOptions,
    common: Common,
    everything: bool,
    features: tuple[str, ...],
    case: str | None,
    bare: bool,
    jobs: int | None,
    budget: float | None,
    out: Path | None,
    recorded: bool,
    quick: bool,
) -> None:
    """Compare kernels with the float64 reference.

    By default the problem's recorded kernels, the default of each family, and the vendor's kernels; with --family
    and --set one variant. The error is in units of what the gate allows: above 1 is wrong. Exit code 1 if any is.

    --all goes through the families, structures, masks, features, types and passes, on two small problems each, and
    shows the largest error against float64 beside those of torch's backends; --family, --feature, --dtype, --pass,
    --head-dim, --case and --quick (defaults only, one problem) restrict it. With --jobs, kernels compile and run in
    processes of their own, in which one may crash or hang without ending the others. What is compiled is kept: the
    same command again, after a --budget or an interruption, is soon where it was. Exit code 1 also if one is left out.
    """
    device = probe(common.device)
    given = _given()
    if everything:
        _refuse("--all has problems of its own", given, set(given) - _OPTIONS_OF_ALL)
        selection = Selection(
            family=wanted.family,
            features=features or tuple(FORMS),
            dtypes=tuple(DType) if sizes.dtype is None else (sizes.dtype,),
            passes=(sizes.op,) if "op" in given else tuple(Pass),
            head_dims=((sizes.head_dim, sizes.head_dim),) if "head_dim" in given else HEAD_DIMS,
            cases=(case,) if case is not None else CASES[-1:] if quick else CASES,
            is_quick=quick,
            is_bare=bare,
            jobs=jobs,
            budget_s=budget,
        )
        verify_all(common, device, selection, out)
        return
    _refuse("without --all there is one problem", given, set(given) & _ONLY_OF_ALL)
    level = Level.SCREEN if quick else Level.FULL
    if recorded:
        pairs = list(_recorded(common, device))
    elif wanted.given:
        problem = sizes.problem(device)
        pairs = [(problem, wanted.variant(cell_of(problem, device), device))]
    else:
        pairs = list(_candidates(common, sizes.problem(device), device))
    checked = []
    with common.progress.status("verifying") as status:
        for problem, variant in pairs:
            status.update(escape(f"verifying {cell_of(problem, device)}: {variant}"))
            checked.append(_check(problem, variant, device, level))
    wrong = [one for one in checked if one.verification is not None and not one.verification.passed]
    if common.json:
        print_json([_json(one) for one in checked])
    else:
        print_table(f"{len(checked)} kernels against float64", COLUMNS, [_row(one) for one in checked])
    if wrong or (wanted.given and checked[0].verification is None):
        raise click.exceptions.Exit(1)


def _given() -> dict[str, str]:
    """The options of the command line by the names of their parameters."""
    context = click.get_current_context()
    return {
        parameter.name: parameter.opts[-1]
        for parameter in context.command.params
        if parameter.name is not None and context.get_parameter_source(parameter.name) is ParameterSource.COMMANDLINE
    }


def _refuse(why: str, given: Mapping[str, str], unused: Collection[str]) -> None:
    """Refuse options that would not be looked at.

    Raises:
        click.UsageError: where there are any.
    """
    options = [option for name, option in given.items() if name in unused]
    if options:
        raise click.UsageError(f"{why}: leave out {', '.join(options)}")


def _candidates(common: Common, problem: Problem, device: Device) -> Iterator[tuple[Problem, Variant]]:
    cell = cell_of(problem, device)
    hits = table.load(common.db, common.table).hits(cell, environment(device))
    variants = [choice.variant for hit in hits if hit.is_exact for choice in hit.decision.choices]
    variants += [
        catalog.search_space(cell, device, family).default()
        for family in catalog.families(cell.op, device, cell.features)
    ]
    variants += catalog.vendors(cell, device)
    yield from ((problem, variant) for variant in dict.fromkeys(variants))


def _recorded(common: Common, device: Device) -> Iterator[tuple[Problem, Variant]]:
    here = environment(device)
    for decision in table.load(common.db, common.table).decisions():
        if other_device(decision.environment, here) is not None:
            continue
        try:
            problem = inside_of(decision.cell, device)
        except InvalidProblemError as error:
            common.progress.print(f"{decision.cell} is left out: {error}", style="dim", markup=False)
            continue
        yield from ((problem, choice.variant) for choice in decision.choices)


def _check(problem: Problem, variant: Variant, device: Device, level: Level) -> Checked:
    cell = str(cell_of(problem, device))
    try:
        executable = bind(Form.of(problem), variant, device)
        found = verify(executable, problem, level, device=device)
    except Exception as error:
        # Whatever torch, Triton or the driver throws is this kernel's result, and the next one is still asked.
        failed = Verification(
            level=level, passed=False, worst_ratio=0.0, detail=f"{type(error).__name__}: {error}", checks=0
        )
        return Checked(cell=cell, variant=variant, verification=failed)
    if not found.checks and not found.passed:
        return Checked(cell=cell, variant=variant, verification=None, reason=found.detail)
    return Checked(cell=cell, variant=variant, verification=found)


def _row(checked: Checked) -> list[str]:
    found = checked.verification
    if found is None:
        return [checked.cell, str(checked.variant), "cannot", "-", "-", first_line(checked.reason)]
    result = "correct" if found.passed else "WRONG"
    ratio = number(found.worst_ratio, 2)
    return [checked.cell, str(checked.variant), result, ratio, str(found.checks), first_line(found.detail)]


def _json(checked: Checked) -> dict[str, Json]:
    found = checked.verification
    return {
        "cell": checked.cell,
        "variant": checked.variant.to_dict(),
        "passed": None if found is None else found.passed,
        "worst_ratio": None if found is None else found.worst_ratio,
        "checks": None if found is None else found.checks,
        "level": None if found is None else found.level.name.lower(),
        "detail": checked.reason if found is None else found.detail,
    }
