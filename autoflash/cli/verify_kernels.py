"""Which kernels ``autoflash verify --all`` goes through, and on which problems."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from autoflash.device import Device
from autoflash.dispatch.buckets import cell_of
from autoflash.problem import LEAST_BLOCK, DType, Feature, Form, Mask, MaskTensor, Pass, Problem
from autoflash.space import catalog, knob
from autoflash.space.catalog import SearchSpace
from autoflash.variant import Choices, Family, Variant

HEAD_DIMS = ((64, 64), (80, 80), (256, 256), (192, 128), (128, 80))
"""Of queries and values: the usual ones, and those that structures are for which 64 has not. Those are vectors in two
tiles, wide ones on Hopper, and two tiles for the vectors of one side alone."""

CASES = ("regular", "irregular")
"""The problems of a kernel: sequences that fill its blocks, and odd ones that fill none."""

# Three of the usual blocks.
_SEQLEN = 384

_WINDOW: dict[str, object] = {"window_left": 127, "window_right": 31}
_PACKED: dict[str, object] = {"batch": 2, "packed_q": 2 * _SEQLEN, "packed_k": 2 * _SEQLEN}
_SCORES: dict[str, object] = {
    "mask": Mask.CAUSAL,
    "window_left": 127,
    "softcap": 20.0,
    "dropout_p": 0.1,
    "sinks": True,
    "alibi": True,
    "alibi_gradient": True,
}

# A table of relative distances, and documents.
_SCORE_MOD = "score_mod(n: int 0, t: float 2) = score + t[h, q_idx - kv_idx + n]"
_MASK_MOD = "mask_mod(doc: int 2) = doc[b, kv_idx] == doc[b, q_idx]"
# Hidden, partial and whole blocks.
_NEAR = "mask_mod(reach: int 0) = abs(kv_idx - q_idx) * 3 < reach"

FORMS: dict[str, dict[str, object]] = {
    Mask.FULL.value: {},
    Mask.CAUSAL.value: {"mask": Mask.CAUSAL},
    Feature.VARLEN.value: _PACKED,
    Feature.SOFTCAP.value: {"softcap": 20.0},
    Feature.SCORE_MOD.value: {"score_mod": _SCORE_MOD},
    Feature.FLOAT_MASK.value: {"mask_tensor": MaskTensor.FLOAT},
    Feature.BOOL_MASK.value: {"mask_tensor": MaskTensor.BOOL},
    Feature.MASK_MOD.value: {"mask_mod": _MASK_MOD},
    Feature.BLOCK_MASK.value: {"block_size": LEAST_BLOCK},
    Feature.WINDOW.value: _WINDOW,
    Feature.ALIBI.value: {"alibi": True},
    Feature.ALIBI_GRADIENT.value: {"alibi": True, "alibi_gradient": True},
    Feature.BIAS.value: {"bias": True},
    Feature.BIAS_GRADIENT.value: {"bias": True, "bias_gradient": True},
    Feature.SINKS.value: {"sinks": True},
    Feature.DROPOUT.value: {"dropout_p": 0.1},
    Feature.PARAMS_GRADIENT.value: {"score_mod": _SCORE_MOD, "params_gradient": True},
    "softcap_window": {"mask": Mask.CAUSAL, "window_left": 127, "softcap": 20.0},
    "together": {**_SCORES, "mask_tensor": MaskTensor.FLOAT, "bias": True, "bias_gradient": True},
    "together_expressions": {
        **_SCORES,
        "score_mod": _SCORE_MOD,
        "mask_mod": _MASK_MOD,
        "mask_tensor": MaskTensor.FLOAT,
    },
    "together_blocks": {**_WINDOW, "mask_mod": _NEAR, "block_size": LEAST_BLOCK, "softcap": 20.0, "sinks": True},
    "together_varlen": {**_SCORES, **_PACKED},
}
"""What ``--feature`` may name: each mask, each feature, those of the Hopper family, and as many as go together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """What to go through.

    Attributes:
        family: None: every one that runs here.
        features: Keys of :data:`FORMS`.
        dtypes, passes: At least one each.
        head_dims: Of queries and of values. The first have every structure, the others those that the ones before had
            not, of plain attention.
        cases: Of :data:`CASES`, at least one.
        is_quick: Only the default structure of each family, at the first head dimensions.
        is_bare: For sanitizers: tensors without margins, and without torch's kernels beside.
        jobs: Processes that share the device, in which a kernel may crash or hang; None for this one.
        budget_s: Seconds after which no kernel is begun; None for all of them.
    """

    family: Family | None
    features: tuple[str, ...]
    dtypes: tuple[DType, ...]
    passes: tuple[Pass, ...]
    head_dims: tuple[tuple[int, int], ...] = HEAD_DIMS
    cases: tuple[str, ...] = CASES
    is_quick: bool = False
    is_bare: bool = False
    jobs: int | None = None
    budget_s: float | None = None


