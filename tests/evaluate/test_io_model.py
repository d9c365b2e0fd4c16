"""What published algorithms move, against sums written out by hand."""

from __future__ import annotations

import pytest

from autoflash.evaluate.cost import least_bytes, score_matrix_bytes
from autoflash.evaluate.io_model import (
    Traffic,
    flash_attention_1,
    flash_attention_2,
    holds_theta_flash,
    published,
    rabe_staats,
    standard,
    theta_flash,
    theta_standard,
)
from autoflash.evaluate.tiles import Blocks, algorithm_1_blocks
from autoflash.problem import DType, Mask, MaskTensor, Pass, Problem
from tests.factories import make_problem

HANDBOOK = make_problem(heads=32, seqlen_q=8192, head_dim=128, dtype=DType.BF16)
SMALL = make_problem(batch=2, heads=3, seqlen_q=64, seqlen_k=96, head_dim=16, head_dim_v=8)
HEADS = 2 * 3


def moved(traffic: Traffic, tensor: str) -> tuple[int, int]:
    """Elements read and written of one tensor of one head, of two bytes each."""
    (stream,) = [stream for stream in traffic.streams if stream.tensor == tensor]
    return stream.read_bytes // (2 * HEADS), stream.written_bytes // (2 * HEADS)


def test_one_score_matrix_of_the_handbook_is_four_gibibytes() -> None:
    assert score_matrix_bytes(HANDBOOK) == 4 * 2**30


def test_standard_attention_moves_four_score_matrices_and_each_tensor_once() -> None:
    traffic = standard(SMALL)

    tensors = 64 * 16 + 96 * 16 + 96 * 8 + 64 * 8
    assert traffic.total_bytes == 2 * HEADS * (tensors + 4 * 64 * 96)
    assert traffic.written_bytes == 2 * HEADS * (2 * 64 * 96 + 64 * 8)


def test_standard_backward_reads_probabilities_twice_and_moves_gradients_five_times() -> None:
    traffic = standard(SMALL.replace(op=Pass.BACKWARD))

    inputs = 64 * 16 + 96 * 16 + 96 * 8 + 2 * 64 * 8
    outputs = 64 * 16 + 96 * 16 + 96 * 8
    assert traffic.total_bytes == 2 * HEADS * (inputs + outputs + 7 * 64 * 96)


def test_rabe_staats_moves_what_standard_attention_does_and_partial_outputs() -> None:
    traffic = rabe_staats(SMALL, Blocks(rows=32, keys=24))

    assert moved(traffic, "scores") == (64 * 96, 64 * 96)
    assert moved(traffic, "q") == (4 * 64 * 16, 0)
    assert moved(traffic, "k") == (2 * 96 * 16, 0)
    # float32 counts as two elements of bf16.
    assert moved(traffic, "partial out") == (2 * 4 * 64 * 8, 2 * 4 * 64 * 8)
    assert moved(traffic, "partial sums") == (2 * 2 * 4 * 64, 2 * 2 * 4 * 64)
    assert traffic.total_bytes > standard(SMALL).total_bytes


def test_flash_attention_1_reads_queries_and_outputs_for_each_block_of_keys() -> None:
    traffic = flash_attention_1(SMALL, Blocks(rows=16, keys=32))

    assert moved(traffic, "q") == (3 * 64 * 16, 0)
    assert moved(traffic, "k") == (96 * 16, 0)
    assert moved(traffic, "out") == (3 * 64 * 8, 4 * 64 * 8)
    assert moved(traffic, "l, m") == (2 * 2 * 3 * 64, 2 * 2 * 4 * 64)


def test_flash_attention_2_reads_keys_for_each_block_of_queries() -> None:
    traffic = flash_attention_2(SMALL, Blocks(rows=16, keys=32))

    assert moved(traffic, "q") == (64 * 16, 0)
    assert moved(traffic, "k") == (4 * 96 * 16, 0)
    assert moved(traffic, "v") == (4 * 96 * 8, 0)
    assert moved(traffic, "out") == (0, 64 * 8)
    assert moved(traffic, "lse") == (0, 2 * 64)


def test_backwards_read_and_write_dq_for_each_block_of_keys() -> None:
    problem = SMALL.replace(op=Pass.BACKWARD)
    first, second = (
        algorithm(problem, Blocks(rows=16, keys=32)) for algorithm in (flash_attention_1, flash_attention_2)
    )

    for traffic in (first, second):
        assert moved(traffic, "dq") == (3 * 64 * 16, 4 * 64 * 16)
        assert moved(traffic, "dk") == (0, 96 * 16)
    assert moved(first, "out") == (3 * 64 * 8, 0)
    assert moved(second, "out") == (64 * 8, 0)
    assert moved(second, "dout") == (4 * 64 * 8, 0)
    assert moved(second, "delta") == (2 * 3 * 64, 2 * 64)


def test_what_l2_holds_is_read_once() -> None:
    assert flash_attention_2(HANDBOOK, Blocks(rows=64, keys=64), in_l2=True).total_bytes == least_bytes(HANDBOOK)


