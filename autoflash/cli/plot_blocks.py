"""The figure of ``autoflash bench --blocks``: time by the share of the blocks that are shown."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COMMAND = "autoflash bench --blocks"
"""What a results file says that made it."""

_PANEL_INCHES = (3.2, 2.6)
# The width of the legend.
_LEAST_INCHES = 5.6
# Of Okabe and Ito, as in other figures.
_TIMED, _PROPORTION, _WITHOUT = "#D55E00", "#999999", "#0072B2"


def draw(rows: list[dict[str, Any]], title: str) -> Figure:
    """A panel for each row of a results file: passes down, the other problems across.

    Raises:
        ImportError: without matplotlib.
    """
    from matplotlib.figure import Figure

    down = list(dict.fromkeys(row["pass"] for row in rows))
    across = list(dict.fromkeys(_name(row) for row in rows))
    width, height = _PANEL_INCHES
    size = max(width * len(across), _LEAST_INCHES), height * len(down) + 0.7
    figure = Figure(figsize=size, layout="constrained")
    grid = figure.subplots(len(down), len(across), squeeze=False, sharex=True)
    for (i, op), (j, name) in itertools.product(enumerate(down), enumerate(across)):
        axes = grid[i][j]
        for row in rows:
            if (row["pass"], _name(row)) == (op, name):
                _draw_panel(axes, row)
        axes.set_title(f"{op}, {name}", fontsize=9)
        axes.tick_params(labelsize=8)
    for axes in grid[-1]:
        axes.set_xlabel("blocks that are shown, %", fontsize=8)
    for axes in grid[:, 0]:
        axes.set_ylabel("time, ms", fontsize=8)
    handles = {handle.get_label(): handle for axes in grid.flat for handle in axes.get_legend_handles_labels()[0]}
    figure.legend(handles.values(), handles.keys(), loc="outside upper center", ncols=len(handles), title=title)
    return figure


def _name(row: dict[str, Any]) -> str:
    others = [feature for feature in row["features"].split(",") if feature != "block_mask"]
    return f"{'+'.join([row['mask'], *others])}, D = {row['head_dim']}, S = {row['seqlen']}"


def _draw_panel(axes: Axes, row: dict[str, Any]) -> None:
    timed = sorted((100.0 * one["visible"], one["median_us"] / 1000.0) for one in row["points"] if one["median_us"])
    if timed:
        shares, times = zip(*timed, strict=True)
        axes.plot(shares, times, marker="o", markersize=3, color=_TIMED, label="with a block mask", zorder=3)
        end = (0.0, shares[-1]), (0.0, times[-1])
        axes.plot(*end, linestyle="--", color=_PROPORTION, label="in proportion", zorder=1)
    if row["without"]["median_us"]:
        axes.axhline(row["without"]["median_us"] / 1000.0, linestyle=":", color=_WITHOUT, label="without one", zorder=2)
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.grid(visible=True, alpha=0.3)
