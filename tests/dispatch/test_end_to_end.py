"""Real kernels on the CPU, from records in a real database to results."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import autoflash
from autoflash.codegen.render import render
from autoflash.db.repository import Repository
from autoflash.dispatch.buckets import cell_of
from autoflash.errors import NoKernelError
from autoflash.evaluate import reference
from autoflash.ops import CALLS
from autoflash.problem import DType, Form, Mask, Pass, Problem
from autoflash.runtime.probe import environment, probe
from autoflash.trial import Decision, Tier
from autoflash.variant import Family, Variant
from tests.factories import make_decision, make_problem, make_ranked, make_variant

CPU = probe("cpu")
HERE = environment(CPU)
FLASH = make_variant(Family.VENDOR, backend="flash")
TILED = make_variant(Family.TORCH_TILED, block_m=64, block_n=64)


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    CALLS.reset()
    yield
    CALLS.reset()


def record(problem: Problem, *variants: Variant, us: float = 50.0, vendor_us: float = 60.0) -> Decision:
    """What a tuner would save: the digests are those of today's templates."""
    form = Form.of(problem)
    choices = [
        make_ranked(
            variant=variant,
            median_us=us,
            source_digest=render(form, variant.family, TILED.structure).digest,
        )
        for variant in variants
    ]
    return make_decision(
        cell=cell_of(problem, CPU),
        environment=HERE,
        choices=choices,
        vendor=make_ranked(variant=FLASH, median_us=vendor_us),
    )


def save(*decisions: Decision) -> None:
    with Repository.open() as repository:
        for decision in decisions:
            repository.save_decision(decision)


def tensors(problem: Problem, dtype: torch.dtype = torch.float32, grad: bool = False) -> list[Tensor]:
    q = torch.randn(problem.batch, problem.heads, problem.seqlen_q, problem.head_dim)
    k = torch.randn(problem.batch, problem.kv_heads, problem.seqlen_k, problem.head_dim)
    v = torch.randn(problem.batch, problem.kv_heads, problem.seqlen_k, problem.head_dim_v)
    return [x.to(dtype).requires_grad_(grad) for x in (q, k, v)]


