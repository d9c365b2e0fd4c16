"""Which compiled form of the Hopper family a call gets, with which numbers."""

from __future__ import annotations

import math

import pytest

from autoflash.device import CROSS_TARGETS
from autoflash.problem import Alignment, DType, Mask, Pass, Problem
from autoflash.runtime import gluon_backward_plan, gluon_plan
from autoflash.runtime.layouts import Operand
from autoflash.space import hopper
from autoflash.variant import Family
from tests.factories import make_problem, make_variant

H200 = CROSS_TARGETS["sm_90"]
FORWARD = make_variant(Family.GLUON_SM90)


def constants(problem: Problem, **changes: str | int) -> dict[str, object]:
    return dict(gluon_plan.forward_plan(problem, make_variant(Family.GLUON_SM90, **changes)).constants)


def operand(*shape: int, dense: bool = True) -> Operand:
    strides = (shape[1] * shape[2] * shape[3], shape[2] * shape[3], shape[3], 1 if dense else 2)
    return Operand.planned(shape, strides, 2)


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ({"seqlen_q": 1024}, True),
        ({"seqlen_q": 1000}, True),
        ({"seqlen_q": 256, "seqlen_k": 512}, True),
        ({"seqlen_q": 250, "seqlen_k": 512}, False),
        ({"seqlen_q": 512, "seqlen_k": 256}, False),
        ({"seqlen_q": 512, "seqlen_k": 256, "alignment": Alignment.TOP_LEFT}, True),
    ],
)
def test_blocks_of_the_loop_are_masked_only_where_the_diagonal_crosses_them(
    sizes: dict[str, object], expected: bool
) -> None:
    problem = make_problem(head_dim=128, mask=Mask.CAUSAL, **sizes)  # type: ignore[arg-type]  # sizes and alignment

    assert constants(problem)["EVERY_ROW_SEES"] is expected


def test_without_a_causal_mask_every_row_sees_a_key() -> None:
    assert constants(make_problem(seqlen_q=250, seqlen_k=33))["EVERY_ROW_SEES"] is True


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ({"mask": Mask.CAUSAL, "window_left": 100}, True),
        ({"mask": Mask.CAUSAL, "window_left": 100, "seqlen_k": 1010}, False),
        ({"window_left": 100}, True),
        ({"window_left": 100, "window_right": 64}, True),
        ({"window_left": 100, "window_right": 63}, False),
        ({"window_right": 64}, True),
        ({"window_left": 100, "seqlen_k": 256}, True),
        ({"window_left": 100, "window_right": 64, "seqlen_k": 256}, False),
        ({"window_left": 800, "seqlen_k": 256, "alignment": Alignment.TOP_LEFT}, True),
        ({"window_left": 767, "seqlen_k": 256, "alignment": Alignment.TOP_LEFT}, False),
    ],
    ids=str,
)
def test_rows_without_a_key_in_the_first_block_are_guarded(sizes: dict[str, object], expected: bool) -> None:
    problem = make_problem(seqlen_q=1024).replace(**{"seqlen_k": 1024, **sizes})

    assert constants(problem)["EVERY_ROW_SEES"] is expected


@pytest.mark.parametrize(("seqlen_k", "expected"), [(1024, False), (1000, True), (64, True)])
def test_keys_that_do_not_fill_their_block_are_masked(seqlen_k: int, expected: bool) -> None:
    assert constants(make_problem(seqlen_k=seqlen_k))["RAGGED_N"] is expected


def test_one_consumer_takes_half_of_the_registers_and_two_blocks_stay() -> None:
    problem = make_problem(batch=16, heads=16, seqlen_q=1024)
    single = make_variant(Family.GLUON_SM90, consumers=1)

    assert gluon_plan.forward_plan(problem, single).max_registers == 128
    assert gluon_plan.forward_programs(problem, single, H200) == 2 * H200.multiprocessors
    assert gluon_plan.forward_programs(problem, FORWARD, H200) == H200.multiprocessors


def test_a_grid_that_does_not_stay_has_a_program_for_each_tile() -> None:
    problem = make_problem(batch=2, heads=3, seqlen_q=300)

    programs = gluon_plan.forward_programs(problem, make_variant(Family.GLUON_SM90, persistent=0), H200)

    assert programs == 2 * 3 * 3


