"""Case A22: Triton builds a small C module at the first launch, and there is no C compiler. Calls go on without it."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator

import pytest
import torch

import autoflash
from autoflash.codegen.render import render
from autoflash.dispatch import ladder
from autoflash.dispatch.buckets import cell_of
from autoflash.dispatch.ladder import Here
from autoflash.dispatch.resolve import Resolver
from autoflash.dispatch.table import Table
from autoflash.ops import CALLS
from autoflash.problem import Form, Pass, Problem
from autoflash.runtime import launch
from autoflash.runtime.executable import Executable
from autoflash.trial import Decision, Level, Tier, Verification
from autoflash.variant import Family
from tests.dispatch.fakes import exact
from tests.factories import (
    make_decision,
    make_device,
    make_environment,
    make_problem,
    make_ranked,
    make_variant,
    make_verification,
)

# Word for word from triton/runtime/build.py of Triton 3.6.
_WORDS = "Failed to find C compiler. Please specify via CC environment variable or set triton.knobs.build.impl."
_GPU = make_device()
_PROBLEM = make_problem(heads=4, seqlen_q=40)


@pytest.fixture(autouse=True)
def _no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    def load_kernel(*_: object) -> launch.Kernel:
        raise RuntimeError(_WORDS)

    monkeypatch.setattr(launch, "load_kernel", load_kernel)


def _decision(op: Pass) -> Decision:
    """A record of two generated kernels, both faster than the vendor's."""
    form = Form(op=op, mask=_PROBLEM.mask)
    variants = [make_variant(Family.TRITON, op=op), make_variant(Family.TRITON, op=op, num_warps=8)]
    return make_decision(
        cell=cell_of(_PROBLEM.replace(op=op), _GPU),
        environment=make_environment(),
        choices=[
            make_ranked(variant=variant, source_digest=render(form, variant.family, variant.structure).digest)
            for variant in variants
        ],
        vendor=make_ranked(variant=make_variant(Family.VENDOR, backend="flash"), median_us=900.0),
    )


def _verify(executable: Executable, problem: Problem) -> Verification:
    """What verification does first on a GPU: prepare the kernel, and run it."""
    q, k, v, dout = (torch.zeros(1, 4, 40, 64, dtype=torch.bfloat16) for _ in range(4))
    if problem.op is Pass.FORWARD:
        executable.prepare_forward(problem, q, k, v, 1.0)(q, k, v)
    else:
        executable.prepare_backward(problem, q, k, v, q, dout, 1.0)
    return make_verification(level=Level.SCREEN)


@pytest.fixture(params=["recorded", "nothing recorded"])
def _on_a_gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Tensors are taken for those of an H200, and lie on the CPU: there, torch has this backend whatever its build."""
    math_alone = (make_variant(Family.VENDOR, backend="math"),)
    monkeypatch.setattr(ladder.catalog, "vendors", lambda cell, device: math_alone)
    decisions = [_decision(op) for op in Pass] if request.param == "recorded" else []
    before = CALLS.resolver
    CALLS.reset()
    CALLS.resolver = Resolver(
        _verify,
        loader=lambda: Table.from_decisions(decisions),
        here=lambda _: Here(device=_GPU, environment=make_environment()),
    )
    yield
    CALLS.reset()
    CALLS.resolver = before


@pytest.mark.usefixtures("_on_a_gpu")
@pytest.mark.parametrize(("vendor", "tier"), [("allow", Tier.VENDOR), ("never", Tier.PORTABLE)])
def test_case_a22_a_call_and_its_gradient_are_served_by_the_next_rung(
    vendor: str, tier: Tier, caplog: pytest.LogCaptureFixture
) -> None:
    q, k, v = (torch.randn(1, 4, 40, 64, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))

    with caplog.at_level(logging.WARNING, "autoflash"):
        out = autoflash.attention(q, k, v, vendor=vendor)
        assert isinstance(out, torch.Tensor)
        out.float().square().sum().backward()
        autoflash.attention(q, k, v, vendor=vendor)

    torch.testing.assert_close(out, exact(q, k, v), atol=2e-2, rtol=2e-2)
    assert q.grad is not None
    assert math.isfinite(float(q.grad.abs().max()))
    assert autoflash.explain(q, k, v, vendor=vendor).passes[0].tier is tier
    told = [record.getMessage() for record in caplog.records if "C compiler" in record.getMessage()]
    assert told == [record.getMessage() for record in caplog.records]
    # At most one for each pass, and none where a vendor's kernel was the first choice anyway.
    assert len(told) <= 2
