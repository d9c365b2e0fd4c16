"""Every structure of every generated family, as its catalog offers them; a spread of them for each feature."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from autoflash.problem import Feature, Form, Mask, Pass, features_of
from autoflash.space.catalog import families, search_space
from autoflash.space.constraint import why_unable
from autoflash.space.knob import Part
from autoflash.variant import Choice, Choices, Family
from tests.factories import make_cell, make_device

FAMILIES = {Family.TRITON: "sm_90", Family.GLUON_SM90: "sm_90", Family.TORCH_TILED: "cpu"}

COMBINATIONS = tuple(
    features_of(names)
    for names in (
        *(feature.value for feature in Feature if not feature.value.endswith("gradient")),
        "bias,bias_gradient",
        "alibi,alibi_gradient",
        "varlen,alibi,sinks,alibi_gradient",
        "alibi,bias,alibi_gradient,bias_gradient",
        "softcap,alibi,bias,float_mask,window,sinks,dropout,alibi_gradient,bias_gradient",
        "softcap,bias,bool_mask,sinks,bias_gradient",
        "softcap,float_mask,window,dropout",
        "softcap,bool_mask,window,dropout",
        "varlen,softcap,window,dropout",
    )
)
"""Features that are asked for together: each alone, and as many as go together."""


SPLIT_HEAD_DIM = 80
"""A head dimension that takes fewer columns in two tiles than in one."""


def structures(family: Family, form: Form, head_dim: int = 64) -> list[Choices]:
    """All structures of a family for a form, in a fixed order, each once."""
    cell = make_cell(op=form.op, mask=form.mask, features=form.features, head_dim=head_dim)
    space = search_space(cell, make_device(FAMILIES[family]), family)
    knobs = [knob for knob in space.knobs if knob.part is Part.STRUCTURE]
    chosen = (
        space.variant(dict(zip((knob.name for knob in knobs), values, strict=True)))
        for values in itertools.product(*(knob.values for knob in knobs))
    )
    return list(dict.fromkeys(variant.structure for variant in chosen if why_unable(variant, cell) is None))


def split_structures(family: Family, form: Form) -> list[Choices]:
    """Those that only some head dimensions have."""
    return [one for one in structures(family, form, SPLIT_HEAD_DIM) if one.get("head_dim_tiles") == "split"]


def spread(all_of_them: list[Choices]) -> list[Choices]:
    """The first ones that together have every two choices that any structure has together."""
    seen: set[tuple[tuple[str, Choice], tuple[str, Choice]]] = set()
    chosen = []
    for structure in all_of_them:
        pairs = set(itertools.product(structure.items(), repeat=2))
        if not pairs <= seen:
            seen |= pairs
            chosen.append(structure)
    return chosen


def cases() -> Iterator[tuple[Form, Family, Choices]]:
    """Every family and structure in both masks; a spread of the structures with features and of heads in two parts."""
    for family in FAMILIES:
        for op, mask in itertools.product(Pass, Mask):
            form = Form(op=op, mask=mask)
            for structure in structures(family, form) + spread(split_structures(family, form)):
                yield form, family, structure
        for op, (number, features) in itertools.product(Pass, enumerate(COMBINATIONS)):
            if family not in families(op, make_device(FAMILIES[family]), features):
                continue
            # Packed sequences have an order of tiles for each mask; masks take turns over the other features.
            for mask in Mask if features == (Feature.VARLEN,) else [list(Mask)[number % 2]]:
                form = Form(op=op, mask=mask, features=features)
                for structure in spread(structures(family, form)) + spread(split_structures(family, form)):
                    yield form, family, structure
