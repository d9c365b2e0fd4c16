"""Calls and tensors that are out of the ordinary: right, or refused in plain words, and never held against a kernel."""

from __future__ import annotations

import contextlib
import copy
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad

import autoflash
from autoflash.errors import InvalidProblemError, UnsupportedError
from autoflash.ops import CALLS
from autoflash.runtime.executable import Extras
from autoflash.runtime.torch_module import TorchTiled
from tests.featured import Case, tensors

pytestmark = pytest.mark.usefixtures("no_records")

ROUTES = pytest.mark.parametrize("arguments", [{}, {"window": (3, 2)}], ids=["plain", "featured"])

JIT = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
"""Torch's own, at its first forward-mode derivative."""


def attend(q: Tensor, k: Tensor, v: Tensor, **arguments: Any) -> Tensor:
    out = autoflash.attention(q, k, v, **{"vendor": "never", **arguments})
    assert isinstance(out, Tensor)
    return out


@JIT
@ROUTES
def test_forward_mode_is_refused_and_the_next_call_works(arguments: Case) -> None:
    """A kernel gives no tangents: without a word, its result would seem not to depend on the input."""
    q, k, v = tensors()

    for vendor in ("never", "allow"):
        with forward_ad.dual_level(), pytest.raises(UnsupportedError, match="forward-mode derivatives"):
            attend(forward_ad.make_dual(q, torch.ones_like(q)), k, v, vendor=vendor, **arguments)
    with forward_ad.dual_level(), pytest.raises(UnsupportedError, match="forward-mode derivatives"):
        attend(q, k, v, bias=forward_ad.make_dual(torch.zeros(53), torch.ones(53)), **arguments)
    with pytest.raises(UnsupportedError, match="forward-mode derivatives"):
        torch.func.jvp(lambda x: attend(x, k, v, **arguments), (q,), (q,))
    with pytest.raises(UnsupportedError, match="forward-mode derivatives"):
        torch.func.hessian(lambda x: attend(x, k, v, **arguments).sum())(q)

    with forward_ad.dual_level():
        inside = attend(q, k, v, **arguments)
    assert torch.equal(inside, attend(q, k, v, **arguments))


@JIT
def test_what_is_recommended_instead_has_second_and_forward_mode_derivatives() -> None:
    q, k, v = (torch.randn(1, 1, 5, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))

    (dq,) = torch.autograd.grad(autoflash.reference.attention(q, k, v).square().sum(), q, create_graph=True)
    _, tangent = torch.func.jvp(lambda x: autoflash.reference.attention(x, k, v), (q,), (torch.ones_like(q),))

    assert torch.autograd.grad(dq.sum(), q)[0].any()
    assert tangent.any()


@ROUTES
@pytest.mark.parametrize("vendor", ["never", "allow"])
def test_a_refusal_of_autograd_is_not_blamed_on_the_kernel(arguments: Case, vendor: str) -> None:
    """Where a hook of the caller's raises in a first call, that is what the caller sees; the kernel stays in use."""
    q, k, v = tensors(grad=True)

    def pack(tensor: Tensor) -> Tensor:
        raise RuntimeError("the disk is full")

    with (
        torch.autograd.graph.saved_tensors_hooks(pack, lambda packed: packed),
        pytest.raises(RuntimeError, match=r"^the disk is full$"),
    ):
        attend(q, k, v, vendor=vendor, **arguments)
    attend(q, k, v, vendor=vendor, **arguments).sum().backward()

    assert q.grad is not None
    for explained in autoflash.explain(q, k, v, vendor=vendor, **arguments).passes:
        assert "disk" not in str(explained.passed_over)


def test_tensors_of_inference_mode_are_refused_by_torch_itself() -> None:
    q, k, v = tensors()
    with torch.inference_mode():
        made_there = k.clone()

    with pytest.raises(RuntimeError, match=r"^Inference tensors cannot be saved for backward"):
        attend(q.requires_grad_(), made_there, v)

    attend(q, k, v).sum().backward()


