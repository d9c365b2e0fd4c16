from __future__ import annotations

import math

import pytest
import torch

from autoflash.evaluate import reference
from autoflash.evaluate.inputs import Guarded, Memory, block_borders, draw, draw_flat
from autoflash.problem import DType, Mask, Pass
from tests.factories import make_problem


def problem_of(**changes):
    sizes = {"batch": 1, "heads": 4, "kv_heads": 2, "head_dim": 64, "seqlen_q": 256, "seqlen_k": 256}
    plain = {name: changes.pop(name) for name in list(changes) if name in {*sizes, "op", "dtype", "mask"}}
    return make_problem(**{**sizes, **plain}).replace(**changes)


def probabilities(problem, inputs, scale):
    keys = inputs.k.double().repeat_interleave(problem.group, dim=1)
    s = inputs.q.double() @ keys.mT * scale
    if problem.causal:
        hidden = torch.arange(problem.seqlen_k) > torch.arange(problem.seqlen_q)[:, None] + problem.diagonal
        s = s.masked_fill(hidden, -math.inf)
    return torch.softmax(s, dim=-1)


@pytest.mark.parametrize("block", [16, 32, 64, 128, 256])
def test_block_borders_hold_the_first_and_last_key_of_every_block(block):
    borders = set(block_borders(1000).tolist())

    assert borders >= set(range(0, 1000, block))
    assert borders >= set(range(block - 1, 1000, block))
    assert 999 in borders


def test_every_border_decides_some_row():
    problem = problem_of()

    p = probabilities(problem, draw(problem, 0.125), 0.125)

    decided = set(p.argmax(dim=-1)[p.amax(dim=-1) > 0.9].tolist())
    assert decided >= set(block_borders(256).tolist())


def test_the_last_visible_key_decides_rows_along_the_diagonal():
    problem = problem_of(mask=Mask.CAUSAL)

    p = probabilities(problem, draw(problem, 0.125), 0.125)

    last = p.diagonal(dim1=-2, dim2=-1)[..., 16:]
    assert (last > 0.9).float().mean() > 0.1


def test_the_first_hidden_key_would_decide_rows_if_it_were_seen():
    problem = problem_of(mask=Mask.CAUSAL)
    inputs = draw(problem, 0.125)

    p = probabilities(problem.replace(mask=Mask.FULL), inputs, 0.125)

    hidden = p.diagonal(offset=1, dim1=-2, dim2=-1)
    assert (hidden > 0.9).float().mean() > 0.1


def test_half_of_the_rows_stay_random():
    problem = problem_of()

    p = probabilities(problem, draw(problem, 0.125), 0.125)

    assert 0.4 < (p.amax(dim=-1) < 0.2).float().mean() < 0.6


def test_a_backward_gets_rows_that_one_key_shares_with_the_others():
    problem = problem_of(op=Pass.BACKWARD)

    p = probabilities(problem, draw(problem, 0.125), 0.125)

    largest = p.amax(dim=-1)
    assert ((largest > 0.2) & (largest < 0.8)).float().mean() > 0.4


@pytest.mark.parametrize("scale", [-0.3, 0.125, 2.0])
def test_plants_do_their_work_at_any_scale(scale):
    problem = problem_of(seqlen_q=1, batch=4)

    p = probabilities(problem, draw(problem, scale), scale)

    assert (p.amax(dim=-1) > 0.9).any()


def test_the_same_numbers_are_drawn_again():
    problem = problem_of()

    first, second = draw(problem, 0.125), draw(problem, 0.125)

    assert torch.equal(first.q, second.q)
    assert torch.equal(first.dlse, second.dlse)


def test_shared_inputs_are_equal_in_all_heads():
    inputs = draw(problem_of(), 0.125, shared=True)

    assert torch.equal(inputs.k[:, 0], inputs.k[:, 1])
    assert torch.equal(inputs.dout, torch.ones_like(inputs.dout))


@pytest.mark.parametrize("head_dim", [8, 40, 64, 96, 128, 256])
@pytest.mark.parametrize("group", [1, 4])
def test_flat_inputs_have_gradients_of_one_size(head_dim, group):
    problem = problem_of(op=Pass.BACKWARD, dtype=DType.BF16, head_dim=head_dim, heads=2 * group, seqlen_q=1, seqlen_k=2)
    scale = 1 / math.sqrt(head_dim)
    inputs = draw_flat(problem, scale)

    grads = reference.gradients(inputs.q, inputs.k, inputs.v, inputs.dout, scale=scale)

    for grad in grads:
        torch.testing.assert_close(grad.abs(), torch.full_like(grad, 0.875), rtol=0.01, atol=0.0)


