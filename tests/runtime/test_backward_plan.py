"""What the kernels of a backward call are told of features, and how large its workspaces are. Nothing is allocated."""

from __future__ import annotations

import math

import pytest

from autoflash.problem import Alignment, Mask, MaskTensor, Problem
from autoflash.runtime import dropout
from autoflash.runtime.backward_features import usual_masks
from autoflash.runtime.backward_plan import Step, backward_steps
from autoflash.runtime.backward_sizes import padded_rows
from autoflash.runtime.launch import Number
from autoflash.runtime.layouts import UNBOUNDED, Operand
from autoflash.variant import Variant
from tests.gradients import backward_problem, make_variant, packed_problem

LOOP_ORDERS = ["split", "fused", "key_outer"]


def _steps(problem: Problem, variant: Variant, scale: float = 0.5) -> dict[str, Step]:
    def dense(heads: int, rows: int, width: int) -> Operand:
        shape = (problem.tensor_batch, heads, rows, width)
        return Operand.planned(shape, (heads * rows * width, rows * width, width, 1), problem.dtype.itemsize)

    q = dense(problem.heads, problem.rows_q, problem.head_dim)
    k = dense(problem.kv_heads, problem.rows_k, problem.head_dim)
    v = dense(problem.kv_heads, problem.rows_k, problem.head_dim_v)
    out = dense(problem.heads, problem.rows_q, problem.head_dim_v)
    operands = {"q": q, "k": k, "v": v, "out": out, "dout": out, "dq": q, "dk": k, "dv": v} | usual_masks(problem)
    steps = backward_steps(problem, variant, operands, scale, has_dlse=False)
    return {step.plan.function: step for step in steps}


def _numbers(step: Step) -> dict[str, Number]:
    return dict(zip((argument.name for argument in step.plan.numbers), step.numbers, strict=True))


def _main(loop_order: str) -> str:
    return "backward_fused" if loop_order == "fused" else "backward_keys"


@pytest.mark.parametrize("loop_order", LOOP_ORDERS)
def test_a_plain_problem_has_no_arguments_of_features(loop_order: str) -> None:
    problem = backward_problem(seqlen_q=128)
    step = _steps(problem, make_variant(loop_order))[_main(loop_order)]
    assert not {"steepness", "window_left", "threshold", "n_sequences"} & set(_numbers(step))
    assert not {"MASK_HAS_ROWS", "PADDING"} & set(dict(step.plan.constants))


def test_a_window_holds_the_causal_mask() -> None:
    problem = backward_problem(seqlen_q=128, mask=Mask.CAUSAL).replace(window_left=7, window_right=9)
    numbers = _numbers(_steps(problem, make_variant("fused"))["backward_fused"])
    assert (numbers["window_left"], numbers["window_right"]) == (7, 0)
    numbers = _numbers(_steps(problem.replace(mask=Mask.FULL), make_variant("fused"))["backward_fused"])
    assert (numbers["window_left"], numbers["window_right"]) == (7, 9)


def test_a_window_without_a_bound_reaches_as_far_as_positions_can_be_added_to() -> None:
    problem = backward_problem(seqlen_q=128).replace(window_left=1 << 40)
    numbers = _numbers(_steps(problem, make_variant("split"))["backward_queries"])
    assert (numbers["window_left"], numbers["window_right"]) == (UNBOUNDED, UNBOUNDED)


def test_a_softcap_takes_the_place_of_the_scale_behind_the_tangent() -> None:
    problem = backward_problem(seqlen_q=128).replace(softcap=20.0)
    numbers = _numbers(_steps(problem, make_variant("fused"), scale=-0.5)["backward_fused"])
    assert numbers["steepness"] == pytest.approx(-0.025)
    assert numbers["log2_scale"] == pytest.approx(20.0 * math.log2(math.e))
    assert numbers["scale"] == -0.5


def test_dropout_is_told_as_a_threshold_and_a_factor() -> None:
    problem = backward_problem(seqlen_q=128).replace(dropout_p=0.25)
    step = _steps(problem, make_variant("key_outer"))["backward_keys"]
    assert _numbers(step)["threshold"] == dropout.threshold(0.25) == 1 << 30
    assert _numbers(step)["keep_scale"] == pytest.approx(4 / 3)
    assert [argument.dtype for argument in step.plan.tensors if argument.name == "rng_ptr"] == ["i64"]


@pytest.mark.parametrize(("kind", "dtype"), [(MaskTensor.BOOL, "u8"), (MaskTensor.FLOAT, "bf16")])
def test_a_mask_that_is_not_at_hand_is_planned_as_a_contiguous_one(kind: MaskTensor, dtype: str) -> None:
    problem = backward_problem(seqlen_q=128, seqlen_k=256).replace(mask_tensor=kind)
    step = _steps(problem, make_variant("split"))["backward_queries"]
    assert [argument.dtype for argument in step.plan.tensors if argument.name == "mask_ptr"] == [dtype]
    assert dict(step.plan.constants)["stride_mask_n"] == 1
    assert dict(step.plan.constants)["MASK_HAS_ROWS"] is True
    assert _numbers(step)["stride_mask_m"] == 256


