"""Small multiples by sequence length: passes and masks down, head dimensions across."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Panel = tuple[str, str, int]
"""Pass, mask and head dimension."""


def small_multiples(
    panels: Iterable[Panel],
    draw_panel: Callable[[Axes, Panel], None],
    *,
    ylabel: str,
    inches: tuple[float, float],
    beside: tuple[float, float],
) -> tuple[Figure, Any]:
    """A figure with an axes for each panel, and the array of them.

    Args:
        panels: Those that have something in them.
        draw_panel: Draws what a panel has, if anything.
        ylabel: Of each row's first axes.
        inches: Width and height of a panel.
        beside: Width and height that the figure has beyond its panels.

    Raises:
        ImportError: without matplotlib.
    """
    from matplotlib.figure import Figure

    known = list(panels)
    down = list(dict.fromkeys((op, mask) for op, mask, _ in known))
    across = sorted({head_dim for _, _, head_dim in known})
    size = inches[0] * len(across) + beside[0], inches[1] * len(down) + beside[1]
    figure = Figure(figsize=size, layout="constrained")
    grid = figure.subplots(len(down), len(across), squeeze=False, sharex=True, sharey="row")
    for (i, (op, mask)), (j, head_dim) in itertools.product(enumerate(down), enumerate(across)):
        axes = grid[i][j]
        draw_panel(axes, (op, mask, head_dim))
        axes.set_title(f"{op}, {mask}, D = {head_dim}", fontsize=9)
        axes.tick_params(labelsize=8)
    for axes in grid[-1]:
        axes.set_xlabel("sequence length", fontsize=8)
    for axes in grid[:, 0]:
        axes.set_ylabel(ylabel, fontsize=8)
    return figure, grid


def scale_lengths(axes: Axes, lengths: Iterable[int]) -> None:
    """A logarithmic axis with a tick for each sequence length, and a grid."""
    ticks = sorted(set(lengths))
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [str(length) for length in ticks], minor=False)
    axes.grid(visible=True, alpha=0.3)
