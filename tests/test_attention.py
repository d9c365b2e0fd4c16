"""The public function: what it takes, what it refuses, and its gradients."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

import autoflash
from autoflash.db.table_format import table_text
from autoflash.errors import InvalidProblemError, TableError, UnsupportedError
from autoflash.evaluate import reference
from autoflash.ops import CALLS
from autoflash.problem import Pass
from autoflash.variant import Family
from tests.dispatch.fakes import FakeKernels, dispatching
from tests.factories import make_decision


@pytest.fixture
def kernels() -> Iterator[FakeKernels]:
    fakes = FakeKernels()
    with dispatching(fakes):
        yield fakes


def tensors(
    *, batch: int = 2, heads: int = 4, kv_heads: int = 2, m: int = 33, n: int = 65, d: int = 16, grad: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    q = torch.randn(batch, heads, m, d, requires_grad=grad)
    k, v = (torch.randn(batch, kv_heads, n, d, requires_grad=grad) for _ in range(2))
    return q, k, v


@pytest.mark.parametrize("causal", [False, True, "bottom_right", "top_left"])
@pytest.mark.parametrize("vendor", ["never", "allow"])
def test_it_computes_attention(kernels: FakeKernels, causal: bool | str, vendor: str) -> None:
    q, k, v = tensors()

    out, lse = autoflash.attention(q, k, v, causal=causal, return_lse=True, vendor=vendor)

    expected, expected_lse = reference.attention(q, k, v, causal=causal, return_lse=True)
    torch.testing.assert_close(out, expected.float())
    torch.testing.assert_close(lse, expected_lse.float())


def test_layout_bshd_is_the_transposed_problem(kernels: FakeKernels) -> None:
    q, k, v = tensors()
    transposed = [x.transpose(1, 2).contiguous() for x in (q, k, v)]

    out, lse = autoflash.attention(*transposed, layout="bshd", return_lse=True, vendor="never")
    again = autoflash.attention(*transposed, layout="bshd", vendor="never")

    expected, expected_lse = autoflash.attention(q, k, v, return_lse=True, vendor="never")
    torch.testing.assert_close(out, expected.transpose(1, 2))
    torch.testing.assert_close(again, expected.transpose(1, 2))
    torch.testing.assert_close(lse, expected_lse)


def test_scale_is_taken(kernels: FakeKernels) -> None:
    q, k, v = tensors()

    out = autoflash.attention(q, k, v, scale=0.5, vendor="never")

    torch.testing.assert_close(out, reference.attention(q, k, v, scale=0.5).float())


def gradients(function: object, *inputs: Tensor, weights: Tensor) -> tuple[Tensor, ...]:
    copies = [x.detach().double().requires_grad_() for x in inputs]
    out = reference.attention(*copies, causal=True)
    return torch.autograd.grad((out * weights.double()).sum(), copies)


@pytest.mark.parametrize("vendor", ["never", "allow"])
def test_gradients_match_float64(kernels: FakeKernels, vendor: str) -> None:
    q, k, v = tensors(grad=True)
    weights = torch.randn(q.shape)

    out = autoflash.attention(q, k, v, causal=True, vendor=vendor)
    (out * weights).sum().backward()

    expected = gradients(None, q, k, v, weights=weights)
    for tensor, gradient in zip((q, k, v), expected, strict=True):
        torch.testing.assert_close(tensor.grad, gradient.float(), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", ["expanded", "transposed", "sliced", "contiguous"])
def test_the_incoming_gradient_may_have_any_strides(kernels: FakeKernels, kind: str) -> None:
    q, k, v = tensors(grad=True)
    dout = {
        "expanded": torch.ones(1).expand(q.shape),
        "transposed": torch.randn(q.shape[0], q.shape[2], q.shape[1], q.shape[3]).transpose(1, 2),
        "sliced": torch.randn(*q.shape[:3], 2 * q.shape[3])[..., ::2],
        "contiguous": torch.randn(q.shape),
    }[kind]

    out = autoflash.attention(q, k, v, causal=True, vendor="never")
    found = torch.autograd.grad(out, (q, k, v), dout)

    for gradient, expected in zip(found, gradients(None, q, k, v, weights=dout), strict=True):
        torch.testing.assert_close(gradient, expected.float(), atol=1e-5, rtol=1e-4)


def test_the_lse_has_a_gradient(kernels: FakeKernels) -> None:
    q, k, v = tensors(grad=True)
    copies = [x.detach().double().requires_grad_() for x in (q, k, v)]

    out, lse = autoflash.attention(q, k, v, return_lse=True)
    found = torch.autograd.grad(out.sum() + (lse**2).sum(), (q, k, v))

    expected_out, expected_lse = reference.attention(*copies, return_lse=True)
    expected = torch.autograd.grad(expected_out.sum() + (expected_lse**2).sum(), copies)
    for gradient, exact in zip(found, expected, strict=True):
        torch.testing.assert_close(gradient, exact.float(), atol=1e-4, rtol=1e-4)


def test_only_the_lse_may_be_used(kernels: FakeKernels) -> None:
    q, k, v = tensors(grad=True)
    copies = [x.detach().double().requires_grad_() for x in (q, k, v)]

    _, lse = autoflash.attention(q, k, v, return_lse=True, vendor="never")
    dq, dk = torch.autograd.grad(lse.sum(), (q, k))

    _, expected_lse = reference.attention(*copies, return_lse=True)
    expected = torch.autograd.grad(expected_lse.sum(), copies[:2])
    torch.testing.assert_close(dq, expected[0].float(), atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(dk, expected[1].float(), atol=1e-5, rtol=1e-4)


def test_gradients_go_only_where_they_are_asked_for(kernels: FakeKernels) -> None:
    q, k, v = tensors()
    k.requires_grad_()

    autoflash.attention(q, k, v, vendor="never").sum().backward()

    assert q.grad is None
    assert k.grad is not None
    assert v.grad is None


def test_the_gradient_of_a_slice_stays_in_the_slice(kernels: FakeKernels) -> None:
    """A kernel warmed up with whole tensors must not write gradients with their strides."""
    q, _, _ = tensors()
    k, v = (torch.randn(2, 2, 96, 16, requires_grad=True) for _ in range(2))
    autoflash.attention(q, k, v, vendor="never").sum().backward()
    k.grad = v.grad = None

    autoflash.attention(q, k[:, :, :-32], v[:, :, :-32], vendor="never").square().sum().backward()

    cut_k, cut_v = (x[:, :, :-32].detach().clone().requires_grad_() for x in (k, v))
    autoflash.attention(q, cut_k, cut_v, vendor="never").square().sum().backward()
    assert k.grad is not None
    assert cut_k.grad is not None
    assert torch.equal(k.grad[:, :, :-32], cut_k.grad)
    assert not k.grad[:, :, -32:].any()


def test_a_second_derivative_is_refused_in_plain_words(kernels: FakeKernels) -> None:
    q, k, v = tensors(grad=True)
    out = autoflash.attention(q, k, v, vendor="never")

    (dq,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)

    with pytest.raises(UnsupportedError, match="second derivative of autoflash"):
        dq.sum().backward()


def test_no_keys_give_zeros_and_minus_infinity(kernels: FakeKernels) -> None:
    q, k, v = tensors(n=0, grad=True)

    out, lse = autoflash.attention(q, k, v, return_lse=True)
    out.sum().backward()

    assert not out.any()
    assert torch.isneginf(lse).all()
    assert q.grad is not None
    assert not q.grad.any()
    assert k.grad is not None
    assert k.grad.shape == k.shape


@pytest.mark.parametrize("sizes", [{"m": 0}, {"batch": 0}])
def test_no_queries_give_an_empty_output(kernels: FakeKernels, sizes: dict[str, int]) -> None:
    q, k, v = tensors(**sizes, grad=True)  # type: ignore[arg-type]

    out = autoflash.attention(q, k, v)
    out.sum().backward()

    assert out.shape == q.shape
    assert k.grad is not None
    assert not k.grad.any()


@pytest.mark.parametrize(
    ("name", "value"),
    [],
)
def test_an_argument_that_is_not_built_is_refused_by_name(kernels: FakeKernels, name: str, value: object) -> None:
    q, k, v = tensors()

    with pytest.raises(NotImplementedError, match=f"^{name} is not built yet"):
        autoflash.attention(q, k, v, **{name: value})  # type: ignore[arg-type]
    with pytest.raises(NotImplementedError, match=f"^{name} is not built yet"):
        autoflash.explain(q, k, v, **{name: value})  # type: ignore[arg-type]


def shaped(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)


Q = shaped(2, 4, 8, 16)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((shaped(4, 8, 16), Q, Q), r"query must have 4 dimensions \(B, H, S, D\)"),
        ((Q, shaped(3, 4, 8, 16), Q), "one batch size, got 2, 3 and 2"),
        ((Q, shaped(2, 3, 8, 16), shaped(2, 3, 8, 16)), "must be a multiple of key/value heads, got 4 and 3"),
        ((Q, Q, shaped(2, 2, 8, 16)), "one number of heads, got 4 and 2"),
        ((Q, Q, shaped(2, 4, 9, 16)), "one length, got 8 and 9"),
        ((Q, shaped(2, 4, 8, 32), Q), "one head dimension, got 16 and 32"),
        ((Q, Q.half(), Q), "one dtype, got torch.float32, torch.float16 and torch.float32"),
        ((Q, shaped(2, 4, 8, 16, device="meta"), Q), "one device, got cpu, meta and cpu"),
        (([[1.0]], Q, Q), "query must be a tensor, got list"),
        ((Q, [[1.0]], Q), "key must be a tensor, got list"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_with_their_sizes(
    kernels: FakeKernels, arguments: tuple[Tensor, Tensor, Tensor], words: str
) -> None:
    with pytest.raises(InvalidProblemError, match=words):
        autoflash.attention(*arguments)

    assert kernels.made == {}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"causal": "upper"}, "causal must be True, False, 'bottom_right' or 'top_left', got 'upper'"),
        ({"causal": 1}, "causal must be"),
        ({"layout": "sbhd"}, "layout must be 'bhsd' or 'bshd', got 'sbhd'"),
        ({"vendor": "maybe"}, "vendor must be 'allow', 'never' or 'only', got 'maybe'"),
        ({"scale": float("nan")}, "scale must be a finite number or None, got nan"),
    ],
)
def test_unknown_values_are_refused(kernels: FakeKernels, options: dict[str, object], words: str) -> None:
    with pytest.raises(InvalidProblemError, match=words):
        autoflash.attention(Q, Q, Q, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float64, torch.int32, torch.float8_e4m3fn])
def test_a_dtype_without_kernels_is_refused(kernels: FakeKernels, dtype: torch.dtype) -> None:
    q = shaped(2, 4, 8, 16, dtype=dtype)

    with pytest.raises(UnsupportedError, match="use float16, bfloat16 or float32"):
        autoflash.attention(q, q, q)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_takes_mixed_dtypes(kernels: FakeKernels, dtype: torch.dtype) -> None:
    q, k, v = tensors(grad=True)
    half_v = v.detach().to(dtype).requires_grad_()

    with torch.autocast("cpu", dtype):
        out = autoflash.attention(q, k, half_v, vendor="never")
    out.float().square().sum().backward()

    assert out.dtype is dtype
    assert q.grad is not None
    assert half_v.grad is not None
    assert (q.grad.dtype, half_v.grad.dtype) == (torch.float32, dtype)


def test_a_new_alignment_is_prepared_anew(kernels: FakeKernels) -> None:
    storage = torch.randn(2 * 4 * 8 * 16 + 1)
    aligned, shifted = storage[:-1].view(2, 4, 8, 16), storage[1:].view(2, 4, 8, 16)

    autoflash.attention(aligned, aligned, aligned, vendor="never")
    autoflash.attention(shifted, aligned, aligned, vendor="never")
    autoflash.attention(aligned, shifted, aligned, vendor="never")

    assert len(CALLS.prepared) == 3


def frequent() -> tuple[Tensor, Tensor, Tensor]:
    """Tensors whose call has a lane."""
    storage = torch.randn(3, 2, 4, 8, 16, dtype=torch.bfloat16)
    q, k, v = storage.unbind()
    for _ in range(20):
        autoflash.attention(q, k, v, vendor="never")
    assert [len(lanes) for lanes in CALLS.lanes.values()] == [1]
    return q, k, v


def test_a_frequent_call_is_told_apart_without_its_key(kernels: FakeKernels, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = frequent()
    expected = autoflash.attention(q, k, v, vendor="never")
    monkeypatch.delattr(sys.modules["autoflash.attention"], "call_key")

    again = autoflash.attention(q.clone(), k.clone(), v.clone(), vendor="never")

    torch.testing.assert_close(again, expected, rtol=0, atol=0)


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x[:, :, :5].clone(),
        lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
        lambda x: x.half(),
        lambda x: torch.cat([x.flatten()[:1], x.flatten()])[1:].view(x.shape),
    ],
    ids=["shape", "strides", "dtype", "alignment"],
)
def test_other_tensors_than_those_of_a_frequent_call_are_prepared_anew(
    kernels: FakeKernels, change: Callable[[Tensor], Tensor]
) -> None:
    given = [change(x) for x in frequent()]

    out = autoflash.attention(*given, vendor="never")

    assert len(CALLS.prepared) == 2
    torch.testing.assert_close(out, reference.attention(*given).to(out.dtype), rtol=1.6e-2, atol=1e-2)


def test_a_frequent_call_still_records_gradients_and_heeds_its_arguments(kernels: FakeKernels) -> None:
    q, k, v = frequent()

    autoflash.attention(q.requires_grad_(), k, v, vendor="never").sum().backward()
    causal = autoflash.attention(q.detach(), k, v, causal=True, vendor="never")

    assert q.grad is not None
    expected = reference.attention(q.detach(), k, v, causal=True).to(causal.dtype)
    torch.testing.assert_close(causal, expected, rtol=1.6e-2, atol=1e-2)


def test_forgotten_calls_have_no_lanes(kernels: FakeKernels) -> None:
    frequent()

    CALLS.reset()

    assert not CALLS.lanes


def test_installed_torch_compares_tensors_for_us() -> None:
    assert autoflash.calls._guards is not None  # type: ignore[attr-defined]  # a module


def test_a_known_shape_is_prepared_once(kernels: FakeKernels) -> None:
    q, k, v = tensors(grad=True)

    for _ in range(3):
        autoflash.attention(q, k, v, vendor="never").sum().backward()

    assert [made.prepared for made in kernels.made.values()] == [1, 1]


def test_a_small_call_allocates_no_lse_that_nobody_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = tensors()
    first = autoflash.attention(q, k, v, vendor="only")
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda *_, **__: pytest.fail("an LSE was allocated"))

    again = autoflash.attention(q, k, v, vendor="only")

    assert torch.equal(first, again)  # type: ignore[arg-type]


def test_deterministic_follows_torch_unless_it_is_given(kernels: FakeKernels) -> None:
    q, k, v = tensors(grad=True)
    torch.use_deterministic_algorithms(True)
    try:
        followed = autoflash.explain(q, k, v, vendor="never")
        given = autoflash.explain(q, k, v, deterministic=False, vendor="never")
    finally:
        torch.use_deterministic_algorithms(False)

    assert [part.cell.deterministic for part in followed.passes] == [False, True]
    assert [part.cell.deterministic for part in given.passes] == [False, False]


def test_the_environment_gives_the_default_of_vendor(kernels: FakeKernels, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOFLASH_VENDOR", "never")
    q, k, v = tensors()

    autoflash.attention(q, k, v)
    autoflash.attention(q, k, v, vendor="allow")

    assert {variant.family for variant in kernels.ran()} == {Family.TORCH_TILED, Family.VENDOR}


def test_vendors_alone_cannot_give_the_lse(kernels: FakeKernels) -> None:
    q, k, v = tensors()

    with pytest.raises(UnsupportedError, match="torch's kernels give no LSE"):
        autoflash.attention(q, k, v, return_lse=True, vendor="only")


def test_warmup_prepares_what_a_call_uses(kernels: FakeKernels) -> None:
    autoflash.warmup((2, 4, 33, 16), (2, 2, 65, 16), dtype=torch.float32, device="cpu", causal=True, backward=True)
    prepared = sum(made.prepared for made in kernels.made.values())
    q, k, v = tensors(grad=True)

    out = autoflash.attention(q, k, v, causal=True)
    torch.autograd.grad(out, q, torch.randn(q.shape))

    assert sum(made.prepared for made in kernels.made.values()) == prepared


def test_warmup_of_a_tensor_takes_its_strides(kernels: FakeKernels) -> None:
    q = torch.randn(2, 33, 4, 16).transpose(1, 2)
    before = q.clone()

    explanation = autoflash.warmup(q, vendor="never")
    autoflash.attention(q, q, q, vendor="never")

    assert len(CALLS.prepared) == 1
    assert explanation.passes[0].has_run
    assert torch.equal(q, before)


def test_freeze_gives_a_digest_and_keeps_the_decisions(kernels: FakeKernels) -> None:
    first = autoflash.freeze()
    resolver = CALLS.resolver

    assert autoflash.freeze() == first
    assert len(first) == 16
    assert resolver.table.decisions() == CALLS.resolver.table.decisions()


def test_an_eager_call_imports_no_compiler() -> None:
    code = """
