"""Kernels that walk over the lists of a block mask compile for GPUs that this machine does not have."""

from __future__ import annotations

import itertools
import os

import pytest

from autoflash.codegen.render import render
from autoflash.expression.expression import Role, parse
from autoflash.problem import DType, Form, Mask, Pass, Problem
from autoflash.runtime import launch
from autoflash.runtime.compile import compile_variant
from autoflash.runtime.load import load
from autoflash.runtime.probe import triton_version
from autoflash.runtime.triton_backward import backward_plans
from autoflash.runtime.triton_forward import forward_plan
from autoflash.trial import Status
from autoflash.variant import Variant
from tests.compile.assembler import assembler_says
from tests.factories import make_device, make_problem, make_variant

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("compiles kernels", allow_module_level=True)

TILES = {"BLOCK_M": 64, "BLOCK_N": 64, "num_warps": 4, "num_stages": 2}
SECOND = {"BLOCK_M2": 64, "BLOCK_N2": 64, "num_stages2": 2}
SMALL_TILES = {
    Pass.FORWARD: {"BLOCK_M": 32, "BLOCK_N": 32},
    Pass.BACKWARD: {"BLOCK_M": 16, "BLOCK_N": 32, "BLOCK_M2": 32, "BLOCK_N2": 16},
}
NEAR = str(parse("kv_idx - q_idx < 300 + h", role=Role.MASK_MOD))
FORMS: dict[str, dict[str, object]] = {
    "blocks": {},
    "causal mask_mod": {"mask": Mask.CAUSAL, "mask_mod": NEAR},
    "mask_mod in a window": {"window_left": 200, "window_right": 50, "mask_mod": NEAR},
}


def problem_of(op: Pass, name: str, **sizes: int) -> Problem:
    problem = make_problem(op=op, dtype=DType.BF16, **{"head_dim": 64, "seqlen_q": 1024, **sizes})  # type: ignore[arg-type]  # sizes are integers
    return problem.replace(block_size=128, **FORMS[name])


def variant_of(op: Pass, **changes: str | int) -> Variant:
    if op is Pass.FORWARD:
        return make_variant(op=op, **{**TILES, **changes})
    second = {} if changes.get("loop_order") == "key_outer" else SECOND
    return make_variant(op=op, **{**TILES, **second, **changes})


@pytest.mark.parametrize(("arch", "name", "op"), list(itertools.product(["sm_80", "sm_90", "gfx942"], FORMS, Pass)))
def test_every_form_compiles(arch: str, name: str, op: Pass) -> None:
    # Only Hopper's asynchronous products need 64 rows; smaller tiles compile in a third of the time.
    variant = variant_of(op, loads="tma") if arch == "sm_90" else variant_of(op, **SMALL_TILES[op])

    outcome = compile_variant(problem_of(op, name, seqlen_q=1000), variant, make_device(arch))

    assert outcome.status is Status.CORRECT, outcome.detail
    assert outcome.resources is not None
    assert outcome.resources.shared_bytes <= make_device(arch).shared_bytes


@pytest.mark.parametrize("loop_order", ["fused", "key_outer"])
def test_every_order_of_the_backward_compiles(loop_order: str) -> None:
    variant = variant_of(Pass.BACKWARD, loop_order=loop_order)

    outcome = compile_variant(problem_of(Pass.BACKWARD, "causal mask_mod"), variant, make_device("sm_80"))

    assert outcome.status is Status.CORRECT, outcome.detail


@pytest.mark.parametrize("name", ["blocks", "causal mask_mod"])
@pytest.mark.parametrize("op", Pass)
def test_a_walk_over_a_list_leaves_the_matrix_products_asynchronous(op: Pass, name: str) -> None:
    problem, variant = problem_of(op, name, head_dim=128), variant_of(op, loads="tma")
    plans = [forward_plan(problem, variant)] if op is Pass.FORWARD else backward_plans(problem, variant)
    module = load(render(Form.of(problem), variant.family, variant.structure))

    for plan in plans:
        compiled = launch.compile_kernel(module, plan, make_device("sm_90"))

        if plan.function == "backward_preprocess":
            continue
        assert "wgmma.mma_async" in compiled.asm["ptx"]
        assert "C75" not in assembler_says(compiled.asm["ptx"])
        if (triton_version() or "").startswith("3.6."):
            assert launch.compiled_resources(compiled).spill_bytes == 0


def test_nothing_is_masked_in_boolean_blocks_that_sequences_fill() -> None:
    problem = problem_of(Pass.FORWARD, "blocks")

    assert dict(forward_plan(problem, variant_of(Pass.FORWARD)).constants)["HAS_MASK"] is False
    assert dict(forward_plan(problem.replace(seqlen_k=1088), variant_of(Pass.FORWARD)).constants)["HAS_MASK"] is True
