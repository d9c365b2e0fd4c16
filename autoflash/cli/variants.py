"""Options that name a variant: a family and some of its choices."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Concatenate, ParamSpec, TypeVar

import click

from autoflash.device import CROSS_TARGETS, Device, DeviceKind
from autoflash.errors import UnsupportedError
from autoflash.problem import Cell, features_text
from autoflash.space import catalog
from autoflash.space.knob import Knob
from autoflash.variant import Choice, Choices, Family, Variant

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True, slots=True, kw_only=True)
class VariantOptions:
    """A variant as the command line gives it.

    Attributes:
        family: None: the best generated family that runs on the device.
        settings: ``NAME=VALUE`` each; what is not set keeps its default.
    """

    family: Family | None
    settings: tuple[str, ...]

    @property
    def given(self) -> bool:
        """Whether anything was asked for at all."""
        return self.family is not None or bool(self.settings)

    def variant(self, cell: Cell, device: Device) -> Variant:
        """The variant asked for, for a cell on a device.

        Raises:
            click.UsageError: for a knob or value that the family does not have.
        """
        family = self.family or catalog.families(cell.op, device, cell.features)[0]
        if family is Family.VENDOR:
            return self._vendor(cell, device)
        space = catalog.search_space(cell, device, family)
        default = space.default()
        return space.variant({**default.structure, **default.config, **self._choices(space.knobs)})

    def _choices(self, knobs: Sequence[Knob]) -> dict[str, Choice]:
        named = {knob.name: knob for knob in knobs}
        choices: dict[str, Choice] = {}
        for setting in self.settings:
            name, _, text = setting.partition("=")
            if name not in named:
                raise click.UsageError(f"--set {setting}: there is no such knob; choose from {', '.join(named)}")
            values = {str(value).lower(): value for value in named[name].values}
            if text.lower() not in values:
                raise click.UsageError(f"--set {setting}: {name} is one of {', '.join(values)}")
            choices[name] = values[text.lower()]
        return choices

    def _vendor(self, cell: Cell, device: Device) -> Variant:
        if cell.features:
            raise click.UsageError(f"--family vendor: torch's kernels are not asked for {features_text(cell.features)}")
        offered = {str(variant.structure["backend"]): variant for variant in catalog.vendors(cell, device)}
        choices = Choices(dict(setting.partition("=")[::2] for setting in self.settings))
        if list(choices) != ["backend"] or choices["backend"] not in offered:
            raise click.UsageError(f"--family vendor needs --set backend={'|'.join(offered)}")
        return offered[choices.text("backend")]


def variant_options(command: Callable[Concatenate[VariantOptions, P], R]) -> Callable[P, R]:
    """Give a command options that name a variant, handed over as its first argument."""

    @click.option("--family", type=click.Choice([member.value for member in Family]), help="Set of templates.")
    @click.option("--set", "settings", multiple=True, metavar="KNOB=VALUE", help="One choice; may be repeated.")
    @functools.wraps(command)
    def with_variant(*args: P.args, **options: P.kwargs) -> R:
        family, settings = options.pop("family"), options.pop("settings")
        wanted = VariantOptions(family=Family(family) if family else None, settings=settings)  # type: ignore[arg-type]  # click has typed it
        return command(wanted, *args, **options)

    return with_variant


def target(name: str | None, family: Family | None) -> Device:
    """The device to make text for: one of this machine, or an architecture that it does not have.

    Args:
        name: ``cpu``, ``cuda:N``, an architecture such as ``sm_90``, or None.
        family: Triton text on a machine with no GPU is made for sm_90.

    Raises:
        UnsupportedError: for a device that is neither.
    """
    # Probing imports torch's device layer; naming an architecture needs none of it.
    from autoflash.runtime.probe import probe

    if name in CROSS_TARGETS:
        return CROSS_TARGETS[name]
    try:
        device = probe(name)
    except UnsupportedError as error:
        raise UnsupportedError(f"{error}, or an architecture: {', '.join(CROSS_TARGETS)}") from None
    return CROSS_TARGETS["sm_90"] if device.kind is DeviceKind.CPU and family is Family.TRITON else device
