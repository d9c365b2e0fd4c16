from __future__ import annotations

import torch

from autoflash.evaluate.blank import blank_inputs
from autoflash.problem import DType, Pass
from tests.factories import make_device, make_problem


def test_inputs_have_the_sizes_of_the_problem() -> None:
    problem = make_problem(
        dtype=DType.FP16, batch=3, heads=4, kv_heads=2, seqlen_q=5, seqlen_k=7, head_dim=8, head_dim_v=16
    )

    q, k, v = blank_inputs(problem, make_device("cpu"))

    assert (q.shape, k.shape, v.shape) == ((3, 4, 5, 8), (3, 2, 7, 8), (3, 2, 7, 16))
    assert q.dtype is k.dtype is v.dtype is torch.float16


def test_a_backward_asks_for_gradients() -> None:
    forward = blank_inputs(make_problem(), make_device("cpu"))
    backward = blank_inputs(make_problem(op=Pass.BACKWARD), make_device("cpu"))

    assert [tensor.requires_grad for tensor in (*forward, *backward)] == [False] * 3 + [True] * 3
