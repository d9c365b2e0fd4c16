"""Terms of scores with gradients through the public functions, on the CPU, beside a formula for autograd."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import autoflash
from autoflash.arguments import draw_rng
from autoflash.errors import InvalidProblemError, NoKernelError
from autoflash.evaluate import reference
from tests.featured import LENGTHS_K, LENGTHS_Q, B, D, H, M, N, bool_mask, float_mask, offsets, packed, tensors
from tests.termed import DTYPES, TOLERANCE, derived

pytestmark = pytest.mark.usefixtures("no_records")


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 4) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


SINKS = {"sinks": normal(H) + 1.0}

BIASES = {
    "bias": normal(B, H, M, N),
    "bias-heads": normal(1, H, M, N),
    "bias-batch": normal(B, 1, M, N),
    "bias-all": normal(1, 1, M, N),
    "bias-2d": normal(M, N),
    "bias-keys": normal(B, 1, 1, N),
    "bias-queries": normal(1, H, M, 1),
    "bias-one": normal(1),
    "bias-3d": normal(H, 1, N),
}

SLOPES = {"alibi_slopes": normal(H).abs() * 0.2}
EACH_SLOPES = {"alibi_slopes": normal(B, H).abs() * 0.2}

# By name: the terms, what else a call is given, and what the formula is given in its place.
CASES: dict[str, tuple[dict[str, Tensor], dict[str, Any]]] = {
    "sinks": (SINKS, {}),
    "sinks-causal": (SINKS, {"causal": True}),
    "sinks-top-left": (SINKS, {"causal": "top_left"}),
    "sinks-window": (SINKS, {"window": (7, 3)}),
    "sinks-bool": (SINKS, {"mask": bool_mask(B, 1, M, N)}),
    "sinks-float": (SINKS, {"mask": float_mask(M, N)}),
    "sinks-all": (SINKS, {"mask": bool_mask(M, N), "softcap": 2.0, "window": (20, 4), "causal": True}),
    "sinks-fp16": ({"sinks": normal(H, dtype=torch.float16)}, {}),
    "sinks-bf16": ({"sinks": normal(H, dtype=torch.bfloat16)}, {"causal": True}),
    "sinks-fp64": ({"sinks": normal(H).double()}, {}),
    **{name: ({"bias": bias}, {"causal": turn % 2 == 1}) for turn, (name, bias) in enumerate(BIASES.items())},
    "bias-fp16": ({"bias": normal(1, H, M, N, dtype=torch.float16)}, {"softcap": 2.0}),
    "bias-bf16": ({"bias": normal(B, 1, 1, N, dtype=torch.bfloat16)}, {"window": (7, 3)}),
    "bias-inf": ({"bias": normal(M, N).masked_fill(~bool_mask(M, N), -torch.inf)}, {}),
    "bias-bool": ({"bias": normal(1, H, M, N)}, {"mask": bool_mask(B, 1, M, N)}),
    "bias-float": ({"bias": normal(1, H, M, 1)}, {"mask": float_mask(B, 1, M, N), "softcap": 2.0}),
    "alibi": (SLOPES, {}),
    "alibi-each": (EACH_SLOPES, {"softcap": 2.0}),
    "alibi-causal": (EACH_SLOPES, {"causal": True}),
    "alibi-top-left": (SLOPES, {"causal": "top_left"}),
    "alibi-window": (SLOPES, {"window": (7, 3), "mask": bool_mask(B, 1, M, N)}),
    "alibi-bf16": ({"alibi_slopes": normal(H, dtype=torch.bfloat16)}, {}),
    "alibi-negative": ({"alibi_slopes": normal(B, H) * 0.1}, {"mask": float_mask(M, N)}),
    "all-terms": (
        {**EACH_SLOPES, "bias": normal(B, 1, 1, N), **SINKS},
        {"mask": bool_mask(M, N), "softcap": 2.0, "window": (20, 4), "causal": True},
    ),
    "bias-sinks-all": (
        {"bias": normal(1, H, M, N), **SINKS},
        {"mask": bool_mask(M, N), "softcap": 2.0, "window": (20, 4), "causal": "top_left"},
    ),
}


def close(ours: Tensor, exact: Tensor, tolerance: float) -> None:
    torch.testing.assert_close(ours.double(), exact, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
def test_output_lse_and_every_gradient_match_autograd_in_float64(name: str, dtype: torch.dtype) -> None:
    terms, how = CASES[name]
    q, k, v = tensors(grad=True, dtype=dtype)
    leaves = {term: value.clone().requires_grad_() for term, value in terms.items()}
    dout, dlse = normal(B, H, M, D, dtype=dtype, seed=8), normal(B, H, M, seed=9)

    out, lse = autoflash.attention(q, k, v, return_lse=True, vendor="never", **leaves, **how)  # type: ignore[arg-type]
    found = torch.autograd.grad((out, lse), (q, k, v, *leaves.values()), (dout, dlse))

    (expected, expected_lse), wanted = derived(q, k, v, dout, dlse, terms, how)
    close(out, expected, TOLERANCE[dtype])
    close(lse, expected_lse, 2e-5)
    for ours, exact, given in zip(found, wanted, (q, k, v, *terms.values()), strict=True):
        assert ours.dtype is given.dtype
        assert ours.shape == given.shape
        coarse = max(TOLERANCE[dtype], TOLERANCE.get(given.dtype, 0.0))
        close(ours, exact, coarse * max(1.0, float(exact.abs().max())))


@pytest.mark.parametrize("name", CASES)
def test_the_specification_matches_autograd(name: str) -> None:
    terms, how = CASES[name]
    q, k, v = tensors()
    dout, dlse = normal(B, H, M, D, seed=8), normal(B, H, M, seed=9)

    out, lse = reference.attention(q, k, v, return_lse=True, **terms, **how)  # type: ignore[arg-type]
    found = (*reference.gradients(q, k, v, dout, dlse, **terms, **how),)  # type: ignore[arg-type]
    of_terms = reference.term_gradients(q, k, v, dout, dlse, **terms, **how)  # type: ignore[arg-type]

    results, wanted = derived(q, k, v, dout, dlse, terms, how)
    for ours, exact in zip((out, lse, *found), (*results, *wanted[:3]), strict=True):
        close(ours, exact, 1e-12)
    for term, exact in zip(terms, wanted[3:], strict=True):
        close(getattr(of_terms, term), exact, 1e-11)


def test_with_dropout_the_gradients_are_those_of_what_was_kept() -> None:
    q, k, v = tensors(grad=True)
    terms = {**SINKS, **EACH_SLOPES, "bias": BIASES["bias-heads"]}
    leaves = {term: value.clone().requires_grad_() for term, value in terms.items()}
    dout, dlse = normal(B, H, M, D, seed=8), normal(B, H, M, seed=9)
    torch.manual_seed(7)
    rng = draw_rng(q)
    torch.manual_seed(7)

    out, lse = autoflash.attention(q, k, v, dropout_p=0.25, return_lse=True, vendor="never", **leaves)  # type: ignore[arg-type]
    found = torch.autograd.grad((out, lse), (q, k, v, *leaves.values()), (dout, dlse))

    keep = reference.dropout_keep(rng, 0.25, B, H, slice(0, M), N, torch.device("cpu")).double() / 0.75
    (expected, expected_lse), wanted = derived(q, k, v, dout, dlse, terms, {"keep": keep})
    close(out, expected, 1e-5)
    close(lse, expected_lse, 1e-5)
    for ours, exact in zip(found, wanted, strict=True):
        close(ours, exact, 1e-4)


@pytest.mark.parametrize("vendor", ["never", "allow"])
@pytest.mark.parametrize("terms", [SINKS, {"bias": BIASES["bias-2d"]}, SLOPES], ids=["sinks", "bias", "alibi"])
def test_case_a05_a_term_that_is_accepted_is_obeyed(terms: dict[str, Tensor], vendor: str) -> None:
    q, k, v = tensors()

    plain = autoflash.attention(q, k, v, vendor=vendor)
    termed = autoflash.attention(q, k, v, vendor=vendor, **terms)  # type: ignore[arg-type]

    assert (plain - termed).abs().max() > 1e-2  # type: ignore[operator]


def test_no_gradient_is_made_of_a_term_that_asks_for_none() -> None:
    q, k, v = tensors(grad=True)
    for terms in (SINKS, {"bias": BIASES["bias-2d"]}, SLOPES):
        out = autoflash.attention(q, k, v, vendor="never", **terms)  # type: ignore[arg-type]

        assert all(torch.isfinite(x).all() for x in torch.autograd.grad(out.sum(), (q, k, v)))  # type: ignore[union-attr]


def test_a_term_alone_may_ask_for_a_gradient() -> None:
    q, k, v = tensors()
    for term, value in {**SINKS, "bias": BIASES["bias-keys"], **SLOPES}.items():
        leaf = value.clone().requires_grad_()

        out = autoflash.attention(q, k, v, vendor="never", **{term: leaf})  # type: ignore[arg-type]

        assert torch.autograd.grad(out.square().sum(), leaf)[0].abs().max() > 0  # type: ignore[union-attr]


def test_a_row_that_sees_its_sink_alone_gives_zero_and_its_sink_as_lse() -> None:
    q, k, v = tensors(grad=True)
    sinks = SINKS["sinks"].clone().requires_grad_()
    mask = torch.ones(B, 1, M, N, dtype=torch.bool)
    mask[:, :, 3:9] = False

    out, lse = autoflash.attention(q, k, v, mask=mask, sinks=sinks, return_lse=True, vendor="never")
    dq, dk, dv, dsinks = torch.autograd.grad(
        (out[:, :, 3:9], lse[:, :, 3:9]), (q, k, v, sinks), (torch.ones(B, H, 6, D), torch.ones(B, H, 6))
    )

    assert not out[:, :, 3:9].any()
    assert torch.equal(lse[:, :, 3:9], sinks.detach()[:, None].expand(B, H, 6))
    assert not any(x.any() for x in (dq, dk, dv))
    torch.testing.assert_close(dsinks, torch.full((H,), 6.0 * B))


def test_without_any_key_lse_is_the_sink_and_has_its_gradient() -> None:
    q, k, v = (x.requires_grad_() for x in tensors(M, 0))
    sinks = SINKS["sinks"].clone().requires_grad_()

    out, lse = autoflash.attention(q, k, v, sinks=sinks, return_lse=True)
    dq, dsinks = torch.autograd.grad((out.sum() + lse.sum()), (q, sinks))

    assert not out.any()
    assert not dq.any()
    assert torch.equal(lse, sinks.detach()[:, None].expand(B, H, M))
    torch.testing.assert_close(dsinks, torch.full((H,), float(B * M)))


def test_a_sink_of_minus_infinity_is_none() -> None:
    q, k, v = tensors()
    sinks = torch.full((H,), -torch.inf)

    ours = autoflash.attention(q, k, v, sinks=sinks, causal=True, return_lse=True, vendor="never")

    for with_sinks, plain in zip(
        ours, autoflash.attention(q, k, v, causal=True, return_lse=True, vendor="never"), strict=True
    ):
        torch.testing.assert_close(with_sinks, plain)


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_layouts_agree(layout: str) -> None:
    q, k, v = (x if layout == "bhsd" else x.transpose(1, 2) for x in tensors())
    terms = {**SINKS, "bias": BIASES["bias-heads"]}

    out = autoflash.attention(q, k, v, **terms, layout=layout, vendor="never")  # type: ignore[arg-type]

    (expected, _), _ = derived(*tensors(), torch.zeros(B, H, M, D), torch.zeros(B, H, M), terms, {})
    close(out if layout == "bhsd" else out.transpose(1, 2), expected, 1e-5)  # type: ignore[arg-type,union-attr]


# How a bias lies in memory


def laid_out(kind: str) -> Tensor:
    full = normal(B, H, M, N)
    return {
        "expanded": normal(1, H, M, N).expand(B, H, M, N),
        "one element": normal(1).expand(B, H, M, N),
        "transposed": full.transpose(2, 3).contiguous().transpose(2, 3),
        "every second": full.repeat_interleave(2, dim=3)[..., ::2],
        # What xformers' alignment of attention biases looks like: a slice of something wider.
        "sliced": normal(B, H, M, N + 8)[..., 3 : N + 3],
        "unaligned": normal(B * H * M * N + 1)[1:].view(B, H, M, N),
    }[kind]


@pytest.mark.parametrize("kind", ["expanded", "one element", "transposed", "every second", "sliced", "unaligned"])
def test_a_bias_of_any_strides_is_read_as_it_lies(kind: str) -> None:
    q, k, v = tensors(grad=True)
    bias = laid_out(kind)
    leaf = bias.detach().requires_grad_()
    dout, dlse = normal(B, H, M, D, seed=8), normal(B, H, M, seed=9)

    out, lse = autoflash.attention(q, k, v, bias=leaf, return_lse=True, vendor="never")
    found = torch.autograd.grad((out, lse), (q, k, v, leaf), (dout, dlse))

    (expected, _), wanted = derived(q, k, v, dout, dlse, {"bias": bias}, {})
    close(out, expected, 1e-5)
    for ours, exact in zip(found, wanted, strict=True):
        close(ours, exact, 1e-4)


@pytest.mark.parametrize("shape", [(2, 4, 65, 65), (1, 4, 65, 65), (1, 1, 65, 65), (2, 1, 1, 65)])
@pytest.mark.parametrize("vendor", ["never", "allow"])
def test_case_a40_the_gradient_of_a_bias_has_its_shape(vendor: str, shape: tuple[int, ...]) -> None:
    q, k, v, dout = (normal(2, 4, 65, 32, seed=seed) for seed in range(4))
    bias = normal(*shape).requires_grad_()

    out = autoflash.attention(q, k, v, bias=bias, vendor=vendor)
    (found,) = torch.autograd.grad(out, bias, dout)  # type: ignore[arg-type]

    exact = bias.detach().double().requires_grad_()
    scores = q.double() @ k.double().mT * 32**-0.5 + exact
    (wanted,) = torch.autograd.grad(torch.softmax(scores, -1) @ v.double(), exact, dout.double())
    assert found.shape == bias.shape
    close(found, wanted, 1e-5)


def test_what_was_expanded_from_a_parameter_gets_its_gradient() -> None:
    q, k, v = tensors()
    parameter = normal(1, H, M, N).requires_grad_()

    def loss(bias: Tensor) -> Tensor:
        return autoflash.attention(q, k, v, bias=bias, vendor="never").square().sum()  # type: ignore[union-attr]

    expanded, given = (torch.autograd.grad(loss(x), parameter)[0] for x in (parameter.expand(B, H, M, N), parameter))

    torch.testing.assert_close(expanded, given)


def test_the_gradient_of_a_bias_by_numbers() -> None:
    q, k, v = tensors(5, 4)
    for shape in ((1, H, 5, 4), (H, 1, 4), (5, 1)):
        bias = normal(*shape)

        def loss(bias: Tensor, q: Tensor = q, k: Tensor = k, v: Tensor = v) -> Tensor:
            return autoflash.attention(q, k, v, bias=bias, vendor="never")[..., 0].sum()  # type: ignore[index]

        leaf = bias.clone().requires_grad_()
        (found,) = torch.autograd.grad(loss(leaf), leaf)
        step = 1e-2
        for index in range(bias.numel()):
            towards = torch.zeros(bias.numel())
            towards[index] = step
            towards = towards.view(shape)
            slope = (loss(bias + towards) - loss(bias - towards)) / (2 * step)
            assert abs(float(slope.detach() - found.view(-1)[index])) < 2e-3


def test_memory_of_a_gradient_of_a_bias_without_rows_is_linear() -> None:
    """Nothing of size M x N is made: 4096 x 4096 float32 are 64 MiB."""
    q, k, v = (torch.randn(1, 1, 4096, 16, requires_grad=True) for _ in range(3))
    bias = torch.randn(1, 1, 1, 4096, requires_grad=True)

    def step() -> None:
        out = autoflash.attention(q, k, v, bias=bias, vendor="never")
        torch.autograd.grad(out.sum(), (q, k, v, bias))  # type: ignore[union-attr]

    step()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        step()

    assert max(event.cpu_memory_usage for event in profiled.events()) < 16 * 2**20


# Packed sequences


PACKED: dict[str, dict[str, Tensor]] = {
    "sinks": SINKS,
    "alibi": SLOPES,
    "alibi-each": {"alibi_slopes": normal(len(LENGTHS_Q), H).abs() * 0.2},
    "all": {"alibi_slopes": normal(len(LENGTHS_Q), H).abs() * 0.2, **SINKS},
}


@pytest.mark.parametrize("how", [{}, {"causal": True}, {"causal": "top_left", "window": (9, 2)}], ids=str)
@pytest.mark.parametrize("name", PACKED)
def test_packed_sequences_match_the_formula_of_each(name: str, how: dict[str, Any]) -> None:
    terms = PACKED[name]
    tail = 3
    q, k, v = packed(tail, grad=True)
    leaves = {term: value.clone().requires_grad_() for term, value in terms.items()}
    cu_q, cu_k = offsets(LENGTHS_Q), offsets(LENGTHS_K)
    dout, dlse = normal(len(q), H, D, seed=8), normal(H, len(q), seed=9)

    out, lse = autoflash.attention_varlen(q, k, v, cu_q, cu_k, return_lse=True, vendor="never", **leaves, **how)  # type: ignore[arg-type]
    found = torch.autograd.grad((out, lse), (q, k, v, *leaves.values()), (dout, dlse))

    wanted = [torch.zeros(x.shape, dtype=torch.float64) for x in (q, k, v, *terms.values())]
    for b in range(len(LENGTHS_Q)):
        rows, keys = slice(cu_q[b], cu_q[b + 1]), slice(cu_k[b], cu_k[b + 1])
        one = [x[part].transpose(0, 1)[None] for x, part in ((q, rows), (k, keys), (v, keys), (dout, rows))]
        of_one = {term: value[b] if value.ndim == 2 else value for term, value in terms.items()}
        (expected, expected_lse), made = derived(*one[:3], one[3], dlse[None, :, rows], of_one, how)
        close(out[rows], expected[0].transpose(0, 1), 1e-5)
        close(lse[:, rows], expected_lse[0], 1e-5)
        for index, part in enumerate((rows, keys, keys)):
            wanted[index][part] += made[index][0].transpose(0, 1)
        for index, value in enumerate(terms.values(), start=3):
            target = wanted[index][b] if value.ndim == 2 else wanted[index]
            target += made[index]
    assert not out[-tail:].any()
    assert (lse[:, -tail:] == -torch.inf).all()
    for ours, exact in zip(found, wanted, strict=True):
        close(ours, exact, 1e-4)


def test_no_packed_sequence_has_no_sink() -> None:
    q, k, v = packed()
    sinks = SINKS["sinks"].clone().requires_grad_()

    out, lse = autoflash.attention_varlen(q, k, v, offsets([]), offsets([]), sinks=sinks, return_lse=True)

    assert not out.any()
    assert (lse == -torch.inf).all()
    assert not torch.autograd.grad(out.sum(), sinks)[0].any()


# Refusals


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"sinks": [0.0] * H}, "sinks must be a tensor or None, got list"),
        ({"sinks": torch.zeros(H, dtype=torch.int64)}, r"sinks must be floating, .* \(H,\) = \(4,\), got torch.int64"),
        ({"sinks": torch.zeros(H + 1)}, r"\(H,\) = \(4,\), got torch.float32 \(5,\)"),
        ({"sinks": torch.zeros(1, H)}, r"got torch.float32 \(1, 4\)"),
        ({"sinks": torch.zeros(H, device="meta")}, "on the device of query, got meta and cpu"),
        ({"alibi_slopes": 0.5}, "alibi_slopes must be a tensor or None, got float"),
        ({"alibi_slopes": torch.ones(H, dtype=torch.int64)}, "alibi_slopes must be floating"),
        ({"alibi_slopes": torch.ones(1, H)}, r"\(H,\) = \(4,\) or \(B, H\) = \(2, 4\), got torch.float32 \(1, 4\)"),
        ({"alibi_slopes": torch.ones(H, device="meta")}, "on the device of query, got meta and cpu"),
        ({"bias": 0.5}, "bias must be a tensor or None, got float"),
        ({"bias": torch.zeros(M, N, dtype=torch.bool)}, "bias must be float16, bfloat16 or float32, got torch.bool"),
        ({"bias": torch.zeros(M, N).double()}, "got torch.float64"),
        ({"bias": torch.zeros(M, N + 1)}, r"bias must be broadcastable to \(B, H, Sq, Sk\) = \(2, 4, 37, 53\)"),
        ({"bias": torch.zeros(M, N, device="meta")}, "on the device of query, got meta and cpu"),
        ({"mask": torch.zeros(M, N, requires_grad=True)}, "mask has no gradient: pass it as bias"),
    ],
)
def test_terms_that_cannot_be_meant_are_refused(arguments: dict[str, Any], words: str) -> None:
    q, k, v = tensors()

    with pytest.raises(InvalidProblemError, match=words):
        autoflash.attention(q, k, v, **arguments)


@pytest.mark.parametrize("call", [autoflash.explain, autoflash.warmup])
def test_packed_sequences_have_no_bias(call: Any) -> None:
    q, k, v = packed()
    cu = {"cu_seqlens_q": offsets(LENGTHS_Q), "cu_seqlens_k": offsets(LENGTHS_K)}

    with pytest.raises(InvalidProblemError, match="packed sequences have no bias: leave bias out"):
        call(q, k, v, bias=torch.zeros(1), **cu)


def test_vendor_kernels_are_said_to_have_no_terms() -> None:
    q, k, v = tensors()

    with pytest.raises(NoKernelError, match="has sinks: vendor kernels have none"):
        autoflash.attention(q, k, v, **SINKS, vendor="only")  # type: ignore[arg-type]
