"""What other implementations once got wrong about masks, windows and softcap, in the tiled torch family."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from autoflash.evaluate import reference
from autoflash.problem import DType, Mask, MaskTensor, Pass
from autoflash.runtime.executable import Extras
from tests.runtime.tiled import (
    LOOP_ORDERS,
    RNG,
    SCALE,
    Tensors,
    Tiles,
    backward,
    draw,
    exact_backward,
    exact_forward,
    forward,
    problem_with,
    tiled,
)

TILES = [Tiles(16, 16), Tiles(64, 128)]


def masked(tensors: Tensors, mask: Tensor) -> Tensors:
    return tensors._replace(extras=tensors.extras._replace(mask=mask))


@pytest.mark.parametrize("loop_order", LOOP_ORDERS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(6, 10), (130, 130)])
@pytest.mark.parametrize("kind", [MaskTensor.BOOL, MaskTensor.FLOAT])
def test_case_a03_rows_without_a_key_are_zero_and_give_no_gradient(
    loop_order: str, dtype: torch.dtype, seqlen_q: int, seqlen_k: int, kind: MaskTensor
) -> None:
    sizes = {"seqlen_q": seqlen_q, "seqlen_k": seqlen_k, "heads": 4, "head_dim": 16, "head_dim_v": 16}
    problem = problem_with(mask_tensor=kind, **sizes)
    visible = torch.ones(2, 4, seqlen_q, seqlen_k, dtype=torch.bool)
    visible[:, :, 4:], visible[:, 3] = False, False
    mask = visible if kind is MaskTensor.BOOL else torch.zeros(visible.shape).masked_fill(~visible, -math.inf)
    tensors = masked(draw(problem, dtype), mask)

    out, lse = forward(problem, tensors, loop_order)
    dq, dk, dv = backward(problem, tensors, out, lse, loop_order)

    dead = ~visible.any(dim=-1)
    assert (out[dead] == 0.0).all()
    assert (dq[dead] == 0.0).all()
    assert torch.equal(lse == -math.inf, dead)
    assert dq.isfinite().all()
    q, k, v, dout, dlse, _ = tensors
    living = (q[:, :, :4], k, v, dout[:, :, :4], dlse[:, :, :4])
    expected = reference.gradients(*living, mask=visible[:, :, :4], scale=SCALE)
    for gradient, exact in zip((dk, dv), expected[1:], strict=True):
        torch.testing.assert_close(gradient.double(), exact, rtol=2e-2, atol=5e-2)


@pytest.mark.parametrize(
    "others", [{}, {"softcap": 2.0}, {"window_left": 12}, {"dropout_p": 0.5}, {"mask": Mask.CAUSAL}], ids=str
)
@pytest.mark.parametrize("kind", [MaskTensor.BOOL, MaskTensor.FLOAT])
@pytest.mark.parametrize("loop_order", LOOP_ORDERS)
def test_case_a05_a42_a_mask_is_obeyed_beside_every_other_argument(
    others: dict[str, object], kind: MaskTensor, loop_order: str
) -> None:
    problem = problem_with(mask_tensor=kind, seqlen_q=32, seqlen_k=32, **others)
    tensors = draw(problem)
    unmasked = problem.replace(mask_tensor=MaskTensor.NONE)

    out, lse = forward(problem, tensors, loop_order)

    torch.testing.assert_close(out, exact_forward(problem, tensors)[0])
    assert not torch.allclose(out, forward(unmasked, tensors, loop_order)[0], atol=1e-2)
    assert not torch.allclose(lse, forward(unmasked, tensors, loop_order)[1], atol=1e-2)


@pytest.mark.parametrize("loop_order", LOOP_ORDERS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 5e-3)])
@pytest.mark.parametrize("others", [{}, {"mask": Mask.CAUSAL, "window_left": 40}], ids=["alone", "causal, window"])
def test_case_a08_softcap_has_its_slope_in_the_backward(
    loop_order: str, dtype: torch.dtype, tolerance: float, others: dict[str, object]
) -> None:
    sizes = {"batch": 1, "heads": 2, "kv_heads": 2, "seqlen_q": 129, "seqlen_k": 129, "head_dim": 64, "head_dim_v": 64}
    problem = problem_with(softcap=30.0, **sizes, **others)
    tensors = draw(problem, dtype)
    scores = (tensors.q.double() @ tensors.k.double().mT * SCALE).abs().max().item()
    tensors = tensors._replace(q=(tensors.q.double() * (170.0 / scores)).to(dtype))

    out, lse = exact_forward(problem, tensors)
    gradients = backward(problem, tensors, out.to(dtype), lse.float(), loop_order)

    for gradient, exact in zip(gradients, exact_backward(problem, tensors), strict=True):
        assert (gradient.double() - exact).norm() <= tolerance * exact.norm()


HIDDEN = {
    "causal": {"mask": Mask.CAUSAL},
    "window": {"window_left": 64, "window_right": 0},
    "first keys": {"mask_tensor": MaskTensor.BOOL},
    "last keys": {"mask_tensor": MaskTensor.BOOL},
}


@pytest.mark.parametrize("hidden", HIDDEN)
@pytest.mark.parametrize("loop_order", LOOP_ORDERS)
@pytest.mark.parametrize("tiles", [Tiles(m, n) for m, n in itertools.product([16, 64, 128], [16, 64, 256])], ids=str)
def test_case_a11_very_negative_scores_behind_a_hidden_tile_keep_their_weight(
    hidden: str, loop_order: str, tiles: Tiles
) -> None:
    sizes = {"batch": 1, "heads": 14, "seqlen_q": 88, "seqlen_k": 448, "head_dim": 64, "head_dim_v": 64}
    problem = problem_with(dtype=DType.BF16, **sizes, **HIDDEN[hidden])
    tensors = draw(problem, torch.bfloat16, (1, 1, 1, 448))
    q, k = tensors.q * 0.1, tensors.k * 0.1
    q[..., 0], k[..., 0] = 1.0, -150.0 / SCALE
    visible = torch.arange(448).expand(1, 14, 88, 448)
    tensors = tensors._replace(q=q, k=k)
    if "keys" in hidden:
        tensors = masked(tensors, visible >= 256 if hidden == "first keys" else visible < 192)

    out, lse = forward(problem, tensors, loop_order, tiles)

    expected, expected_lse = exact_forward(problem, tensors)
    torch.testing.assert_close(out.double(), expected, rtol=0.0, atol=2e-2)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=0.0, atol=1e-3)
    assert (lse < -140.0).all()
    assert (out != 0.0).any(dim=-1).all()


@pytest.mark.parametrize("loop_order", LOOP_ORDERS)
@pytest.mark.parametrize("width", [1, 2, 4, 15, 16, 17])
def test_case_a30_a_window_counts_both_of_its_ends(loop_order: str, width: int) -> None:
    sizes = {"batch": 1, "heads": 1, "kv_heads": 1, "seqlen_q": 16, "seqlen_k": 16, "head_dim": 16, "head_dim_v": 16}
    problem = problem_with(window_left=width, window_right=0, **sizes)
    tensors = draw(problem)._replace(v=torch.eye(16, dtype=torch.float64)[None, None])

    for tiles in (Tiles(5, 3), Tiles(16, 32)):
        support = forward(problem, tensors, loop_order, tiles)[0][0, 0] != 0.0

        i, j = torch.arange(16)[:, None], torch.arange(16)
        assert torch.equal(support, (i - width <= j) & (j <= i))


@pytest.mark.parametrize("loop_order", LOOP_ORDERS)
@pytest.mark.parametrize("tiles", [Tiles(m, n) for m, n in itertools.product([16, 64, 128], repeat=2)], ids=str)
def test_case_a41_nothing_outside_the_window_is_read(loop_order: str, tiles: Tiles) -> None:
    sizes = {"batch": 1, "heads": 2, "kv_heads": 2, "seqlen_q": 512, "seqlen_k": 512, "head_dim": 64, "head_dim_v": 64}
    problem = problem_with(mask=Mask.CAUSAL, window_left=63, window_right=0, **sizes)
    tensors = draw(problem, torch.bfloat16)
    q, k, v = tensors[:3]
    late = tensors._replace(q=q[:, :, 384:], k=k[:, :, 256:], v=v[:, :, 256:])
    expected, _ = exact_forward(problem.replace(seqlen_q=128, seqlen_k=256), late)
    k[:, :, :256], v[:, :, :256] = math.nan, math.nan

    out, lse = forward(problem, tensors, loop_order, tiles)
    dq, _, _ = backward(problem, tensors, out, lse, loop_order, tiles)

    torch.testing.assert_close(out[:, :, 384:].double(), expected, rtol=1e-2, atol=2e-2)
    assert dq[:, :, 384:].isfinite().all()


def test_every_element_of_the_result_depends_on_what_was_asked() -> None:
    problem = problem_with(seqlen_q=24, seqlen_k=24)
    tensors = draw(problem.replace(mask_tensor=MaskTensor.BOOL))
    tensors = tensors._replace(extras=Extras(mask=tensors.extras.mask, rng=RNG))
    changes = [{"softcap": 1.0}, {"window_left": 3}, {"window_right": 3}, {"dropout_p": 0.5}, {"mask": Mask.CAUSAL}]

    plain = forward(problem, tensors)[0]

    for change in changes:
        assert not torch.allclose(forward(problem.replace(**change), tensors)[0], plain, atol=1e-3), change
    assert tiled(problem).why_not(problem.replace(op=Pass.BACKWARD)) is not None
