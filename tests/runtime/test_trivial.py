from __future__ import annotations

import math

import pytest
import torch

from autoflash.runtime.executable import Extras
from autoflash.runtime.layouts import Operand
from autoflash.runtime.trivial import empty_backward, empty_forward

SHAPES = {
    "no keys": (2, 4, 5, 0),
    "no queries": (2, 4, 0, 5),
    "no batch": (0, 4, 5, 5),
    "packed without keys": (1, 4, 70, 0),
    "packed without queries": (1, 4, 0, 70),
}
EXTRAS = Extras(
    cu_seqlens_q=torch.tensor([0, 3], dtype=torch.int32), cu_seqlens_k=torch.tensor([0, 0], dtype=torch.int32)
)


def draw(shape: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    batch, heads, rows_q, rows_k = SHAPES[shape]
    q, out = torch.randn(batch, heads, rows_q, 8), torch.randn(batch, heads, rows_q, 12)
    return q, torch.randn(batch, 2, rows_k, 8), torch.randn(batch, 2, rows_k, 12), out


@pytest.mark.parametrize("shape", SHAPES)
def test_the_output_is_zero_in_the_planned_layout(shape: str) -> None:
    q, k, v, model = draw(shape)
    planned = Operand.of(model.transpose(1, 2).contiguous().transpose(1, 2))

    out, lse = empty_forward(planned)(q, k, v, extras=EXTRAS)

    assert (out.shape, out.stride(), out.dtype) == (model.shape, planned.strides, q.dtype)
    assert (lse.shape, lse.dtype) == (model.shape[:3], torch.float32)
    assert (out == 0.0).all()
    assert (lse == -math.inf).all()


@pytest.mark.parametrize("shape", SHAPES)
def test_given_outputs_are_written_and_returned(shape: str) -> None:
    q, k, v, out = draw(shape)
    lse, dq, dk, dv = torch.randn(out.shape[:3]), *(torch.randn_like(tensor) for tensor in (q, k, v))

    results = empty_forward(Operand.of(out))(q, k, v, out, lse)
    gradients = empty_backward(q, k, v, out, lse, torch.randn_like(out), None, dq, dk, dv, EXTRAS)

    assert (results[0] is out, results[1] is lse) == (True, True)
    assert all(given is returned for given, returned in zip((dq, dk, dv), gradients, strict=True))
    assert all((tensor == 0.0).all() for tensor in (out, dq, dk, dv))
    assert (lse == -math.inf).all()


@pytest.mark.parametrize("shape", SHAPES)
def test_gradients_are_zero_in_the_shapes_of_the_inputs(shape: str) -> None:
    q, k, v, out = draw(shape)

    gradients = empty_backward(q, k, v, out, torch.full(out.shape[:3], -math.inf), out, extras=EXTRAS)

    for gradient, tensor in zip(gradients, (q, k, v), strict=True):
        assert (gradient.shape, gradient.dtype) == (tensor.shape, tensor.dtype)
        assert (gradient == 0.0).all()