def test_l2_serves_all_heads_that_share_keys() -> None:
    problem = HANDBOOK.replace(kv_heads=4)

    assert flash_attention_2(problem, Blocks(rows=64, keys=64), in_l2=True).total_bytes == least_bytes(problem)


def test_one_block_of_queries_needs_no_cache() -> None:
    one = flash_attention_2(SMALL, Blocks(rows=64, keys=16))

    assert one.total_bytes == least_bytes(SMALL)


def test_a_chip_that_holds_everything_makes_one_pass() -> None:
    problem = make_problem(head_dim=1024, head_dim_v=1024, seqlen_q=512)
    blocks = algorithm_1_blocks(problem, 2**40)

    assert flash_attention_2(problem, blocks).total_bytes == least_bytes(problem)
    assert moved_once(flash_attention_1(problem, blocks)) == {"q", "k", "v"}


def moved_once(traffic: Traffic) -> set[str]:
    return {stream.tensor for stream in traffic.streams if not stream.written_bytes}


@pytest.mark.parametrize("op", list(Pass))
def test_more_memory_on_the_chip_never_moves_more(op: Pass) -> None:
    problem = HANDBOOK.replace(op=op)
    totals = [
        [traffic.total_bytes for traffic in published(problem, algorithm_1_blocks(problem, kib * 1024))]
        for kib in (16, 48, 99, 163, 227, 1024, 2**20)
    ]

    for by_chip in zip(*totals, strict=True):
        assert list(by_chip) == sorted(by_chip, reverse=True)


@pytest.mark.parametrize("algorithm", [flash_attention_1, flash_attention_2])
@pytest.mark.parametrize("op", list(Pass))
def test_a_causal_mask_halves_what_is_moved_again_and_again(algorithm, op: Pass) -> None:  # type: ignore[no-untyped-def]  # two signatures
    problem = HANDBOOK.replace(op=op)
    blocks = Blocks(rows=64, keys=64)

    full, causal = (algorithm(problem.replace(mask=mask), blocks).total_bytes for mask in Mask)

    assert 0.5 < causal / full < 0.53


def test_standard_attention_does_not_gain_by_a_causal_mask() -> None:
    assert standard(HANDBOOK.replace(mask=Mask.CAUSAL)).total_bytes == standard(HANDBOOK).total_bytes


@pytest.mark.parametrize("algorithm", [flash_attention_1, flash_attention_2])
def test_a_window_makes_traffic_linear_in_the_sequence(algorithm) -> None:  # type: ignore[no-untyped-def]  # two signatures
    short, long = (
        algorithm(HANDBOOK.replace(seqlen_q=s, seqlen_k=s, window_left=255, window_right=0), Blocks(rows=64, keys=64))
        for s in (8192, 16384)
    )

    assert long.total_bytes == pytest.approx(2 * short.total_bytes, rel=0.01)


@pytest.mark.parametrize(("kind", "item"), [(MaskTensor.BOOL, 1), (MaskTensor.FLOAT, 2)])
def test_a_mask_is_read_where_scores_are_computed(kind: MaskTensor, item: int) -> None:
    blocks = Blocks(rows=16, keys=32)
    for plain, masked in zip(published(SMALL, blocks), published(SMALL.replace(mask_tensor=kind), blocks), strict=True):
        assert masked.read_bytes - plain.read_bytes == HEADS * 64 * 96 * item
        assert masked.written_bytes == plain.written_bytes


def test_theta_of_the_handbook() -> None:
    m = 227 * 1024 / 2

    assert theta_standard(HANDBOOK) == 2 * 32 * (8192 * 128 + 8192**2)
    assert theta_flash(HANDBOOK, 227 * 1024) == pytest.approx(2 * 32 * 8192**2 * 128**2 / m)


@pytest.mark.parametrize("kib", [99, 163, 227])
def test_exact_counts_are_a_small_multiple_of_theta(kib: int) -> None:
    blocks = algorithm_1_blocks(HANDBOOK, kib * 1024)
    theta = theta_flash(HANDBOOK, kib * 1024)

    assert 4 < flash_attention_1(HANDBOOK, blocks).total_bytes / theta < 16
    assert 1 < standard(HANDBOOK).total_bytes / theta_standard(HANDBOOK) < 5


def test_the_theorem_holds_between_one_vector_and_one_head() -> None:
    assert holds_theta_flash(HANDBOOK, 227 * 1024)
    assert not holds_theta_flash(HANDBOOK, 128)
    assert not holds_theta_flash(HANDBOOK, 2**30)


def test_without_blocks_only_algorithms_that_need_none_are_counted() -> None:
    names = [traffic.algorithm for traffic in published(SMALL, None)]

    assert names == ["standard attention", "Rabe-Staats"]


@pytest.mark.parametrize("op", list(Pass))
def test_nothing_is_moved_of_an_empty_problem(op: Pass) -> None:
    problem: Problem = make_problem(op=op, batch=0)

    assert [traffic.total_bytes for traffic in published(problem, Blocks(rows=16, keys=16))] == [0] * (
        5 if op is Pass.FORWARD else 4
    )
