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
        "softcap,window",
        "bias,bias_gradient",
        "alibi,alibi_gradient",
        "varlen,alibi,sinks,alibi_gradient",
        "alibi,bias,alibi_gradient,bias_gradient",
        "softcap,alibi,bias,float_mask,window,sinks,dropout,alibi_gradient,bias_gradient",
        "softcap,bias,bool_mask,sinks,bias_gradient",
        "softcap,float_mask,window,dropout",
        "softcap,bool_mask,window,dropout",
        "varlen,softcap,window,dropout",
        "softcap,score_mod,float_mask,mask_mod,window,dropout,params_gradient",
        "score_mod,bool_mask,mask_mod,sinks",
        "score_mod,alibi,bias,float_mask,mask_mod",
        "score_mod,params_gradient",
        "score_mod,alibi,bias,mask_mod,params_gradient,alibi_gradient,bias_gradient",
        "mask_mod,block_mask",
        "softcap,score_mod,bool_mask,mask_mod,block_mask,window,dropout",
        "bias,bool_mask,block_mask,sinks",
    )
)
"""Features that are asked for together: each alone, and as many as go together."""


SCORE_MOD = "score_mod(n: int 0, t: float 2) = tanh(score) + t[h, q_idx - kv_idx + n]"
LOOK_UPS = (
    "score_mod(c: float 0, f: float 2, t: float 2) = "
    "tanh(score) * c + t[b, kv_idx] * t[h, q_idx] + f[h, q_idx - kv_idx] + t[q_idx, kv_idx]"
)
"""Elements that pairs share in every way."""
MASK_MOD = "mask_mod(doc: int 2) = doc[b, kv_idx] == doc[b, q_idx]"


def form_of(op: Pass, mask: Mask, features: tuple[Feature, ...] = ()) -> Form:
    """A form with these features, whose expressions read tables."""
    return Form(
        op=op,
        mask=mask,
        features=tuple(each for each in features if op is Pass.BACKWARD or each is not Feature.PARAMS_GRADIENT),
        score_mod=SCORE_MOD if Feature.SCORE_MOD in features else "",
        mask_mod=MASK_MOD if Feature.MASK_MOD in features else "",
    )


HEAD_DIMS = {"head_dim_tiles": (80, 80), "consumer_owns": (256, 256)}
"""Choices of some head dimensions only, each with one of these. 80 takes fewer columns in two tiles than in one."""

ONE_SIDED = ((192, 128), (128, 80))
"""Head dimensions of which only that of queries and keys, or of values, takes fewer columns in two tiles."""

LATER = {"rescale", "exp2"}
"""Choices beside a default that is left out."""


def structures(family: Family, form: Form, head_dims: tuple[int, int] = (64, 64)) -> list[Choices]:
    """All structures of a family for a form, in a fixed order, each once."""
    cell = make_cell(
        op=form.op,
        mask=form.mask,
        features=form.features,
        head_dim=head_dims[0],
        head_dim_v=head_dims[1],
        score_mod=form.score_mod,
        mask_mod=form.mask_mod,
    )
    space = search_space(cell, make_device(FAMILIES[family]), family)
    knobs = [knob for knob in space.knobs if knob.part is Part.STRUCTURE]
    chosen = (
        space.variant(dict(zip((knob.name for knob in knobs), values, strict=True)))
        for values in itertools.product(*(knob.values for knob in knobs))
    )
    return list(dict.fromkeys(variant.structure for variant in chosen if why_unable(variant, cell) is None))


def rare_structures(family: Family, form: Form) -> list[Choices]:
    """Those that only some head dimensions have."""
    return [one for knob, dims in HEAD_DIMS.items() for one in structures(family, form, dims) if knob in one]


def one_sided_structures(family: Family, form: Form) -> list[Choices]:
    """Of those with two tiles on one side, the one with the first of all other choices, and that with the last."""
    every = [[one for one in structures(family, form, dims) if "head_dim_tiles" in one] for dims in ONE_SIDED]
    return [one for each in every if each for one in (each[0], each[-1])]


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


def few_structures(family: Family, form: Form) -> list[Choices]:
    """A spread of all of them, and of those that only some head dimensions have."""
    rare = spread(rare_structures(family, form)) + one_sided_structures(family, form)
    return spread(structures(family, form)) + rare


def cases() -> Iterator[tuple[Form, Family, Choices]]:
    """Every family and structure in both masks; a spread with features, later choices and rare head dimensions."""
    for family in FAMILIES:
        for op, mask in itertools.product(Pass, Mask):
            form = Form(op=op, mask=mask)
            first = [one for one in structures(family, form) if not LATER & set(one)]
            later = [one for one in structures(family, form) if LATER & set(one)]
            rare = spread(rare_structures(family, form)) + one_sided_structures(family, form)
            for structure in first + spread(later) + rare:
                yield form, family, structure
        for op, (number, features) in itertools.product(Pass, enumerate(COMBINATIONS)):
            if family not in families(op, make_device(FAMILIES[family]), features):
                continue
            # Packed sequences have an order of tiles for each mask; masks take turns over the other features.
            for mask in Mask if features == (Feature.VARLEN,) else [list(Mask)[number % 2]]:
                form = form_of(op, mask, features)
                for structure in few_structures(family, form):
                    yield form, family, structure
    features = (Feature.SCORE_MOD, Feature.PARAMS_GRADIENT)
    form = Form(op=Pass.BACKWARD, mask=Mask.CAUSAL, features=features, score_mod=LOOK_UPS)
    for family in (Family.TRITON, Family.TORCH_TILED):
        for structure in few_structures(family, form):
            yield form, family, structure
