"""Which blocks of the score matrix are visited, against looking at every pair."""

from __future__ import annotations

import itertools

import pytest

from autoflash.errors import InvalidProblemError
from autoflash.evaluate.cost import visible_pairs
from autoflash.evaluate.tiles import Blocks, Visits, algorithm_1_blocks, visited
from autoflash.problem import Alignment, DType, Mask, Problem
from tests.factories import make_problem


def counted(problem: Problem, blocks: Blocks) -> Visits:
    """Look at every pair of every block."""
    m, n = problem.seqlen_q, problem.seqlen_k
    left = 10**6 if problem.window_left is None else problem.window_left
    right = 10**6 if problem.window_right is None else problem.window_right
    right = 0 if problem.causal else right
    found = [
        (len(rows), len(keys))
        for rows, keys in itertools.product(
            (range(start, min(start + blocks.rows, m)) for start in range(0, m, blocks.rows)),
            [range(start, min(start + blocks.keys, n)) for start in range(0, n, blocks.keys)],
        )
        if any(
            i + problem.diagonal - left <= j <= i + problem.diagonal + right for i, j in itertools.product(rows, keys)
        )
    ]
    return Visits(
        blocks=len(found),
        query_rows=sum(rows for rows, _ in found),
        key_rows=sum(keys for _, keys in found),
        pairs=sum(rows * keys for rows, keys in found),
    )


@pytest.mark.parametrize("window", [(None, None), (0, 0), (3, 1), (None, 2), (2, None), (100, 100), (5, 0)])
@pytest.mark.parametrize("mask", list(Mask))
@pytest.mark.parametrize("alignment", list(Alignment))
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(5, 19), (19, 5), (16, 16), (1, 8), (3, 0), (0, 3)])
def test_a_block_is_visited_where_it_has_a_visible_pair(
    alignment: Alignment, mask: Mask, window: tuple[int | None, int | None], seqlen_q: int, seqlen_k: int
) -> None:
    sizes = make_problem(seqlen_q=seqlen_q, seqlen_k=seqlen_k, mask=mask, alignment=alignment)
    problem = sizes.replace(window_left=window[0], window_right=window[1])

    for blocks in (Blocks(rows=4, keys=4), Blocks(rows=2, keys=7), Blocks(rows=100, keys=3), Blocks(rows=1, keys=1)):
        assert visited(problem, blocks) == counted(problem, blocks)


def test_blocks_of_one_pair_are_the_visible_pairs() -> None:
    problem = make_problem(seqlen_q=9, seqlen_k=14, mask=Mask.CAUSAL).replace(window_left=4)

    assert visited(problem, Blocks(rows=1, keys=1)).pairs == visible_pairs(problem)


def test_a_causal_mask_leaves_half_of_many_blocks() -> None:
    full = make_problem(seqlen_q=4096)
    blocks = Blocks(rows=64, keys=64)

    share = visited(full.replace(mask=Mask.CAUSAL), blocks).key_rows / visited(full, blocks).key_rows

    assert 0.5 < share < 0.51


def test_packed_sequences_are_visited_by_their_mean_length() -> None:
    one = make_problem(batch=4, seqlen_q=96, seqlen_k=160, mask=Mask.CAUSAL)
    packed = one.replace(packed_q=4 * 96, packed_k=4 * 160, seqlen_q=200, seqlen_k=300)

    assert visited(packed, Blocks(rows=32, keys=16)) == visited(one, Blocks(rows=32, keys=16))


def test_blocks_of_algorithm_1() -> None:
    # 227 KiB hold 116224 bf16 numbers: ceil(116224 / (4 * 128)) = 227 keys, and min(227, 128) queries.
    problem = make_problem(head_dim=128, seqlen_q=8192)

    assert algorithm_1_blocks(problem, 227 * 1024) == Blocks(rows=128, keys=227)
    assert algorithm_1_blocks(problem.replace(dtype=DType.FP32), 227 * 1024) == Blocks(rows=114, keys=114)


def test_blocks_of_algorithm_1_are_no_longer_than_the_sequences() -> None:
    problem = make_problem(head_dim=64, seqlen_q=10, seqlen_k=30)

    assert algorithm_1_blocks(problem, 2**20) == Blocks(rows=10, keys=30)


def test_a_chip_that_holds_no_vector_is_refused() -> None:
    with pytest.raises(InvalidProblemError, match="100 bytes does not hold one bf16 vector of 64"):
        algorithm_1_blocks(make_problem(head_dim=64), 100)


def test_blocks_of_nothing_are_refused() -> None:
    with pytest.raises(InvalidProblemError, match="0 x 16"):
        visited(make_problem(), Blocks(rows=0, keys=16))


def test_blocks_of_the_longest_sequence_are_counted_soon() -> None:
    problem = make_problem(mask=Mask.CAUSAL, seqlen_q=2**31 - 1, seqlen_k=2**31 - 1).replace(window_left=127)

    found = visited(problem, Blocks(rows=128, keys=128))

    assert found.blocks == 2 * 2**24 - 1
    assert found.query_rows == 128 * found.blocks - 2


def test_a_window_wider_than_any_sequence_hides_nothing() -> None:
    problem = make_problem(seqlen_q=100, seqlen_k=100).replace(window_left=2**70, window_right=2**70)

    assert visited(problem, Blocks(rows=64, keys=64)).pairs == 100 * 100
