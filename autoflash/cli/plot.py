"""``autoflash plot``: draw a results file of ``autoflash bench``."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from autoflash.cli import peers, plot_blocks, plot_systems
from autoflash.cli.options import Common, common_options
from autoflash.cli.output import print_json
from autoflash.cli.plot_panels import Panel, scale_lengths, small_multiples

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# What made a results file, before the options that narrowed it, and where in it the results are.
_RESULTS = {
    plot_blocks.COMMAND: "rows",
    plot_systems.COMMAND: "problems",
    "autoflash bench": "rows",
}
FORMATS = (".svg", ".png", ".pdf")

Curves = dict[str, dict[int, float]]
"""TFLOP/s by sequence length, for each kernel by name; the generated one first."""

# Colours that people with any kind of colour vision tell apart (Okabe and Ito, https://jfly.uni-koeln.de/color/).
_COLOURS = ("#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_PANEL_INCHES = (3.2, 2.3)
# Of the legend, above each panel; above so few panels, a title takes two lines, in small type.
_NAMES_OF_A_PANEL, _NARROW = 2, 2


@click.command("plot")
@common_options
@click.argument("results", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), required=True, help="File: .svg, .png or .pdf.")
def command(common: Common, results: Path, out: Path) -> None:
    """Draw a results file of `autoflash bench`: TFLOP/s by sequence length, a panel for each pass, mask and head size.

    Of `autoflash bench --blocks`: time by the share of the blocks that are shown. Of `autoflash bench --systems`: bytes
    of main memory by sequence length, of the model and, with --dram, as counted.

    Equal results give equal bytes of an SVG. Needs matplotlib: pip install 'autoflash[report]'.
    """
    if out.suffix not in FORMATS:
        raise click.UsageError(f"{out} does not end in {', '.join(FORMATS)}")
    report = _read(results)
    try:
        figure, panels = _figure(report)
        save(figure, out)
    except (KeyError, TypeError, AttributeError) as error:
        raise click.ClickException(
            f"{results} is damaged or of another version ({type(error).__name__}: {error}); run the benchmark again"
        ) from error
    except ImportError as error:
        raise click.ClickException(f"{error}: pip install 'autoflash[report]' installs matplotlib") from error
    except OSError as error:
        raise click.ClickException(f"cannot write {out}: {error.strerror or error}") from error
    if common.json:
        print_json({"file": str(out), "panels": panels})
    else:
        click.echo(f"Wrote {out}")


def _figure(report: Mapping[str, Any]) -> tuple[Figure, int]:
    """The figure of a results file, and how many panels have something in them."""
    title = _title(report)
    if report["command"] == plot_blocks.COMMAND:
        return plot_blocks.draw(report["rows"], title), len(report["rows"])
    if report["command"].startswith(plot_systems.COMMAND):
        panels = plot_systems.panels_of(report["problems"])
        return plot_systems.draw(panels, title), len(panels)
    curves = panels_of(report["rows"])
    return draw(curves, title), len(curves)


def panels_of(rows: list[dict[str, Any]]) -> dict[Panel, Curves]:
    """What is drawn: the timed kernels of each row, those that could not run left out."""
    panels: dict[Panel, Curves] = {}
    for row in rows:
        mask = "+".join([row["mask"], *filter(None, row["features"].split(","))])
        curves = panels.setdefault((row["pass"], mask, row["head_dim"]), {})
        for name, timed in (("generated", row["generated"]), *((peers.title(n), t) for n, t in row["vendors"].items())):
            if timed["tflops"] is not None:
                curves.setdefault(name, {})[row["seqlen"]] = timed["tflops"]
    return panels


def draw(panels: Mapping[Panel, Curves], title: str) -> Figure:
    """Small multiples: passes and masks down, head dimensions across.

    Raises:
        ImportError: without matplotlib.
    """
    names = list(dict.fromkeys(itertools.chain.from_iterable(panels.values())))
    figure, grid = small_multiples(
        panels,
        lambda axes, panel: _draw_panel(axes, panels.get(panel, {}), names),
        ylabel="TFLOP/s",
        inches=_PANEL_INCHES,
        beside=(0.0, 0.7),
    )
    for axes in grid[:, 0]:
        # Of the row: its panels share the axis.
        axes.set_ylim(bottom=0)
    handles = {handle.get_label(): handle for axes in grid.flat for handle in axes.get_legend_handles_labels()[0]}
    across = grid.shape[1]
    is_narrow = across <= _NARROW
    size = "small" if is_narrow else "medium"
    figure.legend(
        handles.values(),
        handles.keys(),
        loc="outside upper center",
        ncols=min(len(names), _NAMES_OF_A_PANEL * across),
        title=title.replace(" (", "\n(") if is_narrow else title,
        fontsize=size,
        title_fontsize=size,
    )
    return figure


def save(figure: Figure, out: Path) -> None:
    """Write it; neither a date nor random names go into an SVG, so that what is drawn decides the bytes."""
    import matplotlib as mpl

    metadata: dict[str, Any] = {"Date": None} if out.suffix == ".svg" else {}
    with mpl.rc_context({"svg.hashsalt": "autoflash", "svg.fonttype": "none"}):
        figure.savefig(out, metadata=metadata, dpi=150)


def _draw_panel(axes: Axes, curves: Curves, names: list[str]) -> None:
    for number, name in enumerate(names):
        curve = sorted(curves.get(name, {}).items())
        if curve:
            xs, ys = zip(*curve, strict=True)
            colour = _COLOURS[number % len(_COLOURS)]
            axes.plot(xs, ys, marker="o", markersize=3, color=colour, label=name, zorder=len(names) - number)
    scale_lengths(axes, itertools.chain.from_iterable(curves.values()))


def _read(results: Path) -> dict[str, Any]:
    try:
        report = json.loads(results.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise click.ClickException(f"{results} is no JSON: {error}") from error
    command = str(report.get("command", "")) if isinstance(report, dict) else ""
    kind = next((known for known in _RESULTS if f"{command} ".startswith(f"{known} ")), None)
    found = report.get(_RESULTS[kind]) if kind else None
    if not found:
        raise click.ClickException(f"{results} is no results file; `autoflash bench --out DIR` writes one")
    return dict(report)


def _title(report: Mapping[str, Any]) -> str:
    triton = f", Triton {report['triton']}" if report.get("triton") else ""
    return f"{report['device']} (torch {report['torch']}{triton}, {report['date']})"