@ROUTES
def test_a_batch_of_incoming_gradients_is_mapped(arguments: Case) -> None:
    q, k, v = tensors(grad=True)
    out, lse = autoflash.attention(q, k, v, return_lse=True, vendor="never", **arguments)
    incoming = torch.randn(3, *out.shape), torch.randn(3, *lse.shape)

    def pull(dout: Tensor, dlse: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad((out, lse), (q, k, v), (dout, dlse), retain_graph=True)

    together = torch.vmap(pull)(*incoming)

    for index in range(3):
        for ours, alone in zip(together, pull(incoming[0][index], incoming[1][index]), strict=True):
            torch.testing.assert_close(ours[index], alone)


@ROUTES
def test_the_older_batches_of_gradients_are_refused_by_name(arguments: Case) -> None:
    q, k, v = tensors(grad=True)
    out, lse = autoflash.attention(q, k, v, return_lse=True, vendor="never", **arguments)

    for result in (out, lse, out.transpose(1, 2)):
        incoming = torch.randn(3, *result.shape)
        with pytest.raises(UnsupportedError, match="is_grads_batched"):
            torch.autograd.grad(result, q, incoming, is_grads_batched=True, retain_graph=True)
    torch.autograd.grad((out, lse), q, (torch.ones_like(out), torch.ones_like(lse)))


@pytest.mark.parametrize(
    "arguments",
    [{}, {"causal": True}, {"window": (3, 2)}, {"dropout_p": 0.5}, {"layout": "bshd"}],
    ids=["plain", "causal", "window", "dropout", "bshd"],
)
def test_meta_tensors_give_shapes(arguments: Case) -> None:
    q, k, v = (x.to("meta") for x in tensors())
    if arguments.get("layout") == "bshd":
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    q.requires_grad_()

    out, lse = autoflash.attention(q, k, v, return_lse=True, **arguments)
    out.sum().backward()

    assert (out.device.type, out.shape, out.dtype) == ("meta", q.shape, q.dtype)
    assert (lse.shape, lse.dtype) == (torch.Size((2, 4, 37)), torch.float32)
    assert q.grad is not None
    assert q.grad.shape == q.shape


@pytest.mark.parametrize("mode", ["meta", "fake"])
def test_packed_calls_without_values_give_shapes(mode: str) -> None:
    device = "meta" if mode == "meta" else "cpu"
    with FakeTensorMode() if mode == "fake" else contextlib.nullcontext():
        q, k, v = (torch.empty(20, 4, 16, requires_grad=True, device=device) for _ in range(3))
        offsets = torch.empty(3, dtype=torch.int32, device=device)

        out, lse = autoflash.attention_varlen(q, k, v, offsets, offsets, return_lse=True)

    assert out.shape == q.shape
    assert lse.shape == (4, 20)


@pytest.mark.filterwarnings(
    "ignore:Sparse CSR tensor support is in beta state", "ignore:The PyTorch API of nested tensors"
)
@pytest.mark.parametrize("layout", ["nested", "jagged", "sparse", "csr", "mkldnn"])
@ROUTES
def test_tensors_of_another_layout_are_refused_in_plain_words(layout: str, arguments: Case) -> None:
    q, k, v = tensors()
    strange: Tensor = {
        "nested": lambda: torch.nested.nested_tensor([torch.randn(4, 5, 16), torch.randn(4, 7, 16)]),
        "jagged": lambda: torch.nested.nested_tensor(
            [torch.randn(5, 4, 16), torch.randn(7, 4, 16)], layout=torch.jagged
        ).transpose(1, 2),
        "sparse": lambda: q.to_sparse(),
        "csr": lambda: q[0, 0].to_sparse_csr(),
        "mkldnn": lambda: q.to_mkldnn(),
    }[layout]()

    with pytest.raises(UnsupportedError, match=r"^query must be a dense strided tensor, got layout torch\."):
        attend(strange, k, v, **arguments)
    if layout == "sparse":
        with pytest.raises(InvalidProblemError, match=r"^bias must be a dense strided tensor"):
            attend(q, k, v, bias=torch.ones(37, 53).to_sparse(), **arguments)
        with pytest.raises(InvalidProblemError, match=r"^mask must be a dense strided tensor"):
            attend(q, k, v, mask=torch.ones(37, 53).to_sparse(), **arguments)
        with pytest.raises(InvalidProblemError, match=r"^w of score_params must be a dense strided tensor"):
            attend(q, k, v, score_mod="score * w[h]", score_params={"w": torch.ones(4).to_sparse()}, **arguments)


@pytest.mark.parametrize("name", ["causal", "scale", "layout"])
def test_an_argument_without_a_hash_is_refused_as_any_other(name: str) -> None:
    with pytest.raises(InvalidProblemError, match=f"^{name} must be .*, got \\[1\\]$"):
        attend(*tensors(), **{name: [1]})


def test_numbers_of_numpy_are_numbers() -> None:
    q, k, v = tensors()

    ours = attend(
        q,
        k,
        v,
        scale=np.float32(0.25),
        softcap=np.float32(2.0),
        window=(np.int64(3), np.int32(2)),
        dropout_p=np.float64(0),
    )

    assert torch.equal(ours, attend(q, k, v, scale=0.25, softcap=2.0, window=(3, 2)))


@pytest.mark.parametrize(("name", "value"), [("scale", 10**400), ("softcap", 10**400), ("scale", 1j), ("softcap", "2")])
def test_what_is_no_finite_number_is_refused(name: str, value: object) -> None:
    with pytest.raises(InvalidProblemError, match=f"^{name} must be a finite number"):
        attend(*tensors(), **{name: value})


@pytest.mark.parametrize("name", ["scale", "softcap", "dropout_p"])
@pytest.mark.parametrize("dynamic", [None, True])
def test_a_compiled_number_may_change(name: str, dynamic: bool | None) -> None:
    """Torch then traces it as a number that it does not know."""
    q, k, v = tensors()
    torch._dynamo.reset()
    call = torch.compile(
        lambda q, k, v, number: attend(q, k, v, **{name: number}), fullgraph=True, backend="aot_eager", dynamic=dynamic
    )

    for number in (0.25, 0.5, 0.75):
        torch.manual_seed(0)
        compiled = call(q, k, v, number)
        torch.manual_seed(0)
        assert torch.equal(compiled, attend(q, k, v, **{name: number}))


@pytest.mark.parametrize("offsets", [[0, 7, 5, 20], [3, 20], [0, 50], [0, -4, 20]], ids=str)
def test_offsets_of_a_compiled_call_are_checked_on_the_cpu(offsets: list[int]) -> None:
    x = torch.randn(20, 2, 16)
    torch._dynamo.reset()
    call = torch.compile(
        lambda x, offsets: autoflash.attention_varlen(x, x, x, offsets, offsets), fullgraph=True, backend="aot_eager"
    )

    with pytest.raises(InvalidProblemError, match=r"^cu_seqlens_q must begin with 0, never fall"):
        call(x, torch.tensor(offsets, dtype=torch.int32))


FEATURED: dict[str, Case] = {
    "plain": {},
    "mask": {"mask": torch.arange(53) % 5 > 0},
    "bias": {"bias": torch.linspace(-1.0, 1.0, 53)},
    "alibi": {"alibi_slopes": torch.tensor([0.1, 0.2, 0.3, 0.4])},
    "sinks": {"sinks": torch.tensor([0.1, 0.2, 0.3, 0.4])},
    "score_mod": {"score_mod": "score * w[h]", "score_params": {"w": torch.tensor([0.1, 0.2, 0.3, 0.4])}},
    "dropout": {"dropout_p": 0.3},
}


@pytest.mark.parametrize("name", FEATURED)
@pytest.mark.parametrize("default", ["dtype", "device"])
def test_torchs_defaults_change_nothing(name: str, default: str) -> None:
    """Kernels are verified at a first call: the tensors of that are not the caller's, and have types of their own."""
    q, k, v = tensors(grad=True)
    torch.manual_seed(0)
    expected = torch.autograd.grad(attend(q, k, v, **FEATURED[name]).square().sum(), (q, k, v))
    autoflash.forget()
    torch.manual_seed(0)

    try:
        torch.set_default_dtype(torch.float64 if default == "dtype" else torch.float32)
        torch.set_default_device("meta" if default == "device" else None)
        found = torch.autograd.grad(attend(q, k, v, **FEATURED[name]).square().sum(), (q, k, v))
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)

    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: autoflash.warmup("abc"), "warmup takes tensors, or shapes"),
        (lambda: autoflash.warmup((1, 1, -1, 16)), "warmup takes tensors, or shapes"),
        (lambda: autoflash.block_mask("q_idx >= kv_idx", None, None, 2.5, 20), "seqlen_q must be a whole number"),
        (lambda: autoflash.block_mask("q_idx >= b", 1.5, None, 20, 20), "batch must be None or a whole number"),
        (lambda: autoflash.block_mask(None, None, None, 20, 20), "mask_mod must be an expression"),
    ],
    ids=["warmup-text", "warmup-negative", "length", "batch", "expression"],
)
def test_what_is_no_size_is_refused(call: Any, words: str) -> None:
    with pytest.raises(InvalidProblemError, match=f"^{words}"):
        call()


