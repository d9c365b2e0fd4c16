from __future__ import annotations

import dataclasses

import pytest

from autoflash.evaluate.expected import draw_case
from autoflash.evaluate.grid import crowded_case, determinism_case, full_cases, screen_cases
from autoflash.evaluate.inputs import Memory
from autoflash.evaluate.masks import MaskForm, Pattern
from autoflash.problem import Alignment, DType, Form, Mask, MaskTensor, Pass
from tests.factories import make_problem

WINDOW = {"window_left": 1023, "window_right": 0}
SOFTCAP = {"softcap": 50.0}
BOOL = {"mask_tensor": MaskTensor.BOOL}
FLOAT = {"mask_tensor": MaskTensor.FLOAT}
DROPOUT = {"dropout_p": 0.1}
BLOCKS = {"block_size": 128}
PACKED = {"packed_q": 9000, "packed_k": 9000}
COMBINATIONS = [
    {},
    WINDOW,
    SOFTCAP,
    BOOL,
    FLOAT,
    DROPOUT,
    PACKED,
    BLOCKS,
    WINDOW | SOFTCAP | FLOAT | DROPOUT,
    WINDOW | SOFTCAP | PACKED | DROPOUT,
]


def problem_of(features, **changes):
    sizes = {"op": Pass.BACKWARD, "batch": 4, "heads": 8, "kv_heads": 2, "seqlen_q": 4096, "seqlen_k": 4096}
    return make_problem(**{**sizes, **changes}).replace(**features)


@pytest.mark.parametrize("features", COMBINATIONS)
@pytest.mark.parametrize("mask", Mask)
@pytest.mark.parametrize("op", Pass)
@pytest.mark.parametrize("dtype", [DType.BF16, DType.FP32])
def test_every_case_has_the_form_type_and_head_dims_of_the_problem(dtype, op, mask, features):
    problem = problem_of(features, op=op, mask=mask, dtype=dtype, head_dim=96, head_dim_v=48)

    cases = [*full_cases(problem), determinism_case(problem, 132), crowded_case(problem, 132)]

    assert {Form.of(case.problem) for case in cases} == {Form.of(problem)}
    assert {(case.problem.dtype, case.problem.head_dim, case.problem.head_dim_v) for case in cases} == {(dtype, 96, 48)}
    assert len({str(case) for case in cases[:-1]}) == len(cases) - 1


def test_the_grid_has_block_masks_of_several_sizes_and_some_block_is_shown():
    cases = full_cases(problem_of(BLOCKS, op=Pass.FORWARD, dtype=DType.FP32))

    assert {case.problem.block_size for case in cases} == {128, 256, 512}
    for case in cases:
        lists = draw_case(case, "cpu").extras.query_blocks
        assert lists is not None
        assert lists.numel() == 0 or case.problem.is_empty or bool((lists[..., 1] > 0).any())


@pytest.mark.parametrize("features", COMBINATIONS)
def test_the_screening_stays_cheap(features):
    problem = problem_of(features, dtype=DType.FP32)

    cases = screen_cases(problem)

    assert len(cases) == 2
    assert all(case.problem.rows_q * case.problem.rows_k < 2**19 for case in cases)


def test_the_first_case_is_the_problem_s_own():
    own = screen_cases(problem_of(SOFTCAP | DROPOUT | FLOAT))[0]

    assert (own.problem.seqlen_q, own.problem.group) == (512, 4)
    assert (own.problem.softcap, own.problem.dropout_p) == (50.0, 0.1)
    assert own.mask == MaskForm()


