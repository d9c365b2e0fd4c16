"""Numerics of the gradients of parameters of a score_mod in Triton's interpreter, and of terms beside an expression.

The gate compares them, and the gradients beside them.
"""

from __future__ import annotations

import re

import pytest
import torch

from autoflash.codegen.expressions import look_ups_of
from autoflash.errors import NoKernelError
from autoflash.expression.expression import parse
from autoflash.expression.nodes import Kind, Parameter
from autoflash.expression.sharing import Sharing
from autoflash.problem import DType, Form, Mask, Problem
from autoflash.runtime.executable import Extras, TermGradients
from autoflash.runtime.triton_backward import TritonBackward
from tests.codegen.structures import LOOK_UPS
from tests.gradients import backward_problem, make_inputs, make_variant
from tests.interpreter.test_backward_terms import CPU, assert_inside_the_gate, case_of

pytestmark = [
    # Triton 3.6's interpreter takes arrays of one element for numbers.
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0 to a scalar:DeprecationWarning"),
    # What overflows is hidden afterwards, or belongs to rows that are not stored.
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]

STRUCTURES = [("split", "pointer"), ("fused", "tma"), ("key_outer", "pointer")]
SIZES = {"batch": 2, "heads": 4, "kv_heads": 2, "head_dim": 16}
DECLARED = {
    "slopes": Parameter(name="slopes", kind=Kind.FLOAT, rank=1),
    "cap": Parameter(name="cap", kind=Kind.FLOAT, rank=0),
    "offset": Parameter(name="offset", kind=Kind.FLOAT, rank=2),
    "row": Parameter(name="row", kind=Kind.FLOAT, rank=2),
    "table": Parameter(name="table", kind=Kind.FLOAT, rank=2),
    "gate": Parameter(name="gate", kind=Kind.FLOAT, rank=4),
    "n": Parameter(name="n", kind=Kind.INT, rank=0),
    "bucket": Parameter(name="bucket", kind=Kind.INT, rank=1),
    "doc": Parameter(name="doc", kind=Kind.INT, rank=2),
}

EXPRESSIONS = {
    "alibi": ("score - slopes[h] * abs(q_idx - kv_idx)", Sharing.HEAD),
    "head_offset": ("score * (1 + offset[b, h])", Sharing.HEAD),
    "capped": ("cap * tanh(score / cap)", Sharing.HEAD),
    "queries": ("score + row[b, q_idx] / 2", Sharing.QUERY),
    "keys": ("score * exp(row[h, kv_idx] / 4)", Sharing.KEY),
    "relative": ("score + table[h, q_idx - kv_idx + n]", Sharing.DISTANCE),
    "buckets": ("score + table[h, bucket[maximum(kv_idx - q_idx, 0)]]", Sharing.DISTANCE),
    "documents": ("score + table[doc[b, q_idx], doc[b, kv_idx]]", Sharing.PAIR),
    "score": ("score + row[h, floor(abs(tanh(score)) / 2)]", Sharing.PAIR),
    "gated": ("score * sigmoid(gate[b, h, q_idx, kv_idx])", Sharing.PAIR),
}


def line_of(text: str) -> str:
    return str(parse(text, [DECLARED[name] for name in sorted(set(re.findall(r"\w+", text)) & set(DECLARED))]))


def problem_of(text: str, **sizes: object) -> Problem:
    problem = backward_problem(**(SIZES | {"seqlen_q": 20, "seqlen_k": 35} | sizes))
    return problem.replace(score_mod=line_of(text), params_gradient=True)


@pytest.mark.parametrize(("number", "name"), list(enumerate(EXPRESSIONS)))
def test_gradients_of_parameters_match_the_specification(number: int, name: str) -> None:
    text, sharing = EXPRESSIONS[name]
    dtype, mask = list(DType)[number % 3], list(Mask)[number % 2]
    problem = problem_of(text, dtype=dtype, mask=mask)
    assert [look_up.sharing for look_up in look_ups_of(problem.score_mod, "")] == [sharing]

    assert_inside_the_gate(make_variant(*STRUCTURES[number % 3]), case_of("", problem))


@pytest.mark.parametrize("dtype", DType)
@pytest.mark.parametrize("name", ["alibi", "head_offset", "keys", "relative", "documents"])
def test_they_are_summed_over_many_tiles(name: str, dtype: DType) -> None:
    turn = list(DType).index(dtype) + list(EXPRESSIONS).index(name)
    problem = problem_of(EXPRESSIONS[name][0], dtype=dtype, mask=list(Mask)[turn % 2], seqlen_q=70, seqlen_k=130)
    assert_inside_the_gate(make_variant(*STRUCTURES[turn % 3]), case_of("window" if turn % 4 == 0 else "", problem))


@pytest.mark.parametrize(("loop_order", "loads"), STRUCTURES)
def test_several_look_ups_stand_beside_each_other(loop_order: str, loads: str) -> None:
    problem = problem_of("score", dtype=DType.FP32, mask=Mask.CAUSAL).replace(score_mod=LOOK_UPS, params_gradient=True)
    assert_inside_the_gate(make_variant(loop_order, loads), case_of("softcap float_mask dropout", problem))


