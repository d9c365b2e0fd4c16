"""``autoflash bench``: generated kernels beside their peers; the systems; a sweep of a cell; a call's host time."""

from __future__ import annotations

import dataclasses
import json
import shlex
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path

import click
from rich.markup import escape
from rich.progress import Progress

from autoflash.cli import (
    bench_blocks,
    bench_check,
    bench_grid,
    bench_overhead,
    bench_report,
    bench_step,
    bench_systems,
    peers,
    plot_blocks,
    plot_systems,
    systems_markdown,
)
from autoflash.cli.bench_check import Check
from autoflash.cli.bench_grid import Grid, Row
from autoflash.cli.bench_sweep import Sweep, sweep
from autoflash.cli.features import feature_options
from autoflash.cli.options import DTYPE, PASS, Common, Retold, common_options
from autoflash.cli.output import Column, check_folder, markdown_table, number, print_json, print_table
from autoflash.cli.peers import Peers
from autoflash.deploy.export import write_table
from autoflash.deploy.shipped import device_slug
from autoflash.device import Device
from autoflash.dispatch import table
from autoflash.dispatch.buckets import cell_of, problem_of
from autoflash.dispatch.ladder import Here, VendorPolicy, inference_ladder
from autoflash.dispatch.table import Table
from autoflash.errors import CounterError
from autoflash.evaluate import ncu
from autoflash.keys import Json
from autoflash.problem import LEAST_BLOCK, DType, Mask, Pass, Problem
from autoflash.runtime.probe import environment, probe
from autoflash.search.presets import Asked
from autoflash.space import catalog
from autoflash.variant import Family

README_BEGIN = "<!-- benchmark table: begin (made by scripts/benchmark) -->"
README_END = "<!-- benchmark table: end -->"
# Nothing in them changes what is timed: a command in a results file is one for any machine.
_UNTOLD = ("out", "readme", "db", "table", "device", "as_json", "verbose")


