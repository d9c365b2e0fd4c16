"""Derivatives by the score and by parameters, against torch's autograd."""

from __future__ import annotations

import math
import time

import pytest
import torch
from hypothesis import given
from torch import Tensor

from autoflash.errors import ExpressionError
from autoflash.evaluate.expression_values import value_of
from autoflash.expression.derivative import Gradient, parameter_gradients, score_derivative
from autoflash.expression.expression import Expression, Role, parse
from autoflash.expression.nodes import Variable, walk
from autoflash.expression.text import text_of
from tests.expression.corpus import CASES, Case, declared, inputs
from tests.expression.strategies import TENSORS, expressions, properties

SCORE_MODS = [case for case in CASES if case.role is Role.SCORE_MOD]


def summed(gradients: tuple[Gradient, ...], ds: Tensor, given, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Gradients of the parameters, as a backward pass sums them up."""
    sums = {name: torch.zeros_like(tensor) for name, tensor in tensors.items() if tensor.is_floating_point()}
    for gradient in gradients:
        share = (ds * value_of(gradient.derivative, given, tensors)).flatten()
        indices = [value_of(index, given, tensors).expand(ds.shape).flatten().long() for index in gradient.indices]
        target = sums[gradient.parameter.name]
        inside = torch.ones_like(share, dtype=torch.bool)
        for index, size in zip(indices, target.shape, strict=True):
            inside &= (index >= 0) & (index < size)
        if indices:
            target.index_put_(tuple(index[inside] for index in indices), share[inside], accumulate=True)
        else:
            target += share.sum()
    return sums


def assert_agrees(expression: Expression, tensors: dict[str, Tensor], shift: int = 0) -> None:
    """Slope and gradients are what autograd makes of the specification."""
    given = inputs(shift=shift)
    given[Variable.SCORE] = given[Variable.SCORE].requires_grad_()
    exact = {name: t.double().requires_grad_() if t.is_floating_point() else t for name, t in tensors.items()}
    ds = torch.randn(given[Variable.SCORE].shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    learned = {name: tensor for name, tensor in exact.items() if tensor.requires_grad}

    value = value_of(expression.root, given, exact) + 0.0 * sum(
        t.sum() for t in (given[Variable.SCORE], *learned.values())
    )
    finite = value.isfinite()
    by_score, *by_parameters = torch.autograd.grad(
        value[finite] @ ds[finite], [given[Variable.SCORE], *learned.values()]
    )

    with torch.no_grad():
        slope = value_of(score_derivative(expression), given, exact)
        # A hidden key has a slope, but no probability.
        torch.testing.assert_close(torch.where(finite, ds * slope, 0.0), torch.where(finite, by_score, 0.0))
        sums = summed(parameter_gradients(expression), torch.where(finite, ds, 0.0), given, exact)
    for name, expected in zip(learned, by_parameters, strict=True):
        torch.testing.assert_close(sums[name], expected)


@pytest.mark.parametrize("case", SCORE_MODS, ids=lambda case: case.name)
def test_derivatives_are_those_of_autograd(case: Case) -> None:
    assert_agrees(case.expression, case.tensors)
    assert_agrees(case.expression, case.tensors, shift=5)


@properties
@given(expressions())
def test_derivatives_of_any_expression_are_those_of_autograd(expression: Expression) -> None:
    assert_agrees(expression, TENSORS)


@pytest.mark.parametrize(
    ("source", "slope"),
    [
        ("score", "1.0"),
        ("exp(1)", "0.0"),
        ("score * 2 + h", "2.0"),
        ("score * score", "score + score"),
        ("score**3", "score**2 * 3.0"),
        ("where(q_idx >= kv_idx, score, -inf)", "where(kv_idx <= q_idx, 1.0, 0.0)"),
        ("where(score > 0, 1, 2) * h", "0.0"),
        ("exp(-score)", "-exp(-score)"),
        ("sin(score) + cos(score)", "cos(score) - sin(score)"),
        ("tanh(score)", "(tanh(score) + 1.0) * (1.0 - tanh(score))"),
        ("score + floor(score) + floor(score) % 3", "1.0"),
    ],
)
def test_the_derivative_by_the_score_is_simple_where_it_can_be(source: str, slope: str) -> None:
    assert text_of(score_derivative(parse(source))) == slope


def test_each_different_look_up_has_a_gradient_of_its_own() -> None:
    tensors = {"t": torch.zeros(4, 9), "s": torch.zeros(()), "n": torch.zeros(3).int(), "w": torch.zeros(2)}
    expression = parse(
        "score * t[h, q_idx] + s**2 * t[n[h], 0] + t[h, q_idx] + where(w[b] > 0, 1, 2)", declared(tensors)
    )

    found = {
        (each.parameter.name, *map(text_of, each.indices)): text_of(each.derivative)
        for each in parameter_gradients(expression)
    }

    # n holds integers, and w decides only.
    assert found == {
        ("t", "h", "q_idx"): "score + 1.0",
        ("s",): "s * 2.0 * t[n[h], 0]",
        ("t", "n[h]", "0"): "s**2",
    }


def at(source: str, *scores: float) -> list[float]:
    """The derivative at some scores."""
    given = {variable: torch.zeros(len(scores)).int() for variable in Variable}
    given[Variable.SCORE] = torch.tensor(scores, dtype=torch.float64)
    return value_of(score_derivative(parse(source)), given, {}).tolist()


def autograd_at(function, *scores: float) -> list[float]:
    score = torch.tensor(scores, dtype=torch.float64, requires_grad=True)
    return torch.autograd.grad(function(score).sum(), score)[0].tolist()


@pytest.mark.parametrize(
    ("source", "function"),
    [
        ("abs(score)", torch.abs),
        ("minimum(score, 0)", lambda score: torch.minimum(score, torch.zeros(()).double())),
        ("maximum(score, 0)", lambda score: torch.maximum(score, torch.zeros(()).double())),
        ("maximum(score, -score)", lambda score: torch.maximum(score, -score)),
        ("minimum(2 * score, score)", lambda score: torch.minimum(2 * score, score)),
        ("maximum(minimum(score, 0), 0)", lambda score: torch.maximum(torch.minimum(score, score * 0), score * 0)),
        ("sqrt(score)", torch.sqrt),
        ("tanh(score)", torch.tanh),
        ("sigmoid(score)", torch.sigmoid),
    ],
)
def test_at_a_kink_the_derivative_is_that_of_torch(source: str, function) -> None:
    assert at(source, -1.0, 0.0, 2.0, 800.0) == pytest.approx(autograd_at(function, -1.0, 0.0, 2.0, 800.0), nan_ok=True)


@pytest.mark.parametrize(
    ("source", "slopes"),
    [
        ("where(score > 0, sqrt(score), 0)", [0.0, 0.0, 0.25]),
        ("where(score > 0, log(score), score)", [1.0, 1.0, 0.25]),
        ("where(score == 0, 1, sin(score) / score)", [math.nan, 0.0, math.nan]),
        ("sqrt(where(score > 0, score, 0))", [0.0, 0.0, 0.25]),
        ("1 / where(score > 0, score, 0)", [0.0, 0.0, -1 / 16]),
        ("maximum(log(score), -5)", [math.nan, 0.0, 0.25]),
        ("exp(where(score < 3, score, 1000)) * where(score < 3, 1, 0)", [math.exp(-1.0), 1.0, 0.0]),
    ],
)
def test_a_branch_that_is_not_taken_does_not_poison(source: str, slopes: list[float]) -> None:
    found = at(source, -1.0, 0.0, 4.0)

    assert [one for one, wanted in zip(found, slopes, strict=True) if not math.isnan(wanted)] == pytest.approx(
        [wanted for wanted in slopes if not math.isnan(wanted)]
    )


def test_derivatives_of_the_largest_expressions_take_no_time() -> None:
    source = "score"
    for place in range(25):
        source = f"maximum(tanh({source}), sigmoid(score) * {place})"
    start = time.perf_counter()

    slope = score_derivative(parse(source))

    assert time.perf_counter() - start < 5.0
    assert sum(1 for _ in walk(slope)) < 2000


def test_a_mask_has_no_derivative() -> None:
    mask = parse("q_idx >= kv_idx", (), Role.MASK_MOD)

    for derivative in (score_derivative, parameter_gradients):
        with pytest.raises(ExpressionError, match="a mask_mod has no derivative"):
            derivative(mask)
