"""The Hopper family compiles for sm_90a without a GPU, keeps its registers, and its products are not serialised."""

from __future__ import annotations

import os
import re

import pytest

from autoflash import paths
from autoflash.codegen.render import render
from autoflash.deploy.shipped import read_shipped
from autoflash.device import CROSS_TARGETS
from autoflash.dispatch.buckets import problem_of
from autoflash.problem import Form, Mask, Pass, Problem
from autoflash.runtime import gluon_backward_plan, gluon_plan
from autoflash.runtime.compile import compile_variant
from autoflash.runtime.launch import KernelPlan, compile_kernel
from autoflash.runtime.load import load
from autoflash.runtime.probe import triton_version
from autoflash.trial import Decision, Status
from autoflash.variant import Family, Variant
from tests.compile.assembler import assembler_says
from tests.factories import make_problem, make_variant

triton = pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("compiles kernels", allow_module_level=True)

H200 = CROSS_TARGETS["sm_90"]
NARROW = {"consumers": 3, "q_operand": "shared", "exponentials": "whole", "output": "direct", "num_stages": 4}
WIDE = {"q_operand": "shared", "exponentials": "whole", "output": "direct", "ping_pong": "on", "BLOCK_N": 64}
SINGLE = {"consumers": 1, "BLOCK_N": 64}
FEATURES: tuple[dict[str, object], ...] = (
    {"window_left": 255, "window_right": 100},
    {"softcap": 20.0},
    {"softcap": 20.0, "window_left": 255, "window_right": 100},
)
COLUMNS = {"consumer_owns": "columns"}
SPLIT = {"loop_order": "split", "BLOCK_N2": 64, "k_stages2": 2, "v_stages2": 1}


def assembly(problem: Problem, variant: Variant, plan: KernelPlan) -> str:
    module = load(render(Form.of(problem), variant.family, variant.structure))
    return str(compile_kernel(module, plan, H200).asm["ptx"])


def main_plans(problem: Problem, variant: Variant) -> list[KernelPlan]:
    """The kernels that multiply: a backward has one, or two with dQ apart, between those that move memory."""
    if problem.op is Pass.FORWARD:
        return [gluon_plan.forward_plan(problem, variant)]
    return [plan for plan in gluon_backward_plan.backward_plans(problem, variant) if "attention" in plan.function]


def assert_tight(problem: Problem, variant: Variant, plan: KernelPlan, registers: set[int], spill_bytes: int) -> None:
    ptx = assembly(problem, variant, plan)
    said = assembler_says(ptx)

    reallocated = {int(number) for number in re.findall(r"setmaxnreg\S*\s+(\d+)", ptx)}
    assert reallocated
    assert registers <= reallocated
    assert not re.findall(r"C75\d\d", said), said
    spilled = re.search(r"(\d+) bytes spill stores", said)
    assert spilled is not None
    assert int(spilled[1]) <= spill_bytes


@pytest.mark.parametrize(
    ("head_dim", "mask", "seqlen", "changes", "registers"),
    [
        (128, Mask.FULL, 1024, {}, {240, 24}),
        (128, Mask.CAUSAL, 1000, {"schedule": "ticketed", "ping_pong": "on"}, {240, 24}),
        (64, Mask.CAUSAL, 1024, {**NARROW, "schedule": "ticketed"}, {160, 32}),
        (256, Mask.FULL, 1024, WIDE, {240, 24}),
        (256, Mask.CAUSAL, 1000, {**WIDE, "output": "vectors"}, {240, 24}),
        (256, Mask.FULL, 1024, {**WIDE, "output": "through_q"}, {240, 24}),
        (128, Mask.CAUSAL, 1000, {"output": "vectors"}, {240, 24}),
        (96, Mask.CAUSAL, 1024, SINGLE, {232, 24}),
    ],
)
def test_forward_keeps_its_registers(
    head_dim: int, mask: Mask, seqlen: int, changes: dict[str, str | int], registers: set[int]
) -> None:
    problem = make_problem(head_dim=head_dim, heads=8, seqlen_q=seqlen, mask=mask)
    variant = make_variant(Family.GLUON_SM90, **changes)

    # Newer releases than 3.6 may spill a few words: they are tuned anew. (3.9 spills 88 bytes of three consumers'.)
    newer = 96 if variant.structure["consumers"] == 3 else 64
    spill_bytes = 0 if triton_version().startswith("3.6") else newer
    assert_tight(problem, variant, gluon_plan.forward_plan(problem, variant), registers, spill_bytes)


@pytest.mark.skipif(not triton_version().startswith("3.6"), reason="registers are those of one release")
@pytest.mark.parametrize("mask", list(Mask))
@pytest.mark.parametrize(
    ("head_dim", "changes", "spill_bytes"),
    [
        (64, NARROW, 0),
        (64, {"exponentials": "whole", "rescale": "conditional"}, 0),
        (96, SINGLE, 0),
        (128, {}, 0),
        (128, {"ping_pong": "on", "output": "direct"}, 0),
        # A softcap without a mask and a window spills four registers; without features there are none.
        (256, WIDE, 16),
    ],
)
@pytest.mark.parametrize("asked", FEATURES, ids=str)
def test_forward_with_features_keeps_its_registers(
    asked: dict[str, object], head_dim: int, changes: dict[str, str | int], spill_bytes: int, mask: Mask
) -> None:
    # Keys that do not fill their block, and rows that are guarded: the longest code that there is.
    problem = make_problem(head_dim=head_dim, heads=8, seqlen_q=1024, seqlen_k=1037, mask=mask).replace(**asked)
    variant = make_variant(Family.GLUON_SM90, **changes)

    assert_tight(problem, variant, gluon_plan.forward_plan(problem, variant), set(), spill_bytes)


