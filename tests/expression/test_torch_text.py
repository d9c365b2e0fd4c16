"""Printed torch code, run and compared with what the expression means."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from autoflash.evaluate.expression_values import value_of
from autoflash.expression.derivative import parameter_gradients, score_derivative
from autoflash.expression.expression import Expression, Role, parse
from autoflash.expression.nodes import Variable
from autoflash.expression.program import Function
from autoflash.expression.torch_text import to_torch
from tests.expression.corpus import CASES, Case, declared, inputs
from tests.expression.modules import assert_tidy, called, functions_of, torch_functions
from tests.expression.strategies import TENSORS, expressions, properties


def assert_agrees(expression: Expression, tensors: dict[str, Tensor], shift: int = 0) -> None:
    """Values, slopes and gradients of float64 code are those of the specification."""
    given = inputs(expression.role, shift=shift)
    exact = {name: tensor.double() if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}
    printed = torch_functions(expression)

    value = called(printed["modified"], expression, exact, given)
    torch.testing.assert_close(*torch.broadcast_tensors(value, value_of(expression.root, given, exact)), equal_nan=True)

    if expression.role is Role.SCORE_MOD:
        slope = called(printed["slope"], expression, exact, given)
        expected = value_of(score_derivative(expression), given, exact)
        torch.testing.assert_close(*torch.broadcast_tensors(slope, expected), equal_nan=True)
        for place, gradient in enumerate(parameter_gradients(expression)):
            results = called(printed[f"gradient_{place}"], expression, exact, given)
            results = results if isinstance(results, tuple) else (results,)
            for result, node in zip(results, (gradient.derivative, *gradient.indices), strict=True):
                wanted = value_of(node, given, exact)
                torch.testing.assert_close(*torch.broadcast_tensors(result, wanted), equal_nan=True)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_printed_code_computes_what_the_expression_means(case: Case) -> None:
    assert_agrees(case.expression, case.tensors)
    assert_agrees(case.expression, case.tensors, shift=5)


@properties
@given(expressions())
def test_printed_code_of_any_expression_computes_what_it_means(expression: Expression) -> None:
    assert_agrees(expression, TENSORS)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_printed_code_keeps_the_dtype_of_the_scores(case: Case) -> None:
    given = inputs(case.role, dtype=torch.float32)
    expression = case.expression

    value = called(torch_functions(expression)["modified"], expression, case.tensors, given)

    assert value.dtype == (torch.float32 if case.role is Role.SCORE_MOD else torch.bool)
    expected = value_of(expression.root, given, case.tensors).to(value.dtype)
    torch.testing.assert_close(*torch.broadcast_tensors(value, expected), rtol=1e-4, atol=1e-4, equal_nan=True)


def test_no_argument_is_changed() -> None:
    for case in CASES:
        given, expression = inputs(case.role), case.expression
        before = [tensor.clone() for tensor in (*given.values(), *case.tensors.values())]

        for function in functions_of(expression):
            called(torch_functions(expression)[function.name], expression, case.tensors, given)

        assert all(map(torch.equal, before, (*given.values(), *case.tensors.values())))


def test_elements_of_low_precision_are_computed_with_in_that_of_the_scores() -> None:
    expression = parse("score + t[h] * u", declared({"t": torch.zeros(3), "u": torch.zeros(())}))
    tensors = {"t": torch.tensor([0.1, 0.2, 0.3]).bfloat16(), "u": torch.tensor(3.3).half()}
    given = inputs(dtype=torch.float32)

    value = called(torch_functions(expression)["modified"], expression, tensors, given)

    wanted = given[Variable.SCORE] + (tensors["t"].float() * tensors["u"].float()).view(1, -1, 1, 1)
    assert torch.equal(value, wanted)


def test_an_empty_table_reads_as_zero() -> None:
    expression = parse("score + t[q_idx, kv_idx]", declared({"t": torch.zeros(0, 4)}))
    given = inputs()

    assert torch.equal(
        called(torch_functions(expression)["modified"], expression, {"t": torch.zeros(0, 4)}, given),
        given[Variable.SCORE],
    )


@properties
@given(expressions())
def test_each_value_is_computed_once_and_lines_stay_short(expression: Expression) -> None:
    for function in functions_of(expression):
        text = to_torch(expression.role, [function], expression.parameters)

        values = [line.partition(" = ")[2] for line in text.splitlines() if line.startswith("    t")]
        assert len(values) == len(set(values))
        assert max(map(len, text.splitlines())) <= 120


@settings(properties, max_examples=3)
@given(st.lists(expressions(), min_size=20, max_size=20))
def test_printed_text_is_formatted_and_linted(others: list[Expression]) -> None:
    header = '"""Printed."""\n\nimport torch\n\nDTYPE = torch.float32\n\n\n'
    with tempfile.TemporaryDirectory() as folder:
        for place, expression in enumerate([*(case.expression for case in CASES), *others]):
            text = to_torch(expression.role, functions_of(expression), expression.parameters)
            Path(folder, f"printed_{place}.py").write_text(header + text)

        assert_tidy(Path(folder))


def test_results_come_in_the_order_that_was_asked_for() -> None:
    expression = parse("score * 2 + h")
    function = Function(name="both", docstring="Two.", results=(score_derivative(expression), expression.root))

    names: dict = {}
    exec("import torch\n" + to_torch(Role.SCORE_MOD, [function], ()), names)
    slope, value = names["both"](*inputs().values())

    assert slope == 2.0
    assert value.shape == (2, 3, 8, 16)


def test_only_what_is_needed_is_printed() -> None:
    text = to_torch(Role.SCORE_MOD, functions_of(parse("score * 2")), ())

    assert text == (
        'def modified(score, b, h, q_idx, kv_idx):\n    """What the expression gives."""\n    return score * 2.0\n\n\n'
        "def slope(score, b, h, q_idx, kv_idx):\n"
        '    """Derivative by the score."""\n    return torch.tensor(2.0, dtype=score.dtype)\n'
    )
