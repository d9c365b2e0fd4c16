from __future__ import annotations

import torch

from autoflash.evaluate.blank import blank_inputs, blank_shapes, call_arguments
from autoflash.problem import Alignment, DType, Mask, MaskTensor, Pass
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


def test_packed_sequences_lie_one_after_the_other() -> None:
    problem = make_problem(batch=3, heads=4, kv_heads=2, seqlen_q=5, seqlen_k=7, head_dim=8).replace(
        packed_q=15, packed_k=21
    )

    arguments = call_arguments(problem, make_device("cpu"))

    assert blank_shapes(problem) == ((15, 4, 8), (21, 2, 8), (21, 2, 8))
    assert arguments["cu_seqlens_q"].tolist() == [0, 5, 10, 15]
    assert arguments["cu_seqlens_k"].tolist() == [0, 7, 14, 21]
    assert (arguments["max_seqlen_q"], arguments["max_seqlen_k"]) == (5, 7)
    assert arguments["cu_seqlens_q"].dtype is torch.int32


def test_the_arguments_of_a_plain_call_ask_for_nothing() -> None:
    assert call_arguments(make_problem(), make_device("cpu")) == {
        "causal": False,
        "window": None,
        "softcap": 0.0,
        "dropout_p": 0.0,
    }


def test_a_call_is_given_what_its_problem_asks_for() -> None:
    problem = make_problem(
        dtype=DType.FP16, seqlen_q=5, seqlen_k=7, mask=Mask.CAUSAL, alignment=Alignment.TOP_LEFT
    ).replace(window_left=3, softcap=30.0, dropout_p=0.5, mask_tensor=MaskTensor.FLOAT)

    arguments = call_arguments(problem, make_device("cpu"))

    assert (arguments["causal"], arguments["window"]) == ("top_left", (3, None))
    assert (arguments["softcap"], arguments["dropout_p"]) == (30.0, 0.5)
    assert (arguments["mask"].dtype, tuple(arguments["mask"].shape)) == (torch.float16, (1, 1, 5, 7))
