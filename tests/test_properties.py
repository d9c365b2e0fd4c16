"""What holds for attention whatever the numbers, in kernels whose tiles are smaller than the sequences."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

import autoflash
from autoflash.problem import DType, Form, Mask, MaskTensor, Pass, Problem
from autoflash.runtime.bind import bind
from autoflash.runtime.executable import NO_EXTRAS, Extras
from autoflash.variant import Choices, Family, Variant
from tests.factories import make_device, make_problem

CPU = make_device("cpu")
CLOSE = {"rtol": 2e-5, "atol": 2e-5}

# The same examples on every machine and in every run; nothing is written into the checkout.
properties = settings(derandomize=True, database=None, max_examples=25, deadline=None)


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """A forward problem with its tensors, and the kernel's tiles."""

    problem: Problem
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    extras: Extras
    variant: Variant


@st.composite
def drawn(draw, *, features=(), mask=None, most=40):
    """Any sizes and tiles; of ``features`` any subset."""
    kv_heads, group = draw(st.integers(1, 2)), draw(st.integers(1, 3))
    problem = make_problem(
        dtype=DType.FP32,
        batch=draw(st.integers(1, 2)),
        heads=kv_heads * group,
        kv_heads=kv_heads,
        seqlen_q=draw(st.integers(1, most)),
        seqlen_k=draw(st.integers(1, most)),
        head_dim=draw(st.sampled_from([1, 8, 17])),
        head_dim_v=draw(st.sampled_from([4, 9])),
        mask=draw(st.sampled_from(Mask)) if mask is None else mask,
    )
    bounds = st.one_of(st.none(), st.integers(0, most))
    choices = {
        "window": {"window_left": draw(bounds), "window_right": draw(bounds)},
        "softcap": {"softcap": draw(st.sampled_from([0.5, 3.0]))},
        "bool_mask": {"mask_tensor": MaskTensor.BOOL},
        "float_mask": {"mask_tensor": MaskTensor.FLOAT},
        "dropout": {"dropout_p": draw(st.sampled_from([0.1, 0.5]))},
    }
    for feature in features:
        if draw(st.booleans()):
            problem = problem.replace(**choices[feature])
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    shape = (problem.batch, problem.heads, problem.seqlen_q, problem.seqlen_k)
    visible = torch.rand(shape, generator=generator) > draw(st.sampled_from([0.3, 0.95]))
    tensors = {
        MaskTensor.NONE: None,
        MaskTensor.BOOL: visible,
        MaskTensor.FLOAT: torch.randn(shape, generator=generator).masked_fill(~visible, -math.inf),
    }
    return Drawn(
        problem=problem,
        q=torch.randn((*shape[:3], problem.head_dim), generator=generator),
        k=torch.randn(problem.batch, kv_heads, problem.seqlen_k, problem.head_dim, generator=generator),
        v=torch.randn(problem.batch, kv_heads, problem.seqlen_k, problem.head_dim_v, generator=generator),
        extras=Extras(
            mask=tensors[problem.mask_tensor],
            rng=torch.tensor([draw(st.integers(-(2**63), 2**63 - 1)), 7]) if problem.dropout_p else None,
        ),
        variant=draw(variants),
    )


variants = st.builds(
    lambda loop_order, block_m, block_n, heads: Variant(
        family=Family.TORCH_TILED,
        structure=Choices(loop_order=loop_order),
        config=Choices(block_m=block_m, block_n=block_n, heads_per_step=heads),
    ),
    st.sampled_from(["query_outer", "key_outer"]),
    st.sampled_from([4, 16]),
    st.sampled_from([4, 16]),
    st.sampled_from([0, 1]),
)


def forward(problem, variant, q, k, v, extras=NO_EXTRAS, scale=0.4):
    kernel = bind(Form.of(problem), variant, CPU)
    return kernel.prepare_forward(problem, q, k, v, scale, extras)(q, k, v, extras=extras)


def backward(problem, variant, q, k, v, dout, dlse=None, extras=NO_EXTRAS, scale=0.4):
    out, lse = forward(problem, variant, q, k, v, extras, scale)
    problem = problem.replace(op=Pass.BACKWARD)
    kernel = bind(Form.of(problem), variant, CPU)
    call = kernel.prepare_backward(problem, q, k, v, out, dout, scale, extras)
    return call(q, k, v, out, lse, dout, dlse, extras=extras)


ANY = ("window", "softcap", "bool_mask", "float_mask")


@properties
@given(drawn(features=ANY))
def test_values_of_one_give_one_wherever_a_key_is_visible(one):
    out, lse = forward(one.problem, one.variant, one.q, one.k, torch.ones_like(one.v), one.extras)

    expected = (lse > -math.inf).float()[..., None].expand_as(out)
    torch.testing.assert_close(out, expected, **CLOSE)


