"""Which compiled form a forward call takes, and what it does per call. Numerics are tested in tests/interpreter."""

from __future__ import annotations

import math
import os

import pytest
import torch
from torch import Tensor

from autoflash.errors import NoKernelError, UnsupportedError
from autoflash.problem import DType, Form, Mask, Problem
from autoflash.runtime.layouts import block_dim
from autoflash.runtime.triton_forward import TritonForward, forward_plan
from autoflash.variant import Variant
from tests.factories import make_device, make_problem, make_variant
from tests.runtime.fake_gpu import FakeGpu

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("compiles kernels", allow_module_level=True)

SMALL = {"BLOCK_M": 64, "BLOCK_N": 32, "num_stages": 1}
PROBLEM = make_problem(head_dim=64, heads=2, kv_heads=1, seqlen_q=64, seqlen_k=96)


def tensors(problem: Problem) -> tuple[Tensor, Tensor, Tensor]:
    def zeros(heads: int, rows: int, width: int) -> Tensor:
        return torch.zeros(problem.batch, heads, rows, width, dtype=torch.bfloat16)

    return (
        zeros(problem.heads, problem.seqlen_q, problem.head_dim),
        zeros(problem.kv_heads, problem.seqlen_k, problem.head_dim),
        zeros(problem.kv_heads, problem.seqlen_k, problem.head_dim_v),
    )


def executable(problem: Problem, variant: Variant, arch: str = "sm_90") -> TritonForward:
    return TritonForward(Form.of(problem), variant, make_device(arch))


@pytest.mark.parametrize(
    ("head_dim", "block"), [(1, 16), (8, 16), (16, 16), (40, 64), (64, 64), (72, 128), (80, 128), (96, 128), (256, 256)]
)
def test_tile_columns_are_a_power_of_two(head_dim: int, block: int) -> None:
    assert block_dim(head_dim) == block


def test_plan_promises_only_what_a_dense_call_keeps() -> None:
    dense = forward_plan(PROBLEM, make_variant(**SMALL))
    strided = forward_plan(PROBLEM, make_variant(**SMALL), dense=False)

    assert dict(dense.constants)["stride_qd"] == 1
    assert {number.multiple_of for number in dense.numbers if number.name.startswith("stride_")} == {8}
    assert "stride_qd" not in dict(strided.constants)
    assert {number.multiple_of for number in strided.numbers} == {1}
    assert not any(tensor.aligned for tensor in strided.tensors)


@pytest.mark.parametrize(
    ("change", "even_m", "even_n", "has_mask"),
    [
        ({}, True, True, False),
        ({"seqlen_q": 65}, False, True, False),
        ({"seqlen_k": 97}, True, False, True),
        ({"mask": Mask.CAUSAL}, True, True, True),
    ],
)
def test_plan_checks_only_what_can_overrun(change: dict[str, int], even_m: bool, even_n: bool, has_mask: bool) -> None:
    constants = dict(forward_plan(PROBLEM.replace(**change), make_variant(**SMALL)).constants)

    assert (constants["EVEN_M"], constants["EVEN_N"], constants["HAS_MASK"]) == (even_m, even_n, has_mask)


def test_plan_is_shared_by_all_sizes_of_the_same_divisibility() -> None:
    other = PROBLEM.replace(batch=3, heads=8, kv_heads=2, seqlen_q=640, seqlen_k=320)

    assert forward_plan(PROBLEM, make_variant(**SMALL)) == forward_plan(other, make_variant(**SMALL))


@pytest.mark.parametrize(("tf32", "precision"), [(False, "ieee"), (True, "tf32")])
def test_float32_is_exact_unless_tf32_was_asked_for(tf32: bool, precision: str) -> None:
    problem = make_problem(dtype=DType.FP32, tf32=tf32)

    assert dict(forward_plan(problem, make_variant(**SMALL)).constants)["PRECISION"] == precision


def test_call_launches_one_program_for_each_tile_with_real_strides(gpu: FakeGpu) -> None:
    problem = PROBLEM.replace(batch=2, seqlen_q=130)
    q, k, v = tensors(problem)
    q = torch.zeros(2, 130, 2, 64, dtype=torch.bfloat16).transpose(1, 2)
    call = executable(problem, make_variant(**SMALL)).prepare_forward(problem, q, k, v, 0.5)

    out, lse = call(q, k, v)

    (arguments,) = gpu.launches
    assert arguments[0] == 2 * 2 * 3
    assert arguments[9:14] == tuple(tensor.data_ptr() for tensor in (q, k, v, out, lse))
    assert out.stride() == q.stride()
    # The key and value head is the only one: its stride is of no account.
    assert arguments[14:26] == (16640, 64, 128, 6144, 0, 64, 6144, 0, 64, 16640, 64, 128)
    assert arguments[26] == pytest.approx(0.5 * math.log2(math.e))
    assert arguments[27:] == (2, 2, 130, 96, problem.diagonal)