import sys, torch, autoflash
q = torch.randn(1, 2, 8, 16, requires_grad=True)
autoflash.attention(q, q, q, vendor="never").sum().backward()
with torch.no_grad():
    autoflash.attention(q, q, q)
print([name for name in ("torch._dynamo", "torch._inductor") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)

    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


def test_backward_kernels_are_kept_by_the_strides_of_the_gradient(kernels: FakeKernels) -> None:
    q, k, v = tensors(grad=True)
    transposed = torch.randn(2, 33, 4, 16).transpose(1, 2)

    out = autoflash.attention(q, k, v, vendor="never")
    for dout in (torch.randn(q.shape), torch.ones(1).expand(q.shape), transposed):
        torch.autograd.grad(out, q, dout, retain_graph=True)

    (made,) = [fake for (op, _, _), fake in kernels.made.items() if op is Pass.BACKWARD]
    assert (made.prepared, made.calls) == (2, 3)


def test_freeze_refuses_a_damaged_table(kernels: FakeKernels, tmp_path: Path) -> None:
    (tmp_path / "table.json").write_text("{")

    with pytest.raises(TableError):
        autoflash.freeze(tmp_path / "table.json")


def test_freeze_takes_the_decisions_of_a_table(kernels: FakeKernels, tmp_path: Path) -> None:
    (tmp_path / "table.json").write_text(table_text([make_decision(reason="frozen")]))

    with_table, without = autoflash.freeze(tmp_path / "table.json"), autoflash.freeze()

    assert with_table != without
