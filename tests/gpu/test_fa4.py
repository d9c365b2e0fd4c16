"""FlashAttention-4, where it is installed, computes what generated kernels compute."""

from __future__ import annotations

import pytest
import torch

from autoflash.device import Device
from autoflash.evaluate import fa4
from autoflash.evaluate.fa4 import FlashAttention4
from autoflash.evaluate.timed_inputs import timed_inputs
from autoflash.problem import DType, Form, Mask, Pass, Problem
from autoflash.runtime.bind import bind
from autoflash.runtime.executable import TermGradients
from autoflash.runtime.probe import probe
from autoflash.variant import Family
from tests.evaluate.test_fa4 import FORMS as PLAIN_FORMS
from tests.factories import make_problem, make_variant

# What it compiles with warns of things of its own.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]

FORMS: dict[str, dict[str, object]] = {
    **PLAIN_FORMS,
    "fp16": {"dtype": DType.FP16, "mask": Mask.CAUSAL},
    "128 elements": {"head_dim": 128, "head_dim_v": 128, "mask": Mask.CAUSAL},
    "256 elements": {"head_dim": 256, "head_dim_v": 256},
    "odd lengths": {"seqlen_q": 100, "seqlen_k": 100, "mask": Mask.CAUSAL},
    "softcap": {"softcap": 5.0},
    "sinks": {"sinks": True},
}


@pytest.fixture(scope="module")
def device() -> Device:
    device = probe("cuda")
    reason = FlashAttention4().why_not(problem_of(Pass.FORWARD), torch.zeros(1, device=device.torch_device))
    if reason is not None:
        pytest.skip(reason)
    return device


def problem_of(op: Pass, **fields: object) -> Problem:
    return make_problem(op=op, heads=4, kv_heads=2, seqlen_q=128, head_dim=64).replace(**fields)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("op", list(Pass))
def test_it_computes_what_a_verified_kernel_computes(op: Pass, form: str, device: Device) -> None:
    problem = problem_of(op, **FORMS[form])
    q, k, v, out, lse, dout, extras = timed_inputs(problem, device, 0)
    scale = problem.head_dim**-0.5
    portable = bind(Form.of(problem), make_variant(Family.TORCH_TILED, op=op), device)
    tolerance = {"atol": 3e-2, "rtol": 3e-2}

    if op is Pass.FORWARD:
        found, _ = FlashAttention4().prepare_forward(problem, q, k, v, scale, extras)(q, k, v, extras=extras)
        wanted, _ = portable.prepare_forward(problem, q, k, v, scale, extras)(q, k, v, extras=extras)
        torch.testing.assert_close(found, wanted, **tolerance)
        return
    peer = FlashAttention4().prepare_backward(problem, q, k, v, out, dout, scale, extras)
    exact = portable.prepare_backward(problem, q, k, v, out, dout, scale, extras)
    found, wanted = (TermGradients.asked_by(problem, extras) for _ in range(2))
    made = peer(q, k, v, out, lse, dout, extras=extras, terms=found)
    true = exact(q, k, v, out, lse, dout, extras=extras, terms=wanted)
    for ours, theirs in zip((*made, *found.present.values()), (*true, *wanted.present.values()), strict=True):
        torch.testing.assert_close(ours, theirs, **tolerance)


def test_its_version_is_known(device: Device) -> None:
    assert fa4.version() != ""