@pytest.mark.parametrize(("scale", "sign", "factor"), [(2.0, 1, 2.0), (-2.0, -1, 2.0), (0.0, 0, 1 / math.log2(math.e))])
def test_kernel_is_given_a_scale_that_is_not_negative(scale: float, sign: int, factor: float, gpu: FakeGpu) -> None:
    q, k, v = tensors(PROBLEM)
    kernel = executable(PROBLEM, make_variant(**SMALL))

    kernel.prepare_forward(PROBLEM, q, k, v, scale)(q, k, v)

    assert gpu.launches[0][26] == pytest.approx(factor * math.log2(math.e))
    assert kernel.is_loaded(PROBLEM, q, k, v) == (sign == 1)


def test_loaded_forms_are_known(gpu: FakeGpu) -> None:
    kernel = executable(PROBLEM, make_variant(**SMALL))
    q, k, v = tensors(PROBLEM)
    strided = torch.zeros(1, 2, 64, 128, dtype=torch.bfloat16)[..., ::2]

    assert not kernel.is_loaded(PROBLEM, q, k, v)
    assert kernel.resources() is None
    kernel.prepare_forward(PROBLEM, q, k, v, 1.0)
    assert kernel.is_loaded(PROBLEM, q, k, v)
    assert not kernel.is_loaded(PROBLEM, strided, k, v)
    assert not kernel.is_loaded(PROBLEM.replace(seqlen_k=97), *tensors(PROBLEM.replace(seqlen_k=97)))
    assert kernel.resources() is not None


def test_misaligned_tensor_takes_the_strided_form(gpu: FakeGpu) -> None:
    q, k, v = tensors(PROBLEM)
    shifted = torch.zeros(q.numel() + 1, dtype=torch.bfloat16)[1:].view(q.shape)

    executable(PROBLEM, make_variant(**SMALL)).prepare_forward(PROBLEM, shifted, k, v, 1.0)(shifted, k, v)

    assert gpu.signatures == [["*bf16"] * 4 + ["*fp32"] + ["i64"] * 16 + ["fp32"] + ["i32"] * 5]


@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(0, 96), (64, 0)])
def test_problem_without_queries_or_keys_is_answered_without_a_launch(
    seqlen_q: int, seqlen_k: int, gpu: FakeGpu
) -> None:
    problem = PROBLEM.replace(seqlen_q=seqlen_q, seqlen_k=seqlen_k)
    q, k, v = tensors(problem)

    out, lse = executable(problem, make_variant(**SMALL)).prepare_forward(problem, q, k, v, 1.0)(q, k, v)

    assert not gpu.launches
    assert torch.equal(out, torch.zeros(1, 2, seqlen_q, 64, dtype=torch.bfloat16))
    assert torch.equal(lse, torch.full((1, 2, seqlen_q), -math.inf))


def test_key_outer_launches_one_program_for_each_head_with_its_state(gpu: FakeGpu) -> None:
    q, k, v = tensors(PROBLEM)
    variant = make_variant(loop_order="key_outer", **SMALL)

    executable(PROBLEM, variant).prepare_forward(PROBLEM, q, k, v, 1.0)(q, k, v)

    assert gpu.launches[0][0] == 2
    assert gpu.signatures[0][:9] == ["*bf16"] * 4 + ["*fp32"] * 4 + ["i64"]


def test_descriptors_need_a_copy_engine() -> None:
    kernel = executable(PROBLEM, make_variant(loads="tma", **SMALL), "sm_80")
    q, k, v = tensors(PROBLEM)

    assert "the device is sm_80" in str(kernel.why_not(PROBLEM, q, k, v))
    with pytest.raises(NoKernelError, match="copy engine"):
        kernel.prepare_forward(PROBLEM, q, k, v, 1.0)


def test_more_tiles_than_a_launch_has_are_refused() -> None:
    problem = PROBLEM.replace(batch=2**25, seqlen_q=64 * 64)

    assert "4294967296 tiles" in str(executable(problem, make_variant(**SMALL)).why_not(problem))


def test_backward_is_refused_by_name() -> None:
    q, k, v = tensors(PROBLEM)

    with pytest.raises(UnsupportedError, match="asked of a forward kernel"):
        executable(PROBLEM, make_variant(**SMALL)).prepare_backward(PROBLEM, q, k, v, q, q, 1.0)