@pytest.mark.parametrize("head_dim", [8, 40, 96, 224])
@pytest.mark.parametrize("group", [1, 3, 6, 8])
def test_bf16_holds_all_that_is_rounded_between_flat_inputs_and_their_gradients(head_dim, group):
    problem = problem_of(op=Pass.BACKWARD, dtype=DType.BF16, head_dim=head_dim, heads=2 * group, seqlen_q=1, seqlen_k=2)
    inputs = draw_flat(problem, 0.125)

    grads = reference.gradients(inputs.q, inputs.k, inputs.v, inputs.dout, scale=0.125)
    dp = inputs.dout.double() @ inputs.v.double().repeat_interleave(group, 1).mT

    for exact in (*grads, 0.5 * dp):
        assert torch.equal(exact.bfloat16().double(), exact)


def test_the_keys_at_both_edges_of_a_window_decide_rows_and_those_beyond_would():
    problem = problem_of(dtype=DType.FP32, head_dim=128, window_left=40, window_right=9)
    inputs = draw(problem.replace(dtype=DType.FP16), 0.1)

    p = probabilities(problem, inputs, 0.1)

    for distance in (-41, -40, 9, 10):
        at_edge = p.diagonal(offset=distance, dim1=-2, dim2=-1)
        assert (at_edge > 0.9).float().mean() > 0.05


def test_scores_reach_a_softcap_and_go_far_beyond_it():
    problem = problem_of(softcap=20.0)
    inputs = draw(problem, 0.125)

    s = (inputs.q.double() @ inputs.k.double().repeat_interleave(2, dim=1).mT * 0.125).abs()

    most = s.amax(dim=-1)
    assert (most < 10).any()
    assert ((most > 20) & (most < 60)).float().mean() > 0.1
    assert (most > 500).float().mean() > 0.02
    assert s.isfinite().all()


def test_a_plant_has_its_strength_after_the_softcap():
    problem = problem_of(softcap=12.0)
    inputs = draw(problem, 0.125)

    s = inputs.q.double() @ inputs.k.double().repeat_interleave(2, dim=1).mT * 0.125
    p = torch.softmax(12.0 * torch.tanh(s / 12.0), dim=-1)

    assert (p.amax(dim=-1) > 0.85).float().mean() > 0.4


def test_low_scores_all_lie_far_below_0():
    problem = problem_of()
    inputs = draw(problem, 0.125, low=True)

    s = inputs.q.double() @ inputs.k.double().repeat_interleave(2, dim=1).mT * 0.125

    assert s.max() < -100


def test_each_packed_sequence_has_its_own_plants_and_nothing_lies_behind_the_last():
    lengths = ((0, 30), (64, 100), (5, 0), (40, 40))
    problem = problem_of(mask=Mask.CAUSAL, batch=4, packed_q=120, packed_k=175)

    inputs = draw(problem, 0.125, lengths=lengths)

    assert inputs.q.shape == (1, 4, 120, 64)
    for tensor, end in ((inputs.q, 109), (inputs.k, 170), (inputs.v, 170), (inputs.dout, 109), (inputs.dlse, 109)):
        assert tensor[:, :, :end].isfinite().all()
        assert tensor[:, :, end:].isnan().all()
    s = inputs.q[:, :, 0:64].double() @ inputs.k[:, :, 30:130].double().repeat_interleave(2, dim=1).mT * 0.125
    p = torch.softmax(s, dim=-1)
    for distance in (36, 37):
        assert (p.diagonal(offset=distance, dim1=-2, dim2=-1) > 0.9).any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("memory", Memory)
def test_guarded_memory_holds_the_values_in_its_layout(memory, dtype):
    values = torch.ones(2, 3, 5, 8, dtype=dtype)

    guarded = Guarded(values, memory)

    assert torch.equal(guarded.tensor, values)
    assert guarded.is_unchanged()


