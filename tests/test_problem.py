"""What a problem may be, how it is normalised, and that a cell's key holds everything that a kernel depends on."""

from __future__ import annotations

import pytest

from autoflash.errors import InvalidProblemError
from autoflash.problem import Alignment, Cell, DType, Feature, Mask, Parallelism, Pass, Problem
from tests.factories import make_cell, make_problem


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"head_dim": 0}, "head_dim must be at least 1, got 0"),
        ({"heads": 3, "kv_heads": 2}, "multiple of key/value heads, got 3 and 2"),
        ({"seqlen_q": -1}, "seqlen_q must not be negative, got -1"),
        ({"batch": -2}, "batch must not be negative, got -2"),
        ({"block_size": 64}, "block_size must be a power of two from 128 on, got 64"),
        ({"block_size": 384}, "block_size must be a power of two from 128 on, got 384"),
        ({"block_size": 128, "packed_q": 9, "packed_k": 9}, "packed sequences have no block mask"),
    ],
)
def test_sizes_that_mean_nothing_are_refused_by_name(changes: dict[str, int], words: str) -> None:
    with pytest.raises(InvalidProblemError, match=words):
        make_problem().replace(**changes)


def test_fields_that_a_problem_does_not_look_at_are_normalised() -> None:
    top_left = Alignment.TOP_LEFT

    assert make_problem(seqlen_q=8, seqlen_k=8, mask=Mask.CAUSAL, alignment=top_left) == make_problem(
        seqlen_q=8, seqlen_k=8, mask=Mask.CAUSAL
    )
    assert make_problem(op=Pass.FORWARD, deterministic=True) == make_problem(op=Pass.FORWARD)
    assert make_problem(dtype=DType.BF16, tf32=True) == make_problem(dtype=DType.BF16)


@pytest.mark.parametrize(("alignment", "diagonal"), [(Alignment.BOTTOM_RIGHT, 3), (Alignment.TOP_LEFT, 0)])
def test_the_diagonal_follows_the_alignment(alignment: Alignment, diagonal: int) -> None:
    problem = make_problem(seqlen_q=5, seqlen_k=8, mask=Mask.CAUSAL, alignment=alignment)

    assert problem.diagonal == diagonal


@pytest.mark.parametrize(
    "change",
    [
        {"op": Pass.BACKWARD},
        {"dtype": DType.FP16},
        {"head_dim": 128},
        {"head_dim_v": 128},
        {"group": 4},
        {"mask": Mask.CAUSAL},
        {"deterministic": True},
        {"tf32": True},
        {"q_bucket": 11},
        {"k_bucket": 11},
        {"parallelism": Parallelism.LOW},
    ],
    ids=lambda change: next(iter(change)),
)
def test_case_a25_every_field_is_part_of_the_key(change: dict[str, object]) -> None:
    cell = make_cell(head_dim=64, head_dim_v=64, k_bucket=10)

    other = Cell.from_dict({**cell.to_dict(), **{k: getattr(v, "value", v) for k, v in change.items()}})

    assert other.key != cell.key


def test_a_cell_survives_the_way_through_json() -> None:
    cell = make_cell(op=Pass.BACKWARD, mask=Mask.CAUSAL, deterministic=True)

    assert Cell.from_dict(cell.to_dict()) == cell


@pytest.mark.parametrize("change", [{"head_dim": "64"}, {"deterministic": 1}, {"mask": "diagonal"}, {"colour": 1}])
def test_content_that_is_no_cell_is_refused(change: dict[str, str | int]) -> None:
    with pytest.raises(ValueError, match=r"head_dim|deterministic|diagonal|fields"):
        Cell.from_dict({**make_cell().to_dict(), **change})


