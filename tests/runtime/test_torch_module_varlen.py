"""Packed sequences in the tiled torch family: each is computed as if it were alone."""

from __future__ import annotations

import pytest
import torch

from autoflash.errors import InvalidProblemError
from autoflash.evaluate.verify import verify
from autoflash.problem import Alignment, DType, Mask, Pass
from autoflash.runtime.executable import NO_EXTRAS, Extras
from autoflash.trial import Level
from tests.runtime.tiled import (
    FLOAT64,
    LOOP_ORDERS,
    SCALE,
    Tensors,
    Tiles,
    backward,
    draw,
    exact_backward,
    exact_forward,
    forward,
    packed,
    problem_with,
    tiled,
)

LENGTHS = {
    "different": [(5, 9), (63, 40), (1, 1), (17, 30)],
    "equal side by side": [(7, 9)] * 5 + [(20, 20)] * 3 + [(7, 9)],
    "empty ones": [(0, 0), (0, 7), (9, 0), (0, 0), (12, 5), (0, 3)],
    "one": [(33, 21)],
    "none": [],
}
FEATURES: dict[str, dict[str, object]] = {
    "alone": {},
    "causal": {"mask": Mask.CAUSAL},
    "causal top-left": {"mask": Mask.CAUSAL, "alignment": Alignment.TOP_LEFT},
    "window": {"window_left": 5, "window_right": 3},
    "window top-left": {"window_left": 5, "alignment": Alignment.TOP_LEFT},
    "softcap": {"softcap": 1.5},
    "dropout": {"dropout_p": 0.3},
    "all": {"softcap": 1.5, "mask": Mask.CAUSAL, "window_left": 5, "dropout_p": 0.3},
}
PACKED = {"packed_q": 150, "packed_k": 160, "batch": 3}
GATE = {"head_dim": 32, "head_dim_v": 32, "heads": 4, "seqlen_q": 96, "seqlen_k": 96, "packed_q": 192, "packed_k": 192}


def with_lengths(tensors: Tensors, lengths: list[tuple[int, int]]) -> Tensors:
    if lengths:
        return packed(tensors, lengths)
    none = torch.zeros(1, dtype=torch.int32)
    return tensors._replace(extras=tensors.extras._replace(cu_seqlens_q=none, cu_seqlens_k=none))


@pytest.mark.parametrize("features", FEATURES)
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("loop_order", LOOP_ORDERS)
def test_every_sequence_is_exact_in_float64(features: str, lengths: str, loop_order: str) -> None:
    problem = problem_with(**PACKED, **FEATURES[features])
    tensors = with_lengths(draw(problem), LENGTHS[lengths])
    expected, expected_lse = exact_forward(problem, tensors)

    for tiles in (Tiles(10, 7, 3), Tiles(64, 128)):
        out, lse = forward(problem, tensors, loop_order, tiles)
        gradients = backward(problem, tensors, expected, expected_lse, loop_order, tiles)

        torch.testing.assert_close(out, expected, **FLOAT64)
        torch.testing.assert_close(lse, expected_lse.float())
        for gradient, exact in zip(gradients, exact_backward(problem, tensors), strict=True):
            torch.testing.assert_close(gradient, exact, **FLOAT64)


@pytest.mark.parametrize("features", ["causal", "all"])
@pytest.mark.parametrize("dtype", DType)
@pytest.mark.parametrize("op", Pass)
@pytest.mark.parametrize("loop_order", LOOP_ORDERS)
def test_packed_sequences_pass_the_gate(features: str, dtype: DType, op: Pass, loop_order: str) -> None:
    problem = problem_with(op, dtype=dtype, **GATE, **FEATURES[features])

    verification = verify(tiled(problem, loop_order, Tiles(64, 32)), problem, Level.SCREEN)

    assert verification.passed, verification


@pytest.mark.parametrize("op", Pass)
def test_packed_sequences_with_all_features_pass_the_whole_gate(op: Pass) -> None:
    problem = problem_with(op, dtype=DType.BF16, **GATE, **FEATURES["all"])
    order = "key_outer" if op is Pass.FORWARD else "query_outer"

    verification = verify(tiled(problem, order, Tiles(64, 64)), problem, Level.FULL)

    assert verification.passed, verification


