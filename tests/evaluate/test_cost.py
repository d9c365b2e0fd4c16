"""The conventions of rating a kernel, against counting."""

from __future__ import annotations

import pytest

from autoflash.evaluate.cost import (
    flops,
    head_bytes,
    least_bytes,
    lse_bytes,
    score_matrix_bytes,
    tflops,
    visible_pairs,
)
from autoflash.problem import Alignment, DType, Mask, MaskTensor, Pass
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


WINDOWS = [(0, 0), (3, 1), (None, 2), (2, None), (100, 100), (0, 7), (5, 0)]


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("mask", list(Mask))
@pytest.mark.parametrize("alignment", list(Alignment))
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(5, 9), (9, 5), (8, 8), (1, 8), (3, 0), (0, 3)])
def test_pairs_in_a_window_are_counted_exactly(
    alignment: Alignment, mask: Mask, window: tuple[int | None, int | None], seqlen_q: int, seqlen_k: int
) -> None:
    sizes = make_problem(seqlen_q=seqlen_q, seqlen_k=seqlen_k, mask=mask, alignment=alignment)
    problem = sizes.replace(window_left=window[0], window_right=window[1])
    left, right = (1000 if bound is None else bound for bound in window)
    right = 0 if mask is Mask.CAUSAL else right

    counted = sum(
        i + problem.diagonal - left <= j <= i + problem.diagonal + right
        for i in range(seqlen_q)
        for j in range(seqlen_k)
    )

    assert visible_pairs(problem) == counted


def test_the_time_of_a_window_is_rated_by_what_it_leaves() -> None:
    problem = make_problem(seqlen_q=4096, seqlen_k=4096, mask=Mask.CAUSAL)

    assert flops(problem.replace(window_left=127)) < flops(problem) / 15


@pytest.mark.parametrize("mask", list(Mask))
@pytest.mark.parametrize("alignment", list(Alignment))
def test_packed_sequences_are_rated_by_their_mean_length(mask: Mask, alignment: Alignment) -> None:
    one = make_problem(batch=8, seqlen_q=100, seqlen_k=160, mask=mask, alignment=alignment)
    packed = one.replace(packed_q=8 * 100, packed_k=8 * 160, seqlen_q=400, seqlen_k=500)

    assert flops(packed) == flops(one)
    assert least_bytes(packed) == least_bytes(one) + 2 * 4 * 9


def test_a_packed_problem_without_sequences_costs_nothing() -> None:
    assert flops(make_problem(batch=0).replace(packed_q=0, packed_k=0)) == 0


@pytest.mark.parametrize(("kind", "item"), [(MaskTensor.BOOL, 1), (MaskTensor.FLOAT, 2)])
def test_a_mask_is_read_once_for_each_batch_entry(kind: MaskTensor, item: int) -> None:
    problem = make_problem(batch=3, heads=4, seqlen_q=10, seqlen_k=20, dtype=DType.FP16)

    assert least_bytes(problem.replace(mask_tensor=kind)) == least_bytes(problem) + 3 * 10 * 20 * item


def test_a_score_matrix_has_an_element_for_each_pair_of_each_head() -> None:
    problem = make_problem(batch=2, heads=3, kv_heads=3, seqlen_q=10, seqlen_k=20, dtype=DType.FP32)

    assert score_matrix_bytes(problem) == 2 * 3 * 10 * 20 * 4
    assert score_matrix_bytes(problem.replace(packed_q=20, packed_k=40, seqlen_q=15)) == 2 * 3 * 10 * 20 * 4


def test_bytes_of_a_head_and_of_the_log_sum_exp() -> None:
    problem = make_problem(batch=2, heads=4, kv_heads=2, seqlen_q=10, seqlen_k=20, head_dim=8, head_dim_v=16)

    assert head_bytes(problem) == 20 * (8 + 16) * 2
    assert lse_bytes(problem) == 2 * 4 * 10 * 4
    assert lse_bytes(problem.replace(packed_q=33, packed_k=40)) == 4 * 33 * 4