@pytest.mark.parametrize("multiprocessors", [20, 132])
@pytest.mark.parametrize("features", COMBINATIONS)
def test_a_crowd_is_many_tiles_of_one_key_block_that_every_row_sees(features, multiprocessors):
    case = crowded_case(problem_of(features, mask=Mask.CAUSAL), multiprocessors)
    problem = case.problem

    lengths = case.lengths or [(problem.seqlen_q, problem.seqlen_k)] * problem.batch
    tiles = sum(length_q // 128 for length_q, _ in lengths) * problem.heads

    assert 6 * multiprocessors <= tiles <= 6 * multiprocessors + 8 * problem.heads
    assert {length_k for _, length_k in lengths} == {128}
    assert problem.alignment is Alignment.TOP_LEFT


@pytest.mark.parametrize(("left", "kept"), [(1023, 170), (63, 63), (None, None)])
def test_a_window_that_hides_nothing_on_short_sequences_gives_way_to_one_that_does(left, kept):
    own = screen_cases(problem_of({"window_left": left, "window_right": 31}))[0]

    assert (own.problem.window_left, own.problem.window_right) == (kept, 31)


def test_the_grid_has_windows_of_every_kind():
    cases = full_cases(problem_of(WINDOW))
    windows = {(case.problem.window_left, case.problem.window_right) for case in cases}
    large = [case.problem for case in cases if case.problem.seqlen_q * case.problem.seqlen_k > 2**14]

    assert {(0, 0), (None, 5), (40, None), (128, 128), (127, 0), (0, 64)} <= windows
    assert any((problem.window_left or 0) > problem.seqlen_k > 0 for problem in large)
    assert any(problem.window_left == problem.window_right == 0 for problem in large)
    assert {problem.alignment for problem in large if problem.seqlen_q != problem.seqlen_k} == set(Alignment)
    assert any(case.low for case in cases)


@pytest.mark.parametrize("features", [BOOL, FLOAT])
def test_the_grid_has_masks_of_every_kind(features):
    cases = full_cases(problem_of(features))
    large = {case.mask.pattern for case in cases if case.problem.seqlen_q * case.problem.seqlen_k > 2**13}

    assert large == set(Pattern)
    assert {Memory.DENSE, Memory.STRIDED, Memory.TRANSPOSED} <= {case.mask.memory for case in cases}
    assert all(case.problem.batch > 1 for case in cases if case.mask.pattern is Pattern.PADDING)
    types = {case.mask.dtype for case in cases}
    assert types == ({None} if features is BOOL else {None, *DType})


def test_the_grid_has_other_softcaps_and_dropouts_than_the_problem_s():
    cases = full_cases(problem_of(SOFTCAP | DROPOUT))

    assert {case.problem.softcap for case in cases} == {50.0, 12.0, 1.0, 30.0}
    assert {case.problem.dropout_p for case in cases} == {0.1, 0.17, 0.9, 0.5, 0.01}
    assert len({case.rng for case in cases}) == 2


def test_the_grid_has_packed_sequences_of_every_kind():
    cases = full_cases(problem_of(PACKED, mask=Mask.CAUSAL))
    lengths = [case.lengths for case in cases]
    tails = [
        tuple(rows - sum(length[side] for length in case.lengths) for side, rows in enumerate(rows_of(case.problem)))
        for case in cases
    ]

    assert any(sequences[0] == (0, 0) and sequences[-1] == (0, 0) for sequences in lengths)
    assert any((0, 0) in sequences[1:-1] for sequences in lengths)
    assert any(q == 0 < k for sequences in lengths for q, k in sequences)
    assert any(k == 0 < q for sequences in lengths for q, k in sequences)
    assert any((1, 1) in sequences for sequences in lengths)
    assert any(len(sequences) > 64 for sequences in lengths)
    assert any(tail[0] > 256 for tail in tails)
    assert any(tail[1] > 256 for tail in tails)
    assert any(tail == (0, 0) for tail in tails)
    assert {case.memory for case in cases} == set(Memory) - {Memory.SHARED_HEAD, Memory.SHARED_ELEMENT}
    assert {case.problem.alignment for case in cases} == set(Alignment)
    assert {1, 2, 3, 4} <= {case.problem.group for case in cases}
    assert all(case.problem.batch == len(case.lengths) for case in cases)


def rows_of(problem):
    return problem.rows_q, problem.rows_k


def test_extra_tensors_have_the_sizes_that_kernels_get():
    (_, packed), (_, dense) = (screen_cases(problem_of(f, dtype=DType.FP32)) for f in (PACKED, FLOAT | DROPOUT))

    sequences, plain = draw_case(packed, "cpu").extras, draw_case(dense, "cpu").extras

    assert sequences.cu_seqlens_q.tolist() == [0, 0, 113, 114, 178, 183, 183]
    assert sequences.cu_seqlens_k.tolist() == [0, 33, 236, 236, 300, 309, 309]
    assert (sequences.mask, sequences.rng) == (None, None)
    assert (plain.cu_seqlens_q, plain.cu_seqlens_k) == (None, None)
    assert plain.rng.tolist() == list(dense.rng)
    assert plain.mask.shape == (2, 8, 113, 203)


def test_exact_results_are_the_same_for_every_memory_of_a_mask():
    case = screen_cases(problem_of(BOOL))[0]
    other = dataclasses.replace(case, memory=Memory.BSHD, mask=MaskForm(memory=Memory.TRANSPOSED))

    assert case != other
    assert case.values == other.values
