"""Expressions printed to Triton, run on a tile in Triton's interpreter."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from autoflash.evaluate.expression_values import value_of
from autoflash.expression.derivative import parameter_gradients, score_derivative
from autoflash.expression.expression import Expression, Role, parse
from autoflash.expression.nodes import Kind, Variable
from tests.expression.corpus import CASES, B, Case, H, M, N, declared, inputs
from tests.expression.modules import called, imported, tile_kernel, torch_functions
from tests.expression.strategies import TENSORS, expressions, properties

# Triton 3.6's interpreter takes arrays of one element for numbers.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0 to a scalar:DeprecationWarning")


def scalar(tensor: Tensor) -> float | int:
    """A parameter of rank 0, as a kernel takes it."""
    return tensor.item() if tensor.is_floating_point() else int(tensor)


def results_of(
    kernel: ModuleType, function: str, count: int, expression: Expression, tensors: dict[str, Tensor], shift: int = 0
) -> list[Tensor]:
    """Results [B, H, M, N] of a printed function, a tile for each head."""
    score = inputs(dtype=torch.float32)[Variable.SCORE]
    results = [torch.full((B, H, M, N), torch.nan) for _ in range(count)]
    arguments: list[object] = []
    for parameter in expression.parameters:
        tensor = tensors[parameter.name]
        arguments += [tensor, *tensor.shape, *tensor.stride()] if parameter.rank else [scalar(tensor)]
    with np.errstate(all="ignore"):
        for b, h in itertools.product(range(B), range(H)):
            tiles = [result[b, h] for result in results]
            getattr(kernel, f"{function}_tile")[(1,)](score[b, h].contiguous(), *tiles, *arguments, b, h, shift, M, N)
    return results


def assert_as_near(result: Tensor, yardstick: Tensor, expected: Tensor) -> None:
    """Infinite and not a number where the specification is; else no further from it than twice torch, and roundings."""
    assert torch.equal(result[~expected.isfinite()].nan_to_num(), expected[~expected.isfinite()].nan_to_num())
    assert torch.equal(result.isnan(), expected.isnan())
    finite = expected.isfinite()
    if finite.any():
        error, allowed = ((one - expected)[finite].abs().max() for one in (result, yardstick))
        assert error <= 2.0 * allowed + 8.0 * torch.finfo(torch.float32).eps * expected[finite].abs().max()


def assert_agrees(expression: Expression, tensors: dict[str, Tensor], folder: Path, shift: int = 0) -> None:
    """A tile's results in float32 are as near to the specification as torch's."""
    kernel, plain = imported(tile_kernel(expression), folder), torch_functions(expression)
    given = inputs(expression.role, dtype=torch.float32, shift=shift)
    wanted = {"modified": [expression.root]}
    if expression.role is Role.SCORE_MOD:
        wanted["slope"] = [score_derivative(expression)]
        for place, gradient in enumerate(parameter_gradients(expression)):
            wanted[f"gradient_{place}"] = [gradient.derivative, *gradient.indices]

    for function, nodes in wanted.items():
        results = results_of(kernel, function, len(nodes), expression, tensors, shift)
        yardsticks = called(plain[function], expression, tensors, given)
        yardsticks = yardsticks if isinstance(yardsticks, tuple) else (yardsticks,)
        for result, yardstick, node in zip(results, yardsticks, nodes, strict=True):
            expected = value_of(node, given, tensors).expand(B, H, M, N).double()
            if node.kind is Kind.FLOAT:
                assert_as_near(result.double(), yardstick.expand(B, H, M, N).double(), expected)
            else:
                assert torch.equal(result.double(), expected)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_tile_is_what_the_expression_means(case: Case, tmp_path: Path) -> None:
    assert_agrees(case.expression, case.tensors, tmp_path)


@settings(properties, max_examples=12)
@given(expressions())
def test_a_tile_of_any_expression_is_what_it_means(
    tmp_path_factory: pytest.TempPathFactory, expression: Expression
) -> None:
    assert_agrees(expression, TENSORS, tmp_path_factory.mktemp("kernels"), shift=3)


@pytest.mark.parametrize("text", ["(q_idx - 5) // (kv_idx - 7)", "(q_idx - 5) % (kv_idx - 7)", "(5 - q_idx) // -3"])
def test_integers_are_divided_as_in_python(text: str, tmp_path: Path) -> None:
    kernel = imported(tile_kernel(parse(text)), tmp_path)

    (result,) = results_of(kernel, "modified", 1, parse(text), {})

    for q_idx, kv_idx in itertools.product(range(M), range(N)):
        try:
            expected = eval(text, {"q_idx": q_idx, "kv_idx": kv_idx})
        except ZeroDivisionError:
            expected = 0 if "//" in text else q_idx - 5
        assert result[0, 0, q_idx, kv_idx] == expected


def test_the_least_integer_can_be_divided_by_minus_one(tmp_path: Path) -> None:
    tensors = {"n": torch.tensor([-(2**31)]).int()}
    expression = parse("n[0] // (h - 1) + 0 * score", declared(tensors))

    (result,) = results_of(imported(tile_kernel(expression), tmp_path), "modified", 1, expression, tensors)

    assert result[0, :, 0, 0].tolist() == [-(2.0**31), 0.0, -(2.0**31)]


def test_floor_of_what_no_integer_holds_is_the_nearest_or_zero(tmp_path: Path) -> None:
    tensors = {"x": torch.tensor([3e9, -torch.inf, torch.nan])}
    expression = parse("floor(x[h])", declared(tensors))

    (result,) = results_of(imported(tile_kernel(expression), tmp_path), "modified", 1, expression, tensors)

    assert result[0, :, 0, 0].tolist() == [2.0**31 - 128, -(2.0**31), 0.0]


def test_tables_of_any_strides_are_read(tmp_path: Path) -> None:
    table = torch.randn(2 * N, H).t()[:, ::2]
    expression = parse("score + t[h, kv_idx]", declared({"t": table}))

    assert_agrees(expression, {"t": table}, tmp_path)


def test_nothing_outside_a_table_is_touched(tmp_path: Path) -> None:
    around = torch.full((3, 8), torch.nan)
    around[1, 2:6] = torch.arange(4.0)
    table = around[1:2, 2:6]
    expression = parse("t[h - 1, kv_idx - 4]", declared({"t": table}))

    (result,) = results_of(imported(tile_kernel(expression), tmp_path), "modified", 1, expression, {"t": table})

    expected = torch.zeros(B, H, M, N)
    expected[:, 1, :, 4:8] = torch.arange(4.0)
    assert torch.equal(result, expected)


@pytest.mark.parametrize("source", ["minimum(x[h], score)", "maximum(score, x[h])", "where(x[h] < 0, 1, score)"])
def test_what_is_not_a_number_stays_so(source: str, tmp_path: Path) -> None:
    tensors = {"x": torch.tensor([torch.nan, 1.0, -torch.inf])}

    assert_agrees(parse(source, declared(tensors)), tensors, tmp_path)
