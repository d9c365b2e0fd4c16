"""The figure of ``autoflash bench --systems``: bytes of main memory by sequence length, of the model and counted."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from autoflash.cli.plot_panels import Panel, scale_lengths, small_multiples

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COMMAND = "autoflash bench --systems"
"""What a results file says that made it, before options."""

_PANEL_INCHES = (3.6, 3.0)
# Room for the legend, which stands beside the panels.
_LEGEND_INCHES = 2.2
# Of Okabe and Ito, as in other figures; the palest is the last.
_COLOURS = ("#000000", "#E69F00", "#56B4E9", "#009E73", "#0072B2", "#D55E00", "#CC79A7", "#F0E442")
_GREY = "#999999"
_GIB = 2**30

Lines = tuple[dict[int, int], dict[int, int]]
"""Bytes by sequence length: of the model, and counted ones where there are some."""


def panels_of(problems: list[dict[str, Any]]) -> dict[Panel, dict[str, Lines]]:
    """What is drawn: the systems whose algorithm is known, by name."""
    panels: dict[Panel, dict[str, Lines]] = {}
    for one in problems:
        problem = one["problem"]
        lines = panels.setdefault((problem["pass"], problem["mask"], problem["head_dim"]), {})
        for row in one["systems"]:
            if row["traffic"] is None:
                continue
            modelled, counted = lines.setdefault(row["system"], ({}, {}))
            modelled[problem["seqlen_q"]] = row["traffic"]["total_bytes"]
            if row["dram_read_bytes"] is not None:
                counted[problem["seqlen_q"]] = row["dram_read_bytes"] + row["dram_write_bytes"]
    return panels


def draw(panels: Mapping[Panel, Mapping[str, Lines]], title: str) -> Figure:
    """Small multiples: passes and masks down, head dimensions across.

    A line with points is counted, a dashed one of the model.

    Raises:
        ImportError: without matplotlib.
    """
    from matplotlib.lines import Line2D

    names = dict.fromkeys(itertools.chain.from_iterable(panels.values()))
    colours = {name: _COLOURS[number % len(_COLOURS)] for number, name in enumerate(names)}
    figure, _ = small_multiples(
        panels,
        lambda axes, panel: _draw_panel(axes, panels.get(panel, {}), colours),
        ylabel="main memory, GiB",
        inches=_PANEL_INCHES,
        beside=(_LEGEND_INCHES, 0.4),
    )
    handles = [Line2D([], [], color=colour, label=name) for name, colour in colours.items()]
    if any(counted for lines in panels.values() for _, counted in lines.values()):
        handles.append(Line2D([], [], color=_GREY, marker="o", markersize=3, label="counted by ncu"))
    handles.append(Line2D([], [], color=_GREY, linestyle="--", label="IO model"))
    figure.legend(handles=handles, loc="outside right center", fontsize=8)
    figure.suptitle(title, fontsize=10)
    return figure


def _draw_panel(axes: Axes, lines: Mapping[str, Lines], colours: Mapping[str, str]) -> None:
    for name, (modelled, counted) in lines.items():
        for points, marker, style in ((modelled, "", "--"), (counted, "o", "-")):
            if points:
                xs, ys = zip(*sorted(points.items()), strict=True)
                sizes = [y / _GIB for y in ys]
                axes.plot(xs, sizes, color=colours[name], marker=marker, markersize=3, linestyle=style)
    axes.set_yscale("log")
    scale_lengths(axes, (length for modelled, _ in lines.values() for length in modelled))
