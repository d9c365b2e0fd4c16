from __future__ import annotations

import math

import pytest
import torch

from autoflash.errors import InvalidProblemError
from autoflash.evaluate import exact, reference, semantics, yardstick
from autoflash.evaluate.philox import philox
from autoflash.evaluate.semantics import Semantics


def draw(batch=2, heads=4, kv_heads=2, seqlen_q=9, seqlen_k=13, head_dim=8, head_dim_v=6, dtype=torch.float64):
    generator = torch.Generator().manual_seed(7)
    shapes = [
        (batch, heads, seqlen_q, head_dim),
        (batch, kv_heads, seqlen_k, head_dim),
        (batch, kv_heads, seqlen_k, head_dim_v),
    ]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def explicit(q, k, v, visible, scale, weight=lambda b, h, i, j: 1.0, score=lambda s, b, h, i, j: s):
    """One row at a time, by the definition; a row with nothing to see stays 0."""
    out, lse = torch.zeros(*q.shape[:3], v.shape[3]).double(), torch.full(q.shape[:3], -math.inf).double()
    for b, h, i in torch.cartesian_prod(*(torch.arange(n) for n in q.shape[:3])).tolist():
        head = h * k.shape[1] // q.shape[1]
        keys = [j for j in range(k.shape[2]) if visible(i, j)]
        if keys:
            s = torch.stack([score(q[b, h, i] @ k[b, head, j] * scale, b, h, i, j) for j in keys])
            weights = torch.tensor([weight(b, h, i, j) for j in keys]).double()
            out[b, h, i] = (torch.softmax(s, 0) * weights) @ v[b, head, keys]
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

    monkeypatch.setattr(semantics, "SCORES_AT_ONCE", 2 * 4 * 13 * 2)

    torch.testing.assert_close(reference.attention(q, k, v, causal=True, return_lse=True), whole)


@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(9, 13), (13, 9), (4, 0)])
@pytest.mark.parametrize("causal", [False, "bottom_right", "top_left"])
@pytest.mark.parametrize("with_lse", [False, True])
def test_gradients_are_those_of_autograd(seqlen_q, seqlen_k, causal, with_lse, monkeypatch):
    monkeypatch.setattr(semantics, "SCORES_AT_ONCE", 2 * 4 * 13 * 4)
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


def semantics_of(q, k, **options):
    plain = {"causal": False, "scale": None, "window": None, "softcap": 0.0, "mask": None, "dropout_p": 0.0}
    return Semantics.of(q, k, **{**plain, "rng": None, **options})


def magnitude(q, k, v, **options):
    semantics = semantics_of(q, k, **options)
    return yardstick.magnitude(q, v, semantics, exact.tiles(q, k, semantics))


def gradient_magnitudes(q, k, v, dout, **options):
    semantics = semantics_of(q, k, **options)
    return yardstick.gradient_magnitudes(q, k, v, dout, semantics, exact.tiles(q, k, semantics))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_plain_rounds_each_step_and_sets_blind_rows_to_zero(dtype):
    q, k, v = draw(seqlen_q=13, seqlen_k=9, dtype=dtype)

    out, lse = reference.plain(q, k, v, causal=True)

    right, exact_lse = reference.attention(q, k, v, causal=True, return_lse=True)
    error = (out - right).abs().max()
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

    grads = yardstick.plain_gradients(q, k, v, dout, dlse, semantics_of(q, k, causal=True))

    for grad, right in zip(grads, reference.gradients(q, k, v, dout, dlse, causal=True), strict=True):
        assert grad.dtype == dtype
        assert 0 < (grad - right).abs().max() < 50 * torch.finfo(dtype).eps
    assert torch.equal(grads[0][:, :, :4], torch.zeros_like(q[:, :, :4]))


def test_gradient_magnitudes_bound_the_gradients_and_see_what_cancels():
    q, k, v = draw(seqlen_q=13, seqlen_k=9)
    one_key = (q, k[:, :, :1], v[:, :, :1])
    dout = torch.randn_like(reference.attention(q, k, v))

    magnitudes = gradient_magnitudes(q, k, v, dout, causal=True, scale=-0.3)

    grads = reference.gradients(q, k, v, dout, causal=True, scale=-0.3)
    terms = magnitude(q, k, v, causal=True)
    assert (terms >= reference.attention(q, k, v, causal=True).abs()).all()
    assert all((most >= grad.abs()).all() for most, grad in zip(magnitudes, grads, strict=True))
    assert reference.gradients(*one_key, dout)[0].abs().max() < 1e-12
    assert gradient_magnitudes(*one_key, dout)[0].mean() > 0.1


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


