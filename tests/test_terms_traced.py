"""Terms of scores with gradients under torch.compile, functorch and opcheck, and what explain and warmup say."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import autoflash
from autoflash.errors import UnsupportedError
from tests.featured import LENGTHS_K, LENGTHS_Q, B, H, M, offsets, packed, tensors
from tests.test_terms import BIASES, CASES, EACH_SLOPES, SINKS, SLOPES, normal

pytestmark = pytest.mark.usefixtures("no_records")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", ["sinks", "sinks-all", "bias-keys", "alibi-each", "all-terms"])
def test_a_compiled_call_gives_the_bits_of_an_eager_one(name: str) -> None:
    torch.compiler.reset()
    terms, how = CASES[name]

    def run(q: Tensor, k: Tensor, v: Tensor, *values: Tensor) -> Tensor:
        given = dict(zip(terms, values, strict=True))
        return autoflash.attention(q, k, v, vendor="never", **given, **how)  # type: ignore[return-value,arg-type]

    results = []
    for call in (run, torch.compile(run, backend="aot_eager", fullgraph=True)):
        leaves = (*tensors(grad=True), *(value.clone().requires_grad_() for value in terms.values()))
        out = call(*leaves)
        results.append((out, *torch.autograd.grad(out.square().sum(), leaves)))

    for eager, compiled in zip(*results, strict=True):
        assert torch.equal(eager, compiled)


def test_opcheck_accepts_calls_with_terms() -> None:
    q, k, v = tensors(grad=True)
    sinks, bias = SINKS["sinks"].clone().requires_grad_(), normal(1, H, M, 1).requires_grad_()
    slopes = normal(B, H).abs().requires_grad_()
    extras = (None, None, None, None, sinks, bias, slopes, None, None, [])
    options = (0.25, "full", False, "never", True, True, -1, -1, 0.0, 0.0, 0, 0, 0, "", "")

    forward = torch.library.opcheck(
        torch.ops.autoflash.attention_forward.default,
        (q, k, v, *extras, *options),
        test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
    )
    out, lse = torch.ops.autoflash.attention_forward(q, k, v, *extras, *options)
    inputs = [x.detach() for x in (out, q, k, v, out, lse, sinks, bias, slopes)]
    dout, q, k, v, out, lse, *terms = inputs
    backward = torch.library.opcheck(
        torch.ops.autoflash.attention_backward.default,
        (dout, None, q, k, v, out, lse, None, None, None, None, *terms, None, None, [], True, True, True, [], *options),
        test_utils=("test_schema", "test_faketensor"),
    )

    assert set(forward.values()) | set(backward.values()) == {"SUCCESS"}


def test_functorch_s_grad_knows_terms() -> None:
    q, k, v = tensors()

    for term, value in {**SINKS, "bias": BIASES["bias-heads"], **EACH_SLOPES}.items():

        def loss(value: Tensor, term: str = term) -> Tensor:
            return autoflash.attention(q, k, v, **{term: value}, vendor="never").square().sum()  # type: ignore[union-attr,arg-type]

        leaf = value.clone().requires_grad_()
        torch.testing.assert_close(torch.func.grad(loss)(value), torch.autograd.grad(loss(leaf), leaf)[0])


TERMS = {**SINKS, "bias": BIASES["bias-2d"], **SLOPES}


@pytest.mark.parametrize("term", TERMS)
def test_vmap_with_terms_is_refused(term: str) -> None:
    q, k, v = tensors()

    with pytest.raises(UnsupportedError, match=f"vmap with {term} is not built"):
        torch.func.vmap(lambda q: autoflash.attention(q, k, v, **{term: TERMS[term]}))(torch.stack([q, q]))  # type: ignore[arg-type]


def test_the_second_derivative_by_a_term_is_refused() -> None:
    q, k, v = tensors(grad=True)
    leaves = [value.clone().requires_grad_() for value in TERMS.values()]
    out = autoflash.attention(q, k, v, **dict(zip(TERMS, leaves, strict=True)), vendor="never")  # type: ignore[arg-type]

    for first in torch.autograd.grad(out.square().sum(), leaves, create_graph=True):  # type: ignore[union-attr]
        with pytest.raises(UnsupportedError, match="second derivative"):
            torch.autograd.grad(first.sum(), q, retain_graph=True)


def test_explain_and_warmup_know_terms() -> None:
    q, k, v = tensors(grad=True)

    explained = autoflash.explain(q, k, v, **SINKS, vendor="never")  # type: ignore[arg-type]
    warm = autoflash.warmup(q, k, v, backward=True, **SINKS, vendor="never")  # type: ignore[arg-type]

    for explanation in (explained, warm):
        assert ["/full+sinks/" in str(one.cell) for one in explanation.passes] == [True, True]
    for bias, names in ((BIASES["bias-2d"], ""), (BIASES["bias-2d"].clone().requires_grad_(), "+bias_gradient")):
        for explanation in (
            autoflash.explain(q, k, v, bias=bias, vendor="never"),
            autoflash.warmup(q, k, v, bias=bias, backward=True, vendor="never"),
        ):
            cells = [str(one.cell) for one in explanation.passes]
            assert ["/full+bias/" in cells[0], f"/full+bias{names}/" in cells[1]] == [True, True]
    leaf = SLOPES["alibi_slopes"].clone().requires_grad_()
    explained = autoflash.explain(q, k, v, alibi_slopes=leaf, vendor="never")
    cells = [str(one.cell) for one in explained.passes]
    assert ["/full+alibi/" in cells[0], "/full+alibi+alibi_gradient/" in cells[1]] == [True, True]
    q, k, v = packed()
    cu = {"cu_seqlens_q": offsets(LENGTHS_Q), "cu_seqlens_k": offsets(LENGTHS_K)}
    (one,) = autoflash.explain(q, k, v, **SINKS, **cu, vendor="never").passes  # type: ignore[arg-type]
    assert "+varlen+sinks/" in str(one.cell)
