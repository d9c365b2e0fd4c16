"""Choices in the softmax that FlashAttention-4 brought, for the families that search them.

Variants were recorded without them, so their defaults are spelled by leaving them out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from autoflash.problem import Cell, DType
from autoflash.space.knob import Knob, Part
from autoflash.variant import Choice, Choices

# On an H200 a score takes D / 1024 cycles of matrix units and 1 / 16 of special-function units: at 256, four times as
# long.
_MOST_COLUMNS = 128


def rescale_knob(applies: Callable[[Mapping[str, Choice]], bool]) -> Knob:
    """Whether the accumulator is rescaled at each tile, or at those where the maximum of some row grows by much."""
    return Knob(
        name="rescale",
        part=Part.STRUCTURE,
        values=("always", "conditional"),
        default="always",
        applies=applies,
        came_later=True,
    )


def exp2_knob(applies: Callable[[Mapping[str, Choice]], bool]) -> Knob:
    """Whether all exponentials come from the special-function units, or a quarter from a polynomial."""
    return Knob(
        name="exp2",
        part=Part.STRUCTURE,
        values=("hardware", "polynomial"),
        default="hardware",
        applies=applies,
        came_later=True,
    )


def gains(cell: Cell) -> bool:
    """Whether the exponentials of a cell may be what its kernels wait for, and P is rounded to 16 bits."""
    return cell.dtype is not DType.FP32 and max(cell.head_dim, cell.head_dim_v) <= _MOST_COLUMNS


def score(structure: Choices) -> float:
    """What is added to the static score: the same variant without these choices is tried first."""
    # A conditional rescale lost 3 to 5 % on an H200 in a prototype of the Hopper family; a polynomial was not timed.
    conditional = -0.1 if structure.get("rescale") == "conditional" else 0.0
    return conditional - (0.05 if structure.get("exp2") == "polynomial" else 0.0)
