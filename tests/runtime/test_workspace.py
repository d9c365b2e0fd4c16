"""What calls allocate beside their outputs, against what they are seen to allocate."""

from __future__ import annotations

import os
from collections.abc import Callable
from types import ModuleType

import pytest
import torch

from autoflash.device import CROSS_TARGETS, Device
from autoflash.evaluate.timed_inputs import timed_inputs
from autoflash.problem import DType, Form, Mask, MaskTensor, Pass, Problem
from autoflash.runtime import gluon_backward, launch
from autoflash.runtime.bind import bind, workspace
from autoflash.runtime.executable import Executable, TermGradients
from autoflash.runtime.launch import KernelPlan
from autoflash.runtime.layouts import TORCH_TYPES
from autoflash.runtime.probe import probe
from autoflash.runtime.workspace import Buffer, total_bytes
from autoflash.variant import Choices, Family, Variant
from tests import gradients
from tests.factories import make_problem, make_variant
from tests.runtime.live_bytes import peak_bytes
from tests.runtime.tiled import LOOP_ORDERS, SCALE, Tiles, draw, problem_with, tiled

H200 = CROSS_TARGETS["sm_90"]
needs_triton = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="kernels would be interpreted")


def claimed(problem: Problem, variant: Variant) -> int:
    buffers = workspace(problem, variant)
    assert buffers is not None
    return total_bytes(buffers)


def allocated(kernel: Executable, problem: Problem) -> int:
    """The most that a call holds beside its outputs.

    Those are given where that saves an allocation: the compiled backwards make gradients of their own all the same.
    """
    q, k, v, dout, _, extras = draw(problem, TORCH_TYPES[problem.dtype])
    out, lse = torch.zeros_like(dout), torch.zeros(q.shape[:3])
    if problem.op is Pass.FORWARD:
        forward = kernel.prepare_forward(problem, q, k, v, SCALE, extras)
        return peak_bytes(lambda: forward(q, k, v, out, lse, extras))
    backward = kernel.prepare_backward(problem, q, k, v, out, dout, SCALE, extras)
    if kernel.variant.family.uses_triton:
        return peak_bytes(lambda: backward(q, k, v, out, lse, dout)) - q.nbytes - k.nbytes - v.nbytes
    dq, dk, dv = (torch.empty_like(tensor) for tensor in (q, k, v))
    return peak_bytes(lambda: backward(q, k, v, out, lse, dout, None, dq, dk, dv, extras))


def tiled_problem(op: Pass, **fields: object) -> Problem:
    sizes = {"batch": 1, "heads": 2, "kv_heads": 2, "head_dim": 32, "head_dim_v": 16, "seqlen_q": 256, "seqlen_k": 256}
    return problem_with(op, **{**sizes, **fields})


@pytest.mark.parametrize("tiles", [Tiles(64, 64), Tiles(64, 32, 1), Tiles(32, 64)], ids=str)
@pytest.mark.parametrize("mask", list(Mask))
@pytest.mark.parametrize("dtype", [DType.FP32, DType.BF16])
@pytest.mark.parametrize("kv_heads", [2, 1])
@pytest.mark.parametrize("op", list(Pass))
@pytest.mark.parametrize("loop_order", LOOP_ORDERS)
def test_tiles_in_torch_hold_what_they_say(
    loop_order: str, op: Pass, kv_heads: int, dtype: DType, mask: Mask, tiles: Tiles
) -> None:
    problem = tiled_problem(op, dtype=dtype, kv_heads=kv_heads, mask=mask)
    kernel = tiled(problem, loop_order, tiles)

    assert claimed(problem, kernel.variant) == pytest.approx(allocated(kernel, problem), rel=0.05)


