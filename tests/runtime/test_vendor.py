"""Torch's backends as executables, on the CPU."""

from __future__ import annotations

import pytest
import torch

from autoflash.errors import NoKernelError, UnsupportedError
from autoflash.evaluate import reference
from autoflash.problem import Alignment, DType, Form, Mask, Pass, Problem
from autoflash.runtime.probe import probe
from autoflash.runtime.vendor import Vendor
from autoflash.variant import Choices, Family, Variant
from tests.factories import make_problem


def _vendor(backend: str, problem: Problem) -> Vendor:
    variant = Variant(family=Family.VENDOR, structure=Choices(backend=backend), config=Choices())
    return Vendor(Form.of(problem), variant, probe("cpu"))


def _tensors(problem: Problem) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [
        (problem.batch, problem.heads, problem.seqlen_q, problem.head_dim),
        (problem.batch, problem.kv_heads, problem.seqlen_k, problem.head_dim),
        (problem.batch, problem.kv_heads, problem.seqlen_k, problem.head_dim_v),
        (problem.batch, problem.heads, problem.seqlen_q, problem.head_dim_v),
    ]
    return [torch.randn(shape, generator=generator) for shape in shapes]


@pytest.mark.parametrize("backend", ["flash", "math"])
@pytest.mark.parametrize("mask", list(Mask))
def test_a_forward_matches_the_specification(backend: str, mask: Mask) -> None:
    problem = make_problem(dtype=DType.FP32, heads=4, kv_heads=2, seqlen_q=33, head_dim=16, mask=mask)
    q, k, v, _ = _tensors(problem)

    out, lse = _vendor(backend, problem).prepare_forward(problem, q, k, v, 0.3)(q, k, v)

    exact = reference.attention(q, k, v, causal=problem.causal, scale=0.3)
    assert torch.allclose(out.double(), exact, atol=1e-5)
    assert lse.numel() == 0


@pytest.mark.parametrize("backend", ["flash", "math"])
def test_a_backward_matches_the_specification_also_for_tensors_that_changed(backend: str) -> None:
    problem = make_problem(op=Pass.BACKWARD, dtype=DType.FP32, seqlen_q=33, head_dim=16, mask=Mask.CAUSAL)
    q, k, v, dout = _tensors(problem)
    backward = _vendor(backend, problem).prepare_backward(problem, q, k, v, dout, dout, 0.3)
    lse = torch.empty(0)
    backward(q, k, v, dout, lse, dout)
    q.mul_(2.0)

    gradients = backward(q, k, v, dout, lse, dout)

    exact = reference.gradients(q, k, v, dout, causal=True, scale=0.3)
    assert all(torch.allclose(a.double(), b, atol=1e-4) for a, b in zip(gradients, exact, strict=True))


def test_outputs_lie_in_the_memory_order_of_q() -> None:
    problem = make_problem(dtype=DType.FP32, batch=2, heads=4, seqlen_q=10, head_dim=16)
    q, k, v = (tensor.transpose(1, 2).contiguous().transpose(1, 2) for tensor in _tensors(problem)[:3])

    out, _ = _vendor("math", problem).prepare_forward(problem, q, k, v, 0.25)(q, k, v)

    assert out.stride() == q.stride()


@pytest.mark.parametrize(
    ("problem", "words"),
    [
        (make_problem(seqlen_q=3, seqlen_k=5, mask=Mask.CAUSAL), "top-left"),
        (make_problem(seqlen_q=3, seqlen_k=0), "no key"),
        (make_problem(op=Pass.BACKWARD, deterministic=True), "not deterministic"),
        (make_problem(head_dim=16, head_dim_v=32), "equal head dims"),
    ],
)
def test_what_torch_cannot_do_is_refused_with_the_reason(problem: Problem, words: str) -> None:
    vendor = _vendor("flash", problem)
    q, k, v, _ = _tensors(problem)

    reason = vendor.why_not(problem, q, k, v)

    assert reason is not None
    assert words in reason
    if problem.op is Pass.FORWARD:
        with pytest.raises(NoKernelError, match=words):
            vendor.prepare_forward(problem, q, k, v, 1.0)


def test_top_left_alignment_is_what_torch_has() -> None:
    problem = make_problem(
        dtype=DType.FP32, seqlen_q=5, seqlen_k=3, head_dim=16, mask=Mask.CAUSAL, alignment=Alignment.TOP_LEFT
    )
    q, k, v, _ = _tensors(problem)

    out, _ = _vendor("math", problem).prepare_forward(problem, q, k, v, 1.0)(q, k, v)

    assert torch.allclose(out.double(), reference.attention(q, k, v, causal="top_left", scale=1.0), atol=1e-5)


@pytest.mark.parametrize("backend", ["flash", "math"])
@pytest.mark.parametrize("scale", [-0.3, 0.0])
def test_scales_that_are_not_positive_mean_what_they_say(backend: str, scale: float) -> None:
    problem = make_problem(dtype=DType.FP32, seqlen_q=5, seqlen_k=7, head_dim=16)
    q, k, v, dout = _tensors(problem)
    backward = problem.replace(op=Pass.BACKWARD)

    out, lse = _vendor(backend, problem).prepare_forward(problem, q, k, v, scale)(q, k, v)
    grads = _vendor(backend, backward).prepare_backward(backward, q, k, v, out, dout, scale)(q, k, v, out, lse, dout)

    assert torch.allclose(out.double(), reference.attention(q, k, v, scale=scale), atol=1e-5)
    for found, exact in zip(grads, reference.gradients(q, k, v, dout, scale=scale), strict=True):
        assert torch.allclose(found.double(), exact, atol=1e-5)


def test_gpu_backends_are_refused_on_a_cpu_and_unknown_ones_everywhere() -> None:
    problem = make_problem()

    assert "CPU" in (_vendor("cudnn", problem).why_not(problem, *_tensors(problem)[:3]) or "")
    with pytest.raises(UnsupportedError, match="no backend 'magic'"):
        _vendor("magic", problem)


def test_a_gradient_of_lse_is_refused() -> None:
    problem = make_problem(op=Pass.BACKWARD, dtype=DType.FP32, seqlen_q=8, head_dim=16)
    q, k, v, dout = _tensors(problem)
    backward = _vendor("math", problem).prepare_backward(problem, q, k, v, dout, dout, 1.0)

    with pytest.raises(UnsupportedError, match="LSE"):
        backward(q, k, v, dout, torch.empty(0), dout, torch.zeros(1, 2, 8))


def test_only_backends_without_a_library_to_set_up_are_ready_for_a_capture() -> None:
    problem = make_problem()

    ready = {name for name in ("cudnn", "flash", "efficient", "math") if _vendor(name, problem).is_loaded(problem)}

    assert ready == {"flash", "efficient"}
