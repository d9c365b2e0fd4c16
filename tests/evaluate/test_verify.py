from __future__ import annotations

import math

import pytest
import torch

from autoflash.evaluate.expected import expected
from autoflash.evaluate.grid import Case, determinism_case, full_cases, screen_cases
from autoflash.evaluate.inputs import Memory
from autoflash.evaluate.verify import WORST_RATIO, Limit, compare, compare_lse, verify
from autoflash.problem import Alignment, DType, Form, Mask, MaskTensor, Pass
from autoflash.runtime.bind import bind
from autoflash.trial import Level
from autoflash.variant import Choices, Family, Variant
from tests.evaluate.candidates import Fails, Kernel
from tests.factories import make_device, make_problem

SMALL = {"batch": 1, "heads": 4, "kv_heads": 2, "head_dim": 32, "seqlen_q": 128, "seqlen_k": 128}


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def problem_of(**changes):
    return make_problem(**{**SMALL, "dtype": DType.FP32, **changes})


def tiled(form, loop_order):
    variant = Variant(
        family=Family.TORCH_TILED,
        structure=Choices(loop_order=loop_order),
        config=Choices(block_m=64, block_n=128, heads_per_step=0),
    )
    return bind(form, variant, make_device("cpu"))


@pytest.mark.parametrize("loop_order", ["query_outer", "key_outer"])
@pytest.mark.parametrize("mask", Mask)
@pytest.mark.parametrize("dtype", DType)
@pytest.mark.parametrize("op", Pass)
def test_the_tiled_torch_family_passes_the_grid_everywhere(op, dtype, mask, loop_order):
    problem = problem_of(op=op, dtype=dtype, mask=mask, deterministic=True)

    verification = verify(tiled(Form.of(problem), loop_order), problem, Level.FULL)

    assert verification.passed, verification.detail
    assert verification.checks > 15


@pytest.mark.parametrize(
    ("head_dim", "seqlen", "window_left"),
    [(32, 2, None), (64, 512, 170)],
)
def test_what_the_rounding_of_a_given_output_does_is_not_the_kernels_fault(head_dim, seqlen, window_left):
    sizes = {"head_dim": head_dim, "batch": 2, "heads": 2, "kv_heads": 2, "seqlen_q": seqlen, "seqlen_k": seqlen}
    problem = problem_of(op=Pass.BACKWARD, dtype=DType.FP16, mask=Mask.CAUSAL, **sizes).replace(window_left=window_left)

    verification = verify(tiled(Form.of(problem), "query_outer"), problem, Level.SCREEN)

    assert verification.passed, verification.detail


ALL_FEATURES = {"window_left": 60, "window_right": 5, "softcap": 20.0, "dropout_p": 0.2}


@pytest.mark.parametrize(
    "features", [{"mask_tensor": MaskTensor.FLOAT}, {"packed_q": 256, "packed_k": 256, "batch": 2}]
)
@pytest.mark.parametrize("loop_order", ["query_outer", "key_outer"])
@pytest.mark.parametrize(("dtype", "mask"), [(DType.BF16, Mask.CAUSAL), (DType.FP32, Mask.FULL)])
@pytest.mark.parametrize("op", Pass)
def test_the_tiled_torch_family_passes_the_grid_with_all_features(op, dtype, mask, loop_order, features):
    problem = problem_of(op=op, dtype=dtype, mask=mask, deterministic=True).replace(**ALL_FEATURES, **features)

    verification = verify(tiled(Form.of(problem), loop_order), problem, Level.FULL)

    assert verification.passed, verification.detail
    assert verification.checks > 15


@pytest.mark.parametrize("features", [ALL_FEATURES, {"packed_q": 256, "packed_k": 256, "batch": 2}])
def test_a_backward_with_features_that_varies_is_rejected_where_determinism_is_asked_for(features):
    problem = problem_of(op=Pass.BACKWARD, deterministic=True).replace(**features)

    verification = verify(Kernel("not deterministic"), problem, Level.SCREEN)

    assert not verification.passed
    assert "differs between launches" in verification.detail


@pytest.mark.parametrize("backend", ["flash", "math"])
@pytest.mark.parametrize("op", Pass)
def test_vendor_kernels_pass_the_cases_that_they_can_do(op, backend):
    variant = Variant(family=Family.VENDOR, structure=Choices(backend=backend), config=Choices())

    verification = verify(bind(Form(op=op, mask=Mask.FULL), variant, make_device("cpu")), problem_of(op=op), Level.FULL)

    assert verification.passed, verification.detail
    assert 10 < verification.checks <= len(full_cases(problem_of(op=op)))


def test_cases_that_are_refused_are_left_out():
    def only_even(problem, *tensors):
        return "ragged" if problem.seqlen_k % 16 else None

    verification = verify(Kernel("last key doubled", only_even), problem_of(), Level.SCREEN)
    careful = verify(Kernel(None, only_even), problem_of(), Level.SCREEN)

    assert not verification.passed
    assert careful.passed
    assert careful.checks == 1


def test_a_kernel_that_refuses_everything_has_not_passed():
    verification = verify(Kernel(None, lambda problem, *tensors: "no copy engine"), problem_of(), Level.FULL)

    assert not verification.passed
    assert verification.worst_ratio == WORST_RATIO
    assert verification.checks == 0
    assert "no copy engine" in verification.detail


def test_what_a_kernel_raises_reaches_the_caller():
    with pytest.raises(RuntimeError, match="illegal memory access"):
        verify(Fails(), problem_of(), Level.SCREEN)


