from __future__ import annotations

import math

import pytest
import torch

from autoflash.evaluate.accuracy import Errors, accuracy, accuracy_cases, torch_errors
from autoflash.problem import DType, Feature, Mask, MaskTensor, Pass
from tests.evaluate.candidates import Kernel
from tests.factories import make_device, make_problem

CPU = make_device("cpu")
SDPA = {"flash", "math"}
NEAR = "mask_mod(reach: int 0) = abs(kv_idx - q_idx) * 3 < reach"
TABLE = "score_mod(n: int 0, t: float 2) = score + t[h, q_idx - kv_idx + n]"


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def cases_of(op=Pass.FORWARD, dtype=DType.FP32, mask=Mask.FULL, **features):
    problem = make_problem(op=op, dtype=dtype, mask=mask, heads=4, kv_heads=2, head_dim=32, seqlen_q=128)
    return accuracy_cases(problem.replace(**features))


@pytest.mark.parametrize(
    ("features", "backends"),
    [
        ({}, SDPA),
        ({"mask": Mask.CAUSAL}, SDPA),
        ({"mask_tensor": MaskTensor.BOOL}, SDPA),
        ({"mask_tensor": MaskTensor.FLOAT}, SDPA),
        ({"window_left": 20}, SDPA),
        ({"packed_q": 256, "packed_k": 256, "batch": 2, "mask": Mask.CAUSAL}, SDPA),
        ({"mask_mod": NEAR}, SDPA),
        ({"mask_mod": NEAR, "mask_tensor": MaskTensor.BOOL}, SDPA),
        ({"score_mod": TABLE}, set()),
        ({"softcap": 20.0}, set()),
        ({"dropout_p": 0.2}, set()),
    ],
)
@pytest.mark.parametrize("op", Pass)
def test_torch_s_backends_err_by_roundings_on_what_they_can_do(op, features, backends):
    for case in cases_of(op, **features):
        errors = torch_errors(case.values, "cpu")

        assert set(errors) == {*backends, "plain"}
        for by_output in errors.values():
            assert set(by_output) == ({"out"} if op is Pass.FORWARD else {"dq", "dk", "dv"})
            assert all(0 < error < 1e-4 for error in by_output.values())


@pytest.mark.parametrize(
    ("features", "outputs"),
    [
        ({"score_mod": TABLE, "params_gradient": True}, {"dparam_1"}),
        ({"bias": True, "bias_gradient": True, "sinks": True}, {"dbias", "dsinks"}),
        ({"alibi": True, "alibi_gradient": True}, {"dalibi_slopes"}),
    ],
)
def test_gradients_of_terms_are_compared_with_plain_torch(features, outputs):
    for case in cases_of(Pass.BACKWARD, **features):
        errors = torch_errors(case.values, "cpu")

        assert set(errors) == {"plain"}
        assert set(errors["plain"]) == {"dq", "dk", "dv", *outputs}
        assert all(0 < error < 1e-4 for error in errors["plain"].values())


def test_a_kernel_stands_beside_them_with_its_own_errors():
    regular, irregular = (accuracy(Kernel(), case, CPU) for case in cases_of(Pass.BACKWARD, mask=Mask.CAUSAL))

    assert irregular.case.problem.seqlen_q == 113
    for one in (regular, irregular):
        assert 0 < one.gate <= 1
        assert [errors.output for errors in one.errors] == ["dq", "dk", "dv"]
        assert all(0.2 < errors.ratio < 20 for errors in one.errors)


def test_a_wrong_kernel_is_rejected_by_the_gate_and_has_a_large_ratio():
    one = accuracy(Kernel("last key dropped"), cases_of()[0], CPU)

    assert one.gate > 1
    assert one.errors[0].ratio > 1000


def test_a_kernel_may_refuse_a_case():
    assert accuracy(Kernel(None, lambda problem, *tensors: "not here"), cases_of()[0], CPU) == "not here"


@pytest.mark.parametrize(
    ("kernel", "torch_errors", "best", "ratio"),
    [
        (2.0, {"flash": 4.0, "math": 1.0, "plain": 0.5}, "math", 2.0),
        (2.0, {"plain": 0.5}, "plain", 4.0),
        (0.0, {"math": 0.0, "plain": 0.0}, "math", 0.0),
        (1.0, {"math": 0.0, "plain": 0.0}, "math", math.inf),
    ],
)
def test_the_ratio_is_to_the_best_backend_that_can(kernel, torch_errors, best, ratio):
    errors = Errors(output="out", kernel=kernel, torch=torch_errors)

    assert (errors.best, errors.ratio) == (best, ratio)


def test_cases_are_a_regular_and_an_irregular_one_that_backends_take():
    cases = cases_of(Pass.BACKWARD, DType.BF16, mask_tensor=MaskTensor.FLOAT)

    assert [(case.problem.seqlen_q, case.problem.seqlen_k) for case in cases] == [(128, 128), (113, 203)]
    assert not any(case.with_dlse for case in cases)
    assert {case.mask.dtype for case in cases} == {None}
    assert all(Feature.FLOAT_MASK in case.problem.features for case in cases)


def test_bare_the_tensors_fill_their_allocations_and_the_gate_is_asked_alone():
    class Watched(Kernel):
        def prepare_forward(self, problem, q, k, v, scale, extras):
            whole = (tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in (q, k, v))
            assert all(whole)
            return super().prepare_forward(problem, q, k, v, scale, extras)

    for case in cases_of():
        found = accuracy(Watched(), case, CPU, is_bare=True)

        assert found.errors == ()
        assert 0 < found.gate <= 1