@click.command("bench", cls=Retold)
@common_options
@click.option(
    "--grid",
    type=click.Choice(bench_grid.NAMES),
    default=bench_grid.NAMES[0],
    show_default=True,
    expose_value=False,  # there is one
    help="Which problems: fa are those of FlashAttention's papers, as below.",
)
@click.option("--quick", is_flag=True, help="A few problems of the grid only.")
@click.option("--pass", "ops", type=PASS, multiple=True, help="Only this pass; may be repeated.")
@click.option("--dtype", type=DTYPE, help="Type of the tensors (default: bf16; fp32 on a CPU).")
@click.option("--head-dim", "head_dims", type=click.IntRange(1), multiple=True, help="Only this one; may be repeated.")
@click.option("--seqlen", "seqlens", type=click.IntRange(1), multiple=True, help="Only this one; may be repeated.")
@click.option("--causal/--full", default=None, help="Only this mask.")
@click.option("--group", type=click.IntRange(1), default=1, help="Query heads per key and value head.")
@feature_options
@click.option(
    "--peers",
    "peer_names",
    type=peers.PeerNames(),
    metavar="NAME,...",
    help=f"Beside whom, of {','.join(peers.NAMES)} (default: cudnn,flash; on a CPU flash,math).",
)
@click.option("--flex", is_flag=True, help="Beside torch's flex_attention too, compiled for each problem.")
@click.option(
    "--verify",
    "with_gate",
    is_flag=True,
    help="First put each generated kernel through the whole gate, and compare its errors with those of torch's.",
)
@click.option(
    "--step",
    "by_step",
    is_flag=True,
    help="Both passes through autograd with the host's part: D = 128, causal, S = 2048..16384.",
)
@click.option("--systems", "by_system", is_flag=True, help="Standard attention, Rabe-Staats, FlashAttention and SDPA.")
@click.option(
    "--dram", "with_dram", is_flag=True, help="With --systems: bytes of DRAM too, as NVIDIA's ncu counts them."
)
@click.option("--blocks", "by_blocks", is_flag=True, help="Times by the share of blocks that a block mask shows.")
@click.option("--exhaustive", is_flag=True, help="Sweep every variant of one cell, and judge the recorded winner.")
@click.option(
    "--overhead",
    "host",
    is_flag=True,
    help="Host time of a small call, and of one with its gradients, against torch SDPA.",
)
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), help="Folder to write results to, as JSON.")
@click.option("--readme", type=click.Path(exists=True, path_type=Path), help="File to put the table into.")
def command(
    asked: Asked,
    common: Common,
    quick: bool,
    ops: tuple[str, ...],
    dtype: str | None,
    head_dims: tuple[int, ...],
    seqlens: tuple[int, ...],
    causal: bool | None,
    group: int,
    peer_names: tuple[str, ...] | None,
    flex: bool,
    with_gate: bool,
    by_step: bool,
    by_system: bool,
    with_dram: bool,
    by_blocks: bool,
    exhaustive: bool,
    host: bool,
    out: Path | None,
    readme: Path | None,
) -> None:
    """Time generated kernels beside torch SDPA and other peers, all in one run.

    The grid is B*S = 16384 tokens, H*D = 2048, S = 512..16384, D = 64/128/256, causal and full, forward and backward
    (smaller on a CPU). TFLOP/s are 4*B*H*S*S*D floating point operations over the time, half of it where causal,
    and 2.5 times as many backward. Each generated kernel is the one that attention(vendor="never") runs. Features such
    as --window are asked of every problem; torch's kernels are not timed with them, but for the efficient backend with
    --bias; flex_attention is, with --flex.

    --peers names who is timed beside them: torch's SDPA backends, flex (torch's flex_attention, compiled for each
    problem) and fa4 (FlashAttention-4, where the package flash-attn-4 is installed). The table then has the ratio to
    each and to the best of each row. A peer that cannot run a problem, fails, or computes something else than the
    generated kernel (outputs of one call are compared) has a reason in place of a time. No time includes compiling.

    --systems compares standard attention, Rabe-Staats (torch_tiled), the orders of FlashAttention-1 and -2, the Hopper
    family and torch's backends, those of them that run here, on fewer problems: time, the most memory that a call
    holds beside its inputs (and what a backward finds kept by its forward), main-memory bytes in the model of
    autoflash analyze, and the error against float64 at lengths of about 512. --dram adds the bytes that the GPU's own
    counters have for one call, from a cold L2 and with what it leaves there to be written back; it needs NVIDIA's ncu
    on the PATH and the right to read counters. --out also writes the tables as Markdown, and `autoflash plot` draws
    its JSON: bytes of the model and of DRAM.

    --verify compiles and runs the correctness gate's full grid for each kernel before it is timed, and measures the
    largest errors against float64, at lengths of about 512, of the kernel and of torch's backends among the peers. Exit
    code 1 if a kernel is wrong.

    --step times a training step as people make it: attention() and the gradients of q, k and v by torch.autograd.grad,
    from the call to the end of the last kernel, by the host's clock, and the same with the peers; of torch's backends,
    with the context manager that chooses one. TFLOP/s are over both passes. D = 128, causal, S = 2048 to 16384, unless
    options say otherwise.

    --blocks times maps of which each block of queries sees 100, 50, 25, 12 and 6 % of the blocks of keys, at random,
    and the same problem without a map; TFLOP/s are over what is shown. `autoflash plot` draws the file of --out.
    """
    device = probe(common.device)
    if by_system and (exhaustive or host or readme is not None):
        raise click.UsageError("--systems is a run of its own: leave out --exhaustive, --overhead and --readme")
    if with_dram and not by_system:
        raise click.UsageError("--dram counts for --systems: give that too")
    if by_blocks and (by_system or exhaustive or host or flex or peer_names or readme is not None):
        others = "--systems, --exhaustive, --overhead, --peers and --flex"
        raise click.UsageError(f"--blocks is a run of its own: leave out {others}")
    if by_step and (by_system or by_blocks or exhaustive or host or ops or readme is not None):
        others = "--pass, --systems, --blocks, --exhaustive, --overhead and --readme"
        raise click.UsageError(f"--step is a run of its own, of both passes: leave out {others}")
    if by_step and asked != Asked():
        raise click.UsageError("--step times plain attention: leave out features")
    if with_gate and (by_step or by_system or by_blocks or exhaustive or host):
        raise click.UsageError(
            "--verify is for the grid: leave out --step, --systems, --blocks, --exhaustive, --overhead"
        )
    if (flex or peer_names) and (by_system or exhaustive or host):
        what = "--peers are peers" if peer_names else "--flex is a peer"
        raise click.UsageError(f"{what} of the grid: leave out --systems, --exhaustive and --overhead")
    if host:
        bench_overhead.run(common, device)
        return
    if out is not None:
        try:
            out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise click.ClickException(f"cannot make {out}: {error.strerror or error}") from error
        check_folder(out)
    grid = bench_grid.default_grid(device, quick=quick)
    if by_system:
        grid = bench_systems.default_grid(grid, device, quick=quick)
    if by_step:
        grid = bench_step.default_grid(grid, device)
    if by_blocks:
        asked = dataclasses.replace(asked, block_size=LEAST_BLOCK)
        grid = bench_blocks.default_grid(grid, device, quick=quick)
    changes: dict[str, object] = {"asked": asked, "group": group}
    if ops:
        changes["ops"] = tuple(Pass(op) for op in ops)
    if head_dims:
        changes["head_dims"] = head_dims
    if seqlens:
        changes["seqlens"] = seqlens
    if dtype:
        changes["dtype"] = DType(dtype)
    if causal is not None:
        changes["masks"] = (Mask.CAUSAL if causal else Mask.FULL,)
    grid = dataclasses.replace(grid, **changes)  # type: ignore[arg-type]  # dataclasses.replace is untyped by name
    ctx = click.get_current_context()
    if by_system:
        words = [*plot_systems.COMMAND.split(), *Retold.words(ctx, leave_out=(*_UNTOLD, "by_system"))]
        _systems(common, device, grid, out, with_dram=with_dram, command=shlex.join(words))
        return
    if by_blocks:
        _blocks(common, device, grid, out)
        return
    if exhaustive:
        _exhaustive(common, device, grid)
        return
    beside = peers.usual(grid.problems(), device, has_bias=asked.bias)
    if peer_names:
        beside = Peers(names=peer_names, are_named=True)
    if flex:
        beside = dataclasses.replace(beside, names=tuple(dict.fromkeys([*beside.names, peers.FLEX_NAME])))
    _grid(
        common,
        device,
        grid,
        beside,
        Retold.words(ctx, leave_out=_UNTOLD),
        out,
        readme,
        by_step=by_step,
        with_gate=with_gate,
    )


