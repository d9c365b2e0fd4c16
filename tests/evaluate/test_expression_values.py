"""The specification of expressions, against formulas that are written out in torch, and against Python's integers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from autoflash.evaluate.expression_values import value_of
from autoflash.expression.expression import Role, parse
from autoflash.expression.nodes import Kind, Parameter, Variable
from tests.expression.corpus import CASES, B, H, M, N, inputs

Formula = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, dict[str, Tensor]], Tensor]


def _t5(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor, t: dict[str, Tensor]) -> Tensor:
    distance = torch.clamp(30 * (q - k), min=0)
    far = 16 + (torch.log(distance.clamp(min=1).double() / 16) / math.log(8) * 16).int()
    return score + t["bias"][h.long(), torch.where(distance < 16, distance, far.clamp(max=31)).long()]


FORMULAS: dict[str, Formula] = {
    "identity": lambda s, b, h, q, k, t: s,
    "times_two": lambda s, b, h, q, k, t: s * 2,
    "squared": lambda s, b, h, q, k, t: s * s,
    "causal": lambda s, b, h, q, k, t: torch.where(q >= k, s, -torch.inf),
    "inverse_causal": lambda s, b, h, q, k, t: torch.where(q <= k, s, -torch.inf),
    "relative_bias": lambda s, b, h, q, k, t: s + (q - k),
    "relative_causal": lambda s, b, h, q, k, t: torch.where(q >= k, s + (q - k), -torch.inf),
    "alibi": lambda s, b, h, q, k, t: s - t["slopes"][h.long()] * (q - k).abs(),
    "trigonometric": lambda s, b, h, q, k, t: s.cos().sin(),
    "head_offset": lambda s, b, h, q, k, t: s * t["offset"][h.long()],
    "head_and_batch_offset": lambda s, b, h, q, k, t: s + t["offset"][b.long(), h.long()],
    "every_other_head": lambda s, b, h, q, k, t: torch.where(h % 2 == 0, s + (q - k) / 4, s),
    "capped": lambda s, b, h, q, k, t: t["cap"] * torch.tanh(s / t["cap"]),
    "table": lambda s, b, h, q, k, t: s + t["bias"][h.long(), (q - k + N).long()],
    "t5_buckets_by_formula": _t5,
    "t5_buckets_by_table": _t5,
    "gate": lambda s, b, h, q, k, t: s * torch.sigmoid(t["gate"]),
    "logarithm_of_distance": lambda s, b, h, q, k, t: s - torch.log(1.0 + (q - k).abs().double()) * t["t"],
    "only_some": lambda s, b, h, q, k, t: torch.where(t["flags"][q.long()], s**3 / 9, -s),
    "constant": lambda s, b, h, q, k, t: torch.full_like(s, math.e),
    "causal_mask": lambda s, b, h, q, k, t: q >= k,
    "sliding_window": lambda s, b, h, q, k, t: (q - k >= 0) & (q - k < 4),
    "prefix_lm": lambda s, b, h, q, k, t: (k < t["prefix"][b.long()]) | (q >= k),
    "documents": lambda s, b, h, q, k, t: t["doc"][b.long(), q.long()] == t["doc"][b.long(), k.long()],
    "padding": lambda s, b, h, q, k, t: t["keep"][b.long(), k.long()],
    "everything": lambda s, b, h, q, k, t: torch.ones_like(s, dtype=torch.bool),
}


@pytest.mark.parametrize("case", [case for case in CASES if case.name in FORMULAS], ids=lambda case: case.name)
def test_an_expression_means_what_is_written_out(case) -> None:
    given = inputs()
    exact = {name: tensor.double() if tensor.is_floating_point() else tensor for name, tensor in case.tensors.items()}
    expected = FORMULAS[case.name](*given.values(), exact)
    read = given if case.role is Role.SCORE_MOD else inputs(case.role)

    value = value_of(case.expression.root, read, exact)

    assert value.dtype == (torch.float64 if case.role is Role.SCORE_MOD else torch.bool)
    torch.testing.assert_close(*torch.broadcast_tensors(value.double(), expected.double()))
    assert set(FORMULAS) <= {one.name for one in CASES}


def of_integers(source: str, h: list[int], q_idx: list[int]) -> list[int]:
    """An integer expression of h and q_idx, for some pairs of them."""
    given = {variable: torch.zeros(len(h)).int() for variable in Variable}
    given |= {Variable.H: torch.tensor(h).int(), Variable.Q_IDX: torch.tensor(q_idx).int()}
    # As an index, so that it stays an integer.
    root = parse(f"t[{source}]", [Parameter(name="t", kind=Kind.FLOAT, rank=1)]).root
    return value_of(root.children[0], given, {}).tolist()


PAIRS = list(itertools.product(range(-9, 10), range(-5, 6)))


@pytest.mark.parametrize("sign", ["//", "%"])
def test_integers_are_divided_as_in_python(sign: str) -> None:
    dividends, divisors = zip(*PAIRS, strict=True)

    found = of_integers(f"h {sign} q_idx", dividends, divisors)

    by_zero = {"//": lambda a: 0, "%": lambda a: a}[sign]
    python = {"//": lambda a, b: a // b, "%": lambda a, b: a % b}[sign]
    assert found == [python(a, b) if b else by_zero(a) for a, b in PAIRS]


def test_integers_wrap_around_at_32_bits() -> None:
    most, least = 2**31 - 1, -(2**31)

    assert of_integers("h + q_idx", [most, least], [1, -1]) == [least, most]
    assert of_integers("h * q_idx", [65536, most], [65536, most]) == [0, 1]
    assert of_integers("h // q_idx", [least], [-1]) == [least]
    assert of_integers("-h", [least], [0]) == [least]


def test_floor_is_an_integer_whatever_it_is_given() -> None:
    given = {variable: torch.zeros(6).int() for variable in Variable}
    given[Variable.SCORE] = torch.tensor([2.5, -2.5, 1e20, -torch.inf, torch.nan, 2147483647.0]).double()
    root = parse("t[floor(score)]", [Parameter(name="t", kind=Kind.FLOAT, rank=1)]).root

    found = value_of(root.children[0], given, {})

    assert found.tolist() == [2, -3, 2**31 - 128, -(2**31), 0, 2**31 - 128]


def test_an_element_outside_a_parameter_is_zero() -> None:
    given = {variable: torch.arange(-2, 4).int() for variable in Variable}
    root = parse("t[q_idx]", [Parameter(name="t", kind=Kind.FLOAT, rank=1)]).root

    assert value_of(root, given, {"t": torch.tensor([5.0, 6.0])}).tolist() == [0.0, 0.0, 5.0, 6.0, 0.0, 0.0]
    assert value_of(root, given, {"t": torch.zeros(0)}).tolist() == [0.0] * 6


@pytest.mark.parametrize(
    ("source", "gradients"),
    [
        ("where(score > 0, sqrt(score), 0)", [0.0, 0.0, 0.25]),
        ("sqrt(where(score > 0, score, 1))", [0.0, 0.0, 0.25]),
        ("where(score > 0, where(score > 1, log(score), 2), score)", [1.0, 1.0, 0.25]),
        ("maximum(-3, where(score > 0, 1 / score, -9))", [0.0, 0.0, -1 / 16]),
        ("maximum(score, 0)", [0.0, 0.5, 1.0]),
        ("minimum(maximum(score, 0), 0)", [0.5 * 0.0, 0.25, 0.0]),
    ],
)
def test_what_is_not_chosen_has_no_part_in_a_gradient(source: str, gradients: list[float]) -> None:
    given = {variable: torch.zeros(3).int() for variable in Variable}
    given[Variable.SCORE] = torch.tensor([-1.0, 0.0, 4.0], dtype=torch.float64, requires_grad=True)

    value = value_of(parse(source).root, given, {})

    assert torch.autograd.grad(value.sum(), given[Variable.SCORE])[0].tolist() == gradients


def test_values_are_of_the_shape_that_the_inputs_broadcast_to() -> None:
    for source in ("score", "1", "h", "q_idx - kv_idx"):
        assert value_of(parse(source).root, inputs(), {}).shape == (B, H, M, N)