@properties
@given(drawn(features=("window", "bool_mask", "float_mask")), st.floats(-4.0, 4.0))
def test_a_shift_of_all_keys_leaves_the_output_and_shifts_the_log_sum_exp(one, size):
    shift = torch.full((one.problem.head_dim,), size)

    out, lse = forward(one.problem, one.variant, one.q, one.k, one.v, one.extras)
    shifted, shifted_lse = forward(one.problem, one.variant, one.q, one.k + shift, one.v, one.extras)

    torch.testing.assert_close(shifted, out, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(shifted_lse, lse + 0.4 * one.q @ shift, rtol=1e-4, atol=1e-4)


@properties
@given(drawn(features=("softcap", "bool_mask", "float_mask"), mask=Mask.FULL), st.randoms(use_true_random=False))
def test_the_order_of_keys_does_not_matter_under_a_full_mask(one, random):
    order = list(range(one.problem.seqlen_k))
    random.shuffle(order)
    mask = None if one.extras.mask is None else one.extras.mask[..., order]
    dout = torch.randn(*one.q.shape[:3], one.problem.head_dim_v, generator=torch.Generator().manual_seed(1))

    out, lse = forward(one.problem, one.variant, one.q, one.k, one.v, one.extras)
    dq, dk, dv = backward(one.problem, one.variant, one.q, one.k, one.v, dout, extras=one.extras)
    moved = (one.problem, one.variant, one.q, one.k[:, :, order], one.v[:, :, order])
    moved_out, moved_lse = forward(*moved, Extras(mask=mask))
    moved_dq, moved_dk, moved_dv = backward(*moved, dout, extras=Extras(mask=mask))

    torch.testing.assert_close((moved_out, moved_lse, moved_dq), (out, lse, dq), **CLOSE)
    torch.testing.assert_close((moved_dk, moved_dv), (dk[:, :, order], dv[:, :, order]), **CLOSE)


@properties
@given(drawn(features=("softcap", "bool_mask")), st.integers(0, 1), st.booleans())
def test_a_window_over_all_keys_is_the_mask_alone(one, more, is_open):
    far = max(one.problem.seqlen_q, one.problem.seqlen_k) + more
    # On the right a causal mask is the bound, whether the window has one there or not.
    windowed = one.problem.replace(window_left=far, window_right=None if is_open and one.problem.causal else far)
    dout = torch.ones(*one.q.shape[:3], one.problem.head_dim_v)

    results = [
        (
            *forward(problem, one.variant, one.q, one.k, one.v, one.extras),
            *backward(problem, one.variant, one.q, one.k, one.v, dout, extras=one.extras),
        )
        for problem in (windowed, one.problem)
    ]

    torch.testing.assert_close(*results, **CLOSE)


@properties
@given(drawn(features=("softcap", "bool_mask", "float_mask"), mask=Mask.FULL), st.lists(st.integers(0, 40), max_size=3))
def test_parts_of_the_keys_merged_by_their_log_sum_exp_are_the_whole(one, cuts):
    borders = sorted({0, one.problem.seqlen_k, *(cut for cut in cuts if cut < one.problem.seqlen_k)})
    out, lse = torch.zeros(*one.q.shape[:3], one.problem.head_dim_v), torch.full(one.q.shape[:3], -math.inf)

    for start, end in itertools.pairwise(borders):
        mask = None if one.extras.mask is None else one.extras.mask[..., start:end]
        k, v = one.k[:, :, start:end], one.v[:, :, start:end]
        problem = one.problem.replace(seqlen_k=end - start)
        part, part_lse = forward(problem, one.variant, one.q, k, v, Extras(mask=mask))
        both = torch.logaddexp(lse, part_lse)
        share, part_share = (torch.exp(each - both.nan_to_num(neginf=0.0))[..., None] for each in (lse, part_lse))
        out, lse = out * share + part * part_share, both

    whole, whole_lse = forward(one.problem, one.variant, one.q, one.k, one.v, one.extras)
    torch.testing.assert_close(out, whole, **CLOSE)
    torch.testing.assert_close(lse, whole_lse, **CLOSE)


@properties
@given(drawn(features=(*ANY, "dropout")))
def test_key_heads_that_are_shared_are_those_heads_repeated(one):
    repeated = one.problem.replace(kv_heads=one.problem.heads)
    k, v = (tensor.repeat_interleave(one.problem.group, dim=1) for tensor in (one.k, one.v))
    generator = torch.Generator().manual_seed(1)
    dout = torch.randn(*one.q.shape[:3], one.problem.head_dim_v, generator=generator)
    dlse = torch.randn(one.q.shape[:3], generator=generator)

    shared = forward(one.problem, one.variant, one.q, one.k, one.v, one.extras)
    dq, dk, dv = backward(one.problem, one.variant, one.q, one.k, one.v, dout, dlse, one.extras)
    alone = forward(repeated, one.variant, one.q, k, v, one.extras)
    all_dq, all_dk, all_dv = backward(repeated, one.variant, one.q, k, v, dout, dlse, one.extras)

    torch.testing.assert_close(shared, alone, **CLOSE)
    summed = [grad.unflatten(1, (one.problem.kv_heads, -1)).sum(dim=2) for grad in (all_dk, all_dv)]
    torch.testing.assert_close([dq, dk, dv], [all_dq, *summed], **CLOSE)


@properties
@given(drawn(features=(*ANY, "dropout")), variants)
def test_tiles_and_loop_orders_do_not_matter(one, other):
    dout = torch.ones(*one.q.shape[:3], one.problem.head_dim_v)

    results = [
        (
            *forward(one.problem, variant, one.q, one.k, one.v, one.extras),
            *backward(one.problem, variant, one.q, one.k, one.v, dout, extras=one.extras),
        )
        for variant in (one.variant, other)
    ]

    torch.testing.assert_close(*results, **CLOSE)


@properties
@given(drawn(features=("window", "bool_mask", "float_mask")), st.sampled_from([0.25, -2.0]))
def test_a_factor_of_the_queries_may_be_taken_into_the_scale(one, factor):
    out, lse = forward(one.problem, one.variant, one.q * factor, one.k, one.v, one.extras, scale=0.4)
    scaled = forward(one.problem, one.variant, one.q, one.k, one.v, one.extras, scale=0.4 * factor)

    torch.testing.assert_close((out, lse), scaled, **CLOSE)


@properties
@given(
    st.lists(st.tuples(st.integers(0, 25), st.integers(0, 25)), min_size=1, max_size=5),
    st.tuples(st.integers(0, 5), st.integers(0, 5)),
    drawn(features=("window", "softcap", "dropout"), most=12),
)
def test_packed_sequences_are_the_sequences_one_by_one(lengths, tail, one):
    rows, keys = (sum(length[side] for length in lengths) for side in (0, 1))
    generator = torch.Generator().manual_seed(rows * 100 + keys)
    heads, kv_heads = one.problem.heads, one.problem.kv_heads
    q = torch.randn(1, heads, rows + tail[0], one.problem.head_dim, generator=generator)
    k = torch.randn(1, kv_heads, keys + tail[1], one.problem.head_dim, generator=generator)
    v = torch.randn(1, kv_heads, keys + tail[1], one.problem.head_dim_v, generator=generator)
    starts = [torch.tensor([0, *(length[side] for length in lengths)]).cumsum(0).int() for side in (0, 1)]
    sizes = {"batch": len(lengths), "packed_q": q.shape[2], "packed_k": k.shape[2]}
    problem = one.problem.replace(mask_tensor=MaskTensor.NONE, **sizes)

    extras = Extras(cu_seqlens_q=starts[0], cu_seqlens_k=starts[1], rng=one.extras.rng)
    out, lse = forward(problem, one.variant, q, k, v, extras)

    for b, (length_q, length_k) in enumerate(lengths):
        first, first_key = int(starts[0][b]), int(starts[1][b])
        part_q = q[:, :, first : first + length_q].expand(b + 1, -1, -1, -1)
        part_k, part_v = (tensor[:, :, first_key : first_key + length_k].expand(b + 1, -1, -1, -1) for tensor in (k, v))
        alone = problem.replace(packed_q=None, packed_k=None, batch=b + 1, seqlen_q=length_q, seqlen_k=length_k)
        # A dropout takes the number of the sequence for the batch.
        expected, expected_lse = forward(alone, one.variant, part_q, part_k, part_v, Extras(rng=one.extras.rng))
        torch.testing.assert_close(out[0, :, first : first + length_q], expected[b], **CLOSE)
        torch.testing.assert_close(lse[0, :, first : first + length_q], expected_lse[b], **CLOSE)
    assert torch.equal(out[:, :, rows:], torch.zeros_like(out[:, :, rows:]))
    assert (lse[:, :, rows:] == -math.inf).all()


@properties
@given(drawn(features=("bool_mask",)), st.integers(0, 40), st.booleans())
def test_the_public_function_obeys_the_same_laws(one, left, is_bshd):
    def attend(k, v, **options):
        tensors = [tensor.transpose(1, 2) if is_bshd else tensor for tensor in (one.q, k, v)]
        out, lse = autoflash.attention(
            *tensors, mask=one.extras.mask, layout="bshd" if is_bshd else "bhsd", return_lse=True, **options
        )
        return out.transpose(1, 2) if is_bshd else out, lse

    causal = {"causal": one.problem.causal}
    repeated = [tensor.repeat_interleave(one.problem.group, dim=1) for tensor in (one.k, one.v)]
    everything = max(one.problem.seqlen_q, one.problem.seqlen_k)

    whole = attend(one.k, one.v, **causal)
    ones, lse = attend(one.k, torch.ones_like(one.v), window=(left, None), **causal)

    torch.testing.assert_close(attend(*repeated, **causal), whole, **CLOSE)
    torch.testing.assert_close(attend(one.k, one.v, window=(everything, everything), **causal), whole, **CLOSE)
    torch.testing.assert_close(ones, (lse > -math.inf).float()[..., None].expand_as(ones), **CLOSE)