def test_layouts_are_what_they_say():
    values = torch.zeros(2, 3, 5, 8)

    strides = {memory: Guarded(values, memory).tensor.stride() for memory in Memory}

    assert strides == {
        Memory.DENSE: (120, 40, 8, 1),
        Memory.BSHD: (120, 8, 24, 1),
        Memory.PACKED: (360, 8, 72, 1),
        Memory.STRIDED: (240, 80, 16, 2),
        Memory.TRANSPOSED: (120, 40, 1, 5),
        Memory.SHARED_HEAD: (40, 0, 8, 1),
        Memory.SHARED_ELEMENT: (0, 0, 0, 0),
    }


def test_dense_memory_is_aligned_and_strided_memory_is_not():
    values = torch.zeros(1, 1, 4, 8, dtype=torch.float16)

    assert Guarded(values, Memory.DENSE).tensor.data_ptr() % 16 == 0
    assert Guarded(values, Memory.STRIDED).tensor.data_ptr() % 16 != 0


@pytest.mark.parametrize("memory", [Memory.DENSE, Memory.BSHD, Memory.PACKED, Memory.STRIDED, Memory.TRANSPOSED])
def test_an_output_is_unwritten_until_it_is_written(memory):
    guarded = Guarded.unwritten(torch.zeros(2, 3, 5, 8), memory)
    unwritten = bool(guarded.tensor.isnan().all())

    guarded.tensor.copy_(torch.ones(2, 3, 5, 8))

    assert unwritten
    assert guarded.is_unchanged_outside()
    assert not guarded.is_unchanged()


@pytest.mark.parametrize("memory", [Memory.DENSE, Memory.BSHD, Memory.PACKED, Memory.STRIDED, Memory.TRANSPOSED])
@pytest.mark.parametrize("value", [0.0, math.nan])
@pytest.mark.parametrize("distance", [-1, -1000, "end"])
def test_whatever_is_written_outside_is_seen(memory, value, distance):
    guarded = Guarded.unwritten(torch.zeros(2, 3, 5, 8), memory)
    tensor = guarded.tensor
    end = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    place = tensor.storage_offset() + (end + 1 if distance == "end" else distance)

    tensor.as_strided((1,), (1,), place).fill_(value)

    assert not guarded.is_unchanged_outside()


def test_a_gap_between_rows_is_outside():
    guarded = Guarded.unwritten(torch.zeros(1, 1, 5, 8), Memory.PACKED)
    tensor = guarded.tensor

    tensor.as_strided((1,), (1,), tensor.storage_offset() + 8).fill_(0.0)

    assert not guarded.is_unchanged_outside()


@pytest.mark.parametrize(
    "values",
    [
        torch.tensor([True, False, True]).view(1, 1, 1, 3),
        torch.tensor([0, 4, 9], dtype=torch.int32),
        torch.tensor([-(2**62), 2**33]),
    ],
)
def test_masks_and_numbers_can_be_guarded(values):
    guarded = Guarded(values, Memory.DENSE)

    assert torch.equal(guarded.tensor, values)
    assert guarded.tensor.is_contiguous()
    assert guarded.is_unchanged()
    guarded.tensor[..., -1] = 1 - guarded.tensor[..., -1].long()
    assert not guarded.is_unchanged()


@pytest.mark.parametrize("shape", [(0, 3, 5, 8), (2, 3, 0, 8)])
def test_empty_tensors_can_be_guarded(shape):
    guarded = Guarded(torch.zeros(shape), Memory.BSHD)

    assert guarded.tensor.shape == shape
    assert guarded.is_unchanged_outside()


def test_without_a_margin_an_allocation_ends_where_the_tensor_does() -> None:
    guarded = Guarded(torch.zeros(2, 3, 5, 8), Memory.BSHD, margin=0)

    assert guarded.tensor.storage_offset() == 0
    assert guarded.tensor.untyped_storage().nbytes() == 2 * 3 * 5 * 8 * 4


@pytest.mark.parametrize("head_dim", [1, 2])
def test_inputs_of_the_smallest_heads_are_finite_in_half_precision(head_dim):
    """A key of one element may be next to nothing, and what points at it would be beyond the type."""
    for seqlen_q in range(96, 128):
        problem = problem_of(dtype=DType.FP16, head_dim=head_dim, seqlen_q=seqlen_q, seqlen_k=203)

        assert torch.isfinite(draw(problem, 1.0).q).all()
