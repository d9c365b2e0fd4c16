"""A maximum that may be stale and exponentials by polynomial on a GPU: the whole gate, and scores that are hostile."""

from __future__ import annotations

import math

import pytest
import torch

from autoflash.problem import DType, Form, Mask, Pass
from autoflash.runtime.bind import bind
from autoflash.runtime.probe import probe
from autoflash.variant import Family, Variant
from tests.factories import make_problem, make_variant
from tests.gpu.conftest import Gate

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]

CHOICES = {
    "conditional": {"rescale": "conditional"},
    "polynomial": {"exp2": "polynomial"},
    "both": {"rescale": "conditional", "exp2": "polynomial"},
}
FEATURES: dict[str, dict[str, object]] = {
    "softcap": {"softcap": 3.0},
    "sinks": {"sinks": True},
    "window": {"window_left": 100, "window_right": 30},
    "bias": {"bias": True},
}
RULES = {
    "grows past the threshold in every tile": lambda j: j * 0.5,
    "grows by just the threshold": lambda j: (j // 64) * 8.0,
    "grows below the threshold in every tile": lambda j: j * 0.0625,
    "jumps": lambda j: torch.where(j < 300, -300.0, 300.0),
    "falls": lambda j: -j * 1.0,
    "one key far above": lambda j: torch.where(j == 400, 500.0, 0.0),
}


def families() -> list[Family]:
    is_hopper = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
    return [Family.TRITON, Family.GLUON_SM90] if is_hopper else [Family.TRITON]


def make_forward(family: Family, name: str, mask: Mask = Mask.FULL) -> Variant:
    changes = dict(CHOICES[name])
    if family is Family.GLUON_SM90:
        schedule = "ticketed" if mask is Mask.CAUSAL else "round_robin"
        # Halves go without a conditional rescale: they get the polynomial alone.
        changes |= {"schedule": schedule, "exponentials": "halves" if name == "polynomial" else "whole"}
    return make_variant(family, **changes)


@pytest.mark.parametrize("dtype", [DType.FP16, DType.BF16])
@pytest.mark.parametrize("mask", list(Mask))
@pytest.mark.parametrize("head_dim", [64, 80, 128])
@pytest.mark.parametrize("name", CHOICES)
@pytest.mark.parametrize("family", families())
def test_forward_passes_the_gate(
    family: Family, name: str, head_dim: int, mask: Mask, dtype: DType, gate: Gate
) -> None:
    problem = make_problem(dtype=dtype, head_dim=head_dim, batch=4, heads=8, seqlen_q=2048, mask=mask)

    verification = gate(problem, make_forward(family, name, mask), probe("cuda"))

    assert verification.passed, verification.detail


@pytest.mark.parametrize("features", FEATURES)
@pytest.mark.parametrize("name", CHOICES)
def test_forward_with_features_passes_the_gate(name: str, features: str, gate: Gate) -> None:
    problem = make_problem(heads=4, kv_heads=2, seqlen_q=1024, mask=Mask.CAUSAL).replace(**FEATURES[features])

    verification = gate(problem, make_forward(Family.TRITON, name), probe("cuda"))

    assert verification.passed, verification.detail


@pytest.mark.parametrize("dtype", [DType.FP16, DType.BF16])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_backward_by_polynomial_passes_the_gate(head_dim: int, dtype: DType, gate: Gate) -> None:
    problem = make_problem(
        op=Pass.BACKWARD, dtype=dtype, head_dim=head_dim, heads=4, kv_heads=2, seqlen_q=1024, mask=Mask.CAUSAL
    )
    plain = make_variant(op=Pass.BACKWARD, exp2="polynomial", dot_order="scores_first")

    verification = gate(problem, plain, probe("cuda"))

    assert verification.passed, verification.detail


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", CHOICES)
@pytest.mark.parametrize("family", families())
def test_hostile_scores_are_exact(family: Family, name: str, rule: str, dtype: torch.dtype) -> None:
    kind = DType.FP16 if dtype is torch.float16 else DType.BF16
    problem = make_problem(dtype=kind, head_dim=64, heads=1, seqlen_q=128, seqlen_k=640)
    q, k = (torch.zeros(1, 1, rows, 64, device="cuda", dtype=dtype) for rows in (128, 640))
    v = torch.randn(1, 1, 640, 64, device="cuda").to(dtype)
    q[..., 0] = (1.0 + torch.arange(128, device="cuda") / 256).to(dtype)
    k[..., 0] = RULES[rule](torch.arange(640.0, device="cuda")).to(dtype)
    scale = math.log(2.0)

    executable = bind(Form.of(problem), make_forward(family, name), probe("cuda"))
    out, lse = executable.prepare_forward(problem, q, k, v, scale)(q, k, v)

    scores = q.double() @ k.double().mT * scale
    exact = torch.softmax(scores, -1) @ v.double()
    tolerance = 2e-3 if dtype is torch.float16 else 1.6e-2
    torch.testing.assert_close(out.double(), exact, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(lse.double(), torch.logsumexp(scores, -1), rtol=1e-5, atol=1e-4)
