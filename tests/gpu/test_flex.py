"""flex_attention, compiled, computes what generated kernels compute."""

from __future__ import annotations

import pytest
import torch

from autoflash.device import Device
from autoflash.evaluate.flex import FlexAttention
from autoflash.evaluate.timed_inputs import timed_inputs
from autoflash.problem import Form, Pass
from autoflash.runtime.bind import bind
from autoflash.runtime.executable import TermGradients
from autoflash.runtime.probe import probe
from autoflash.variant import Family
from tests.evaluate.test_flex import FORMS
from tests.factories import make_problem, make_variant

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def device() -> Device:
    return probe("cuda")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("op", list(Pass))
def test_it_computes_what_a_verified_kernel_computes(op: Pass, form: str, device: Device) -> None:
    problem = make_problem(op=op, heads=4, kv_heads=2, seqlen_q=128, head_dim=64).replace(**FORMS[form])
    if op is Pass.BACKWARD and problem.alibi:
        # Of slopes without a gradient: torch's compiler fails with one.
        problem = problem.replace(alibi_gradient=False)
    q, k, v, out, lse, dout, extras = timed_inputs(problem, device, 0)
    portable = bind(Form.of(problem), make_variant(Family.TORCH_TILED, op=op), device)
    tolerance = {"atol": 3e-2, "rtol": 3e-2}

    if op is Pass.FORWARD:
        found, _ = FlexAttention().prepare_forward(problem, q, k, v, 0.125, extras)(q, k, v, extras=extras)
        wanted, _ = portable.prepare_forward(problem, q, k, v, 0.125, extras)(q, k, v, extras=extras)
        torch.testing.assert_close(found, wanted, **tolerance)
        return
    flex = FlexAttention().prepare_backward(problem, q, k, v, out, dout, 0.125, extras)
    exact = portable.prepare_backward(problem, q, k, v, out, dout, 0.125, extras)
    found, wanted = (TermGradients.asked_by(problem, extras) for _ in range(2))
    made = flex(q, k, v, out, lse, dout, extras=extras, terms=found)
    true = exact(q, k, v, out, lse, dout, extras=extras, terms=wanted)
    for ours, theirs in zip((*made, *found.present.values()), (*true, *wanted.present.values()), strict=True):
        torch.testing.assert_close(ours, theirs, **tolerance)