def has_every_combination(problem: Problem) -> bool:
    """Whether all combinations of choices are verified, and not only every choice.

    They are of plain attention with heads of one length in bf16 and fp32. fp16 differs from bf16 in nothing that
    templates or spaces look at.
    """
    return not problem.features and problem.dtype is not DType.FP16 and problem.head_dim == problem.head_dim_v


def kernels(device: Device, selection: Selection) -> Iterator[tuple[Problem, Variant]]:
    """Kernels with a problem of the form that each is verified on; no kernel twice."""
    seen = set()
    for feature in selection.features:
        for op in selection.passes:
            for dtype in selection.dtypes:
                form = Form.of(_problem(feature, op, dtype, selection.head_dims[0]))
                # A forward has no gradients: that of a bias with one is that of a bias.
                if (form, dtype) in seen:
                    continue
                seen.add((form, dtype))
                for family in catalog.families(op, device, form.features):
                    if selection.family in (None, family):
                        yield from _of_family(feature, op, dtype, family, device, selection)


def _of_family(
    feature: str, op: Pass, dtype: DType, family: Family, device: Device, selection: Selection
) -> Iterator[tuple[Problem, Variant]]:
    chosen: list[Variant] = []
    for head_dims in selection.head_dims:
        problem = _problem(feature, op, dtype, head_dims)
        space = catalog.search_space(cell_of(problem, device), device, family)
        if selection.is_quick:
            some = [space.default()]
        elif has_every_combination(problem):
            known = {variant.structure for variant in chosen}
            some = [variant for variant in structures(space) if variant.structure not in known]
        else:
            some = covering(space, chosen)
        yield from ((problem, variant) for variant in some)
        chosen += some
        if selection.is_quick or problem.features:
            return


def structures(space: SearchSpace) -> list[Variant]:
    """One variant of each structure: the default config, or the one that has most in common with it."""
    return [
        variant
        for structure, configs in knob.structures(space.knobs)
        if (variant := _nearest(space, structure, configs)) is not None
    ]


def covering(space: SearchSpace, before: list[Variant] | None = None) -> list[Variant]:
    """A few structures in which every choice of every knob is that is in none ``before``.

    Each adds the most choices that are left, and of those that add as many it is the most usual one.
    """
    usual = space.default().structure
    left = structures(space)
    seen = {choice for variant in before or () for choice in variant.structure.items()}
    chosen: list[Variant] = []

    def gain(variant: Variant) -> tuple[bool, int, int]:
        new = [choice for choice in variant.structure.items() if choice not in seen]
        changes = sum(usual.get(name) != value for name, value in variant.structure.items())
        # With nothing before it, the usual one goes first.
        return not seen and not changes, len(new), -changes

    while left and gain(best := max(left, key=gain))[1]:
        chosen.append(best)
        seen.update(best.structure.items())
    return chosen


def _nearest(space: SearchSpace, structure: Choices, configs: Iterator[Choices]) -> Variant | None:
    """The variant of a structure whose config is the most usual one; None where all are refused."""
    wanted = space.default().config
    usual = space.variant({**structure, **wanted})
    if space.why_not(usual) is None:
        return usual
    variants = (Variant(family=space.family, structure=structure, config=config) for config in configs)
    return max(
        (variant for variant in variants if space.why_not(variant) is None),
        key=lambda variant: sum(wanted.get(name) == value for name, value in variant.config.items()),
        default=None,
    )


def _problem(feature: str, op: Pass, dtype: DType, head_dims: tuple[int, int]) -> Problem:
    return Problem(
        op=op,
        dtype=dtype,
        head_dim=head_dims[0],
        head_dim_v=head_dims[1],
        batch=1,
        heads=4,
        kv_heads=2,
        seqlen_q=_SEQLEN,
        seqlen_k=_SEQLEN,
    ).replace(**FORMS[feature])
