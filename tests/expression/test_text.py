"""The canonical text of an expression is its identity."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from hypothesis import given

from autoflash.expression.derivative import parameter_gradients, score_derivative
from autoflash.expression.expression import Expression, of_line, parse
from autoflash.expression.nodes import Read, walk
from autoflash.expression.text import text_of
from tests.expression.corpus import CASES, Case, declared
from tests.expression.strategies import TENSORS, expressions, properties


@properties
@given(expressions())
def test_the_text_of_any_expression_gives_it_again(expression: Expression) -> None:
    again = parse(expression.text, declared(TENSORS))

    assert again == expression
    assert again.root.order == expression.root.order
    assert (again.text, again.key) == (expression.text, expression.key)
    assert of_line(str(expression)) == expression


@properties
@given(expressions(depth=2))
def test_derivatives_are_expressions_too(expression: Expression) -> None:
    slopes = [score_derivative(expression), *(each.derivative for each in parameter_gradients(expression))]

    for slope in slopes:
        read = {node.parameter for node in walk(slope) if isinstance(node, Read)}
        assert parse(text_of(slope), list(read)).root == slope


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_white_space_and_parentheses_do_not_matter(case: Case) -> None:
    spread = "  ((" + case.source.replace("+", "  +  ").replace(",", " , ") + "))  "

    assert parse(spread, declared(case.tensors), case.role).key == case.expression.key


def test_different_expressions_have_different_keys() -> None:
    keys = {case.expression.key for case in CASES}

    assert len(keys) == len(CASES)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("score + 1", "score + 1.5"),
        ("score + h", "score + b"),
        ("score - h", "h - score"),
        ("(score + 1) + 1e-8", "score + (1 + 1e-8)"),
        ("where(h < 1, score, 0)", "where(h <= 1, score, 0)"),
        ("float(q_idx + kv_idx) + score", "float(q_idx) + float(kv_idx) + score"),
        ("where(not score < 0, score, 0)", "where(score >= 0, score, 0)"),
    ],
)
def test_what_may_differ_in_a_bit_is_not_the_same(one: str, other: str) -> None:
    assert parse(one).key != parse(other).key


def test_a_parameter_of_another_kind_or_rank_makes_another_expression() -> None:
    kinds = [declared({"n": TENSORS["n"]}), declared({"n": TENSORS["t"]})]

    assert len({parse("score + n", parameters).key for parameters in kinds}) == 2


PROGRAM = """
from tests.expression.corpus import CASES
for case in CASES:
    print(case.expression, case.expression.key)
"""


def test_text_and_key_are_the_same_in_every_process() -> None:
    printed = {
        subprocess.run(
            [sys.executable, "-c", PROGRAM],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2", "3")
    }

    assert printed == {"".join(f"{case.expression} {case.expression.key}\n" for case in CASES)}


def test_the_key_of_a_recorded_expression_stays() -> None:
    expression = parse("score - slopes[h] * abs(q_idx - kv_idx)", declared({"slopes": TENSORS["slopes"]}))

    assert str(expression) == "score_mod(slopes: float 1) = score - slopes[h] * float(abs(q_idx - kv_idx))"
    assert expression.key == "b816cdd4530111df"


def test_a_node_is_visited_once() -> None:
    root = parse("(score + h) * (score + h) + exp(score + h)").root

    texts = [text_of(node) for node in walk(root)]

    assert texts.count("score + float(h)") == 1
    assert len(texts) == len(set(texts))
    assert texts[-1] == text_of(root)