def test_the_detail_names_the_output_and_the_case():
    verification = verify(Kernel("last block of out wrong"), problem_of(mask=Mask.CAUSAL), Level.SCREEN)

    assert "out" in verification.detail
    assert "128x128 causal" in verification.detail


def test_the_worst_ratio_is_the_error_in_units_of_what_is_allowed():
    limit = Limit(exact=torch.zeros(4).double(), max_error=0.5, mean_error=0.4)

    finding = compare("out", torch.tensor([0.0, 0.1, -0.25, 0.0]), limit)

    assert finding.ratio == pytest.approx(0.5)
    assert finding.words == "largest error of out is 0.25, allowed 0.5"


def test_a_bias_is_rejected_by_its_mean_where_no_element_is_far_off():
    limit = Limit(exact=torch.zeros(4).double(), max_error=0.5, mean_error=0.1)

    finding = compare("dq", torch.full((4,), 0.2), limit)

    assert finding.ratio == pytest.approx(2.0)
    assert "mean error of dq" in finding.words


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_elements_that_are_not_finite_are_rejected(value):
    limit = Limit(exact=torch.zeros(4).double(), max_error=0.5, mean_error=0.1)

    assert compare("out", torch.tensor([0.0, value, 0.0, 0.0]), limit).ratio == WORST_RATIO


def test_another_shape_is_rejected():
    limit = Limit(exact=torch.zeros(4).double(), max_error=0.5, mean_error=0.1)

    assert compare("out", torch.zeros(5), limit).ratio == WORST_RATIO


@pytest.mark.parametrize(
    ("actual", "exact", "ratio"),
    [
        ([1.0, -math.inf], [1.0, -math.inf], 0.0),
        ([1.00005, 2.0], [1.0, 2.0], 0.48),
        ([1.0, -1e30], [1.0, -math.inf], WORST_RATIO),
        ([-math.inf, 2.0], [1.0, 2.0], WORST_RATIO),
        ([math.nan, 2.0], [1.0, 2.0], WORST_RATIO),
        ([1000.003, 2.0], [1000.0, 2.0], 0.77),
    ],
)
def test_the_log_sum_exp_has_its_own_rule(actual, exact, ratio):
    finding = compare_lse(torch.tensor(actual), torch.tensor(exact).double())

    assert finding.ratio == pytest.approx(ratio, abs=0.02)


def test_a_log_sum_exp_in_half_precision_is_rejected():
    assert compare_lse(torch.zeros(3, dtype=torch.float16), torch.zeros(3).double()).ratio == WORST_RATIO


@pytest.mark.parametrize(("seqlen", "reduced"), [(100, 100), (512, 512), (16384, 512), (16383, 767), (1040, 528)])
def test_long_sequences_are_brought_down_in_their_class_of_divisibility(seqlen, reduced):
    own = screen_cases(problem_of(seqlen_q=seqlen, seqlen_k=seqlen, batch=64, heads=32, kv_heads=8))[0].problem

    assert (own.seqlen_q, own.seqlen_k) == (reduced, reduced)
    assert own.group == 4
    assert own.batch * own.heads <= 16


def test_the_grid_covers_what_dispatch_can_select():
    cases = full_cases(problem_of(op=Pass.BACKWARD, mask=Mask.CAUSAL, heads=8, kv_heads=2))
    problems = [case.problem for case in cases]

    assert {case.memory for case in cases} == set(Memory) - {Memory.SHARED_HEAD, Memory.SHARED_ELEMENT}
    assert {Alignment.BOTTOM_RIGHT, Alignment.TOP_LEFT} <= {problem.alignment for problem in problems}
    assert {1, 2, 3, 4} <= {problem.group for problem in problems}
    assert {case.problem.seqlen_k % 256 == 0 for case in cases if case.memory is Memory.STRIDED} == {True, False}
    assert {case.problem.seqlen_k % 256 == 0 for case in cases if case.memory is Memory.DENSE} == {True, False}
    assert any(problem.seqlen_q > problem.seqlen_k > 0 for problem in problems)
    assert any(problem.seqlen_k == 0 for problem in problems)
    assert any(problem.seqlen_q == 0 for problem in problems)
    assert any(case.scale is not None and case.scale < 0 for case in cases)
    assert any(case.with_dlse for case in cases)
    assert len(set(cases)) == len(cases)


def test_determinism_is_tried_with_more_tiles_than_multiprocessors():
    case = determinism_case(problem_of(op=Pass.BACKWARD, deterministic=True), 132)

    assert case.problem.deterministic
    assert case.problem.batch * case.problem.heads * 512 // 128 > 132


def test_exact_results_are_computed_once_for_all_kernels_and_layouts(monkeypatch):
    expected.cache_clear()
    verify(Kernel(), problem_of(), Level.FULL)
    computed = expected.cache_info().misses

    verify(Kernel(), problem_of(), Level.FULL)

    assert expected.cache_info().misses == computed
    assert Case(problem=problem_of(), memory=Memory.BSHD).values == Case(problem=problem_of()).values


def test_a_gradient_of_zero_by_cancellation_may_be_rounded_in_float32():
    problem = problem_of(op=Pass.BACKWARD, seqlen_q=70, seqlen_k=1)

    wanted = expected(Case(problem=problem), "cpu", True)

    limits = dict(wanted.limits)
    assert limits["dq"].exact.abs().max() < 1e-12
    assert 1e-7 < limits["dq"].max_error < 1e-3