@pytest.mark.parametrize("causal", [False, "bottom_right", "top_left"])
def test_generated_kernels_match_float64_with_nothing_recorded(causal: bool | str) -> None:
    problem = make_problem(heads=4, kv_heads=2, seqlen_q=50, seqlen_k=77, head_dim=32, head_dim_v=24)
    q, k, v = tensors(problem, grad=True)

    out, lse = autoflash.attention(q, k, v, causal=causal, return_lse=True, vendor="never")
    found = torch.autograd.grad(out.square().sum() + lse[torch.isfinite(lse)].sum(), (q, k, v))

    copies = [x.detach().double().requires_grad_() for x in (q, k, v)]
    expected_out, expected_lse = reference.attention(*copies, causal=causal, return_lse=True)
    finite = torch.isfinite(expected_lse)
    expected = torch.autograd.grad(expected_out.square().sum() + expected_lse[finite].sum(), copies)
    torch.testing.assert_close(out, expected_out.float(), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(lse, expected_lse.float(), atol=1e-5, rtol=1e-5)
    for gradient, exact in zip(found, expected, strict=True):
        torch.testing.assert_close(gradient, exact.float(), atol=1e-4, rtol=1e-4)


CASES = list(
    itertools.product(
        (Pass.FORWARD, Pass.BACKWARD), (DType.FP32, DType.BF16), ((64, 64), (40, 24)), (Mask.FULL, Mask.CAUSAL), (4, 2)
    )
)


def test_case_a26_every_recorded_cell_is_found_by_the_call_that_it_is_for() -> None:
    """One record for each problem of a grid: what was written under a key is looked up under the same."""
    problems = [
        make_problem(op=op, dtype=dtype, head_dim=d, head_dim_v=d_v, mask=mask, heads=4, kv_heads=kv_heads, seqlen_q=20)
        for op, dtype, (d, d_v), mask, kv_heads in CASES
    ]
    save(*(record(problem, TILED) for problem in problems))

    for problem in problems:
        dtype = torch.float32 if problem.dtype is DType.FP32 else torch.bfloat16
        inputs = tensors(problem, dtype, grad=True)
        part = autoflash.explain(*inputs, causal=problem.causal, vendor="never").passes[problem.op is Pass.BACKWARD]
        assert (part.tier, part.cell) == (Tier.EXACT, cell_of(problem, CPU))


def test_a_recorded_kernel_runs_and_both_times_are_explained() -> None:
    problem = make_problem(dtype=DType.FP32, heads=4, seqlen_q=50)
    save(record(problem, TILED))
    q, k, v = tensors(problem)

    out = autoflash.attention(q, k, v)
    explanation = autoflash.explain(q, k, v)

    torch.testing.assert_close(out, reference.attention(q, k, v).float(), atol=1e-5, rtol=1e-5)  # type: ignore[union-attr]
    (part,) = explanation.passes
    assert (part.variant, part.tier, part.has_run) == (TILED, Tier.EXACT, True)
    assert "50.0 us" in str(explanation)
    assert "60.0 us" in str(explanation)


def test_the_faster_vendor_runs_by_the_record() -> None:
    problem = make_problem(dtype=DType.FP32, heads=4, seqlen_q=50)
    save(record(problem, TILED, us=70.0))
    q, k, v = tensors(problem)

    out = autoflash.attention(q, k, v)
    part = autoflash.explain(q, k, v).passes[0]

    torch.testing.assert_close(out, reference.attention(q, k, v).float(), atol=1e-5, rtol=1e-5)  # type: ignore[union-attr]
    assert (part.variant, part.tier) == (FLASH, Tier.VENDOR)


def test_a_vendor_kernel_gives_gradients() -> None:
    q, k, v = tensors(make_problem(heads=4, kv_heads=2, seqlen_q=50), grad=True)

    found = torch.autograd.grad(autoflash.attention(q, k, v, causal=True, vendor="only").square().sum(), (q, k, v))  # type: ignore[union-attr]

    copies = [x.detach().double().requires_grad_() for x in (q, k, v)]
    out = reference.attention(*copies, causal=True)
    for gradient, exact in zip(found, torch.autograd.grad(out.square().sum(), copies), strict=True):
        torch.testing.assert_close(gradient, exact.float(), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("vendor", ["never", "allow"])
def test_every_route_obeys_one_rule_of_causal_alignment(vendor: str) -> None:
    """A decode step sees every key; a chunk sees the past."""
    for m, n in ((1, 8), (16, 64)):
        q, k, v = tensors(make_problem(heads=2, seqlen_q=m, seqlen_k=n))
        out = autoflash.attention(q, k, v, causal=True, vendor=vendor)
        expected = reference.attention(q, k, v, causal=True)
        torch.testing.assert_close(out, expected.float(), atol=1e-5, rtol=1e-5)  # type: ignore[union-attr]


def test_a_vendor_of_the_other_causal_alignment_refuses() -> None:
    q, k, v = tensors(make_problem(heads=2, seqlen_q=16, seqlen_k=64))

    with pytest.raises(NoKernelError, match="aligned top-left"):
        autoflash.attention(q, k, v, causal=True, vendor="only")


@pytest.mark.parametrize("vendor", ["never", "only"])
def test_compiled_training_verifies_and_matches_float64(vendor: str) -> None:
    """The first call is inside the operator, below autograd, which verifying a backward needs."""
    torch.compiler.reset()
    q, k, v = tensors(make_problem(heads=2, seqlen_q=24), grad=True)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return autoflash.attention(q, k, v, causal=True, vendor=vendor).square().sum()  # type: ignore[union-attr]

    found = torch.autograd.grad(torch.compile(call, fullgraph=True, backend="aot_eager")(q, k, v), (q, k, v))

    copies = [x.detach().double().requires_grad_() for x in (q, k, v)]
    expected = torch.autograd.grad(reference.attention(*copies, causal=True).square().sum(), copies)
    for gradient, exact in zip(found, expected, strict=True):
        torch.testing.assert_close(gradient, exact.float(), atol=1e-4, rtol=1e-4)


def test_a_record_that_cannot_be_rendered_is_quarantined_and_the_result_right(
    caplog: pytest.LogCaptureFixture,
) -> None:
    problem = make_problem(dtype=DType.FP32, heads=4, seqlen_q=50)
    broken = Variant(family=TILED.family, structure=TILED.structure.replace(loop_order="spiral"), config=TILED.config)
    save(record(problem, broken, TILED))
    q, k, v = tensors(problem)

    with caplog.at_level(logging.WARNING, "autoflash"):
        out = autoflash.attention(q, k, v, vendor="never")

    torch.testing.assert_close(out, reference.attention(q, k, v).float(), atol=1e-5, rtol=1e-5)  # type: ignore[union-attr]
    assert [variant for _, variant in CALLS.resolver.quarantined()] == [broken]
    assert len(caplog.records) == 1


def test_a_call_writes_nothing_to_the_database() -> None:
    problem = make_problem(dtype=DType.FP32, heads=4, seqlen_q=50)
    save(record(problem, TILED))
    with Repository.open(read_only=True) as repository:
        before = repository.decisions(), repository.trials()
    q, k, v = tensors(problem, grad=True)

    autoflash.attention(q, k, v).sum().backward()  # type: ignore[union-attr]

    with Repository.open(read_only=True) as repository:
        assert (repository.decisions(), repository.trials()) == before
