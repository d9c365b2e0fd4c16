"""The text that is printed for Triton; tests/interpreter runs it, tests/compile compiles it."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from autoflash.expression.expression import Expression, Role, parse
from autoflash.expression.triton_text import to_triton
from tests.expression.corpus import CASES, declared
from tests.expression.modules import assert_tidy, functions_of, tile_kernel
from tests.expression.strategies import expressions, properties


@settings(properties, max_examples=3)
@given(st.lists(expressions(), min_size=20, max_size=20))
def test_printed_text_is_formatted_and_linted(others: list[Expression]) -> None:
    header = '"""Printed."""\n\nfrom typing import NamedTuple\n\nimport triton\nimport triton.language as tl\n\n'
    with tempfile.TemporaryDirectory() as folder:
        for place, expression in enumerate([*(case.expression for case in CASES), *others]):
            text = to_triton(expression.role, functions_of(expression), expression.parameters)
            uses = "TUPLE, CAST = NamedTuple, tl.cast\n\n\n"
            Path(folder, f"printed_{place}.py").write_text(f"{header}{uses}{text}")

        assert_tidy(Path(folder))


def test_a_function_unpacks_what_it_reads() -> None:
    expression = parse(
        "where(q_idx > n, score + slopes[h], score)", declared({"n": torch.tensor(1).int(), "slopes": torch.ones(2)})
    )

    text = to_triton(expression.role, functions_of(expression), expression.parameters)

    assert text.startswith('class Table1(NamedTuple):\n    """A tensor of rank 1."""\n')
    assert text.endswith(
        '''@triton.jit
def modified(score, b, h, q_idx, kv_idx, params):
    """What the expression gives."""
    param_n = params[0]
    param_slopes = params[1]
    t0 = score + tl.cast(look_up_1(param_slopes, h), tl.float32)
    return tl.where(param_n < q_idx, t0, score)


@triton.jit
def slope(score, b, h, q_idx, kv_idx, params):
    """Derivative by the score."""
    return tl.full((), 1.0, tl.float32)


@triton.jit
def gradient_0(score, b, h, q_idx, kv_idx, params):
    """Derivative by an element of slopes, and which one."""
    param_n = params[0]
    return tl.where(param_n < q_idx, 1.0, 0.0), h
'''
    )


def test_offsets_into_tables_have_64_bits() -> None:
    expression = parse("score + t[b, h, q_idx, kv_idx]", declared({"t": torch.zeros(1, 1, 1, 1)}))

    text = to_triton(Role.SCORE_MOD, functions_of(expression), expression.parameters)

    assert text.count(".to(tl.int64) * table.stride_") == 4


def test_no_name_of_a_user_reaches_the_text_bare() -> None:
    names = ["tl", "torch", "triton", "print", "t0", "params", "base", "look_up_1"]
    expression = parse(
        "score + " + " + ".join(f"{name}[h]" for name in names), declared({n: torch.ones(1) for n in names})
    )

    text = tile_kernel(expression)

    assert all(f"param_{name} = params[" in text for name in names)
