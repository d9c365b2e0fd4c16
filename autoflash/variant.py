"""One way to compute a problem: a family, a structure (text of the kernel) and a config (numbers at launch)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum

from autoflash import keys

Choice = str | int | bool


class Family(str, Enum):
    """A set of templates with its knobs and constraints."""

    TORCH_TILED = "torch_tiled"
    TRITON = "triton"
    GLUON_SM90 = "gluon_sm90"
    VENDOR = "vendor"

    @property
    def uses_triton(self) -> bool:
        """Whether Triton's compiler makes its kernels."""
        return self in (Family.TRITON, Family.GLUON_SM90)


class Choices(Mapping[str, Choice]):
    """An immutable mapping of knob to choice, hashable, sorted by name.

    The catalog of the family (``space.catalog``) says which names and values there are.
    """

    __slots__ = ("_hash", "_items")

    def __init__(self, choices: Mapping[str, Choice] | None = None, /, **named: Choice) -> None:
        """Build from a mapping, from keywords, or both."""
        self._items: dict[str, Choice] = dict(sorted({**(choices or {}), **named}.items()))
        self._hash = hash(tuple(self._items.items()))

    def __getitem__(self, name: str) -> Choice:
        """The choice made for one knob."""
        return self._items[name]

    def __iter__(self) -> Iterator[str]:
        """Names in sorted order."""
        return iter(self._items)

    def __len__(self) -> int:
        """How many knobs are set."""
        return len(self._items)

    def __hash__(self) -> int:
        """Equal choices hash equally."""
        return self._hash

    def __eq__(self, other: object) -> bool:
        """Same names, same choices; True is not 1."""
        if not isinstance(other, Choices):
            return NotImplemented
        return [(k, type(v), v) for k, v in self.items()] == [(k, type(v), v) for k, v in other.items()]

    def __repr__(self) -> str:
        """Readable and stable."""
        return f"Choices({self})"

    def __str__(self) -> str:
        """Short form such as ``loads=tma loop_order=query_outer``."""
        return " ".join(
            f"{name}={str(value).lower() if value in (True, False) and isinstance(value, bool) else value}"
            for name, value in self.items()
        )

    def __reduce__(self) -> tuple[type[Choices], tuple[dict[str, Choice]]]:
        """Pickle as a plain dict."""
        return (Choices, (dict(self._items),))

    def number(self, name: str) -> int:
        """An integer choice.

        Raises:
            TypeError: if the knob holds something else.
        """
        value = self._items[name]
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{name} is {value!r}, not a number")
        return value

    def text(self, name: str) -> str:
        """A string choice.

        Raises:
            TypeError: if the knob holds something else.
        """
        value = self._items[name]
        if not isinstance(value, str):
            raise TypeError(f"{name} is {value!r}, not a string")
        return value

    def flag(self, name: str) -> bool:
        """A boolean choice.

        Raises:
            TypeError: if the knob holds something else.
        """
        value = self._items[name]
        if not isinstance(value, bool):
            raise TypeError(f"{name} is {value!r}, not a flag")
        return value

    def replace(self, **changes: Choice) -> Choices:
        """A copy with some choices changed or added."""
        return Choices({**self._items, **changes})


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """Family + structure + config: enough to render, compile and launch, given a problem.

    Attributes:
        family: Which templates.
        structure: Choices that change the text of the kernel.
        config: Numbers passed at launch (constexpr, warps, stages).
    """

    family: Family
    structure: Choices
    config: Choices

    def to_dict(self) -> dict[str, str | dict[str, Choice]]:
        """Plain JSON content; :meth:`from_dict` reads it back."""
        return {"family": self.family.value, "structure": dict(self.structure), "config": dict(self.config)}

    @classmethod
    def from_dict(cls, content: Mapping[str, object]) -> Variant:
        """Read what :meth:`to_dict` wrote.

        Raises:
            ValueError, KeyError: for content that is not a variant.
        """
        structure, config = content["structure"], content["config"]
        for choices in (structure, config):
            if not isinstance(choices, Mapping) or not all(
                isinstance(name, str) and isinstance(value, (str, int, bool)) for name, value in choices.items()
            ):
                raise ValueError(f"choices must map names to strings, integers or booleans, got {choices!r}")
        return cls(family=Family(content["family"]), structure=Choices(structure), config=Choices(config))  # type: ignore[arg-type]  # checked above

    @property
    def key(self) -> str:
        """Identity of the variant."""
        return keys.key("variant", self.to_dict())

    def __str__(self) -> str:
        """Short form for people."""
        return " ".join(part for part in (self.family.value, str(self.structure), str(self.config)) if part)
