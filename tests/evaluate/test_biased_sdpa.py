"""SDPA with a bias computes what a verified kernel computes, gradients and all."""

from __future__ import annotations

import pytest
import torch

from autoflash.errors import NoKernelError
from autoflash.evaluate.biased_sdpa import BiasedSdpa
from autoflash.evaluate.peer import Peer
from autoflash.evaluate.standard import StandardAttention
from autoflash.evaluate.timed_inputs import timed_inputs
from autoflash.problem import DType, Form, Mask, Pass, Problem
from autoflash.runtime.bind import bind
from autoflash.runtime.executable import TermGradients
from autoflash.runtime.probe import probe
from autoflash.variant import Family
from tests.factories import make_problem, make_variant

CPU = probe("cpu")


def problem_of(op: Pass, **fields: object) -> Problem:
    return make_problem(op=op, dtype=DType.FP32, batch=2, heads=4, seqlen_q=64, head_dim=32).replace(
        **{"bias": True, "bias_gradient": op is Pass.BACKWARD, **fields}
    )


def test_the_forward_is_that_of_a_verified_kernel() -> None:
    problem = problem_of(Pass.FORWARD)
    q, k, v, _, _, _, extras = timed_inputs(problem, CPU, 0)

    found, _ = BiasedSdpa().prepare_forward(problem, q, k, v, 0.25, extras)(q, k, v, extras=extras)
    portable = bind(Form.of(problem), make_variant(Family.TORCH_TILED), CPU)
    wanted, _ = portable.prepare_forward(problem, q, k, v, 0.25, extras)(q, k, v, extras=extras)

    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("peer", [BiasedSdpa(), StandardAttention()])
def test_the_backward_gives_the_gradient_of_the_bias_too(peer: Peer) -> None:
    problem = problem_of(Pass.BACKWARD)
    q, k, v, out, lse, dout, extras = timed_inputs(problem, CPU, 0)
    found, wanted = (TermGradients.asked_by(problem, extras) for _ in range(2))
    scale = problem.head_dim**-0.5

    made = peer.prepare_backward(problem, q, k, v, out, dout, scale, extras)(
        q, k, v, out, lse, dout, extras=extras, terms=found
    )
    portable = bind(Form.of(problem), make_variant(Family.TORCH_TILED, op=Pass.BACKWARD), CPU)
    true = portable.prepare_backward(problem, q, k, v, out, dout, scale, extras)(
        q, k, v, out, lse, dout, extras=extras, terms=wanted
    )

    assert set(found.present) == {"bias"}
    for ours, theirs in zip((*made, *found.present.values()), (*true, *wanted.present.values()), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("problem", "words"),
    [
        (problem_of(Pass.FORWARD, bias=False), "not with none"),
        (problem_of(Pass.FORWARD, softcap=5.0), "not with softcap"),
        (problem_of(Pass.FORWARD, mask=Mask.CAUSAL), "a bias or a causal mask"),
        (problem_of(Pass.BACKWARD, deterministic=True), "not deterministic"),
        (problem_of(Pass.FORWARD, seqlen_k=0), "no query or no key"),
    ],
)
def test_what_it_cannot_do_is_refused_with_the_reason(problem: Problem, words: str) -> None:
    tensors = [torch.zeros(2, 4, 64, 32) for _ in range(3)]

    assert words in (BiasedSdpa().why_not(problem, *tensors) or "")
    with pytest.raises(NoKernelError, match=words):
        BiasedSdpa().prepare_forward(problem, *tensors, 1.0)