@pytest.mark.parametrize(
    ("head_dim", "mask", "block_m"), [(128, Mask.CAUSAL, 64), (64, Mask.FULL, 128), (64, Mask.CAUSAL, 128)]
)
def test_backward_keeps_its_registers(head_dim: int, mask: Mask, block_m: int) -> None:
    problem = make_problem(op=Pass.BACKWARD, head_dim=head_dim, heads=8, seqlen_q=1000, mask=mask)
    variant = make_variant(Family.GLUON_SM90, op=Pass.BACKWARD, BLOCK_M=block_m)

    main = gluon_backward_plan.backward_plans(problem, variant)[1]

    spill_bytes = 16 if triton_version().startswith("3.6") else 128
    assert_tight(problem, variant, main, {240, 24}, spill_bytes)


@pytest.mark.parametrize(
    ("head_dim", "mask", "changes"),
    [
        (256, Mask.CAUSAL, COLUMNS),
        (256, Mask.FULL, {**COLUMNS, **SPLIT, "s_issue": "step_before"}),
        (192, Mask.CAUSAL, {**COLUMNS, **SPLIT}),
        (128, Mask.CAUSAL, {**SPLIT, "BLOCK_N2": 128, "v_stages2": 2}),
        (64, Mask.CAUSAL, {**SPLIT, "BLOCK_M": 128}),
    ],
)
def test_backward_in_columns_and_with_dq_apart_keeps_its_registers(
    head_dim: int, mask: Mask, changes: dict[str, str | int]
) -> None:
    problem = make_problem(op=Pass.BACKWARD, head_dim=head_dim, heads=8, seqlen_q=1000, mask=mask)
    variant = make_variant(Family.GLUON_SM90, op=Pass.BACKWARD, **changes)

    mains = main_plans(problem, variant)

    assert len(mains) == (2 if "loop_order" in changes else 1)
    spill_bytes = 16 if triton_version().startswith("3.6") else 160
    for main in mains:
        assert_tight(problem, variant, main, {240, 24}, spill_bytes)


def shipped_winners() -> list[Decision]:
    """One decision for each kernel of the family that a shipped row puts first; types of two bytes compile alike."""
    winners = {
        (Form.of(decision.cell), decision.cell.head_dim, decision.choices[0].variant): decision
        for decision in read_shipped(paths.tuning_db_dir())
        if decision.choices[0].variant.family is Family.GLUON_SM90
    }
    return list(winners.values())


@pytest.mark.skipif(
    not triton_version().startswith("3.6"), reason="shipped rows hold for the Triton they were timed with"
)
@pytest.mark.parametrize("decision", shipped_winners(), ids=lambda decision: str(decision.cell).replace("/", "-"))
def test_every_shipped_winner_keeps_its_registers(decision: Decision) -> None:
    problem, variant = problem_of(decision.cell, H200), decision.choices[0].variant

    for plan in main_plans(problem, variant):
        assert_tight(problem, variant, plan, set(), 0 if problem.op is Pass.FORWARD else 16)


@pytest.mark.skipif(not triton_version().startswith("3.6"), reason="registers are those of one release")
@pytest.mark.parametrize(
    ("head_dim", "changes"),
    [
        (64, {**NARROW, "exp2": "polynomial"}),
        (64, {**NARROW, "exp2": "polynomial", "rescale": "conditional"}),
        (128, {"exp2": "polynomial"}),
        (128, {"exponentials": "whole", "rescale": "conditional"}),
        (128, {"exponentials": "whole", "rescale": "conditional", "exp2": "polynomial"}),
    ],
)
def test_choices_in_the_softmax_keep_their_registers(head_dim: int, changes: dict[str, str | int]) -> None:
    problem = make_problem(head_dim=head_dim, heads=8, seqlen_q=1024)
    chosen = make_variant(Family.GLUON_SM90, **changes)
    plain = make_variant(Family.GLUON_SM90, **{k: v for k, v in changes.items() if k not in ("exp2", "rescale")})

    assert_tight(problem, chosen, gluon_plan.forward_plan(problem, chosen), set(), 0)

    ptx, before = (assembly(problem, one, gluon_plan.forward_plan(problem, one)) for one in (chosen, plain))
    consumers = chosen.structure.number("consumers")
    # Two tiles of scores for each consumer, of 64 exponentials a thread, and one factor for each of two rows.
    assert before.count("ex2.approx") == consumers * (2 * 64 + 2)
    assert ptx.count("ex2.approx") == consumers * ((2 * 48 if "exp2" in changes else 2 * 64) + 2)
    blocks = re.findall(r"vote\.sync\.any\.pred q, p, -1; @!q bra\.uni E;(.*?)E: }", ptx)
    assert len(blocks) == (consumers if "rescale" in changes else 0)
    for block in blocks:
        assert block.count("mul.f32") == head_dim // 2
        # Two rows of accumulators take turns, each with the factor that was voted on.
        factors = re.findall(r"mul\.f32 (%\w+), \1, (%\w+);", block)
        assert [factor for _, factor in factors] == [factors[0][1]] * 2 + [factors[2][1]] * 2 + [
            factors[i // 2 % 2 * 2][1] for i in range(4, head_dim // 2)
        ]


def test_other_architectures_are_refused_before_anything_is_compiled() -> None:
    outcome = compile_variant(make_problem(), make_variant(Family.GLUON_SM90), CROSS_TARGETS["sm_100"])

    assert outcome.status is Status.CONSTRAINTS
    assert "sm_90" in outcome.detail
