"""Numerics of the backward templates in Triton's interpreter.

Tiles are small, so that few elements make many tiles.
"""

from __future__ import annotations

import pytest
import torch

from autoflash.evaluate import reference
from autoflash.problem import Alignment, DType, Mask
from autoflash.runtime.probe import probe
from tests.gradients import assert_gradients, backward_problem, make_inputs, make_variant, masks, run

# Triton 3.6's interpreter takes arrays of one element for numbers.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0 to a scalar:DeprecationWarning")

LOOP_ORDERS = ["split", "fused", "key_outer"]
CPU = probe("cpu")


@pytest.mark.parametrize(("mask", "alignment"), masks())
@pytest.mark.parametrize("loads", ["pointer", "tma"])
@pytest.mark.parametrize("loop_order", LOOP_ORDERS)
def test_irregular_sizes_match_the_specification(loop_order: str, loads: str, mask: Mask, alignment: Alignment) -> None:
    problem = backward_problem(
        dtype=DType.FP32,
        head_dim=40,
        head_dim_v=24,
        heads=2,
        kv_heads=1,
        seqlen_q=50,
        seqlen_k=33,
        mask=mask,
        alignment=alignment,
    )
    inputs = make_inputs(problem)
    assert_gradients(run(make_variant(loop_order, loads), problem, inputs, CPU), problem, inputs)


@pytest.mark.parametrize("mask", list(Mask))
@pytest.mark.parametrize("loop_order", LOOP_ORDERS)
def test_every_other_choice_of_the_structure_matches_the_specification(loop_order: str, mask: Mask) -> None:
    variant = make_variant(
        loop_order,
        mask_loops="everywhere",
        dot_order="scores_first",
        tile_order="per_kind" if loop_order == "fused" else "per_head",
        tiles=(16, 32, 32, 16),
    )
    problem = backward_problem(dtype=DType.FP32, head_dim=16, batch=2, heads=1, seqlen_q=45, seqlen_k=70, mask=mask)
    inputs = make_inputs(problem)
    assert_gradients(run(variant, problem, inputs, CPU), problem, inputs)


@pytest.mark.parametrize("dtype", [DType.FP16, DType.BF16])
@pytest.mark.parametrize("loads", ["pointer", "tma"])
@pytest.mark.parametrize("loop_order", LOOP_ORDERS)
def test_regular_sizes_in_half_precision_match_the_specification(loop_order: str, loads: str, dtype: DType) -> None:
    problem = backward_problem(
        dtype=dtype, head_dim=64, heads=4, kv_heads=1, seqlen_q=64, seqlen_k=64, mask=Mask.CAUSAL
    )
    inputs = make_inputs(problem, with_dlse=False)
    assert_gradients(run(make_variant(loop_order, loads), problem, inputs, CPU), problem, inputs)


@pytest.mark.parametrize("head_dims", [(8, 8), (72, 72), (80, 96), (128, 64), (256, 16)])
def test_any_head_dim_matches_the_specification(head_dims: tuple[int, int]) -> None:
    head_dim, head_dim_v = head_dims
    problem = backward_problem(
        dtype=DType.FP16, head_dim=head_dim, head_dim_v=head_dim_v, heads=1, seqlen_q=17, seqlen_k=34
    )
    inputs = make_inputs(problem)
    assert_gradients(run(make_variant("split"), problem, inputs, CPU), problem, inputs)


@pytest.mark.parametrize("mask", list(Mask))
@pytest.mark.parametrize("lengths", [(0, 5), (5, 0), (1, 1), (1, 130), (130, 1), (63, 64), (64, 17), (33, 63)])
def test_any_length_matches_the_specification(lengths: tuple[int, int], mask: Mask) -> None:
    problem = backward_problem(
        dtype=DType.FP32, head_dim=16, heads=1, seqlen_q=lengths[0], seqlen_k=lengths[1], mask=mask
    )
    inputs = make_inputs(problem)
    assert_gradients(run(make_variant("fused"), problem, inputs, CPU), problem, inputs)


@pytest.mark.parametrize("loop_order", LOOP_ORDERS)
def test_rows_that_see_no_key_give_nothing_whatever_their_upstream_gradients(loop_order: str) -> None:
    problem = backward_problem(dtype=DType.FP32, head_dim=16, seqlen_q=40, seqlen_k=9, mask=Mask.CAUSAL)
    inputs = make_inputs(problem)
    blind = torch.isinf(inputs.lse)
    assert blind[0, 0].sum() == 31
    assert inputs.dlse is not None
    got = run(make_variant(loop_order), problem, inputs.replace(dlse=inputs.dlse.masked_fill(blind, torch.nan)), CPU)
    assert_gradients(got, problem, inputs)
    assert (got[0][blind] == 0).all()