def draw_mask(kind, seqlen_q=9, seqlen_k=13, batch=2, heads=4):
    """A mask that hides a third of the pairs, all keys of a row, and all but one key of another."""
    visible = torch.rand(batch, heads, seqlen_q, seqlen_k, generator=torch.Generator().manual_seed(1)) > 0.3
    visible[0, 1, 3] = False
    visible[1, 2, 4] = torch.arange(seqlen_k) == 7
    if kind == "bool":
        return visible
    values = torch.randn(visible.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    return values.masked_fill(~visible, -math.inf)


FEATURES = {
    "window": {"window": (2, 3)},
    "window of one key": {"window": (0, 0)},
    "window open to the left": {"window": (None, 2)},
    "window open to the right": {"window": (-1, -1)},
    "window and causal": {"window": (3, 5), "causal": True},
    "window and top-left": {"window": (3, 5), "causal": "top_left"},
    "softcap": {"softcap": 1.5},
    "bool mask": {"mask": draw_mask("bool")},
    "float mask": {"mask": draw_mask("float")},
    "padding": {"mask": torch.arange(13) < torch.tensor([8, 0]).view(2, 1, 1, 1)},
    "dropout": {"dropout_p": 0.4, "rng": (-(2**62) + 5, 2**33 + 17)},
    "everything": {
        "window": (6, 1),
        "softcap": 0.7,
        "mask": draw_mask("float"),
        "dropout_p": 0.25,
        "rng": torch.tensor([3, 4]),
        "causal": True,
    },
}


def by_definition(
    q, k, v, *, scale, causal=False, window=(None, None), softcap=0.0, mask=None, dropout_p=0.0, rng=None
):
    diagonal = 0 if causal == "top_left" else k.shape[2] - q.shape[2]
    left, right = (10**6 if bound in (None, -1) else bound for bound in window)
    right = 0 if causal else right
    full = None if mask is None else mask.expand(*q.shape[:3], k.shape[2])

    def score(s, b, h, i, j):
        s = softcap * torch.tanh(s / softcap) if softcap else s
        if full is None:
            return s
        return s + full[b, h, i, j] if full.is_floating_point() else s.masked_fill(~full[b, h, i, j], -math.inf)

    keep = dropout_p and reference.dropout_keep(rng, dropout_p, *q.shape[:2], slice(0, q.shape[2]), k.shape[2], "cpu")
    out, lse = explicit(
        q,
        k,
        v,
        lambda i, j: i + diagonal - left <= j <= i + diagonal + right,
        scale,
        (lambda b, h, i, j: float(keep[b, h, i, j]) / (1 - dropout_p)) if dropout_p else lambda *_: 1.0,
        score,
    )
    return out.nan_to_num(), lse


@pytest.mark.parametrize("options", FEATURES.values(), ids=FEATURES)
def test_every_feature_is_its_definition(options, monkeypatch):
    monkeypatch.setattr(semantics, "SCORES_AT_ONCE", 2 * 4 * 13 * 4)
    q, k, v = draw()

    out, lse = reference.attention(q, k, v, scale=0.6, return_lse=True, **options)

    expected_out, expected_lse = by_definition(q, k, v, scale=0.6, **options)
    torch.testing.assert_close(out, expected_out)
    torch.testing.assert_close(lse, expected_lse)


@pytest.mark.parametrize("options", FEATURES.values(), ids=FEATURES)
def test_gradients_of_every_feature_are_those_of_autograd(options, monkeypatch):
    monkeypatch.setattr(semantics, "SCORES_AT_ONCE", 2 * 4 * 13 * 4)
    q, k, v = inputs = [tensor.requires_grad_() for tensor in draw()]
    out, lse = reference.plain(q, k, v, scale=0.6, **options)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)

    grads = reference.gradients(*(tensor.detach() for tensor in inputs), dout, dlse, scale=0.6, **options)

    total = (out * dout).sum() + (torch.where(lse > -math.inf, lse, 0.0) * dlse).sum()
    for grad, expected in zip(grads, torch.autograd.grad(total, inputs), strict=True):
        # The log-sum-exp of `plain` is float32, and so is the way of its gradient.
        torch.testing.assert_close(grad, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("options", FEATURES.values(), ids=FEATURES)
def test_plain_errs_by_a_few_roundings_whatever_the_feature(options):
    q, k, v = draw(dtype=torch.float32)
    dout = torch.randn(2, 4, 9, 6)

    out, lse = reference.plain(q, k, v, **options)
    grads = yardstick.plain_gradients(q, k, v, dout, torch.ones(2, 4, 9), semantics_of(q, k, **options))

    right, exact_lse = reference.attention(q, k, v, return_lse=True, **options)
    assert (out - right).abs().max() < 20 * torch.finfo(torch.float32).eps
    assert torch.equal(lse == -math.inf, exact_lse == -math.inf)
    exact_grads = reference.gradients(q, k, v, dout, torch.ones(2, 4, 9), **options)
    for grad, expected in zip(grads, exact_grads, strict=True):
        assert (grad - expected).abs().max() < 50 * torch.finfo(torch.float32).eps


def test_a_float_mask_is_added_whatever_its_type():
    q, k, v = draw(dtype=torch.bfloat16)
    mask = draw_mask("float").half()

    torch.testing.assert_close(
        reference.attention(q, k, v, mask=mask), reference.attention(q, k, v, mask=mask.double())
    )


LENGTHS = ([0, 4, 1, 0, 6, 0], [3, 5, 0, 0, 9, 1])


def draw_packed(lengths=LENGTHS, tail=(2, 3)):
    """q, k, v [T, H, D] with NaN behind the last sequence, and where the sequences begin."""
    starts = [torch.tensor([0, *torch.tensor(part).cumsum(0).tolist()], dtype=torch.int32) for part in lengths]
    rows = [int(part[-1]) + more for part, more in zip(starts, tail, strict=True)]
    q, k, v = (tensor[0].transpose(0, 1).clone() for tensor in draw(batch=1, seqlen_q=rows[0], seqlen_k=rows[1]))
    q[starts[0][-1] :], k[starts[1][-1] :], v[starts[1][-1] :] = math.nan, math.nan, math.nan
    return q, k, v, *starts


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": True},
        {"causal": "top_left", "softcap": 2.0},
        {"window": (2, 1)},
        {"dropout_p": 0.5, "rng": (9, 8)},
    ],
)
def test_packed_sequences_are_computed_one_by_one(options):
    q, k, v, starts_q, starts_k = draw_packed()
    dout, dlse = torch.randn(q.shape[0], 4, 6).double(), torch.randn(4, q.shape[0]).double()

    out, lse = reference.attention_varlen(q, k, v, starts_q, starts_k, return_lse=True, **options)
    dq, dk, dv = reference.gradients_varlen(q, k, v, dout, starts_q, starts_k, dlse, **options)

    for b in range(len(starts_q) - 1):
        rows, keys = (slice(int(part[b]), int(part[b + 1])) for part in (starts_q, starts_k))
        one = [tensor[part].transpose(0, 1)[None] for tensor, part in ((q, rows), (k, keys), (v, keys), (dout, rows))]
        here = dict(options)
        if "rng" in here and rows.stop > rows.start:
            # A dropout takes the number of the sequence for the batch: repeat it, and take that one.
            one = [tensor.expand(b + 1, -1, -1, -1) for tensor in one]
        right, right_lse = reference.attention(*one[:3], return_lse=True, **here)
        grads = reference.gradients(*one, dlse[None, :, rows], **here)
        torch.testing.assert_close(out[rows].transpose(0, 1), right[-1])
        torch.testing.assert_close(lse[:, rows], right_lse[-1])
        for grad, part, expected in zip((dq, dk, dv), (rows, keys, keys), grads, strict=True):
            torch.testing.assert_close(grad[part].transpose(0, 1), expected[-1])