def test_a_cell_reads_well() -> None:
    cell = make_cell(head_dim=128, group=4, mask=Mask.CAUSAL, q_bucket=12)

    assert str(cell) == "forward/bf16/d128/gqa4/causal/q4096/k4096"


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("score_mod() = score * 2", "full+score_mod(score * 2)+sinks"),
        ("score_mod(t: float 1) = score + t[h]", "full+score_mod(score + t[h]~0a4c8b)+sinks"),
        ("score_mod(t: int 1) = score + t[h]", "full+score_mod(score + t[h]~b209d6)+sinks"),
        ("score_mod() = score - 0.5 * abs(q_idx - kv_idx)", "full+score_mod(score - 0.5 * abs(q_idx~3488b4)+sinks"),
    ],
)
def test_cells_of_different_expressions_read_differently(line: str, shown: str) -> None:
    cell = make_cell(features=(Feature.SCORE_MOD, Feature.SINKS), score_mod=line, q_bucket=12, head_dim=64)

    assert str(cell) == f"forward/bf16/d64/{shown}/q4096/k4096"


def test_a_cell_shows_both_of_its_expressions() -> None:
    cell = make_cell(
        features=(Feature.SCORE_MOD, Feature.MASK_MOD),
        score_mod="score_mod() = score * 2",
        mask_mod="mask_mod() = q_idx >= kv_idx",
    )

    assert "/full+score_mod(score * 2)+mask_mod(q_idx >= kv_idx)/" in str(cell)


_Bounds = tuple[int | None, int | None]


@pytest.mark.parametrize(
    ("mask", "bounds", "plain_mask", "plain_bounds"),
    [
        (Mask.FULL, (3, 0), Mask.CAUSAL, (3, None)),
        (Mask.FULL, (None, 0), Mask.CAUSAL, (None, None)),
        (Mask.CAUSAL, (3, 5), Mask.CAUSAL, (3, None)),
        (Mask.CAUSAL, (None, 5), Mask.CAUSAL, (None, None)),
        (Mask.FULL, (3, 2), Mask.FULL, (3, 2)),
        # 8 queries stand at keys 4 to 11 of 12.
        (Mask.FULL, (11, 7), Mask.FULL, (None, None)),
        (Mask.FULL, (10, 6), Mask.FULL, (10, 6)),
    ],
)
def test_the_plainest_window_hides_the_same_keys(
    mask: Mask, bounds: _Bounds, plain_mask: Mask, plain_bounds: _Bounds
) -> None:
    asked = make_problem(seqlen_q=8, seqlen_k=12, mask=mask).replace(window_left=bounds[0], window_right=bounds[1])

    plain = asked.without_idle_bounds()

    assert (plain.mask, (plain.window_left, plain.window_right)) == (plain_mask, plain_bounds)
    assert _visible(plain) == _visible(asked)


def test_of_packed_sequences_only_a_window_wider_than_all_of_them_is_idle() -> None:
    packed = make_problem(batch=4, seqlen_q=8).replace(packed_q=32, packed_k=32, window_left=31, window_right=31)

    assert packed.without_idle_bounds() == packed
    assert not packed.replace(window_left=32, window_right=63).without_idle_bounds().has_window


def _visible(problem: Problem) -> set[tuple[int, int]]:
    left = problem.seqlen_k if problem.window_left is None else problem.window_left
    right = problem.seqlen_k if problem.window_right is None else problem.window_right
    right = 0 if problem.causal else right
    return {
        (row, key)
        for row in range(problem.seqlen_q)
        for key in range(problem.seqlen_k)
        if -left <= key - (row + problem.diagonal) <= right
    }


def test_a_cell_names_its_expressions_and_plain_cells_name_none() -> None:
    plain = make_cell()
    modified = make_cell(features=(Feature.SCORE_MOD,), score_mod="score_mod() = score * 2")

    assert not {"score_mod", "mask_mod"} & set(plain.to_dict())
    assert modified.to_dict()["score_mod"] == "score_mod() = score * 2"
    assert Cell.from_dict(modified.to_dict()) == modified
    assert modified.without([Feature.SCORE_MOD]) == plain
    with pytest.raises(ValueError, match="the feature score_mod has a line"):
        Cell.from_dict({**modified.to_dict(), "features": "softcap"})
