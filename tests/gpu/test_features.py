"""Windows, masks, softcap, dropout and packed sequences on a GPU: the gate, large offsets, graphs, memory."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import autoflash
from autoflash.device import Device
from autoflash.dispatch.buckets import cell_of
from autoflash.problem import DType, Mask, MaskTensor, Pass
from autoflash.runtime.probe import probe
from autoflash.space import catalog
from autoflash.variant import Family
from tests.codegen.structures import LOOK_UPS
from tests.factories import make_problem
from tests.gpu.conftest import Gate

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]

FEATURES: dict[str, dict[str, Any]] = {
    "window": {"window_left": 63, "window_right": 5},
    "window-causal": {"window_left": 100, "mask": Mask.CAUSAL},
    "softcap": {"softcap": 20.0},
    "bool": {"mask_tensor": MaskTensor.BOOL},
    "float": {"mask_tensor": MaskTensor.FLOAT},
    "dropout": {"dropout_p": 0.2},
    "varlen": {"packed_q": 1024, "packed_k": 1024, "mask": Mask.CAUSAL},
    "sinks": {"sinks": True},
    "bias": {"bias": True, "bias_gradient": True},
    "alibi": {"alibi": True, "alibi_gradient": True},
    "alibi-varlen": {"alibi": True, "alibi_gradient": True, "packed_q": 1024, "packed_k": 1024},
    "score-mod": {"score_mod": "score_mod(n: int 0, t: float 2) = score + t[h, q_idx - kv_idx + n]"},
    "mask-mod": {"mask_mod": "mask_mod(doc: int 2) = doc[b, kv_idx] == doc[b, q_idx]", "mask": Mask.CAUSAL},
    "relative": {
        "score_mod": "score_mod(n: int 0, t: float 2) = tanh(score) + t[h, q_idx - kv_idx + n]",
        "params_gradient": True,
    },
    "look-ups": {"score_mod": LOOK_UPS, "params_gradient": True, "mask": Mask.CAUSAL},
    "beside": {
        "score_mod": "score_mod(s: float 1) = score * s[h]",
        "params_gradient": True,
        "bias": True,
        "bias_gradient": True,
        "alibi": True,
        "alibi_gradient": True,
        "dropout_p": 0.2,
    },
    "sinks-varlen": {"sinks": True, "packed_q": 1024, "packed_k": 1024},
    "dense-all": {
        "window_left": 100,
        "mask": Mask.CAUSAL,
        "softcap": 20.0,
        "mask_tensor": MaskTensor.BOOL,
        "alibi": True,
        "alibi_gradient": True,
        "bias": True,
        "bias_gradient": True,
        "sinks": True,
        "dropout_p": 0.2,
    },
    "varlen-all": {"window_left": 100, "packed_q": 1024, "packed_k": 1024, "softcap": 20.0, "dropout_p": 0.2},
}


@pytest.fixture(scope="module")
def device() -> Device:
    return probe("cuda")


@pytest.fixture(scope="module", autouse=True)
def _no_records() -> Iterator[None]:
    autoflash.forget()
    yield
    autoflash.forget()


@pytest.mark.parametrize("dtype", list(DType))
@pytest.mark.parametrize("op", list(Pass))
@pytest.mark.parametrize("name", FEATURES)
def test_every_feature_is_inside_the_gate(name: str, op: Pass, dtype: DType, device: Device, gate: Gate) -> None:
    problem = make_problem(op=op, dtype=dtype, head_dim=64, batch=2, heads=4, seqlen_q=512)
    problem = problem.replace(**FEATURES[name])
    variant = catalog.search_space(cell_of(problem, device), device, Family.TRITON).default()

    verification = gate(problem, variant, device)

    assert verification.passed, verification.detail


def tensors(*shape: int, kv_heads: int | None = None, grad: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    b, h, s, d = shape
    q = torch.randn(b, h, s, d, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(b, kv_heads or h, s, d, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return q.requires_grad_(grad), k.requires_grad_(grad), v.requires_grad_(grad)


def attend(q: Tensor, k: Tensor, v: Tensor, **arguments: Any) -> Tensor:
    out = autoflash.attention(q, k, v, vendor="never", **arguments)
    assert isinstance(out, Tensor)
    return out


def test_case_a13_a_long_window_of_more_than_2_to_31_elements() -> None:
    q, k, v = tensors(1, 32, 2**19 + 3, 128)

    out = attend(q, k, v, causal=True, window=(128, 0))

    last = [x[:, :, -512:] for x in (q, k, v)]
    alone = attend(*last, causal=True, window=(128, 0))
    # Blocks of keys begin elsewhere: sums are rounded in another order.
    torch.testing.assert_close(out[:, :, -256:], alone[:, :, -256:], atol=2e-3, rtol=1.6e-2)


def test_case_a48_a_mask_of_more_than_2_to_31_elements() -> None:
    q, k, v = tensors(8, 28, 4096, 64, grad=True)
    mask = torch.rand(8, 28, 4096, 4096, device="cuda", dtype=torch.float16) < 0.7
    out = attend(q, k, v, mask=mask)
    found = torch.autograd.grad(out.float().square().sum(), (q, k, v))

    last = [x[-1:, -1:].detach().requires_grad_() for x in (q, k, v)]
    alone = attend(*last, mask=mask[-1:, -1:])
    wanted = torch.autograd.grad(alone.float().square().sum(), last)

    torch.testing.assert_close(out[-1:, -1:], alone)
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours[-1:, -1:], theirs, atol=2e-2, rtol=2e-2)


def test_case_a43_more_than_65535_heads_and_sequences() -> None:
    q, k, v = tensors(1, 1, 65537 * 3, 16)
    q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))
    cu = torch.arange(65538, device="cuda", dtype=torch.int32) * 3

    out = autoflash.attention_varlen(q, k, v, cu, cu, causal=True, vendor="never")

    batched = [x.view(65537, 3, 1, 16).transpose(1, 2) for x in (q, k, v)]
    torch.testing.assert_close(out.view(65537, 3, 1, 16).transpose(1, 2), attend(*batched, causal=True))


def test_packed_sequences_make_the_host_wait_for_nothing() -> None:
    cu = torch.tensor([0, 100, 100, 700], device="cuda", dtype=torch.int32)
    q, k, v = (x[0].transpose(0, 1).detach().requires_grad_() for x in tensors(1, 4, 800, 64))

    def step() -> None:
        out = autoflash.attention_varlen(q, k, v, cu, cu, causal=True, vendor="never")
        torch.autograd.grad(out, (q, k, v), torch.ones_like(out))  # type: ignore[arg-type]

    step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_case_a06_each_replay_of_a_graph_drops_anew_and_its_backward_agrees() -> None:
    q, k, v = tensors(1, 2, 256, 64, grad=True)

    def step() -> tuple[Tensor, ...]:
        out = attend(q, k, v, dropout_p=0.3)
        return (out, *torch.autograd.grad(out, (q, k, v), torch.ones_like(out)))

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    torch.manual_seed(5)
    graph.replay()
    first = [x.clone() for x in captured]
    graph.replay()
    second = [x.clone() for x in captured]
    torch.manual_seed(5)
    graph.replay()

    assert not torch.equal(first[0], second[0])
    assert torch.equal(captured[0], first[0])


@pytest.mark.parametrize(
    ("text", "shape"),
    [
        ("score * (1 + x[h])", (4,)),
        ("score + x[b, q_idx]", (2, 512)),
        ("score * exp(x[h, kv_idx])", (4, 512)),
        ("score + x[h, q_idx - kv_idx + 512]", (4, 1024)),
    ],
)
def test_gradients_of_parameters_have_the_same_bits_100_times_and_make_nobody_wait(
    text: str, shape: tuple[int, ...]
) -> None:
    q, k, v = tensors(2, 4, 512, 64, grad=True)
    x = torch.randn(shape, device="cuda", requires_grad=True)

    def step() -> Tensor:
        out = attend(q, k, v, score_mod=text, score_params={"x": x}, deterministic=True)
        return torch.autograd.grad(out, x, torch.ones_like(out))[0]

    how: dict[str, Any] = {"score_mod": text, "score_params": {"x": x}, "deterministic": True, "vendor": "never"}
    assert autoflash.explain(q, k, v, **how).passes[1].variant.family is Family.TRITON
    first = step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        again = [step() for _ in range(100)]
    finally:
        torch.cuda.set_sync_debug_mode("default")

    assert float(first.abs().max()) > 0.0
    assert all(torch.equal(first, other) for other in again)


@pytest.mark.parametrize(
    "shape",
    [
        pytest.param((2, 4, 512, 512), id="pairs"),
        pytest.param((1, 4, 512, 512), id="batch-shared"),
        pytest.param((2, 1, 512, 512), id="heads-shared"),
        pytest.param((2, 4, 1, 512), id="keys"),
        pytest.param((2, 4, 512, 1), id="rows"),
        pytest.param((1, 1, 1, 1), id="one"),
    ],
)
def test_gradients_of_terms_have_the_same_bits_100_times(shape: tuple[int, ...]) -> None:
    q, k, v = tensors(2, 4, 512, 64, grad=True)
    bias = torch.randn(shape, device="cuda", requires_grad=True)
    terms: dict[str, Any] = {
        "bias": bias,
        "alibi_slopes": torch.rand(4, device="cuda", requires_grad=True),
        "sinks": torch.randn(4, device="cuda", requires_grad=True),
    }
    how: dict[str, Any] = {**terms, "deterministic": True, "vendor": "never"}
    dout = torch.randn(2, 4, 512, 64, device="cuda", dtype=torch.bfloat16)

    def step() -> tuple[Tensor, ...]:
        return torch.autograd.grad(attend(q, k, v, **terms, deterministic=True), (q, k, v, *terms.values()), dout)

    assert autoflash.explain(q, k, v, **how).passes[1].variant.family is Family.TRITON
    first = step()

    assert all(float(gradient.abs().max()) > 0.0 for gradient in first)
    assert all(torch.equal(one, other) for _ in range(100) for one, other in zip(first, step(), strict=True))


@pytest.mark.parametrize(
    "name", ["window", "bool-keys", "softcap", "sinks", "alibi", "bias-keys", "relative", "dropout", "varlen"]
)
def test_memory_beside_outputs_is_linear_in_the_sequence(name: str) -> None:
    def peak(s: int) -> int:
        q, k, v = tensors(1, 4, s, 64, grad=True)
        dout = torch.randn(1, 4, s, 64, device="cuda", dtype=torch.bfloat16)
        x = torch.zeros(4, 2 * s, device="cuda", requires_grad=True)
        how: dict[str, Any] = {
            "window": {"window": (100, 100)},
            "bool-keys": {"mask": torch.rand(1, 1, 1, s, device="cuda") < 0.5},
            "softcap": {"softcap": 10.0},
            "sinks": {"sinks": torch.zeros(4, device="cuda", requires_grad=True)},
            "alibi": {"alibi_slopes": torch.rand(4, device="cuda", requires_grad=True)},
            "bias-keys": {"bias": torch.randn(1, 4, 1, s, device="cuda", requires_grad=True)},
            "relative": {"score_mod": "score + x[h, q_idx - kv_idx + n]", "score_params": {"x": x, "n": s}},
            "dropout": {"dropout_p": 0.1},
        }.get(name, {})
        cu = torch.tensor([0, s // 3, s], device="cuda", dtype=torch.int32)

        def step() -> None:
            if name == "varlen":
                rows = [x[0].transpose(0, 1) for x in (q, k, v)]
                out = autoflash.attention_varlen(*rows, cu, cu, vendor="never").transpose(0, 1)[None]  # type: ignore[union-attr]
            else:
                out = attend(q, k, v, **how)
            terms = [how[term] for term in ("sinks", "alibi_slopes", "bias") if term in how]
            terms += [x] if name == "relative" else []
            torch.autograd.grad(out, (q, k, v, *terms), dout)

        # What the first step leaves behind, a later one may free: it would count for less.
        for _ in range(2):
            step()
        gc.collect()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step()
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated()
        gc.collect()
        return peak - min(before, torch.cuda.memory_allocated())

    short, long = peak(4096), peak(8192)

    assert long <= 2.2 * short
    assert long < 8192 * 8192
