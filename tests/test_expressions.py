"""score_mod, mask_mod and score_params through the public functions, on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import autoflash
from autoflash.errors import ExpressionError, InvalidProblemError, UnsupportedError
from autoflash.runtime import modifiers
from autoflash.runtime.executable import SINGLE
from tests.grouped import DOCUMENTS, H_KV, B, D, H, attended, normal

pytestmark = [
    pytest.mark.usefixtures("no_records"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

M, N = 20, 28
RELATIVE = "score + table[h, q_idx - kv_idx + n]"
EXTRA: dict[str, Any] = {"score_mod": RELATIVE, "mask_mod": DOCUMENTS}


def tensors(grad: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    return attended(M, N, grad)


def params(grad: bool = False) -> dict[str, Any]:
    doc = (torch.arange(B * N).view(B, N) // 9 % 3).int()
    return {"table": normal(H, 2 * N).requires_grad_(grad), "n": N, "doc": doc}


def formula(q: Tensor, k: Tensor, v: Tensor, table: Tensor, doc: Tensor) -> Tensor:
    k, v = (x.repeat_interleave(H // H_KV, 1) for x in (k, v))
    distance = torch.arange(M)[:, None] - torch.arange(N)[None]
    s = q @ k.mT * D**-0.5 + table[:, distance + N][None]
    return torch.softmax(s.masked_fill((doc[:, :M, None] != doc[:, None])[:, None], -torch.inf), dim=-1) @ v


def adding(x: object) -> dict[str, Any]:
    return {"score_mod": "score + x", "score_params": {"x": x}}


def test_results_and_gradients_are_those_of_a_formula() -> None:
    given, q, k, v = params(grad=True), *tensors(grad=True)
    leaves = [x.detach().double().requires_grad_() for x in (q, k, v, given["table"])]
    exact = formula(*leaves, given["doc"])
    exact_gradients = torch.autograd.grad(exact.square().sum(), leaves)

    out = autoflash.attention(q, k, v, **EXTRA, score_params=given)
    assert isinstance(out, Tensor)
    found = torch.autograd.grad(out.square().sum(), (q, k, v, given["table"]))

    for ours, theirs in zip((out, *found), (exact, *exact_gradients), strict=True):
        torch.testing.assert_close(ours.double(), theirs, atol=2e-5, rtol=2e-5)


def test_a_lambda_is_the_text_that_it_is_written_as() -> None:
    given, q, k, v = params(), *tensors()
    written = autoflash.attention(q, k, v, **EXTRA, score_params=given)

    spoken = autoflash.attention(
        q,
        k,
        v,
        score_mod=lambda score, b, head, i, j, table, n: score + table[head, i - j + n],
        mask_mod=lambda b, h, q_idx, kv_idx: doc[b, q_idx] == doc[b, kv_idx],  # type: ignore[name-defined] # noqa: F821
        score_params=given,
    )

    assert isinstance(written, Tensor)
    assert isinstance(spoken, Tensor)
    assert torch.equal(written, spoken)


def test_the_specification_takes_the_same_arguments() -> None:
    given, q, k, v = params(), *tensors()
    exact = autoflash.reference.attention(q, k, v, **EXTRA, score_params=given)

    torch.testing.assert_close(exact, formula(*(x.double() for x in (q, k, v, given["table"])), given["doc"]))


@pytest.mark.parametrize(
    ("argument", "neutral"),
    [({"score_mod": "score * 2"}, "score"), ({"mask_mod": "kv_idx < 5"}, None)],
    ids=["score_mod", "mask_mod"],
)
def test_what_is_accepted_is_obeyed(argument: dict[str, Any], neutral: str | None) -> None:
    q, k, v = tensors()
    plain, asked = autoflash.attention(q, k, v, score_mod=neutral), autoflash.attention(q, k, v, **argument)

    assert isinstance(plain, Tensor)
    assert isinstance(asked, Tensor)
    assert not torch.allclose(plain, asked, atol=1e-2)


def test_a_second_call_reads_no_expression(monkeypatch: pytest.MonkeyPatch) -> None:
    given, q, k, v = params(), *tensors()
    double = lambda score, b, h, i, j: score * 2  # noqa: E731
    for _ in range(2):
        autoflash.attention(q, k, v, score_mod=double)
        autoflash.attention(q, k, v, **EXTRA, score_params=given)
        monkeypatch.setattr(modifiers, "parse", None)


def test_parameters_of_other_types_get_gradients_of_their_own() -> None:
    q, k, v = tensors()
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625], dtype=torch.bfloat16, requires_grad=True)
    cap = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    text = "cap * tanh(score / cap) - slopes[h] * abs(q_idx - kv_idx) * where(on, 1, 0)"

    out = autoflash.attention(q, k, v, score_mod=text, score_params={"slopes": slopes, "cap": cap, "on": True})
    assert isinstance(out, Tensor)
    out.sum().backward()

    assert slopes.grad is not None
    assert cap.grad is not None
    assert (slopes.grad.dtype, cap.grad.dtype) == (torch.bfloat16, torch.float64)
    assert float(slopes.grad.abs().min()) > 0.0
    assert float(cap.grad.abs()) > 0.0


def test_a_parameter_that_only_a_mask_reads_has_a_gradient_of_zero() -> None:
    q, k, v = tensors()
    reach = torch.full((H,), 6.5, requires_grad=True)

    out = autoflash.attention(q, k, v, mask_mod="q_idx - kv_idx < reach[h]", score_params={"reach": reach})
    assert isinstance(out, Tensor)
    assert not out.requires_grad or torch.equal(torch.autograd.grad(out.sum(), reach)[0], torch.zeros(H))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"score_mod": "score + x"}, ExpressionError, "x is not known here"),
        ({"score_mod": "score", "score_params": {"x": 1.0}}, InvalidProblemError, "nothing reads x"),
        ({"score_params": {"x": 1.0}}, InvalidProblemError, "belong to a score_mod or a mask_mod"),
        ({"score_mod": 3}, ExpressionError, "a string or a lambda"),
        ({"mask_mod": "q_idx + kv_idx"}, ExpressionError, "must give a truth"),
        (adding(torch.ones((), dtype=torch.int64)), InvalidProblemError, "int64"),
        (adding(2**40), InvalidProblemError, "32 bits"),
        (adding("2"), InvalidProblemError, "a number or a tensor"),
        ({"score_mod": "score + x", "score_params": [1.0]}, InvalidProblemError, "a dict"),
    ],
)
def test_what_means_nothing_is_refused(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        autoflash.attention(*tensors(), **arguments)


def test_a_compiled_call_is_the_eager_one() -> None:
    given, q, k, v = params(grad=True), *tensors(grad=True)
    del given["n"]

    def attend(q: Tensor, k: Tensor, v: Tensor, table: Tensor, doc: Tensor) -> Tensor:
        score_params = {"table": table, "doc": doc, "n": N}
        out = autoflash.attention(q, k, v, **EXTRA, score_params=score_params)
        assert isinstance(out, Tensor)
        return out

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    arguments = (q, k, v, given["table"], given["doc"])
    pairs = [(out, torch.autograd.grad(out.sum(), arguments[:4])) for out in (attend(*arguments), compiled(*arguments))]

    assert torch.equal(pairs[0][0], pairs[1][0])
    assert all(torch.equal(eager, traced) for eager, traced in zip(pairs[0][1], pairs[1][1], strict=True))


def test_opcheck_accepts_the_operator() -> None:
    given, q, k, v = params(grad=True), *tensors(grad=True)
    lines = modifiers.modified_by(RELATIVE, DOCUMENTS, given, q.device)
    single = (None,) * len(SINGLE)
    options = (0.25, "full", False, "never", False, True, -1, -1, 0.0, 0.0, 0, 0, 0, *lines[:2])

    torch.library.opcheck(
        torch.ops.autoflash.attention_forward.default,
        (q, k, v, *single, list(lines.params), *options),
        test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
    )


def test_transforms_of_torch_func_are_refused_by_name() -> None:
    q, k, v = tensors()
    with pytest.raises(UnsupportedError, match="score_mod under the transforms"):
        torch.func.grad(lambda x: autoflash.attention(x, k, v, score_mod="score * 2").sum())(q)  # type: ignore[union-attr]


def test_packed_sequences_refuse_expressions_by_name() -> None:
    with pytest.raises(TypeError, match="score_mod"):
        autoflash.attention_varlen(score_mod="score")  # type: ignore[call-arg]
    q = normal(6, H, D)
    starts = torch.tensor([0, 6], dtype=torch.int32)
    with pytest.raises(InvalidProblemError, match="packed sequences have no mask_mod"):
        autoflash.explain(q, q, q, mask_mod="kv_idx < 3", cu_seqlens_q=starts, cu_seqlens_k=starts)


def test_explain_and_warmup_take_the_same_arguments() -> None:
    q, k, v = tensors()
    explained = autoflash.warmup(q, k, v, backward=True, **EXTRA, score_params=params(grad=True))

    assert [str(one.cell.features[0].value) for one in explained.passes] == ["score_mod", "score_mod"]
    assert "params_gradient" in str(explained)