def _grid(
    common: Common,
    device: Device,
    grid: Grid,
    beside: Peers,
    words: list[str],
    out: Path | None,
    readme: Path | None,
    *,
    by_step: bool,
    with_gate: bool,
) -> None:
    run = bench_step.run if by_step else bench_grid.run
    decisions = table.load(common.db, common.table)
    checks = _checked(common, device, grid, decisions) if with_gate else {}
    rows: list[Row] = []
    stopped: KeyboardInterrupt | None = None
    with Progress(console=common.progress, transient=True) as progress:
        wanted = sum(1 for _ in grid.problems())
        task = progress.add_task("benchmark", total=wanted)

        def keep(row: Row) -> None:
            rows.append(row)
            progress.update(task, advance=1)

        def tell(problem: Problem, name: str) -> None:
            # Others' compilers take up to a minute.
            progress.update(task, description=escape(f"{cell_of(problem, device)}: preparing {name}"))

        try:
            run(grid, device, decisions, beside=beside, seed=common.seed or 0, on_kernel=tell, on_row=keep)
        except KeyboardInterrupt as stop:
            if not rows:
                raise
            stopped = stop
    report = _report(device, grid, rows, beside, words, checks)
    whole = bench_grid.default_grid(device, quick=False)
    if by_step:
        whole = bench_step.default_grid(whole, device)
    kind = ["step"] if by_step else []
    kind += [f"group{grid.group}"] if grid.group > 1 else []
    kind += sorted({feature.value for problem in grid.problems() for feature in problem.features})
    # Somebody who asks for peers asks for one grid after another.
    kind += ["peers", *bench_grid.narrowed(grid, whole)] if beside.are_named else []
    # What is whole is not replaced by what is not.
    kind += [] if stopped is None else ["partial"]
    _write(out, f"{'-'.join([device_slug(device.name), *kind])}.json", bench_json(report))
    short = f"{_caption(device, beside, words)}\n\n{markdown_table(*bench_report.pivot(rows, beside.names))}\n"
    if readme is not None and stopped is None:
        _put_into(readme, short)
    wrong = not all(check.passed for check in checks.values())
    if common.json:
        print_json(report)
    else:
        print_table("TFLOP/s", bench_report.row_columns(beside), [bench_report.row_cells(row, beside) for row in rows])
        lines = [*bench_report.summary(rows, beside.names), *bench_report.without_times(rows, beside.names)]
        lines += bench_check.lines(checks, bench_check.backends_of(beside.names)) if checks else []
        click.echo("\n".join([short, *(str(line) for line in lines)]))
    if stopped is not None:
        click.echo(f"Stopped: {wanted - len(rows)} of {wanted} problems were not timed.", err=True)
        raise stopped
    if wrong:
        raise click.exceptions.Exit(1)