@pytest.mark.parametrize("seqlens", [(200, 300), (300, 200)])
@pytest.mark.parametrize("op", list(Pass))
@pytest.mark.parametrize("loop_order", LOOP_ORDERS)
def test_ragged_tiles_in_torch_hold_little_less(loop_order: str, op: Pass, seqlens: tuple[int, int]) -> None:
    problem = tiled_problem(op, seqlen_q=seqlens[0], seqlen_k=seqlens[1])
    for tiles in (Tiles(128, 128), Tiles(512, 128), Tiles(64, 512)):
        kernel = tiled(problem, loop_order, tiles)
        assert 0.95 < claimed(problem, kernel.variant) / allocated(kernel, problem) < 1.25


FEATURES: dict[str, dict[str, object]] = {
    "softcap": {"softcap": 5.0},
    "window": {"window_left": 100, "window_right": 50},
    "bool mask": {"mask_tensor": MaskTensor.BOOL},
    "float mask": {"mask_tensor": MaskTensor.FLOAT},
    "dropout": {"dropout_p": 0.2},
}


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("op", list(Pass))
@pytest.mark.parametrize("loop_order", LOOP_ORDERS)
def test_features_in_torch_are_estimated(loop_order: str, op: Pass, feature: str) -> None:
    problem = tiled_problem(op, **FEATURES[feature])
    kernel = tiled(problem, loop_order, Tiles(64, 64))

    assert claimed(problem, kernel.variant) == pytest.approx(allocated(kernel, problem), rel=0.25)


@pytest.fixture
def kernels_that_do_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    class Nothing:
        resources = None

        def bind(self, *arguments: object) -> Callable[..., None]:
            return lambda *tensors: None

    def load_kernel(module: ModuleType, plan: KernelPlan, device: Device) -> Nothing:
        return Nothing()

    monkeypatch.setattr(launch, "load_kernel", load_kernel)


@needs_triton
@pytest.mark.usefixtures("kernels_that_do_nothing")
@pytest.mark.parametrize("loop_order", ["query_outer", "key_outer"])
def test_a_triton_forward_holds_what_it_says(loop_order: str) -> None:
    pytest.importorskip("triton")
    problem = make_problem(batch=2, heads=6, kv_heads=2, seqlen_q=100, seqlen_k=70, head_dim=64, head_dim_v=32)
    variant = make_variant(loop_order=loop_order)

    assert claimed(problem, variant) == allocated(bind(Form.of(problem), variant, H200), problem)
    assert claimed(problem, variant) == (0 if loop_order == "query_outer" else 4 * 2 * 6 * 100 * (32 + 2))


@needs_triton
@pytest.mark.usefixtures("kernels_that_do_nothing")
@pytest.mark.parametrize("loop_order", ["split", "fused", "key_outer"])
def test_a_triton_backward_holds_what_it_says(loop_order: str) -> None:
    pytest.importorskip("triton")
    problem = make_problem(op=Pass.BACKWARD, batch=2, heads=6, kv_heads=2, seqlen_q=100, seqlen_k=70, head_dim=64)
    variant = gradients.make_variant(loop_order)

    rows = 2 * 4 * 2 * 6 * 128
    sums = 4 * 2 * 6 * 100 * 64 if loop_order == "key_outer" else 0
    assert claimed(problem, variant) == rows + sums
    assert allocated(bind(Form.of(problem), variant, H200), problem) == rows + sums


@needs_triton
@pytest.mark.usefixtures("kernels_that_do_nothing")
def test_a_gradient_of_slopes_is_in_what_a_triton_backward_holds() -> None:
    pytest.importorskip("triton")
    problem = make_problem(op=Pass.BACKWARD, batch=2, heads=6, kv_heads=2, seqlen_q=100, seqlen_k=70, head_dim=64)
    problem = problem.replace(alibi=True, alibi_gradient=True)
    variant = gradients.make_variant("split")
    q, k, v, out, lse, dout, extras = timed_inputs(problem, probe("cpu"), 0)
    terms = TermGradients.asked_by(problem, extras)

    call = bind(Form.of(problem), variant, H200).prepare_backward(problem, q, k, v, out, dout, SCALE, extras)
    held = peak_bytes(lambda: call(q, k, v, out, lse, dout, extras=extras, terms=terms))

    # Tiles of 64 queries have a share each.
    assert claimed(problem, variant) == claimed(problem.replace(alibi_gradient=False), variant) + 4 * 2 * 6 * 2
    assert held - q.nbytes - k.nbytes - v.nbytes == pytest.approx(claimed(problem, variant), abs=512)