@pytest.mark.parametrize(
    ("loop_order", "combination"),
    [
        ("split", "bias_gradient"),
        ("fused", "alibi_gradient"),
        ("key_outer", "softcap alibi_gradient bias_gradient bool_mask window sinks dropout"),
    ],
)
@pytest.mark.parametrize("is_mask", [False, True])
def test_terms_have_gradients_beside_an_expression(loop_order: str, combination: str, is_mask: bool) -> None:
    problem = problem_of(EXPRESSIONS["relative"][0], dtype=DType.BF16, mask=Mask.FULL)
    if is_mask:
        documents = "mask_mod(doc: int 2) = doc[b, kv_idx] == doc[b, q_idx]"
        problem = problem.replace(score_mod="", params_gradient=False, mask_mod=documents)
    assert_inside_the_gate(make_variant(loop_order), case_of(combination, problem))


def test_heads_in_two_tiles() -> None:
    problem = problem_of(EXPRESSIONS["relative"][0], dtype=DType.BF16, head_dim=40, seqlen_q=70)
    assert_inside_the_gate(make_variant("split", head_dim_tiles="split"), case_of("", problem))


def gradients_of(
    problem: Problem, params: tuple[torch.Tensor, ...], wanted: tuple[bool, ...]
) -> list[torch.Tensor | None]:
    """Those of the parameters that are wanted, which were not a number before."""
    inputs = make_inputs(problem, extras=Extras(params=params))
    executable = TritonBackward(Form.of(problem), make_variant("split"), CPU)
    tensors = (inputs.q, inputs.k, inputs.v, inputs.out)
    call = executable.prepare_backward(problem, *tensors, inputs.dout, 0.25, inputs.extras)
    made = [torch.full_like(x, torch.nan) if is_wanted else None for x, is_wanted in zip(params, wanted, strict=True)]
    call(*tensors, inputs.lse, inputs.dout, inputs.dlse, extras=inputs.extras, terms=TermGradients(params=tuple(made)))
    return made


def test_only_what_is_wanted_is_computed() -> None:
    problem = problem_of("score * slopes[h] + row[b, q_idx]", dtype=DType.FP32)
    row, slopes = torch.ones(2, 20), torch.ones(4)
    torch.manual_seed(0)
    both = gradients_of(problem, (row, slopes), (True, True))
    torch.manual_seed(0)
    one = gradients_of(problem, (row, slopes), (False, True))

    assert one[0] is None
    assert one[1] is not None
    assert both[1] is not None
    assert torch.equal(one[1], both[1])


def test_a_parameter_without_influence_has_a_gradient_of_zero() -> None:
    problem = problem_of("score + slopes[h] * where(row[h, kv_idx] < 9, 1, 0)", dtype=DType.FP32)

    row, _ = gradients_of(problem, (torch.ones(4, 35), torch.ones(4)), (True, True))

    assert row is not None
    assert torch.equal(row, torch.zeros(4, 35))


def test_what_lies_outside_has_no_part() -> None:
    problem = problem_of("score + row[h, kv_idx - 30]", dtype=DType.FP32)

    (row,) = gradients_of(problem, (torch.ones(4, 99),), (True,))

    assert row is not None
    assert torch.isfinite(row).all()
    assert row[:, :5].abs().min() > 0.0
    assert torch.equal(row[:, 5:], torch.zeros(4, 94))


def test_gradients_without_any_key() -> None:
    assert_inside_the_gate(
        make_variant("split"), case_of("", problem_of(EXPRESSIONS["relative"][0], dtype=DType.FP32, seqlen_k=0))
    )


@pytest.mark.parametrize("name", EXPRESSIONS)
def test_only_what_is_added_in_a_fixed_order_is_deterministic(name: str) -> None:
    text, sharing = EXPRESSIONS[name]
    problem = problem_of(text, dtype=DType.FP32, deterministic=True)
    executable = TritonBackward(Form.of(problem), make_variant("split"), CPU)

    reason = executable.why_not(problem)

    if sharing is not Sharing.PAIR or name == "gated":
        assert reason is None
    else:
        assert reason is not None
        assert "it is not deterministic" in reason
        inputs = make_inputs(problem.replace(score_mod="", params_gradient=False))
        with pytest.raises(NoKernelError, match="added up in any order"):
            executable.prepare_backward(problem, inputs.q, inputs.k, inputs.v, inputs.out, inputs.dout, 0.25)


@pytest.mark.parametrize("name", ["alibi", "relative", "keys"])
def test_gradients_have_the_same_bits_every_time(name: str) -> None:
    problem = problem_of(EXPRESSIONS[name][0], dtype=DType.FP32, seqlen_q=70, deterministic=True)
    count = len(look_ups_of(problem.score_mod, ""))
    assert count == 1
    params = {
        "alibi": (torch.ones(4),),
        "relative": (torch.tensor(35, dtype=torch.int32), torch.ones(4, 150)),
        "keys": (torch.ones(4, 35),),
    }[name]
    found = []
    for _ in range(2):
        torch.manual_seed(0)
        found.append(gradients_of(problem, params, tuple(x.is_floating_point() for x in params))[-1])

    assert found[0] is not None
    assert found[1] is not None
    assert torch.equal(found[0], found[1])
