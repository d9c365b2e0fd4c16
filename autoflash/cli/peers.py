"""The kernels of others that `autoflash bench` times beside generated ones, by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import click

from autoflash.device import Device, DeviceKind
from autoflash.evaluate import fa4
from autoflash.evaluate.biased_sdpa import BIASED, BiasedSdpa
from autoflash.evaluate.fa4 import FA4, FlashAttention4
from autoflash.evaluate.flex import FLEX, FlexAttention
from autoflash.evaluate.peer import Peer
from autoflash.problem import Cell, Form, Problem
from autoflash.runtime.bind import bind
from autoflash.runtime.executable import Executable
from autoflash.runtime.vendor import BACKENDS, cudnn_version
from autoflash.space import catalog
from autoflash.variant import Choices, Family, Variant


@dataclass(frozen=True, slots=True, kw_only=True)
class _Outsider:
    """A peer that dispatch does not know."""

    variant: Variant
    make: Callable[[], Peer]
    title: str

    @property
    def name(self) -> str:
        return self.variant.structure.text("backend")


_OUTSIDERS = {
    outsider.name: outsider
    for outsider in (
        _Outsider(variant=FA4, make=FlashAttention4, title="FlashAttention-4"),
        _Outsider(variant=FLEX, make=FlexAttention, title="FlexAttention"),
        _Outsider(variant=BIASED, make=BiasedSdpa, title="SDPA efficient"),
    )
}
NAMES = (*BACKENDS, *_OUTSIDERS)
FLEX_NAME = FLEX.structure.text("backend")
_FA4_NAME = FA4.structure.text("backend")
_BIASED_NAME = BIASED.structure.text("backend")


@dataclass(frozen=True, slots=True, kw_only=True)
class Peers:
    """Who is timed.

    Attributes:
        names: Of :data:`NAMES`, in the order of the table.
        are_named: Somebody asked for them by name: then each has a place in every row, with the reason where it cannot
            run. Of the usual ones, those that are not worth asking are left out.
    """

    names: tuple[str, ...]
    are_named: bool = False

    def variants(self, cell: Cell, device: Device) -> dict[str, Variant]:
        """Those to time on a problem of this cell."""
        known = catalog.vendors(cell, device)
        found = {name: _variant(name) for name in self.names}
        return {
            name: variant for name, variant in found.items() if self.are_named or name in _OUTSIDERS or variant in known
        }


class PeerNames(click.ParamType):  # type: ignore[type-arg]  # generic only since click 8.4
    """Names of peers with commas between them, such as ``cudnn,fa4``."""

    name = "peers"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, ...]:
        """Each name once."""
        if isinstance(value, tuple):
            return value
        names = tuple(dict.fromkeys(name.strip() for name in str(value).split(",")))
        for name in names:
            if name not in NAMES:
                self.fail(f"{name!r} is no peer; write some of {','.join(NAMES)}", param, ctx)
        return names


def usual(problems: Iterable[Problem], device: Device, *, has_bias: bool) -> Peers:
    """Torch's backends that do most; with features that torch's kernels are not asked for, none, or the one for a bias.

    A window that is as long as the sequence is none: problems of one grid may differ.
    """
    if all(problem.features for problem in problems):
        return Peers(names=(_BIASED_NAME,) if has_bias else ())
    return Peers(names=("flash", "math") if device.kind is DeviceKind.CPU else ("cudnn", "flash"))


def executable(problem: Problem, variant: Variant, device: Device) -> Executable:
    """Of a peer or of a generated kernel.

    Raises:
        RenderError, ImportError: as :func:`autoflash.runtime.bind.bind`.
    """
    outsider = next((one for one in _OUTSIDERS.values() if one.variant == variant), None)
    return bind(Form.of(problem), variant, device) if outsider is None else outsider.make()


def title(name: str) -> str:
    """A peer for people."""
    return _OUTSIDERS[name].title if name in _OUTSIDERS else f"SDPA {name}"


def versions(names: Iterable[str]) -> dict[str, str]:
    """Of those that torch's own version does not tell, where they are known."""
    known = {
        "cudnn": cudnn_version(),
        _FA4_NAME: f"{fa4.PACKAGE} {fa4.version()}" if fa4.version() else "",
    }
    return {name: known[name] for name in names if known.get(name)}


def _variant(name: str) -> Variant:
    if name in _OUTSIDERS:
        return _OUTSIDERS[name].variant
    return Variant(family=Family.VENDOR, structure=Choices(backend=name), config=Choices())
