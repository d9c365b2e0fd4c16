"""The conventions of rating a kernel, against counting."""

from __future__ import annotations

import pytest

from autoflash.evaluate.cost import flops, least_bytes, tflops, visible_pairs
from autoflash.problem import Alignment, Mask, Pass
from tests.factories import make_problem


@pytest.mark.parametrize("alignment", list(Alignment))
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(5, 9), (9, 5), (1, 8), (8, 1), (3, 0), (0, 3)])
def test_causal_pairs_of_other_shapes_are_counted_exactly(alignment: Alignment, seqlen_q: int, seqlen_k: int) -> None:
    problem = make_problem(seqlen_q=seqlen_q, seqlen_k=seqlen_k, mask=Mask.CAUSAL, alignment=alignment)

    counted = sum(j <= i + problem.diagonal for i in range(seqlen_q) for j in range(seqlen_k))

    assert visible_pairs(problem) == counted


def test_a_square_causal_mask_counts_half() -> None:
    assert visible_pairs(make_problem(seqlen_q=64, seqlen_k=64, mask=Mask.CAUSAL)) == 64 * 64 / 2


def test_the_usual_formulas_hold() -> None:
    problem = make_problem(
        op=Pass.FORWARD, batch=2, heads=3, kv_heads=3, seqlen_q=128, seqlen_k=128, head_dim=64, head_dim_v=64
    )

    assert flops(problem) == 4 * 2 * 3 * 128 * 128 * 64
    assert flops(problem.replace(op=Pass.BACKWARD)) == 2.5 * flops(problem)
    assert tflops(problem, 10.0) == pytest.approx(flops(problem) / 10e-6 / 1e12)


def test_least_bytes_count_each_tensor_once() -> None:
    problem = make_problem(
        op=Pass.FORWARD, batch=1, heads=4, kv_heads=2, seqlen_q=10, seqlen_k=20, head_dim=8, head_dim_v=16
    )
    q, k, v, out, lse = 4 * 10 * 8, 2 * 20 * 8, 2 * 20 * 16, 4 * 10 * 16, 4 * 10

    assert least_bytes(problem) == 2 * (q + k + v + out) + 4 * lse
    assert least_bytes(problem.replace(op=Pass.BACKWARD)) == 2 * (2 * q + 2 * k + 2 * v + 2 * out) + 4 * lse
