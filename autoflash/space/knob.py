"""A knob: one named choice of a family, with the values that a search may give it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

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

    def is_spelled(self, value: Choice, applies: bool) -> bool:
        """Whether a variant names the knob, given its value and whether it means anything."""
        if self.came_later and value == self.default:
            return False
        return applies or self.part is Part.STRUCTURE

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
    parts: dict[Part, dict[str, Choice]] = {part: {} for part in Part}
    for knob in knobs:
        applies = knob.applies(known)
        value = choices.get(knob.name, knob.default) if applies else knob.default
        known[knob.name] = value
        if knob.is_spelled(value, applies):
            parts[knob.part][knob.name] = value
    return Choices(parts[Part.STRUCTURE]), Choices(parts[Part.CONFIG])


def spellings(knobs: tuple[Knob, ...]) -> Iterator[tuple[Choices, Choices]]:
    """Every structure with every config, once each, in the order of the knobs' values: the last knob changes first."""
    return ((structure, config) for structure, configs in structures(knobs) for config in configs)


def structures(knobs: tuple[Knob, ...]) -> Iterator[tuple[Choices, Iterator[Choices]]]:
    """Every structure once with its configs, which are made where they are asked for."""
    # Thousands of variants share a few structures and numbers.
    shared: dict[tuple[tuple[str, Choice], ...], Choices] = {}
    texts = sum(1 for _ in itertools.takewhile(lambda knob: knob.part is Part.STRUCTURE, knobs))

    def share(choices: dict[str, Choice]) -> Choices:
        one = tuple(choices.items())
        return shared.get(one) or shared.setdefault(one, Choices(choices))

    def configs(text: _Branch) -> Iterator[Choices]:
        yield from (share(branch.config) for branch in _grown(text, knobs[texts:]))

    # One text at a time: a space has a hundred thousand branches.
    for text in _grown(_Branch({}, {}, {}), knobs[:texts]):
        yield share(text.structure), configs(text)


class _Branch(NamedTuple):
    """The choices of the first few knobs: all of them, and those that a variant names."""

    known: dict[str, Choice]
    structure: dict[str, Choice]
    config: dict[str, Choice]


def _grown(branch: _Branch, knobs: tuple[Knob, ...]) -> list[_Branch]:
    """A branch with every choice of more knobs; one that means nothing has one."""
    branches = [branch]
    for knob in knobs:
        grown = []
        for known, structure, config in branches:
            applies = knob.applies(known)
            for value in knob.values if applies else (knob.default,):
                one = {knob.name: value}
                if not knob.is_spelled(value, applies):
                    grown.append(_Branch(known | one, structure, config))
                elif knob.part is Part.STRUCTURE:
                    grown.append(_Branch(known | one, structure | one, config))
                else:
                    grown.append(_Branch(known | one, structure, config | one))
        branches = grown
    return branches