def test_rows_behind_the_last_sequence_are_zero_whatever_lies_there():
    q, k, v, starts_q, starts_k = draw_packed()

    out, lse = reference.attention_varlen(q, k, v, starts_q, starts_k, return_lse=True)
    grads = reference.gradients_varlen(q, k, v, torch.full_like(out, math.nan), starts_q, starts_k)

    assert torch.equal(out[-2:], torch.zeros_like(out[-2:]))
    assert (lse[:, -2:] == -math.inf).all()
    for grad, tail in zip(grads, (2, 3, 3), strict=True):
        assert torch.equal(grad[-tail:], torch.zeros_like(grad[-tail:]))


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_known_answers(counter, key, words):
    """The vectors `philox4x32 10` of Random123's kat_vectors."""
    found = philox(key, tuple(torch.tensor([word]) for word in counter))

    assert tuple(int(word) for word in found) == words


def test_an_element_of_a_dropout_depends_on_its_place_and_the_seed_only():
    rng = (0x0123456789ABCDEF, 2**32 + 7)
    keep = reference.dropout_keep(rng, 0.5, 3, 4, slice(0, 9), 11, "cpu")

    words = philox((0x89ABCDEF, 0x01234567), tuple(torch.tensor([word]) for word in (2, 5, 1 * 4 + 3, 7)))
    assert keep[1, 3, 5, 8:11].tolist() == [int(word) >= 2**31 for word in words[:3]]
    part = reference.dropout_keep(torch.tensor(rng), 0.5, 1, 4, slice(2, 7), 6, "cpu", first_batch=2)
    assert torch.equal(part, keep[2:, :, 2:7, :6])


@pytest.mark.parametrize("dropout_p", [0.0, 0.1, 0.5, 0.99])
def test_a_dropout_keeps_its_share(dropout_p):
    keep = reference.dropout_keep((1, 2), dropout_p, 2, 4, slice(0, 100), 128, "cpu")

    assert keep.double().mean().item() == pytest.approx(1 - dropout_p, abs=0.01)


@pytest.mark.parametrize(
    "options",
    [{"dropout_p": 0.5}, {"mask": torch.ones(3, 13, dtype=torch.bool)}, {"window": (-2, 0)}, {"window": (0, -3)}],
)
def test_arguments_that_mean_nothing_are_refused(options):
    with pytest.raises(InvalidProblemError):
        reference.attention(*draw(), **options)


@pytest.mark.parametrize("starts", [[1, 4, 9], [0, 5, 4], [0, 9]])
def test_sequences_that_do_not_belong_together_are_refused(starts):
    q, k, v, _, _ = draw_packed()

    with pytest.raises(InvalidProblemError):
        reference.attention_varlen(q, k, v, torch.tensor(starts), torch.tensor([0, 5, 9]))
