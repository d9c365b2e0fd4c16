"""A knob: one named choice of a family, with the values that a search may give it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum

from autoflash.variant import Choice, Choices


class Part(str, Enum):
    """Where a knob acts: on the text of the kernel, or on the numbers passed at launch."""

    STRUCTURE = "structure"
    CONFIG = "config"


def always(_: Mapping[str, Choice]) -> bool:
    """A knob that means something whatever else is chosen."""
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class Knob:
    """One choice of a family.

    A structure knob that does not apply is spelled with its default; a config knob that does not apply is absent, and
    so is the default of a knob that came later than recorded variants. So each distinct kernel has one spelling.

    Attributes:
        name: As templates and launch plans know it.
        part: Structure or config.
        values: What a search may try, simplest first.
        default: The safe value; one of ``values``.
        applies: Whether the knob means anything, given the choices of the knobs before it.
        came_later: Variants were recorded without the knob: they mean its default, which is spelled by leaving it out.
    """

    name: str
    part: Part
    values: tuple[Choice, ...]
    default: Choice
    applies: Callable[[Mapping[str, Choice]], bool] = always
    came_later: bool = False

    def __post_init__(self) -> None:
        """A default outside the values could never be found by a search."""
        if self.default not in self.values:
            raise ValueError(f"the default {self.default!r} of {self.name} is not among {self.values}")

    def of(self, choices: Mapping[str, Choice]) -> Choice | None:
        """What flat choices say of the knob; None where they are of a variant that lacks it."""
        return choices.get(self.name, self.default if self.came_later else None)

    def distance(self, one: Choice, other: Choice) -> int:
        """Steps between two values: along the list for numbers, 0 or 1 for words."""
        if one == other:
            return 0
        if isinstance(one, str) or isinstance(other, str):
            return 1
        return abs(self.values.index(one) - self.values.index(other))


def split(knobs: tuple[Knob, ...], choices: Mapping[str, Choice]) -> tuple[Choices, Choices]:
    """Structure and config out of one flat mapping, every knob spelled in its one way."""
    known: dict[str, Choice] = {}
    structure: dict[str, Choice] = {}
    config: dict[str, Choice] = {}
    for knob in knobs:
        applies = knob.applies(known)
        value = choices.get(knob.name, knob.default) if applies else knob.default
        known[knob.name] = value
        if knob.came_later and value == knob.default:
            continue
        if knob.part is Part.STRUCTURE:
            structure[knob.name] = value
        elif applies:
            config[knob.name] = value
    return Choices(structure), Choices(config)