# What overflows is hidden afterwards, or belongs to rows that are not stored.
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("loads", ["pointer", "tma"])
@pytest.mark.parametrize("loop_order", LOOP_ORDERS)
def test_keys_beyond_the_end_take_no_part_where_their_score_of_zero_would_be_the_highest(
    loop_order: str, loads: str
) -> None:
    problem = backward_problem(dtype=DType.FP32, head_dim=16, heads=1, seqlen_q=20, seqlen_k=20)
    inputs = make_inputs(problem)
    # Every score is near -200: exp(0 - LSE) overflows.
    q, k = torch.full_like(inputs.q, 3.5), inputs.k * 0.1 - 14.0
    out, lse = reference.attention(q, k, inputs.v, return_lse=True)
    assert (lse < -150).all()
    inputs = inputs.replace(q=q, k=k, out=out.float(), lse=lse.float())
    got = run(make_variant(loop_order, loads), problem, inputs, CPU)
    assert_gradients(got, problem, inputs)


@pytest.mark.parametrize("scale", [0.0, -0.7, 3.0])
def test_any_scale_matches_the_specification(scale: float) -> None:
    problem = backward_problem(dtype=DType.FP32, head_dim=16, heads=1, seqlen_q=20, seqlen_k=40, mask=Mask.CAUSAL)
    inputs = make_inputs(problem, scale=scale)
    got = run(make_variant("key_outer"), problem, inputs, CPU, scale=scale)
    assert_gradients(got, problem, inputs, scale=scale)


@pytest.mark.parametrize("loads", ["pointer", "tma"])
@pytest.mark.parametrize("loop_order", LOOP_ORDERS)
def test_nothing_leaks_from_beyond_the_tensors(loop_order: str, loads: str) -> None:
    problem = backward_problem(dtype=DType.FP16, head_dim=40, heads=2, kv_heads=1, seqlen_q=21, seqlen_k=35)
    inputs = make_inputs(problem)

    def surrounded(tensor: torch.Tensor) -> torch.Tensor:
        batch, heads, rows, width = tensor.shape
        larger = torch.full((batch, heads, rows + 30, width + 8), torch.nan, dtype=tensor.dtype)
        larger[:, :, :rows, :width] = tensor
        return larger[:, :, :rows, :width]

    variant = make_variant(loop_order, loads)
    poisoned = inputs.replace(**{name: surrounded(getattr(inputs, name)) for name in ("q", "k", "v", "out", "dout")})
    clean, got = run(variant, problem, inputs, CPU), run(variant, problem, poisoned, CPU)
    for expected, gradient in zip(clean, got, strict=True):
        assert torch.equal(expected, gradient)


def test_tensors_in_any_memory_order_give_the_same_gradients() -> None:
    problem = backward_problem(dtype=DType.FP32, head_dim=16, heads=4, kv_heads=2, seqlen_q=19, seqlen_k=35)
    inputs = make_inputs(problem)
    expected = run(make_variant("split"), problem, inputs, CPU)
    sequence_first = inputs.replace(
        q=inputs.q.transpose(1, 2).contiguous().transpose(1, 2),
        k=inputs.k.transpose(2, 3).contiguous().transpose(2, 3),
        v=inputs.v.transpose(0, 2).contiguous().transpose(0, 2),
        out=inputs.out.transpose(1, 2).contiguous().transpose(1, 2),
        dout=torch.stack([inputs.dout, inputs.dout + 1], dim=-1)[..., 0],
        lse=inputs.lse.transpose(1, 2).contiguous().transpose(1, 2),
    )
    got = run(make_variant("split"), problem, sequence_first, CPU)
    for one, other in zip(expected, got, strict=True):
        assert torch.equal(one, other)
    assert got[0].stride() == sequence_first.q.stride()


@pytest.mark.parametrize("loop_order", LOOP_ORDERS)
def test_an_expanded_upstream_gradient_counts_like_its_copy(loop_order: str) -> None:
    problem = backward_problem(dtype=DType.FP32, head_dim=16, seqlen_q=20, seqlen_k=20)
    inputs = make_inputs(problem)
    inputs = inputs.replace(dout=torch.ones((), dtype=torch.float32).expand(inputs.dout.shape))
    assert_gradients(run(make_variant(loop_order), problem, inputs, CPU), problem, inputs)


@pytest.mark.parametrize("loads", ["pointer", "tma"])
def test_gradients_are_written_where_the_caller_wants_them(loads: str) -> None:
    problem = backward_problem(dtype=DType.FP32, head_dim=16, seqlen_q=20, seqlen_k=20)
    inputs = make_inputs(problem)
    variant = make_variant("fused", loads)
    expected = run(variant, problem, inputs, CPU)
    packed = torch.full((1, 20, 3, 2, 16), torch.nan)
    slots = [packed[:, :, index].transpose(1, 2) for index in range(3)]
    skewed = torch.full((1, 2, 20, 17), torch.nan)[..., :16]
    slots[1] = skewed
    got = run(variant, problem, inputs, CPU, dq=slots[0], dk=slots[1], dv=slots[2])
    for slot, gradient, exact in zip(slots, got, expected, strict=True):
        assert gradient is slot
        assert torch.equal(slot, exact)


def test_case_a17_an_accumulator_starts_at_zero_in_every_call() -> None:
    problem = backward_problem(dtype=DType.FP32, head_dim=16, seqlen_q=20, seqlen_k=40)
    inputs = make_inputs(problem)
    variant = make_variant("key_outer")
    first, second = (run(variant, problem, inputs, CPU) for _ in range(2))
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one, other)
