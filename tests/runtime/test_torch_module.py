from __future__ import annotations

import math
import threading

import pytest
import torch

from autoflash.errors import UnsupportedError
from autoflash.evaluate import reference
from autoflash.problem import Alignment, DType, Form, Mask, Pass
from autoflash.runtime.torch_module import TorchTiled
from autoflash.variant import Choices, Family, Variant
from tests.factories import make_device, make_problem


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    """The tensors are small: a second thread costs more than it gives."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


LOOP_ORDERS = ["query_outer", "key_outer"]
SHAPES = {
    "square": {"seqlen_q": 64, "seqlen_k": 64},
    "prime": {"seqlen_q": 37, "seqlen_k": 37},
    "more keys": {"seqlen_q": 23, "seqlen_k": 71},
    "more queries": {"seqlen_q": 71, "seqlen_k": 23},
    "decode": {"seqlen_q": 1, "seqlen_k": 50},
    "one key": {"seqlen_q": 9, "seqlen_k": 1},
    "no keys": {"seqlen_q": 9, "seqlen_k": 0},
    "no queries": {"seqlen_q": 0, "seqlen_k": 9},
    "no batch": {"seqlen_q": 5, "seqlen_k": 9, "batch": 0},
    "groups": {"seqlen_q": 37, "seqlen_k": 53, "heads": 6, "kv_heads": 2},
    "wide values": {"seqlen_q": 37, "seqlen_k": 53, "head_dim": 24, "head_dim_v": 40},
}
FLOAT64 = {"rtol": 1e-10, "atol": 1e-10}


def executable(op, mask=Mask.FULL, loop_order="query_outer", block_m=16, block_n=32, heads_per_step=0):
    variant = Variant(
        family=Family.TORCH_TILED,
        structure=Choices(loop_order=loop_order),
        config=Choices(block_m=block_m, block_n=block_n, heads_per_step=heads_per_step),
    )
    return TorchTiled(Form(op=op, mask=mask), variant, make_device("cpu"))


def draw(problem, dtype=torch.float64):
    q = torch.randn(problem.batch, problem.heads, problem.seqlen_q, problem.head_dim, dtype=torch.float64)
    k = torch.randn(problem.batch, problem.kv_heads, problem.seqlen_k, problem.head_dim, dtype=torch.float64)
    v = torch.randn(problem.batch, problem.kv_heads, problem.seqlen_k, problem.head_dim_v, dtype=torch.float64)
    return q.to(dtype), k.to(dtype), v.to(dtype)


def problem_of(shape, op=Pass.FORWARD, mask=Mask.FULL, **changes):
    sizes = {"dtype": DType.FP32, "batch": 2, "heads": 2, "kv_heads": 2, "head_dim": 16, **SHAPES[shape], **changes}
    return make_problem(op=op, mask=mask, **sizes)


def causal(problem):
    return problem.alignment.value if problem.causal else False


MASKS = [
    (Mask.FULL, Alignment.BOTTOM_RIGHT),
    (Mask.CAUSAL, Alignment.BOTTOM_RIGHT),
    (Mask.CAUSAL, Alignment.TOP_LEFT),
]


@pytest.mark.parametrize("loop_order", LOOP_ORDERS)
@pytest.mark.parametrize(("mask", "alignment"), MASKS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("heads_per_step", [0, 3])
def test_forward_is_exact_in_float64(loop_order, mask, alignment, shape, heads_per_step):
    problem = problem_of(shape, mask=mask, alignment=alignment)
    q, k, v = draw(problem)
    kernel = executable(Pass.FORWARD, mask, loop_order, heads_per_step=heads_per_step)

    out, lse = kernel.prepare_forward(problem, q, k, v, 0.3)(q, k, v)

    expected, expected_lse = reference.attention(q, k, v, causal=causal(problem), scale=0.3, return_lse=True)
    torch.testing.assert_close(out, expected, **FLOAT64)
    torch.testing.assert_close(lse, expected_lse.float())


@pytest.mark.parametrize("loop_order", LOOP_ORDERS)
@pytest.mark.parametrize(("mask", "alignment"), MASKS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("with_lse", [False, True])
def test_backward_is_exact_in_float64(loop_order, mask, alignment, shape, with_lse):
    problem = problem_of(shape, Pass.BACKWARD, mask, alignment=alignment)
    q, k, v = draw(problem)
    out, lse = reference.attention(q, k, v, causal=causal(problem), scale=0.3, return_lse=True)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse) if with_lse else None
    kernel = executable(Pass.BACKWARD, mask, loop_order, heads_per_step=3 if with_lse else 0)

    grads = kernel.prepare_backward(problem, q, k, v, out, dout, 0.3)(q, k, v, out, lse, dout, dlse)

    expected = reference.gradients(q, k, v, dout, dlse, causal=causal(problem), scale=0.3)
    for grad, exact in zip(grads, expected, strict=True):
        torch.testing.assert_close(grad, exact, **FLOAT64)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_outputs_have_the_type_and_memory_order_of_the_query(dtype):
    problem = problem_of("groups")
    q, k, v = (tensor.transpose(1, 2).contiguous().transpose(1, 2) for tensor in draw(problem, dtype))

    out, lse = executable(Pass.FORWARD).prepare_forward(problem, q, k, v, 0.25)(q, k, v)

    assert (out.dtype, lse.dtype) == (dtype, torch.float32)
    assert out.stride() == q.stride()
    assert lse.is_contiguous()
    torch.testing.assert_close(out.double(), reference.attention(q, k, v), atol=2e-2, rtol=2e-2)


def test_given_outputs_are_written_and_returned():
    problem = problem_of("groups")
    q, k, v = draw(problem)
    wide = torch.full((2, 6, 37, 32), math.nan, dtype=torch.float64)
    out, lse = wide[..., ::2], torch.full((2, 37, 6), math.nan).transpose(1, 2)

    results = executable(Pass.FORWARD).prepare_forward(problem, q, k, v, 0.25)(q, k, v, out=out, lse=lse)

    assert results[0] is out
    assert results[1] is lse
    torch.testing.assert_close(out, reference.attention(q, k, v), **FLOAT64)
    assert wide[..., 1::2].isnan().all()
    assert not lse.isnan().any()


def test_any_strides_will_do():
    problem = problem_of("groups", Pass.BACKWARD)
    q, k, v = draw(problem)
    out, lse = reference.attention(q, k, v, return_lse=True)
    dout = torch.randn(1, 1, 1, 16, dtype=torch.float64).expand_as(out)
    odd = [
        q.mT.contiguous().mT,
        torch.stack([k, v], dim=-1)[..., 0],
        v.flip(2).contiguous().flip(2).transpose(0, 2).contiguous().transpose(0, 2),
    ]
    kernel = executable(Pass.BACKWARD)

    grads = kernel.prepare_backward(problem, *odd, out, dout, 0.25)(*odd, out, lse, dout)

    for grad, exact in zip(grads, reference.gradients(q, k, v, dout), strict=True):
        torch.testing.assert_close(grad, exact, **FLOAT64)


def test_inputs_are_left_alone():
    problem = problem_of("groups", Pass.BACKWARD)
    q, k, v = draw(problem, torch.float32)
    out, lse = (tensor.float() for tensor in reference.attention(q, k, v, return_lse=True))
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    inputs = (q, k, v, out, lse, dout, dlse)
    before = [tensor.clone() for tensor in inputs]

    executable(Pass.BACKWARD).prepare_backward(problem, q, k, v, out, dout, 0.25)(*inputs)

    assert all(torch.equal(tensor, copy) for tensor, copy in zip(inputs, before, strict=True))


def test_huge_scores_do_not_overflow():
    problem = problem_of("square")
    q, k, v = (tensor * 100.0 for tensor in draw(problem, torch.float32))

    out, lse = executable(Pass.FORWARD).prepare_forward(problem, q, k, v, 1.0)(q, k, v)

    expected, expected_lse = reference.attention(q, k, v, scale=1.0, return_lse=True)
    assert out.isfinite().all()
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-5, atol=0.0)
    torch.testing.assert_close(out.double(), expected, rtol=1e-2, atol=1e-1)


def test_memory_is_linear_in_the_sequence():
    shapes = []
    problem = problem_of("square", seqlen_q=512, seqlen_k=512, batch=1, heads=1, kv_heads=1)
    q, k, v = draw(problem, torch.float32)
    call = executable(Pass.FORWARD, block_m=32, block_n=64).prepare_forward(problem, q, k, v, 0.25)

    class Largest(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor):
                shapes.append(result.numel())
            return result

    with Largest():
        call(q, k, v)

    assert max(shapes) <= q.numel()


def test_a_call_records_no_gradient():
    problem = problem_of("square")
    q, k, v = (tensor.requires_grad_() for tensor in draw(problem, torch.float32))

    out, lse = executable(Pass.FORWARD).prepare_forward(problem, q, k, v, 0.25)(q, k, v)

    assert not out.requires_grad
    assert not lse.requires_grad


def test_another_form_is_refused_with_a_reason():
    kernel = executable(Pass.FORWARD, Mask.FULL)
    problem = problem_of("square", mask=Mask.CAUSAL)

    assert "causal" in kernel.why_not(problem)
    with pytest.raises(UnsupportedError, match="causal"):
        kernel.prepare_forward(problem, *draw(problem), 0.25)


def test_the_module_is_loaded_when_first_prepared():
    kernel = executable(Pass.FORWARD)
    problem = problem_of("square")
    before = kernel.is_loaded(problem)

    kernel.prepare_forward(problem, *draw(problem), 0.25)

    assert (before, kernel.is_loaded(problem)) == (False, True)
    assert kernel.resources() is None
    assert len(kernel.source_digest) == 16


def test_threads_may_share_it():
    kernel = executable(Pass.FORWARD)
    problem = problem_of("groups")
    q, k, v = draw(problem)
    expected, results = reference.attention(q, k, v), []

    def work():
        results.append(kernel.prepare_forward(problem, q, k, v, 0.25)(q, k, v)[0])

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len(results) == 8
    assert all(torch.allclose(out, expected) for out in results)
