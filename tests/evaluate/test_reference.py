from __future__ import annotations

import math

import pytest
import torch

from autoflash.errors import InvalidProblemError
from autoflash.evaluate import reference


def draw(batch=2, heads=4, kv_heads=2, seqlen_q=9, seqlen_k=13, head_dim=8, head_dim_v=6, dtype=torch.float64):
    generator = torch.Generator().manual_seed(7)
    shapes = [
        (batch, heads, seqlen_q, head_dim),
        (batch, kv_heads, seqlen_k, head_dim),
        (batch, kv_heads, seqlen_k, head_dim_v),
    ]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def explicit(q, k, v, visible, scale):
    """One row at a time, by the definition; a row with nothing to see stays 0."""
    out, lse = torch.zeros(*q.shape[:3], v.shape[3]).double(), torch.full(q.shape[:3], -math.inf).double()
    for b, h, i in torch.cartesian_prod(*(torch.arange(n) for n in q.shape[:3])).tolist():
        keys = [j for j in range(k.shape[2]) if visible(i, j)]
        if keys:
            s = torch.stack([q[b, h, i] @ k[b, h * k.shape[1] // q.shape[1], j] * scale for j in keys])
            out[b, h, i] = torch.softmax(s, 0) @ v[b, h * k.shape[1] // q.shape[1], keys]
            lse[b, h, i] = s.exp().sum().log()
    return out, lse


@pytest.mark.parametrize(
    ("seqlen_q", "seqlen_k", "causal", "visible"),
    [
        (9, 13, False, lambda i, j: True),
        (9, 13, True, lambda i, j: j <= i + 4),
        (9, 13, "bottom_right", lambda i, j: j <= i + 4),
        (9, 13, "top_left", lambda i, j: j <= i),
        (13, 9, "bottom_right", lambda i, j: j <= i - 4),
        (13, 9, "top_left", lambda i, j: j <= i),
        (5, 0, False, lambda i, j: True),
    ],
)
def test_attention_is_the_definition(seqlen_q, seqlen_k, causal, visible):
    q, k, v = draw(seqlen_q=seqlen_q, seqlen_k=seqlen_k)

    out, lse = reference.attention(q, k, v, causal=causal, scale=0.3, return_lse=True)

    expected_out, expected_lse = explicit(q, k, v, visible, 0.3)
    torch.testing.assert_close(out, expected_out)
    torch.testing.assert_close(lse, expected_lse)


def test_attention_agrees_with_torch_in_float64():
    q, k, v = draw(kv_heads=4)

    out = reference.attention(q, k, v)

    torch.testing.assert_close(out, torch.nn.functional.scaled_dot_product_attention(q, k, v))


def test_attention_is_the_same_in_chunks(monkeypatch):
    q, k, v = draw()
    whole = reference.attention(q, k, v, causal=True, return_lse=True)

    monkeypatch.setattr(reference, "_SCORES_AT_ONCE", 2 * 4 * 13 * 2)

    torch.testing.assert_close(reference.attention(q, k, v, causal=True, return_lse=True), whole)


@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(9, 13), (13, 9), (4, 0)])
@pytest.mark.parametrize("causal", [False, "bottom_right", "top_left"])
@pytest.mark.parametrize("with_lse", [False, True])
def test_gradients_are_those_of_autograd(seqlen_q, seqlen_k, causal, with_lse, monkeypatch):
    monkeypatch.setattr(reference, "_SCORES_AT_ONCE", 2 * 4 * 13 * 4)
    inputs = [tensor.requires_grad_() for tensor in draw(seqlen_q=seqlen_q, seqlen_k=seqlen_k)]
    out, lse = reference.plain(*inputs, causal=causal, scale=0.4)
    lse = torch.where(lse > -math.inf, lse, 0.0)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse) if with_lse else None
    total = (out * dout).sum() + ((lse * dlse).sum() if with_lse else 0.0)

    grads = reference.gradients(*(tensor.detach() for tensor in inputs), dout, dlse, causal=causal, scale=0.4)

    # The log-sum-exp of `plain` is float32, and so is the way of its gradient.
    tolerance = {"rtol": 1e-4, "atol": 1e-5} if with_lse else {}
    for grad, expected in zip(grads, torch.autograd.grad(total, inputs), strict=True):
        torch.testing.assert_close(grad, expected, **tolerance)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_plain_rounds_each_step_and_sets_blind_rows_to_zero(dtype):
    q, k, v = draw(seqlen_q=13, seqlen_k=9, dtype=dtype)

    out, lse = reference.plain(q, k, v, causal=True)

    exact, exact_lse = reference.attention(q, k, v, causal=True, return_lse=True)
    error = (out - exact).abs().max()
    assert out.dtype == dtype
    assert 0 < error < 20 * torch.finfo(dtype).eps
    assert torch.equal(out[:, :, :4], torch.zeros_like(out[:, :, :4]))
    assert torch.equal(lse == -math.inf, exact_lse == -math.inf)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("with_lse", [False, True])
def test_plain_gradients_err_by_a_few_roundings_and_are_zero_in_blind_rows(dtype, with_lse):
    q, k, v = draw(seqlen_q=13, seqlen_k=9, dtype=dtype)
    out, lse = reference.attention(q, k, v, causal=True, return_lse=True)
    dout, dlse = torch.randn_like(out).to(dtype), torch.randn_like(lse).float() if with_lse else None

    grads = reference.plain_gradients(q, k, v, dout, dlse, causal=True)

    for grad, exact in zip(grads, reference.gradients(q, k, v, dout, dlse, causal=True), strict=True):
        assert grad.dtype == dtype
        assert 0 < (grad - exact).abs().max() < 50 * torch.finfo(dtype).eps
    assert torch.equal(grads[0][:, :, :4], torch.zeros_like(q[:, :, :4]))


def test_gradient_magnitudes_bound_the_gradients_and_see_what_cancels():
    q, k, v = draw(seqlen_q=13, seqlen_k=9)
    one_key = (q, k[:, :, :1], v[:, :, :1])
    dout = torch.randn_like(reference.attention(q, k, v))

    magnitudes = reference.gradient_magnitudes(q, k, v, dout, causal=True, scale=-0.3)

    grads = reference.gradients(q, k, v, dout, causal=True, scale=-0.3)
    assert (reference.magnitude(q, k, v, causal=True) >= reference.attention(q, k, v, causal=True).abs()).all()
    assert all((most >= grad.abs()).all() for most, grad in zip(magnitudes, grads, strict=True))
    assert reference.gradients(*one_key, dout)[0].abs().max() < 1e-12
    assert reference.gradient_magnitudes(*one_key, dout)[0].mean() > 0.1


def test_visible_keys_counts_what_each_query_sees():
    q, k, _ = draw(seqlen_q=5, seqlen_k=3)

    assert reference.visible_keys(q, k).tolist() == [3, 3, 3, 3, 3]
    assert reference.visible_keys(q, k, causal=True).tolist() == [0, 0, 1, 2, 3]
    assert reference.visible_keys(q, k, causal="top_left").tolist() == [1, 2, 3, 3, 3]


@pytest.mark.parametrize(
    "change",
    [{"heads": 3}, {"head_dim": 7}],
)
def test_shapes_that_do_not_belong_together_are_refused(change):
    q, k, v = draw()
    q = draw(**change)[0]

    with pytest.raises(InvalidProblemError):
        reference.attention(q, k, v)


def test_an_unknown_alignment_is_refused():
    with pytest.raises(ValueError, match="middle"):
        reference.attention(*draw(), causal="middle")