def test_unused_rows_are_written_but_never_read() -> None:
    problem = problem_with(**PACKED, **FEATURES["all"])
    tensors = packed(draw(problem), [(5, 9), (20, 30)])
    out, lse = torch.full_like(tensors.dout, torch.nan), torch.full(tensors.dlse.shape, torch.nan)
    extras = tensors.extras

    call = tiled(problem).prepare_forward(problem, *tensors[:3], SCALE, extras)
    call(*tensors[:3], out=out, lse=lse, extras=extras)
    out_with_garbage = out.clone()
    out_with_garbage[:, :, 25:] = torch.nan
    dq, dk, dv = backward(problem, tensors, out_with_garbage, lse)

    assert tensors.q[:, :, 25:].isnan().all()
    assert out.isfinite().all()
    assert (out[:, :, 25:] == 0.0).all()
    assert (lse[:, :, 25:] == -torch.inf).all()
    for gradient, end in ((dq, 25), (dk, 39), (dv, 39)):
        assert gradient.isfinite().all()
        assert (gradient[:, :, end:] == 0.0).all()


def test_lengths_that_stand_for_all_have_no_influence() -> None:
    problem = problem_with(**PACKED, **FEATURES["all"])
    tensors = packed(draw(problem), LENGTHS["different"])

    out, lse = forward(problem, tensors)
    same_out, same_lse = forward(problem.replace(seqlen_q=1, seqlen_k=999, batch=1), tensors)

    assert torch.equal(out, same_out)
    assert torch.equal(lse, same_lse)


def test_one_prepared_call_serves_any_lengths() -> None:
    problem = problem_with(**PACKED, **FEATURES["causal"])
    tensors = draw(problem)
    first, second = (packed(tensors, LENGTHS[name]) for name in ("different", "empty ones"))
    call = tiled(problem).prepare_forward(problem, *first[:3], SCALE, first.extras)
    call(*first[:3], extras=first.extras)

    out, _ = call(*second[:3], extras=second.extras)

    torch.testing.assert_close(out, exact_forward(problem, second)[0], **FLOAT64)


def test_more_sequences_than_a_grid_of_a_gpu_has_in_its_second_dimension() -> None:
    lengths = [(1, 1)] * 40_000 + [(0, 0)] * 100 + [(0, 1)] * 50 + [(2, 3)] * 30_000
    problem = problem_with(packed_q=100_000, packed_k=130_050, batch=len(lengths), heads=2, kv_heads=1, dropout_p=0.5)
    tensors = packed(draw(problem), lengths)

    out, lse = forward(problem, tensors, tiles=Tiles(128, 256))

    last = draw_last(tensors)
    alone = problem.replace(packed_q=None, packed_k=None, seqlen_q=2, seqlen_k=3, batch=1, dropout_p=0.0)
    torch.testing.assert_close(lse[:, :, -2:], forward(alone, last)[1])
    assert out[:, :, 40_000:].isfinite().all()
    # Of one visible key, the probability is 1: kept, it is doubled; dropped, it is 0.
    kept = (out[:, :, :40_000] / tensors.v[:, :, :40_000]).mean()
    assert kept == pytest.approx(1.0, abs=0.02)


def draw_last(tensors: Tensors) -> Tensors:
    """The last sequence of two queries and three keys."""
    q, k, v, dout, dlse, _ = tensors
    return Tensors(q[:, :, -2:], k[:, :, -3:], v[:, :, -3:], dout[:, :, -2:], dlse[:, :, -2:], NO_EXTRAS)


@pytest.mark.parametrize("loop_order", LOOP_ORDERS)
def test_case_a50_nothing_uninitialised_reaches_a_gradient(loop_order: str) -> None:
    lengths = [(n, n) for n in (5, 63, 65, 1, 130)]
    sizes = {"heads": 8, "kv_heads": 2, "head_dim": 64, "head_dim_v": 64, "batch": 5}
    problem = problem_with(packed_q=300, packed_k=300, **sizes, **FEATURES["causal"])
    tensors = packed(draw(problem, torch.float32), lengths)

    repeats = [backward(problem, tensors, *forward(problem, tensors), loop_order) for _ in range(3)]

    assert torch.empty(3).isnan().all()
    for gradients in repeats:
        for gradient, first in zip(gradients, repeats[0], strict=True):
            assert gradient.isfinite().all()
            assert torch.equal(gradient, first)


def test_a_call_that_reads_lengths_from_a_gpu_is_never_fit_for_a_graph() -> None:
    problem = problem_with(**PACKED)
    tensors = packed(draw(problem), LENGTHS["different"])
    kernel = tiled(problem)
    kernel.prepare_forward(problem, *tensors[:3], SCALE, tensors.extras)

    assert kernel.is_loaded(problem, *tensors[:3])
    assert not kernel.is_loaded(problem, OnGpu())  # type: ignore[arg-type]  # all that is looked at


class OnGpu:
    """Says that it lies on a GPU."""

    is_cuda = True


def test_missing_lengths_are_named() -> None:
    problem = problem_with(**PACKED)
    tensors = draw(problem)

    with pytest.raises(InvalidProblemError, match="cu_seqlens_q and cu_seqlens_k"):
        tiled(problem).prepare_forward(problem, *tensors[:3], SCALE, Extras())