@pytest.mark.parametrize("longest", ["a", 2.5, -1])
def test_what_is_no_length_is_refused(longest: object) -> None:
    x, offsets = torch.randn(20, 2, 16), torch.tensor([0, 20])

    with pytest.raises(InvalidProblemError, match=r"^max_seqlen_q must be None or a whole number"):
        autoflash.attention_varlen(x, x, x, offsets, offsets, max_seqlen_q=longest)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.int32, torch.complex64])
def test_autocast_brings_no_other_types_in(dtype: torch.dtype) -> None:
    q, k, v = (x.to(dtype) for x in tensors())

    with (
        torch.autocast("cpu", torch.bfloat16),
        pytest.raises(UnsupportedError, match=f"dtype {dtype} is not supported"),
    ):
        attend(q, k, v)


@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, lambda block_mask: pickle.loads(pickle.dumps(block_mask))]
)
def test_a_block_mask_can_be_copied_and_pickled(copied: Any) -> None:
    """As a module does that holds one."""
    q, k, v = tensors()
    doc = (torch.arange(53) // 9).int()
    original = autoflash.block_mask("doc[q_idx] == doc[kv_idx]", None, None, 37, 53, params={"doc": doc}, device="cpu")

    again = copied(original)

    assert torch.equal(attend(q, k, v, block_mask=again), attend(q, k, v, block_mask=original))
    assert again.mask_mod == original.mask_mod
    with pytest.raises(TypeError):
        again.params["doc"] = doc


@ROUTES
def test_what_torch_has_yet_to_negate_is_negated(arguments: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as the imaginary part of a conjugate: a kernel reads the memory, and does not know."""
    numbers = [torch.randn(1, 2, 9, 16, dtype=torch.complex64) for _ in range(4)]
    q, k, v, dout = (number.conj().imag.requires_grad_() for number in numbers)
    more = {"bias": numbers[0][0, 0, 0, :9].conj().imag} if arguments else {}
    assert all(tensor.is_neg() for tensor in (q, k, v, dout, *more.values()))
    given: list[Tensor] = []

    def noting(run: Any) -> Any:
        def noted(*tensors: Any, **named: Any) -> Any:
            extras = next((each.flat for each in tensors if isinstance(each, Extras)), ())
            given.extend(each for each in (*tensors, *extras) if torch.is_tensor(each))
            return run(*tensors, **named)

        return noted

    autoflash.forget()
    # Often enough for the call to be known by its guards: it lies in memory as that of the negated ones.
    for _ in range(20):
        attend(*(number.imag for number in numbers[:3]), **arguments)
    known = dict(CALLS.prepared)
    for prepared in known.values():
        monkeypatch.setattr(prepared, "forward", noting(prepared.forward))
        monkeypatch.setattr(prepared, "run", noting(prepared.run))
    monkeypatch.setattr(TorchTiled, "prepare_forward", lambda *a, f=TorchTiled.prepare_forward: noting(f(*a)))
    monkeypatch.setattr(TorchTiled, "prepare_backward", lambda *a, f=TorchTiled.prepare_backward: noting(f(*a)))

    out = attend(q, k, v, **more, **arguments)
    found = torch.autograd.grad(out, (q, k, v), dout)

    assert given
    assert not any(tensor.is_neg() for tensor in given)
    resolved = [tensor.detach().resolve_neg().requires_grad_() for tensor in (q, k, v)]
    expected = attend(*resolved, **{name: bias.resolve_neg() for name, bias in more.items()}, **arguments)
    assert torch.equal(out, expected)
    assert all(map(torch.equal, found, torch.autograd.grad(expected, resolved, dout.resolve_neg())))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("head_dim", [1, 2, 3])
@pytest.mark.parametrize("n", [1, 3])
def test_the_smallest_problems_have_gradients(n: int, head_dim: int, dtype: torch.dtype) -> None:
    """At a first call, a kernel is verified on a problem as small, where a limit for means meets a single error."""
    q = torch.randn(1, 1, 1, head_dim).to(dtype).requires_grad_()
    k, v = (torch.randn(1, 1, n, head_dim).to(dtype).requires_grad_() for _ in range(2))

    for causal in (False, True):
        found = torch.autograd.grad(attend(q, k, v, causal=causal).sum(), (q, k, v))

        assert all(gradient.isfinite().all() for gradient in found)
    assert torch.allclose(found[2].sum(2).float(), torch.ones(1, 1, head_dim), atol=1e-2)