def test_sums_of_parameters_are_in_what_a_triton_backward_holds() -> None:
    problem = make_problem(op=Pass.BACKWARD, batch=2, heads=6, seqlen_q=100, seqlen_k=70, head_dim=64)
    relative = problem.replace(score_mod="score_mod(n: int 0, t: float 2) = score + t[h, q_idx - kv_idx + n]")
    variant = gradients.make_variant("split")

    asked = claimed(relative.replace(params_gradient=True), variant)

    # Two tiles of queries and two of keys lie on three diagonals, of 128 differences.
    assert asked == claimed(relative, variant) + 12 * 2 * 6 * 3 * 128


@needs_triton
@pytest.mark.usefixtures("kernels_that_do_nothing")
def test_a_hopper_backward_holds_what_it_says() -> None:
    pytest.importorskip("triton.experimental.gluon")
    problem = make_problem(op=Pass.BACKWARD, batch=2, heads=6, kv_heads=2, seqlen_q=100, seqlen_k=70, head_dim=96)
    variant = make_variant(Family.GLUON_SM90, op=Pass.BACKWARD)

    padded = 2 * 6 * 128
    assert claimed(problem, variant) == 2 * 4 * padded + 4 * padded * 128
    assert allocated(bind(Form.of(problem), variant, H200), problem) == claimed(problem, variant)


def test_a_hopper_forward_keeps_a_ticket_where_tiles_are_drawn() -> None:
    problem = make_problem(head_dim=128)

    assert workspace(problem, make_variant(Family.GLUON_SM90)) == ()
    assert workspace(problem, make_variant(Family.GLUON_SM90, schedule="ticketed")) == (
        Buffer(name="ticket counter, int32", size_bytes=torch.zeros(1, dtype=torch.int32).nbytes),
    )


def test_packed_rows_are_padded_once_for_each_sequence() -> None:
    problem = make_problem(op=Pass.BACKWARD, batch=3, heads=2, seqlen_q=100)
    packed = problem.replace(packed_q=300, packed_k=300)
    variant = gradients.make_variant("key_outer")

    assert claimed(packed, variant) == 4 * 2 * (2 * (300 // 128 + 3 + 1) * 128 + 300 * 64)


def test_a_vendors_kernel_does_not_say() -> None:
    variant = Variant(family=Family.VENDOR, structure=Choices(backend="flash"), config=Choices())

    assert workspace(make_problem(), variant) is None


@pytest.mark.parametrize("op", list(Pass))
@pytest.mark.parametrize("family", [Family.TORCH_TILED, Family.TRITON, Family.GLUON_SM90])
def test_an_empty_problem_needs_nothing(family: Family, op: Pass) -> None:
    problem = make_problem(op=op, seqlen_q=0, seqlen_k=5)

    assert workspace(problem, make_variant(family, op=op)) == ()


def test_hopper_workspaces_are_those_of_the_plan() -> None:
    problem = make_problem(op=Pass.BACKWARD, heads=3, seqlen_q=129, head_dim=64)

    added_up = make_variant(Family.GLUON_SM90, op=Pass.BACKWARD)
    apart = make_variant(Family.GLUON_SM90, op=Pass.BACKWARD, loop_order="split")

    rows, sums = gluon_backward.workspace(problem, added_up)

    assert rows.size_bytes == 2 * 4 * 3 * 256
    assert sums.size_bytes == 4 * 3 * 256 * 64
    assert gluon_backward.workspace(problem, apart) == (rows,)