def test_numbers_come_in_the_order_of_the_plan() -> None:
    problem = make_problem(batch=2, heads=6, kv_heads=2, seqlen_q=300, seqlen_k=200, head_dim=128)
    names = [argument.name for argument in gluon_plan.forward_plan(problem, FORWARD).numbers]

    numbers = dict(zip(names, gluon_plan.forward_numbers(problem, FORWARD, operand(2, 6, 300, 128), 0.5), strict=True))

    assert (numbers["n_q"], numbers["n_k"], numbers["n_heads"], numbers["group"]) == (300, 200, 6, 3)
    assert (numbers["n_bh"], numbers["n_row_blocks"], numbers["n_tiles"]) == (12, 3, 36)
    assert numbers["qk_scale"] == pytest.approx(0.5 * math.log2(math.e))
    assert numbers["stride_om"] == 128


@pytest.mark.parametrize(
    ("window", "expected"),
    [
        ({"window_left": 3, "window_right": 5}, (-103, -95)),
        ({"window_left": None, "window_right": 5}, (-100 - 2**30, -95)),
        ({"window_left": 3}, (-103, -100 + 2**30)),
        ({"window_left": 3, "mask": Mask.CAUSAL}, (-103, -100)),
    ],
    ids=str,
)
def test_a_window_is_told_by_the_diagonals_of_its_edges(window: dict[str, object], expected: tuple[int, int]) -> None:
    problem = make_problem(seqlen_q=300, seqlen_k=200).replace(**window)
    names = [argument.name for argument in gluon_plan.forward_plan(problem, FORWARD).numbers]

    numbers = dict(zip(names, gluon_plan.forward_numbers(problem, FORWARD, operand(1, 2, 300, 64), 0.5), strict=True))

    assert "diagonal" not in numbers
    assert (numbers["left_diagonal"], numbers["right_diagonal"]) == expected


@pytest.mark.parametrize(
    ("problem", "operands", "words"),
    [
        (make_problem(dtype=DType.FP32), {}, "fp16 and bf16"),
        (make_problem(head_dim=64, head_dim_v=128), {}, "must be equal"),
        (make_problem(head_dim=20), {}, "multiple of 8"),
        (make_problem().replace(sinks=True, window_left=3), {}, "the forward of the family has no sinks"),
        (make_problem(op=Pass.BACKWARD).replace(window_left=3), {}, "the backward of the family has no window"),
        (make_problem(), {"k": operand(1, 2, 128, 64, dense=False)}, "k needs a last stride of 1"),
        (make_problem(), {"v": Operand.planned((1, 2, 128, 64), (8192, 0, 64, 1), 2)}, "element of v"),
    ],
)
def test_what_the_family_cannot_do_is_refused_with_the_reason(
    problem: Problem, operands: dict[str, Operand], words: str
) -> None:
    assert words in (gluon_plan.why_not(problem, H200, operands) or "")


def test_other_architectures_are_refused() -> None:
    assert "sm_90" in (gluon_plan.why_not(make_problem(), CROSS_TARGETS["sm_100"], {}) or "")


def test_consumers_that_share_columns_have_64_keys_together_and_store_half_rows() -> None:
    problem = make_problem(op=Pass.BACKWARD, batch=2, heads=3, seqlen_q=130, head_dim=256)
    variant = make_variant(Family.GLUON_SM90, op=Pass.BACKWARD, consumer_owns="columns")

    main = gluon_backward_plan.backward_plans(problem, variant)[1]

    blocks = {argument.name: argument.block for argument in main.tensors}
    assert hopper.keys_per_program(variant.structure) == 64
    assert blocks["k_desc"] == blocks["v_desc"] == (1, 1, 32, 256)
    assert blocks["dk_desc"] == blocks["dv_desc"] == (1, 1, 64, 128)
    assert blocks["acc_ptr"] == ()


def test_workspaces_hold_whole_tiles() -> None:
    problem = make_problem(op=Pass.BACKWARD, batch=2, heads=3, seqlen_q=130, head_dim=96)

    assert gluon_backward_plan.padded_rows(problem) == 256
    added_up = make_variant(Family.GLUON_SM90, op=Pass.BACKWARD)
    assert gluon_backward_plan.accumulator_shape(problem, added_up) == (2 * 3 * 256 * 128 // 128, 128)


def test_a_kernel_of_its_own_for_dq_needs_no_accumulator() -> None:
    problem = make_problem(op=Pass.BACKWARD, batch=2, heads=3, seqlen_q=130, head_dim=96)
    variant = make_variant(
        Family.GLUON_SM90, op=Pass.BACKWARD, loop_order="split", BLOCK_N2=64, k_stages2=2, v_stages2=2
    )

    plans = gluon_backward_plan.backward_plans(problem, variant)

    assert gluon_backward_plan.accumulator_shape(problem, variant) is None
    assert [plan.function for plan in plans] == ["preprocess", "attention_backward", "attention_backward_dq"]
    assert not any(argument.name.startswith("acc") for plan in plans for argument in plan.tensors)