@pytest.mark.parametrize("loop_order", LOOP_ORDERS)
def test_packed_sequences_have_room_for_a_tile_more_each(loop_order: str) -> None:
    problem = packed_problem(((50, 30), (0, 7), (13, 90)), tail=(1, 1), heads=4, kv_heads=2)
    steps = _steps(problem, make_variant(loop_order, tiles=(32, 16, 64, 32)))
    keys, queries = 128 // 16 + 3 + 1, 64 // 64 + 3 + 1
    programs = {name: step.programs for name, step in steps.items()}
    if loop_order == "fused":
        assert programs["backward_fused"] == 2 * (keys + 2 * queries)
    else:
        assert programs["backward_keys"] == 2 * keys
    if loop_order == "split":
        assert programs["backward_queries"] == 4 * queries
    if loop_order == "key_outer":
        # This one looks at rows alone, whatever their sequence.
        assert programs["backward_postprocess"] == 4


def test_packed_sequences_are_never_promised_to_fill_their_tiles() -> None:
    problem = packed_problem(((64, 64), (64, 64)))
    for step in _steps(problem, make_variant("split")).values():
        assert not dict(step.plan.constants).get("EVEN_M", False)
        assert not dict(step.plan.constants).get("EVEN_N", False)


@pytest.mark.parametrize("alignment", list(Alignment))
def test_packed_sequences_count_the_difference_of_their_lengths_once_or_not_at_all(alignment: Alignment) -> None:
    problem = packed_problem(((64, 30), (64, 64)), mask=Mask.CAUSAL, alignment=alignment)
    numbers = _numbers(_steps(problem, make_variant("fused"))["backward_fused"])
    assert numbers["diagonal"] == (1 if alignment is Alignment.BOTTOM_RIGHT else 0)


def test_no_length_that_stands_for_all_reaches_a_kernel_of_packed_sequences() -> None:
    problem = packed_problem(((50, 30), (0, 7)))
    variant = make_variant("key_outer")
    assert _steps(problem, variant) == _steps(problem.replace(seqlen_q=3, seqlen_k=4000), variant)


def test_workspaces_of_packed_sequences_hold_whole_tiles_of_each() -> None:
    lengths = ((50, 30), (1, 7), (0, 5), (200, 64))
    problem = packed_problem(lengths, tail=(3, 0))
    variant = make_variant("split", tiles=(32, 32, 64, 32))
    # The largest tile of queries has 128 rows: that of the kernel that runs first.
    padding = dict(_steps(problem, variant)["backward_keys"].plan.constants)["PADDING"]
    assert padding == 128
    ends = [0]
    begin = 0
    for index, (rows, _) in enumerate((*lengths, (3, 0))):
        first = (begin // 128 + index) * 128
        assert first >= ends[-1]
        ends.append(first + -(-rows // 128) * 128)
        begin += rows
    assert ends[-1] <= padded_rows(problem, variant)


def test_sizes_beyond_32_bits_are_computed_as_they_are() -> None:
    # 65536 sequences of 512 queries with 64 heads.
    problem = packed_problem(((512, 512),) * 65536, heads=64, kv_heads=8, head_dim=128)
    variant = make_variant("key_outer", tiles=(64, 128, 0, 0))
    rows = padded_rows(problem, variant)
    assert rows < 1 << 31
    assert problem.heads * rows > 1 << 31
    steps = _steps(problem, variant)
    assert steps["backward_keys"].programs == 8 * (65536 * 512 // 128 + 65536 + 1)
    strides = _numbers(steps["backward_keys"])
    assert strides["stride_q_h"] == 65536 * 512 * 128 > 1 << 31
    for step in steps.values():
        wide = {argument.name for argument in step.plan.numbers if argument.type == "i64"}
        narrow = {name: number for name, number in _numbers(step).items() if name not in wide}
        assert all(abs(number) < 1 << 31 for number in narrow.values())


def test_strides_of_a_large_mask_are_64_bits_wide() -> None:
    problem = backward_problem(batch=4, heads=16, seqlen_q=16384).replace(mask_tensor=MaskTensor.BOOL)
    step = _steps(problem, make_variant("fused"))["backward_fused"]
    assert _numbers(step)["stride_mask_b"] == 16 * 16384 * 16384 > 1 << 31
    types = {argument.name: argument.type for argument in step.plan.numbers}
    assert all(types[f"stride_mask_{dim}"] == "i64" for dim in "bhm")


def test_a_usual_mask_takes_no_memory() -> None:
    problem = backward_problem(batch=64, heads=64, seqlen_q=1 << 20).replace(mask_tensor=MaskTensor.FLOAT)
    mask = usual_masks(problem)["mask"]
    assert mask.shape == (64, 64, 1 << 20, 1 << 20)
