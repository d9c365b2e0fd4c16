"""Torch's kernels, and the portable family, on a GPU: what they claim to do they do, what they cannot they refuse."""

from __future__ import annotations

import pytest
import torch

from autoflash.evaluate.verify import verify
from autoflash.problem import Alignment, DType, Form, Mask, Pass
from autoflash.runtime.bind import bind
from autoflash.runtime.probe import card_state, environment, probe
from autoflash.trial import Level
from autoflash.variant import Choices, Family, Variant
from tests.factories import make_problem

pytestmark = pytest.mark.gpu


def vendor(backend):
    return Variant(family=Family.VENDOR, structure=Choices(backend=backend), config=Choices())


def problem_of(**changes):
    sizes = {"batch": 2, "heads": 8, "kv_heads": 8, "head_dim": 128, "seqlen_q": 1024, "seqlen_k": 1024}
    return make_problem(**{**sizes, **changes})


@pytest.mark.parametrize("backend", ["cudnn", "flash", "efficient", "math"])
@pytest.mark.parametrize("mask", Mask)
@pytest.mark.parametrize("dtype", [DType.FP16, DType.BF16])
@pytest.mark.parametrize("op", Pass)
def test_each_backend_passes_the_grid_where_it_does_not_refuse(op, dtype, mask, backend):
    device = probe("cuda")
    executable = bind(Form(op=op, mask=mask), vendor(backend), device)

    verification = verify(executable, problem_of(op=op, dtype=dtype, mask=mask), Level.FULL, device=device)

    assert verification.passed, verification.detail
    assert verification.checks >= 5


@pytest.mark.parametrize("backend", ["cudnn", "flash"])
def test_float32_is_refused_where_the_backend_has_none(backend):
    executable = bind(Form(op=Pass.FORWARD, mask=Mask.FULL), vendor(backend), probe("cuda"))
    q, k, v = (torch.randn(2, 8, 64, 128, device="cuda") for _ in range(3))

    reason = executable.why_not(problem_of(dtype=DType.FP32, seqlen_q=64, seqlen_k=64), q, k, v)

    assert reason is not None
    assert backend in reason


def test_bottom_right_alignment_is_refused():
    problem = problem_of(mask=Mask.CAUSAL, seqlen_q=64, seqlen_k=128, alignment=Alignment.BOTTOM_RIGHT)
    executable = bind(Form(op=Pass.FORWARD, mask=Mask.CAUSAL), vendor("cudnn"), probe("cuda"))

    assert "top-left" in executable.why_not(problem)


@pytest.mark.parametrize("loop_order", ["query_outer", "key_outer"])
@pytest.mark.parametrize("mask", Mask)
@pytest.mark.parametrize("dtype", DType)
@pytest.mark.parametrize("op", Pass)
def test_the_tiled_torch_family_passes_the_grid_on_a_gpu(op, dtype, mask, loop_order):
    variant = Variant(
        family=Family.TORCH_TILED,
        structure=Choices(loop_order=loop_order),
        config=Choices(block_m=256, block_n=512, heads_per_step=0),
    )
    device = probe("cuda")
    problem = problem_of(op=op, dtype=dtype, mask=mask, deterministic=True)

    verification = verify(bind(Form(op=op, mask=mask), variant, device), problem, Level.FULL, device=device)

    assert verification.passed, verification.detail


def test_the_probe_describes_the_card():
    device = probe()

    assert device.torch_device == "cuda:0"
    assert device.multiprocessors > 0
    assert device.shared_bytes >= 64 * 1024
    assert device.uuid
    assert environment(device).driver
    assert card_state(device).temperature_c >= 0
