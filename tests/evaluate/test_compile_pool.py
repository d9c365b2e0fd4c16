from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import CancelledError
from types import SimpleNamespace

import pytest

from autoflash.device import CROSS_TARGETS, Device
from autoflash.evaluate import compile_pool
from autoflash.evaluate.compile_pool import CompilePool
from autoflash.evaluate.expected import masks_of
from autoflash.evaluate.grid import full_cases, screen_cases
from autoflash.evaluate.inputs import Memory
from autoflash.evaluate.verify import run_case
from autoflash.problem import Form, MaskTensor, Pass, Problem
from autoflash.runtime import compile as compile_module
from autoflash.runtime.bind import bind
from autoflash.runtime.compile import CompileOutcome
from autoflash.runtime.compiled import CompiledExecutable
from autoflash.runtime.launch import KernelPlan
from autoflash.trial import Status
from autoflash.variant import Family, Variant
from tests.factories import make_problem, make_variant

_H200 = CROSS_TARGETS["sm_90"]


def compile_by_sequence_length(
    problem: Problem, variant: Variant, device: Device, scale_sign: int = 1, masks: Mapping[str, object] | None = None
) -> CompileOutcome:
    """Stands for the compiler: the length of the sequence says what goes wrong."""
    if problem.seqlen_q == 1:
        os._exit(7)
    if problem.seqlen_q == 2:
        time.sleep(600)
    return CompileOutcome(status=Status.CORRECT, detail=str(problem.seqlen_q))


@pytest.fixture(autouse=True)
def _stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_pool, "compile_variant", compile_by_sequence_length)


@pytest.fixture
def pool() -> Iterator[CompilePool]:
    with CompilePool(1, timeout_s=300.0) as pool:
        yield pool


def _problem(length: int) -> Problem:
    return make_problem(seqlen_q=length)


def test_results_belong_to_their_variants(pool: CompilePool) -> None:
    futures = [pool.submit(_problem(length), make_variant(), _H200) for length in (10, 20, 30)]

    assert [future.result(timeout=300).detail for future in futures] == ["10", "20", "30"]


def test_a_compiler_that_dies_is_a_compile_failure_and_the_next_goes_on(pool: CompilePool) -> None:
    dead, alive = (pool.submit(_problem(length), make_variant(), _H200) for length in (1, 10))

    assert dead.result(timeout=300).status is Status.COMPILE
    assert "status 7" in dead.result().detail
    assert alive.result(timeout=300).status is Status.CORRECT


def test_a_compiler_that_hangs_is_killed() -> None:
    with CompilePool(1, timeout_s=0.5) as pool:
        hung = pool.submit(_problem(2), make_variant(), _H200)

        assert hung.result(timeout=300).status is Status.TIMEOUT


def test_portable_and_vendor_variants_start_no_process(pool: CompilePool) -> None:
    outcomes = [
        pool.submit(_problem(10), make_variant(family=family), _H200) for family in (Family.TORCH_TILED, Family.VENDOR)
    ]

    assert [outcome.done() for outcome in outcomes] == [True, True]
    assert pool._pool._workers == []


def test_closing_ends_what_runs_and_forgets_what_waits(pool: CompilePool) -> None:
    running = pool.submit(_problem(2), make_variant(), _H200)
    waiting = pool.submit(_problem(10), make_variant(), _H200)
    started = time.monotonic()

    pool.close()

    # Less than the sleep, by far; how much less is up to the machine.
    assert time.monotonic() - started < 300.0
    assert running.done()
    with pytest.raises(CancelledError):
        waiting.result(timeout=1)


def test_there_is_always_a_process() -> None:
    assert compile_pool.default_processes() >= 1


def test_what_compiles_to_the_same_kernel_is_compiled_once(pool: CompilePool) -> None:
    first = pool.submit(make_problem(batch=2, heads=4, seqlen_q=1024), make_variant(), _H200)
    same = pool.submit(make_problem(batch=7, heads=3, seqlen_q=8192), make_variant(), _H200)
    other = pool.submit(make_problem(seqlen_q=1000), make_variant(), _H200)

    assert same is first
    assert other is not first
    assert first.result(timeout=300).status is Status.CORRECT


def test_the_kernels_of_a_verification_are_compiled_before_it_begins(pool: CompilePool) -> None:
    problem = make_problem(seqlen_q=1024)

    pool.prepare(screen_cases(problem), make_variant(), _H200)()

    assert all(pool.submit(case.problem, make_variant(), _H200).done() for case in screen_cases(problem))


@pytest.mark.parametrize("feature", ["bias", "float_mask"])
@pytest.mark.parametrize("op", list(Pass))
def test_kernels_are_compiled_for_the_masks_and_biases_of_a_verification(
    op: Pass, feature: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fields = {
        "bias": {"bias": True, "bias_gradient": op is Pass.BACKWARD},
        "float_mask": {"mask_tensor": MaskTensor.FLOAT},
    }
    problem = make_problem(op=op, head_dim=16, heads=2, kv_heads=1, seqlen_q=64).replace(**fields[feature])
    variant = make_variant(op=op)
    asked: list[KernelPlan] = []

    def record(self: object, plan: KernelPlan) -> object:
        asked.append(plan)
        return SimpleNamespace(bind=lambda *_: lambda *tensors: None)

    monkeypatch.setattr(CompiledExecutable, "_kernel", record)
    cases = [
        case
        for case in full_cases(problem)
        if 0 < case.problem.seqlen_q * case.problem.seqlen_k < 10**5
        and case.memory in (Memory.DENSE, Memory.BSHD)
        and not case.shared
    ]

    missed = []
    for case in cases:
        asked.clear()
        run_case(bind(Form.of(problem), variant, _H200), case, "cpu")
        sign = (case.score_scale > 0) - (case.score_scale < 0)
        compiled = compile_module._plans(case.problem, variant, sign, masks_of(case))
        missed += [f"{case}: {plan.function}" for plan in asked if plan not in compiled]

    assert len(cases) > 8
    assert missed == []
