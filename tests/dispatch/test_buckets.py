"""Every problem falls into one cell, and the problem that stands for a cell falls into it again."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoflash.device import CROSS_TARGETS, Device
from autoflash.dispatch.buckets import bucket, cell_of, inside_of, problem_of
from autoflash.errors import InvalidProblemError
from autoflash.problem import DType, Feature, Form, Mask, MaskTensor, Parallelism, Pass, Problem
from tests.factories import make_cell, make_device, make_problem

DEVICES = [*CROSS_TARGETS.values(), make_device("cpu"), dataclasses.replace(make_device("cpu"), multiprocessors=1)]


@pytest.mark.parametrize(
    ("length", "expected"), [(0, 0), (1, 0), (2, 1), (3, 2), (4, 2), (5, 3), (512, 9), (513, 10), (16384, 14)]
)
def test_bucket_holds_lengths_up_to_a_power_of_two(length: int, expected: int) -> None:
    assert bucket(length) == expected


@settings(max_examples=300, deadline=None)
@given(
    device=st.sampled_from(DEVICES),
    batch=st.integers(0, 64),
    kv_heads=st.integers(1, 40),
    group=st.integers(1, 24),
    seqlen_q=st.integers(0, 70000),
    seqlen_k=st.integers(0, 70000),
    head_dim=st.sampled_from([8, 40, 64, 128, 192, 256]),
    op=st.sampled_from(Pass),
)
def test_the_problem_of_a_cell_falls_into_that_cell(
    device: Device, batch: int, kv_heads: int, group: int, seqlen_q: int, seqlen_k: int, head_dim: int, op: Pass
) -> None:
    problem = make_problem(
        op=op,
        dtype=DType.FP16,
        batch=batch,
        heads=kv_heads * group,
        kv_heads=kv_heads,
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        head_dim=head_dim,
        mask=Mask.CAUSAL,
        deterministic=True,
    )
    cell = cell_of(problem, device)

    assert cell_of(problem_of(cell, device), device) == cell
    assert cell_of(inside_of(cell, device), device) == cell


_BOUNDS = st.one_of(st.none(), st.integers(0, 300), st.integers(0, 2**33))


@settings(max_examples=300, deadline=None)
@given(
    device=st.sampled_from(DEVICES),
    batch=st.integers(0, 64),
    group=st.integers(1, 24),
    seqlen_q=st.integers(0, 70000),
    seqlen_k=st.integers(0, 70000),
    head_dim=st.sampled_from([8, 64, 576]),
    mask=st.sampled_from(Mask),
    window=st.tuples(_BOUNDS, _BOUNDS),
    softcap=st.sampled_from([0.0, 1.5, 50.0]),
    dropout_p=st.sampled_from([0.0, 0.5]),
    mask_tensor=st.sampled_from(MaskTensor),
    packed=st.booleans(),
)
def test_the_problem_of_a_cell_with_features_falls_into_that_cell_and_asks_for_the_same(
    device: Device,
    batch: int,
    group: int,
    seqlen_q: int,
    seqlen_k: int,
    head_dim: int,
    mask: Mask,
    window: tuple[int | None, int | None],
    softcap: float,
    dropout_p: float,
    mask_tensor: MaskTensor,
    packed: bool,
) -> None:
    packed = packed and mask_tensor is MaskTensor.NONE
    problem = make_problem(
        batch=batch, heads=group, kv_heads=1, seqlen_q=seqlen_q, seqlen_k=seqlen_k, head_dim=head_dim, mask=mask
    ).replace(
        window_left=window[0],
        window_right=window[1],
        softcap=softcap,
        dropout_p=dropout_p,
        mask_tensor=mask_tensor,
        packed_q=batch * seqlen_q + 5 if packed else None,
        packed_k=batch * seqlen_k if packed else None,
    )
    cell = cell_of(problem, device)

    for representative in (problem_of(cell, device), inside_of(cell, device)):
        assert cell_of(representative, device) == cell
        assert Form.of(representative) == Form.of(problem)


def windowed(left: int | None, right: int | None, mask: Mask = Mask.FULL, seqlen: int = 1024) -> Problem:
    return make_problem(seqlen_q=seqlen, mask=mask).replace(window_left=left, window_right=right)


@pytest.mark.parametrize(
    ("left", "right", "mask", "expected"),
    [
        (None, None, Mask.FULL, 0),
        (0, 0, Mask.FULL, 1),
        (127, 0, Mask.FULL, 7),
        (128, 0, Mask.FULL, 7),
        (129, 0, Mask.FULL, 8),
        (64, 64, Mask.FULL, 7),
        (127, 500, Mask.CAUSAL, 7),
        (127, None, Mask.CAUSAL, 7),
        (127, None, Mask.FULL, 0),
        (None, 127, Mask.FULL, 0),
        (None, 127, Mask.CAUSAL, 0),
        (2**40, 2**40, Mask.FULL, 10),
    ],
)
def test_windows_are_told_apart_by_the_keys_that_they_leave(
    left: int | None, right: int | None, mask: Mask, expected: int
) -> None:
    assert cell_of(windowed(left, right, mask), make_device()).window_bucket == expected


def test_a_window_stands_at_the_top_of_its_bucket_and_inside_at_a_prime() -> None:
    full, causal = (cell_of(windowed(70, 0, mask), make_device()) for mask in Mask)

    top, inside = problem_of(full, make_device()), inside_of(full, make_device())

    assert (top.window_left, top.window_right) == (64, 63)
    assert (inside.window_left, inside.window_right) == (64, 63)
    assert problem_of(causal, make_device()).window_left == 127
    assert inside_of(cell_of(windowed(200, 0), make_device()), make_device()).window_left == 251 - 125


def test_packed_sequences_stand_for_themselves_one_after_the_other() -> None:
    cell = make_cell(features=(Feature.VARLEN,), q_bucket=10, k_bucket=11)

    top, inside = problem_of(cell, make_device()), inside_of(cell, make_device())

    assert (top.rows_q, top.rows_k, top.tensor_batch) == (top.batch * 1024, top.batch * 2048, 1)
    assert (inside.rows_q, inside.rows_k) == (top.batch * 1021, top.batch * 2039)


@pytest.mark.parametrize(
    ("features", "window_bucket", "words"), [((), 5, "has no window"), ((Feature.WINDOW,), 11, "no window leaves more")]
)
def test_a_window_that_no_problem_has_is_refused(features: tuple[Feature, ...], window_bucket: int, words: str) -> None:
    with pytest.raises(InvalidProblemError, match=words):
        problem_of(make_cell(features=features, window_bucket=window_bucket), make_device())


@pytest.mark.parametrize(("head_dim", "seqlen"), [(64, 512), (128, 2048), (256, 16384)])
def test_a_gpu_cell_of_high_parallelism_is_the_published_grid(head_dim: int, seqlen: int) -> None:
    cell = make_cell(head_dim=head_dim, q_bucket=bucket(seqlen), parallelism=Parallelism.HIGH)

    problem = problem_of(cell, make_device("sm_90"))

    assert (problem.seqlen_q, problem.seqlen_k) == (seqlen, seqlen)
    assert problem.batch * problem.seqlen_q == 16384
    assert problem.heads * problem.head_dim == 2048


def test_a_cpu_cell_stays_small_enough_to_tune_in_seconds() -> None:
    problem = problem_of(make_cell(q_bucket=10), make_device("cpu"))

    flops = 4 * problem.batch * problem.heads * problem.seqlen_q * problem.seqlen_k * problem.head_dim
    assert flops <= 4 * 2**30


def test_inside_lengths_are_prime_and_in_the_bucket() -> None:
    cell = make_cell(q_bucket=10, k_bucket=12)

    problem = inside_of(cell, make_device())

    assert (problem.seqlen_q, problem.seqlen_k) == (1021, 4093)


def test_inside_keeps_the_batch_and_heads_of_the_top() -> None:
    cell = make_cell(q_bucket=11, group=4)

    top, inside = problem_of(cell, make_device()), inside_of(cell, make_device())

    assert (inside.batch, inside.heads, inside.kv_heads) == (top.batch, top.heads, top.kv_heads)


def test_a_cell_that_no_problem_falls_into_is_refused() -> None:
    cell = make_cell(q_bucket=20, parallelism=Parallelism.LOW)

    with pytest.raises(InvalidProblemError, match="no problem on NVIDIA H200"):
        problem_of(cell, make_device())


def test_a_slice_of_a_gpu_is_not_the_whole_gpu() -> None:
    problem = make_problem(batch=8, heads=16, seqlen_q=256)
    whole = make_device()
    part = dataclasses.replace(whole, multiprocessors=16)

    assert cell_of(problem, whole).parallelism is Parallelism.MEDIUM
    assert cell_of(problem, part).parallelism is Parallelism.HIGH
