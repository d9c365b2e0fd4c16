"""Random expressions, as text: whatever they contain, they can be differentiated and computed in float32."""

from __future__ import annotations

import torch
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor

from autoflash.expression.expression import Expression, parse
from tests.expression.corpus import B, H, M, N, declared

# What random expressions may read.
TENSORS: dict[str, Tensor] = {
    "t": torch.tensor(0.75),
    "slopes": torch.tensor([0.5, -0.25, 1.5]),
    "table": torch.linspace(-1.0, 2.0, H * 9).view(H, 9),
    "deep": torch.linspace(-2.0, 1.0, B * H * M * N).view(B, H, M, N),
    "n": torch.tensor(5).int(),
    "doc": (torch.arange(B * N).view(B, N) * 7 % 4 - 1).int(),
    "flags": torch.arange(M) % 3 == 0,
}

# The same examples on every machine and in every run; nothing is written into the checkout.
properties = settings(derandomize=True, database=None, max_examples=100, deadline=None)


def _call(name: str, *operands: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.tuples(*operands).map(lambda texts: f"{name}({', '.join(texts)})")


def _infix(signs: str, left: st.SearchStrategy[str], right: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.tuples(left, st.sampled_from(signs.split()), right).map(lambda parts: f"({' '.join(parts)})")


def integers(depth: int) -> st.SearchStrategy[str]:
    """Text of an integer."""
    atoms = st.sampled_from(["q_idx", "kv_idx", "b", "h", "n", "doc[b, kv_idx]"]) | st.integers(-9, 9).map(str)
    if depth == 0:
        return atoms
    less = integers(depth - 1)
    return st.one_of(
        atoms,
        _infix("+ - *", less, less),
        _infix("// %", less, st.sampled_from(["2", "3", "-5", "1", "n", "(h - 1)", "(kv_idx - 4)"])),
        _call("minimum", less, less),
        _call("maximum", less, less),
        _call("abs", less),
        less.map(lambda text: f"-{text}"),
        _call("where", truths(depth - 1), less, less),
        _call("floor", st.sampled_from(["score", "t * 3", "-0.5", "float(q_idx)"])),
    )


def truths(depth: int) -> st.SearchStrategy[str]:
    """Text of a truth. Floats are compared only where no rounding can decide."""
    atoms = st.sampled_from(["flags[q_idx]", "score < 0.5", "score >= t", "q_idx >= kv_idx", "True", "h == 1"])
    if depth == 0:
        return atoms.map(lambda text: f"({text})")
    less = truths(depth - 1)
    return st.one_of(
        atoms.map(lambda text: f"({text})"),
        _infix("< <= > >= == !=", integers(depth - 1), integers(depth - 1)),
        _infix("and or & | == !=", less, less),
        less.map(lambda text: f"(not {text})"),
        less.map(lambda text: f"~{text}"),
    )


def floats(depth: int) -> st.SearchStrategy[str]:
    """Text of a float that is finite, and so are its derivatives, whatever the score."""
    atoms = st.sampled_from(["score", "t", "slopes[h]", "deep[b, h, q_idx, kv_idx]", "0.5", "-2.0", "1", "q_idx"])
    if depth == 0:
        return atoms
    less = floats(depth - 1)
    return st.one_of(
        atoms,
        integers(depth - 1).map(lambda index: f"table[h, {index}]"),
        _infix("+ - *", less, less),
        less.map(lambda text: f"-{text}"),
        st.tuples(less, st.integers(0, 3)).map(lambda parts: f"tanh({parts[0]})**{parts[1]}"),
        st.tuples(less, less).map(lambda parts: f"({parts[0]} / (1 + abs({parts[1]})))"),
        *(_call(name, less) for name in ("tanh", "sigmoid", "sin", "cos", "abs")),
        less.map(lambda text: f"exp(-abs({text}))"),
        less.map(lambda text: f"log(1 + abs({text}))"),
        less.map(lambda text: f"sqrt(0.25 + abs({text}))"),
        _call("minimum", less, less),
        _call("maximum", less, less),
        _call("where", truths(depth - 1), less, less),
        st.tuples(less, truths(depth - 1), less).map(lambda parts: f"({parts[0]} if {parts[1]} else {parts[2]})"),
    )


# Every parameter is read, whatever else is.
_ALL = "where(flags[q_idx], t * slopes[h], table[h, doc[b, n]]) * deep[b, h, q_idx, kv_idx]"


def expressions(depth: int = 3) -> st.SearchStrategy[Expression]:
    """Random modifications of the score, which read all of ``TENSORS``."""
    return floats(depth).map(lambda text: parse(f"{text} + {_ALL}", declared(TENSORS)))