def _checked(common: Common, device: Device, grid: Grid, decisions: Table) -> dict[Problem, Check]:
    problems = list(grid.problems())
    with Progress(console=common.progress, transient=True) as progress:
        task = progress.add_task("verifying", total=len(problems))
        return bench_check.run(problems, device, decisions, on_check=lambda problem: progress.update(task, advance=1))


def _systems(common: Common, device: Device, grid: Grid, out: Path | None, *, with_dram: bool, command: str) -> None:
    seed, failure = common.seed or 0, None
    if with_dram:
        # Before minutes are spent on times.
        ncu.find()
    with common.progress.status("compiling") as status:
        compared = bench_systems.run(
            grid,
            device,
            table.load(common.db, common.table),
            seed=seed,
            on_problem=lambda problem: status.update(escape(f"comparing {cell_of(problem, device)}")),
        )
        if with_dram:
            status.update("counting bytes of DRAM")
            try:
                compared = bench_systems.with_dram(compared, device, seed=seed)
            except CounterError as error:
                # The times are worth having all the same.
                failure = error
    rows: list[Json] = [bench_systems.comparison_json(one) for one in compared]
    report = {**_about(device), "command": command, "problems": rows}
    name = f"systems-{device_slug(device.name)}"
    _write(out, f"{name}.json", bench_json(report))
    _write(out, f"{name}.md", systems_markdown.text(compared, report))
    if common.json:
        print_json(report)
    else:
        for one in compared:
            bench_systems.print_comparison(one, device)
    if failure is not None:
        raise failure


def _blocks(common: Common, device: Device, grid: Grid, out: Path | None) -> None:
    with common.progress.status("timing block masks") as status:
        rows = bench_blocks.run(
            grid,
            device,
            table.load(common.db, common.table),
            seed=common.seed or 0,
            on_row=lambda row: status.update(escape(f"timed {cell_of(row.problem, device)}")),
        )
    found: list[Json] = [bench_blocks.row_json(row) for row in rows]
    report = {**_about(device), "command": plot_blocks.COMMAND, "rows": found}
    _write(out, f"blocks-{device_slug(device.name)}.json", bench_json(report))
    if common.json:
        print_json(report)
        return
    for row in rows:
        bench_blocks.print_row(row)


def _write(out: Path | None, name: str, text: str) -> None:
    """Write a results file into the folder that was asked for, if one was."""
    if out is not None:
        write_table(out / name, text, force=True)


def bench_json(report: Json) -> str:
    """The text of a results file."""
    return json.dumps(report, indent=1, sort_keys=True, allow_nan=False) + "\n"


def _about(device: Device) -> dict[str, Json]:
    here = environment(device)
    return {
        "device": device.name,
        "arch": device.arch,
        "torch": here.torch,
        "triton": here.triton,
        "cuda": here.cuda,
        "driver": here.driver,
        "date": _today(),
    }


