"""What flex_attention is asked to compute is what the problem says."""

from __future__ import annotations

import pytest
import torch

from autoflash.errors import NoKernelError
from autoflash.evaluate.flex import FlexAttention
from autoflash.evaluate.timed_inputs import timed_inputs
from autoflash.problem import Alignment, DType, Form, Mask, MaskTensor, Pass, Problem
from autoflash.runtime.bind import bind
from autoflash.runtime.probe import probe
from autoflash.variant import Family
from tests.factories import make_problem, make_variant

CPU = probe("cpu")

FORMS: dict[str, dict[str, object]] = {
    "full": {},
    "causal": {"mask": Mask.CAUSAL},
    "bottom right": {"mask": Mask.CAUSAL, "seqlen_k": 190, "batch": 2},
    "top left": {"mask": Mask.CAUSAL, "seqlen_k": 190, "alignment": Alignment.TOP_LEFT},
    "window": {"window_left": 40, "window_right": 20},
    "causal window": {"mask": Mask.CAUSAL, "window_left": 40},
    "softcap": {"softcap": 5.0},
    "bool mask": {"mask_tensor": MaskTensor.BOOL},
    "float mask after softcap": {"mask_tensor": MaskTensor.FLOAT, "softcap": 5.0, "mask": Mask.CAUSAL},
    "alibi": {"alibi": True, "alibi_gradient": True, "mask": Mask.CAUSAL, "seqlen_k": 190},
    "bias": {"bias": True, "bias_gradient": True},
    "packed": {"batch": 2, "packed_q": 256, "packed_k": 256},
    "packed causal window": {
        "batch": 2,
        "packed_q": 256,
        "packed_k": 300,
        "mask": Mask.CAUSAL,
        "window_left": 40,
    },
}

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")


def problem_of(op: Pass, **fields: object) -> Problem:
    return make_problem(op=op, dtype=DType.FP32, heads=4, kv_heads=2, seqlen_q=128, head_dim=32).replace(**fields)


@pytest.mark.parametrize("form", FORMS)
def test_it_computes_what_a_verified_kernel_computes(form: str) -> None:
    problem = problem_of(Pass.FORWARD, **FORMS[form])
    q, k, v, _, _, _, extras = timed_inputs(problem, CPU, 0)

    flex = FlexAttention(compiled=False).prepare_forward(problem, q, k, v, 0.25, extras)
    portable = bind(Form.of(problem), make_variant(Family.TORCH_TILED), CPU)
    wanted, _ = portable.prepare_forward(problem, q, k, v, 0.25, extras)(q, k, v, extras=extras)

    torch.testing.assert_close(flex(q, k, v, extras=extras)[0], wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("problem", "words"),
    [
        (problem_of(Pass.FORWARD, dropout_p=0.1), "not asked for dropout"),
        (problem_of(Pass.FORWARD, alibi=True, packed_q=256, packed_k=256), "alibi of packed sequences"),
        (problem_of(Pass.BACKWARD, deterministic=True), "not deterministic"),
        (problem_of(Pass.BACKWARD, alibi=True, alibi_gradient=True), "gradient of slopes"),
        (problem_of(Pass.FORWARD, seqlen_k=0), "no query or no key"),
        (problem_of(Pass.FORWARD), "compared on GPUs"),
        (problem_of(Pass.BACKWARD), "compared on GPUs"),
    ],
)
def test_what_it_cannot_do_is_refused_with_the_reason(problem: Problem, words: str) -> None:
    tensors = [torch.zeros(1, 4, 128, 32) for _ in range(3)]

    assert words in (FlexAttention().why_not(problem, *tensors) or "")
    with pytest.raises(NoKernelError, match=words):
        FlexAttention().prepare_forward(problem, *tensors, 1.0)
