from __future__ import annotations

import pytest
import torch

from autoflash.evaluate.timed_inputs import timed_inputs
from autoflash.problem import DType, Mask, MaskTensor, Pass, Problem
from autoflash.runtime.block_map import shown_blocks
from autoflash.runtime.executable import NO_EXTRAS
from tests.factories import make_device, make_problem

CPU = make_device("cpu")


def packed(batch: int, seqlen_q: int = 64, seqlen_k: int = 64) -> Problem:
    return make_problem(batch=batch, seqlen_q=seqlen_q, seqlen_k=seqlen_k, head_dim=16).replace(
        packed_q=batch * seqlen_q, packed_k=batch * seqlen_k
    )


def test_the_same_seed_gives_the_same_inputs() -> None:
    problem = make_problem(seqlen_q=16, head_dim=16)

    def first_query(seed: int) -> float:
        timed_inputs.cache_clear()
        return float(timed_inputs(problem, CPU, seed).q.flatten()[0])

    assert first_query(1) == first_query(1)
    assert first_query(1) != first_query(2)


def test_plain_problems_have_nothing_beside_their_tensors() -> None:
    assert timed_inputs(make_problem(head_dim=16), CPU, 0).extras == NO_EXTRAS


@pytest.mark.parametrize("batch", [0, 1, 2, 7, 100])
def test_packed_sequences_fill_their_tensors_and_are_not_all_alike(batch: int) -> None:
    inputs = timed_inputs(packed(batch, 64, 128), CPU, 0)
    lengths_q, lengths_k = (
        borders.diff() for borders in (inputs.extras.cu_seqlens_q, inputs.extras.cu_seqlens_k) if borders is not None
    )

    assert inputs.q.shape == (1, 2, batch * 64, 16)
    assert inputs.k.shape == (1, 2, batch * 128, 16)
    assert (len(lengths_q), int(lengths_q.sum()), int(lengths_k.sum())) == (batch, batch * 64, batch * 128)
    assert all(47 <= length <= 81 for length in lengths_q.tolist())
    assert torch.all((lengths_k - 2 * lengths_q).abs() <= 3)
    assert batch < 7 or len(set(lengths_q.tolist())) > 3


def test_queries_and_keys_of_one_length_have_the_same_borders() -> None:
    extras = timed_inputs(packed(9), CPU, 5).extras

    assert extras.cu_seqlens_q is not None
    assert extras.cu_seqlens_k is not None
    assert torch.equal(extras.cu_seqlens_q, extras.cu_seqlens_k)


@pytest.mark.parametrize(
    ("kind", "dtype", "expected"),
    [
        (MaskTensor.BOOL, DType.BF16, torch.bool),
        (MaskTensor.FLOAT, DType.BF16, torch.bfloat16),
        (MaskTensor.FLOAT, DType.FP32, torch.float32),
    ],
)
def test_a_mask_is_shared_by_the_heads_of_a_sequence(kind: MaskTensor, dtype: DType, expected: torch.dtype) -> None:
    problem = make_problem(dtype=dtype, batch=2, heads=4, seqlen_q=32, seqlen_k=48, head_dim=16)

    mask = timed_inputs(problem.replace(mask_tensor=kind), CPU, 0).extras.mask

    assert mask is not None
    assert (mask.dtype, tuple(mask.shape), mask.stride(1)) == (expected, (2, 4, 32, 48), 0)
    assert torch.any(mask != mask[0, 0, 0, 0])


def test_a_block_mask_shows_every_block_or_the_same_share_to_each_row() -> None:
    problem = make_problem(dtype=DType.FP32, batch=2, heads=2, seqlen_q=512, seqlen_k=1000, head_dim=16)
    problem = problem.replace(block_size=128)

    whole, half = (timed_inputs(problem, CPU, 0, share).extras.query_blocks for share in (1.0, 0.5))

    assert whole is not None
    assert half is not None
    assert shown_blocks(whole).all()
    assert shown_blocks(half).sum(dim=-1).tolist() == [[[4, 4, 4, 4]]]
    assert not torch.equal(half[0, 0, 0], half[0, 0, 1])


def test_a_backward_gets_what_the_forward_with_the_same_features_gives() -> None:
    problem = make_problem(op=Pass.BACKWARD, dtype=DType.FP32, seqlen_q=32, head_dim=16, mask=Mask.CAUSAL)

    plain, windowed = (timed_inputs(each, CPU, 0) for each in (problem, problem.replace(window_left=3)))

    assert torch.equal(plain.q, windowed.q)
    assert torch.equal(plain.lse[:, :, :4], windowed.lse[:, :, :4])
    assert torch.all(plain.lse[:, :, 4:] > windowed.lse[:, :, 4:])
