"""Every problem falls into one cell, and the problem that stands for a cell falls into it again."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoflash.device import CROSS_TARGETS, Device
from autoflash.dispatch.buckets import bucket, cell_of, inside_of, problem_of
from autoflash.errors import InvalidProblemError
from autoflash.problem import DType, Mask, Parallelism, Pass
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
