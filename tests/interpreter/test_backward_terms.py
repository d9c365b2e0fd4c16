"""Numerics of the gradients of terms of scores (sinks, biases, slopes of ALiBi) in Triton's interpreter.

The gate compares them, and the gradients beside them.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from autoflash.evaluate.grid import Case
from autoflash.evaluate.inputs import Memory
from autoflash.evaluate.masks import MaskForm
from autoflash.evaluate.terms import BiasForm
from autoflash.evaluate.verify import run_case
from autoflash.problem import Alignment, DType, Form, Mask, MaskTensor, Problem
from autoflash.runtime.executable import Extras, TermGradients
from autoflash.runtime.probe import probe
from autoflash.runtime.triton_backward import TritonBackward
from autoflash.variant import Variant
from tests.gradients import (
    Lengths,
    backward_problem,
    make_inputs,
    make_variant,
)

pytestmark = [
    # Triton 3.6's interpreter takes arrays of one element for numbers.
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0 to a scalar:DeprecationWarning"),
    # What overflows is hidden afterwards, or belongs to rows that are not stored.
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]

LOOP_ORDERS = ["split", "fused", "key_outer"]
CPU = probe("cpu")

# Empty ones, some shorter and some longer than a tile, one query or one key; rows behind the last.
LENGTHS: Lengths = ((3, 5), (0, 7), (18, 9), (0, 0), (1, 1), (4, 0))
TAIL = (2, 3)

WITH_TERMS = [
    "sinks",
    "varlen sinks",
    "softcap float_mask window sinks dropout",
    "softcap bool_mask sinks",
    "varlen softcap window sinks dropout",
    "bias",
    "bias_gradient",
    "softcap bias_gradient float_mask window sinks dropout",
    "softcap bias_gradient bool_mask",
    "bias_gradient window dropout",
    "alibi",
    "alibi_gradient",
    "varlen alibi_gradient",
    "softcap alibi_gradient bias_gradient bool_mask window sinks dropout",
    "varlen softcap alibi_gradient window sinks dropout",
]
"""Combinations with terms that have gradients: the gate compares them."""

FIELDS: dict[str, dict[str, object]] = {
    "window": {"window_left": 9, "window_right": 5},
    "softcap": {"softcap": 2.0},
    "bool_mask": {"mask_tensor": MaskTensor.BOOL},
    "float_mask": {"mask_tensor": MaskTensor.FLOAT},
    "bias": {"bias": True},
    "bias_gradient": {"bias": True, "bias_gradient": True},
    "alibi": {"alibi": True},
    "alibi_gradient": {"alibi": True, "alibi_gradient": True},
    "sinks": {"sinks": True},
    "dropout": {"dropout_p": 0.3},
}


def _variant(loop_order: str, mask: Mask) -> Variant:
    """Of two masks, the variants together have every choice of the structure."""
    if mask is Mask.FULL:
        return make_variant(loop_order, tiles=(32, 16, 16, 32))
    order = "per_kind" if loop_order == "fused" else "per_head"
    return make_variant(
        loop_order, tiles=(16, 32, 32, 16), mask_loops="everywhere", dot_order="scores_first", tile_order=order
    )


def case_of(combination: str, problem: Problem, **options: Any) -> Case:
    features = combination.split()
    fields = {name: value for feature in features for name, value in FIELDS.get(feature, {}).items()}
    if "varlen" in features:
        rows = [sum(pair[side] for pair in LENGTHS) + TAIL[side] for side in (0, 1)]
        fields |= {"batch": len(LENGTHS), "packed_q": rows[0], "packed_k": rows[1]}
        options["lengths"] = LENGTHS
    problem = problem.replace(**fields)
    mask = None if problem.mask_tensor is MaskTensor.NONE else MaskForm()
    rng = (1 << 40, 3) if problem.dropout_p else None
    options = {"bias": BiasForm(), **options} if problem.bias else options
    options = {"own_slopes": problem.is_varlen, **options} if problem.alibi else options
    return Case(problem=problem, mask=mask, rng=rng, with_dlse=True, **options)


def assert_inside_the_gate(variant: Variant, case: Case) -> None:
    found = run_case(TritonBackward(Form.of(case.problem), variant, CPU), case, "cpu")
    assert not isinstance(found, str), found
    assert found.finding.ratio <= 1.0, f"{found.finding.words} ({case})"


@pytest.mark.parametrize(("number", "combination"), list(enumerate(WITH_TERMS)), ids=WITH_TERMS)
@pytest.mark.parametrize("loop_order", LOOP_ORDERS)
def test_gradients_of_terms_match_the_specification(loop_order: str, number: int, combination: str) -> None:
    turn = LOOP_ORDERS.index(loop_order) + number
    mask, dtype = list(Mask)[turn % 2], list(DType)[turn % 3]
    sizes = {"seqlen_q": 20, "seqlen_k": 35, "heads": 4, "kv_heads": 2, "head_dim": 24, "head_dim_v": 16}
    problem = backward_problem(dtype=dtype, mask=mask, **sizes)
    assert_inside_the_gate(_variant(loop_order, mask), case_of(combination, problem))


@pytest.mark.parametrize("own", ["bhmn", "hmn", "bmn", "mn", "bn", "hm", "n", "b", ""])
@pytest.mark.parametrize(("loop_order", "loads"), [("split", "pointer"), ("fused", "tma"), ("key_outer", "pointer")])
def test_the_gradient_of_a_bias_is_summed_over_what_shares_it(loop_order: str, loads: str, own: str) -> None:
    turn = len(own) + LOOP_ORDERS.index(loop_order)
    form = BiasForm(own=own, dtype=list(DType)[turn % 3], has_holes=turn % 2 == 1, memory=Memory.TRANSPOSED)
    mask, dtype = list(Mask)[turn % 2], list(DType)[(turn + 1) % 3]
    sizes = {"batch": 2, "heads": 4, "kv_heads": 2, "head_dim": 16, "seqlen_q": 70, "seqlen_k": 75}
    problem = backward_problem(dtype=dtype, mask=mask, **sizes)
    batch_order, tile_order = ("innermost", "per_kind") if turn % 3 else ("outermost", "per_head")
    variant = make_variant(loop_order, loads, batch_order=batch_order, tile_order=tile_order)
    assert_inside_the_gate(variant, case_of("bias_gradient", problem, bias=form))


@pytest.mark.parametrize("combination", ["bias_gradient", "bias_gradient window", "bias_gradient softcap float_mask"])
@pytest.mark.parametrize("loop_order", ["split", "fused"])
def test_the_gradient_of_a_bias_of_each_pair_is_whole(loop_order: str, combination: str) -> None:
    # Blocks that nobody sees, on both sides of a band, are 0; so are rows that see no key.
    sizes = {"batch": 2, "heads": 2, "kv_heads": 1, "head_dim": 16, "seqlen_q": 75, "seqlen_k": 60}
    problem = backward_problem(dtype=DType.FP32, mask=Mask.CAUSAL, **sizes)
    variant = make_variant(loop_order, tiles=(16, 16, 16, 16), batch_order="innermost")
    form = BiasForm(memory=Memory.TRANSPOSED, dtype=DType.FP32)
    assert_inside_the_gate(variant, case_of(combination, problem, bias=form))


@pytest.mark.parametrize(
    ("own", "loads", "head_dim_tiles", "head_dims"),
    [
        *((own, "pointer", "split", (40, 40)) for own in ("bhmn", "bn", "hm")),
        ("bn", "tma", "split_qk", (40, 32)),
        ("hm", "tma", "split_v", (32, 40)),
    ],
)
def test_the_gradient_of_a_bias_of_heads_in_two_tiles(
    own: str, loads: str, head_dim_tiles: str, head_dims: tuple[int, int]
) -> None:
    head_dim, head_dim_v = head_dims
    problem = backward_problem(
        dtype=DType.BF16, head_dim=head_dim, head_dim_v=head_dim_v, seqlen_q=33, seqlen_k=64, heads=2, kv_heads=1
    )
    variant = make_variant("split", loads, head_dim_tiles=head_dim_tiles)
    assert_inside_the_gate(variant, case_of("bias_gradient softcap", problem, bias=BiasForm(own=own)))


def test_the_gradient_of_a_bias_has_the_same_bits_every_time() -> None:
    sizes = {"batch": 2, "heads": 2, "head_dim": 16, "seqlen_q": 40, "seqlen_k": 40}
    problem = backward_problem(dtype=DType.FP32, deterministic=True, **sizes).replace(bias=True, bias_gradient=True)
    bias = torch.randn(1, 2, 40, 1)
    inputs = make_inputs(problem, extras=Extras(bias=bias))
    executable = TritonBackward(Form.of(problem), make_variant("fused"), CPU)
    tensors = (inputs.q, inputs.k, inputs.v, inputs.out)
    call = executable.prepare_backward(problem, *tensors, inputs.dout, 0.25, inputs.extras)
    made = [TermGradients.asked_by(problem, inputs.extras) for _ in range(2)]
    for terms in made:
        call(*tensors, inputs.lse, inputs.dout, inputs.dlse, extras=inputs.extras, terms=terms)
    assert torch.equal(made[0].bias, made[1].bias)  # type: ignore[arg-type]  # asked for


@pytest.mark.parametrize("own_slopes", [True, False])
@pytest.mark.parametrize("alignment", Alignment)
@pytest.mark.parametrize(
    ("loop_order", "loads", "combination"),
    [
        ("split", "pointer", "alibi_gradient"),
        ("fused", "tma", "alibi_gradient"),
        ("key_outer", "pointer", "varlen alibi_gradient"),
    ],
)
def test_the_gradient_of_slopes(
    loop_order: str, loads: str, combination: str, alignment: Alignment, own_slopes: bool
) -> None:
    sizes = {"batch": 2, "heads": 4, "kv_heads": 2, "head_dim": 16, "seqlen_q": 70, "seqlen_k": 75}
    problem = backward_problem(dtype=DType.BF16, mask=Mask.CAUSAL, **sizes).replace(alignment=alignment)
    assert_inside_the_gate(make_variant(loop_order, loads), case_of(combination, problem, own_slopes=own_slopes))


@pytest.mark.parametrize("combination", ["sinks", "varlen sinks", "bias_gradient", "alibi_gradient"])
def test_gradients_of_terms_without_any_key(combination: str) -> None:
    problem = backward_problem(dtype=DType.FP32, head_dim=16, seqlen_q=7, seqlen_k=0, heads=2)
    case = case_of(combination, problem)
    if case.lengths:
        case = dataclasses.replace(
            case, problem=case.problem.replace(batch=2, packed_q=9, packed_k=0), lengths=((4, 0), (3, 0))
        )
    assert case.problem.is_empty
    assert_inside_the_gate(make_variant("split"), case)
