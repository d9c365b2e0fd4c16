"""Every structure of every generated family, as its catalog offers them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from autoflash.problem import Form, Mask, Pass
from autoflash.space.catalog import search_space
from autoflash.space.knob import Part
from autoflash.variant import Choices, Family
from tests.factories import make_cell, make_device

FAMILIES = {Family.TRITON: "sm_90", Family.GLUON_SM90: "sm_90", Family.TORCH_TILED: "cpu"}


def structures(family: Family, form: Form) -> list[Choices]:
    """All structures of a family for a form, in a fixed order, each once."""
    space = search_space(make_cell(op=form.op, mask=form.mask), make_device(FAMILIES[family]), family)
    knobs = [knob for knob in space.knobs if knob.part is Part.STRUCTURE]
    chosen = (
        space.variant(dict(zip((knob.name for knob in knobs), values, strict=True))).structure
        for values in itertools.product(*(knob.values for knob in knobs))
    )
    return list(dict.fromkeys(chosen))


def cases() -> Iterator[tuple[Form, Family, Choices]]:
    """Every form, family and structure."""
    for family in FAMILIES:
        for op, mask in itertools.product(Pass, Mask):
            form = Form(op=op, mask=mask)
            for structure in structures(family, form):
                yield form, family, structure