def _report(
    device: Device, grid: Grid, rows: list[Row], beside: Peers, words: list[str], checks: Mapping[Problem, Check]
) -> dict[str, Json]:
    backends = bench_check.backends_of(beside.names)
    found: list[Json] = []
    for row in rows:
        check = checks.get(row.problem)
        checked: dict[str, Json] = {} if check is None else {"gate": bench_check.check_json(check, backends)}
        found.append({**bench_report.row_json(row), **checked})
    return {
        **_about(device),
        "command": shlex.join(["autoflash", "bench", *words]),
        "tokens": grid.tokens,
        "model_dim": grid.model_dim,
        "peer_versions": {**peers.versions(beside.names)},
        "summary": [one.to_json() for one in bench_report.summary(rows, beside.names)],
        "rows": found,
    }


def _caption(device: Device, beside: Peers, words: list[str]) -> str:
    here = environment(device)
    versions = f"torch {here.torch}" + (f", Triton {here.triton}" if here.triton else "")
    versions += "".join(f", {version}" for name, version in peers.versions(beside.names).items() if name != "cudnn")
    names = " / ".join((bench_grid.GENERATED, *(peers.title(name) for name in beside.names)))
    command = shlex.join(["scripts/benchmark", *words])
    return f"TFLOP/s, {names}, on {device.name} ({versions}, {_today()}; `{command}` remakes it):"


def _today() -> str:
    return datetime.now(timezone.utc).date().isoformat()


def _put_into(readme: Path, text: str) -> None:
    """Replace what stands between the two marks.

    Raises:
        click.UsageError: if the file does not have them.
    """
    before, begin, rest = readme.read_text(encoding="utf-8").partition(README_BEGIN)
    _, end, after = rest.partition(README_END)
    if not begin or not end:
        raise click.UsageError(f"{readme} has no lines {README_BEGIN!r} and {README_END!r}")
    write_table(readme, f"{before}{begin}\n{text}{end}{after}", force=True)


def _exhaustive(common: Common, device: Device, grid: Grid) -> None:
    decisions = table.load(common.db, common.table)
    here = Here(device=device, environment=environment(device))
    reports: list[Json] = []
    for asked in grid.problems():
        cell = cell_of(asked, device)
        problem = problem_of(cell, device)
        candidate = inference_ladder(cell, here, decisions, VendorPolicy.NEVER)[0]
        family = candidate.variant.family
        space = catalog.search_space(cell, device, family)
        variants = space.variants()
        with Progress(console=common.progress, transient=True) as progress:
            task = progress.add_task(escape(str(cell)), total=len(variants))
            found = sweep(
                problem,
                device,
                variants,
                winner=candidate.variant,
                default=space.default(),
                seed=common.seed or 0,
                on_variant=lambda timed, task=task, progress=progress: progress.advance(task),  # type: ignore[misc]  # bound early on purpose
            )
        reports.append(_sweep_json(str(cell), candidate.tier.value, found))
        if not common.json:
            _print_sweep(str(cell), family, candidate.tier.value, found)
    if common.json:
        print_json(reports)


def _sweep_json(cell: str, tier: str, found: Sweep) -> dict[str, Json]:
    return {
        "cell": cell,
        "tier": tier,
        "variants": len(found.screened),
        "regret": found.regret,
        "spread": found.spread,
        "winner": bench_report.timed_json(found.winner),
        "default": bench_report.timed_json(found.default),
        "best": bench_report.timed_json(found.best),
        "screened": [bench_report.timed_json(timed) for timed in found.screened],
    }


def _print_sweep(cell: str, family: Family, tier: str, found: Sweep) -> None:
    columns = (Column(title="kernel"), Column(title="us", numeric=True), Column(title="TFLOP/s", numeric=True))
    named = [(f"winner ({tier})", found.winner), ("default", found.default)]
    named += [("sweep", timed) for timed in found.finalists]
    rows = [
        [
            f"{name}: {timed.variant}",
            number(None if timed.measurement is None else timed.measurement.median_us),
            number(timed.tflops, 3),
        ]
        for name, timed in named
    ]
    print_table(f"{cell}: {len(found.screened)} variants of {family.value}", columns, rows)
    click.echo(
        f"The winner is {100 * found.regret:.1f} % slower than the best of the sweep; "
        f"the slowest of the sweep takes {found.spread:.1f} times as long as the fastest.\n"
    )
