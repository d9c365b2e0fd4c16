"""Which pairs share an element of a parameter."""

from __future__ import annotations

import pytest

from autoflash.expression.derivative import parameter_gradients
from autoflash.expression.expression import Expression, parse
from autoflash.expression.nodes import Kind, Parameter
from autoflash.expression.sharing import Sharing, scattered_parameters, sharing_of


def looking_up(*indices: str) -> Expression:
    """A score beside an element of ``t``, whose indices may read ``labels`` and ``n``."""
    text = f"score + t[{', '.join(indices)}]"
    declared = [Parameter(name="t", kind=Kind.FLOAT, rank=len(indices))]
    declared += [Parameter(name="labels", kind=Kind.INT, rank=1)] if "labels" in text else []
    declared += [Parameter(name="n", kind=Kind.INT, rank=0)] if "n)" in text or "+ n" in text else []
    return parse(text, declared)


@pytest.mark.parametrize(
    ("indices", "sharing"),
    [
        (("0",), Sharing.HEAD),
        (("b", "h"), Sharing.HEAD),
        (("labels[h]",), Sharing.HEAD),
        (("h", "q_idx"), Sharing.QUERY),
        (("labels[q_idx // 3]",), Sharing.QUERY),
        (("kv_idx", "h"), Sharing.KEY),
        (("h", "q_idx - kv_idx"), Sharing.DISTANCE),
        (("h", "kv_idx + n - q_idx"), Sharing.DISTANCE),
        (("abs(q_idx - kv_idx) // 2",), Sharing.DISTANCE),
        (("2 * q_idx - (kv_idx + kv_idx)",), Sharing.DISTANCE),
        (("labels[maximum(q_idx - kv_idx, 0)]",), Sharing.DISTANCE),
        (("where(q_idx >= kv_idx, q_idx - kv_idx, 0)",), Sharing.DISTANCE),
        (("floor(log(1 + abs(q_idx - kv_idx)))",), Sharing.DISTANCE),
        (("q_idx", "kv_idx"), Sharing.PAIR),
        (("q_idx + kv_idx",), Sharing.PAIR),
        (("2 * q_idx - kv_idx",), Sharing.PAIR),
        (("q_idx // 2 - kv_idx // 2",), Sharing.PAIR),
        (("where(q_idx > 5, q_idx - kv_idx, 0)",), Sharing.PAIR),
        (("labels[q_idx] - labels[kv_idx]",), Sharing.PAIR),
        (("h", "floor(score)"), Sharing.PAIR),
    ],
)
def test_sharing_is_known_from_the_indices(indices: tuple[str, ...], sharing: Sharing) -> None:
    (gradient,) = parameter_gradients(looking_up(*indices))

    assert sharing_of(gradient) is sharing


@pytest.mark.parametrize(
    ("indices", "is_scattered"),
    [
        (("h", "q_idx - kv_idx"), False),
        (("h", "q_idx", "kv_idx"), True),
        (("b", "h", "q_idx", "kv_idx"), False),
        (("b", "h", "q_idx", "kv_idx + 1"), True),
    ],
)
def test_elements_that_pairs_meet_in_any_order_are_scattered(indices: tuple[str, ...], is_scattered: bool) -> None:
    assert scattered_parameters(str(looking_up(*indices))) == (("t",) if is_scattered else ())
