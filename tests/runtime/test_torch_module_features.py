"""The tiled torch family with windows, softcap, mask tensors and dropout, against float64 and through the gate."""

from __future__ import annotations

import itertools

import pytest
import torch

from autoflash.errors import InvalidProblemError
from autoflash.evaluate.verify import verify
from autoflash.problem import Alignment, DType, Mask, MaskTensor, Pass
from autoflash.runtime.executable import NO_EXTRAS
from autoflash.trial import Level
from tests.runtime.tiled import (
    FEATURES,
    FLOAT64,
    LOOP_ORDERS,
    SCALE,
    Tiles,
    backward,
    draw,
    exact_backward,
    exact_forward,
    forward,
    problem_with,
    tiled,
)

SHAPES = {
    "more keys": {},
    "more queries": {"seqlen_q": 53, "seqlen_k": 37},
    "square": {"seqlen_q": 48, "seqlen_k": 48},
    "one query": {"seqlen_q": 1},
    "one key": {"seqlen_k": 1},
    "no keys": {"seqlen_k": 0},
    "no queries": {"seqlen_q": 0},
    "no batch": {"batch": 0},
}
MASKS = [
    (Mask.FULL, Alignment.BOTTOM_RIGHT),
    (Mask.FULL, Alignment.TOP_LEFT),
    (Mask.CAUSAL, Alignment.BOTTOM_RIGHT),
    (Mask.CAUSAL, Alignment.TOP_LEFT),
]
# Neither divides the lengths; queries and keys in a tile are no multiples of four, which share their random words.
SMALL, LARGE = Tiles(10, 7, 3), Tiles(64, 128)


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("loop_order", LOOP_ORDERS)
def test_every_feature_is_exact_in_float64(feature: str, shape: str, loop_order: str) -> None:
    for (mask, alignment), tiles in zip(MASKS, itertools.cycle([SMALL, LARGE])):
        problem = problem_with(mask=mask, alignment=alignment, **SHAPES[shape], **FEATURES[feature])
        tensors = draw(problem)

        out, lse = forward(problem, tensors, loop_order, tiles)
        gradients = backward(problem, tensors, *exact_forward(problem, tensors), loop_order, tiles)

        expected, expected_lse = exact_forward(problem, tensors)
        torch.testing.assert_close(out, expected, **FLOAT64)
        torch.testing.assert_close(lse, expected_lse.float())
        for gradient, exact in zip(gradients, exact_backward(problem, tensors), strict=True):
            torch.testing.assert_close(gradient, exact, **FLOAT64)


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("dtype", DType)
@pytest.mark.parametrize("op", Pass)
@pytest.mark.parametrize("loop_order", LOOP_ORDERS)
def test_every_feature_passes_the_gate(feature: str, dtype: DType, op: Pass, loop_order: str) -> None:
    fields = {**FEATURES[feature], "head_dim": 32, "head_dim_v": 32, "heads": 4, "seqlen_q": 96, "seqlen_k": 96}
    problem = problem_with(op, dtype=dtype, mask=Mask.CAUSAL if dtype is DType.BF16 else Mask.FULL, **fields)

    verification = verify(tiled(problem, loop_order, Tiles(64, 32)), problem, Level.SCREEN)

    assert verification.passed, verification


@pytest.mark.parametrize(
    "features", [{"softcap": 15.0, "mask_tensor": kind, "dropout_p": 0.2} for kind in MaskTensor], ids=list(MaskTensor)
)
@pytest.mark.parametrize("op", Pass)
def test_many_features_at_once_pass_the_whole_gate(features: dict[str, object], op: Pass) -> None:
    sizes = {"head_dim": 32, "head_dim_v": 32, "heads": 4, "seqlen_q": 96, "seqlen_k": 96}
    problem = problem_with(op, dtype=DType.BF16, mask=Mask.CAUSAL, window_left=33, **sizes, **features)
    order = "query_outer" if op is Pass.FORWARD else "key_outer"

    verification = verify(tiled(problem, order, Tiles(64, 64)), problem, Level.FULL)

    assert verification.passed, verification


@pytest.mark.parametrize("kind", [MaskTensor.BOOL, MaskTensor.FLOAT])
@pytest.mark.parametrize("expanded", list(itertools.product([False, True], repeat=4)))
@pytest.mark.parametrize("heads_per_step", [0, 1, 3])
def test_a_mask_reaches_its_rows_however_it_is_expanded(
    kind: MaskTensor, expanded: tuple[bool, ...], heads_per_step: int
) -> None:
    problem = problem_with(mask_tensor=kind, seqlen_q=11, seqlen_k=13, softcap=3.0)
    full = (problem.batch, problem.heads, problem.seqlen_q, problem.seqlen_k)
    shape = tuple(1 if is_expanded else size for size, is_expanded in zip(full, expanded, strict=True))
    tensors = draw(problem, mask_shape=shape)
    mask = tensors.extras.mask
    assert mask is not None
    if expanded == (False,) * 4:
        # No stride is 0, and none is what a contiguous mask would have.
        mask = mask.transpose(0, 3).contiguous().transpose(0, 3)
        tensors = tensors._replace(extras=tensors.extras._replace(mask=mask))

    out, _ = forward(problem, tensors, "query_outer", Tiles(4, 5, heads_per_step))
    gradients = backward(problem, tensors, *exact_forward(problem, tensors), "key_outer", Tiles(3, 8, heads_per_step))

    torch.testing.assert_close(out, exact_forward(problem, tensors)[0], **FLOAT64)
    for gradient, exact in zip(gradients, exact_backward(problem, tensors), strict=True):
        torch.testing.assert_close(gradient, exact, **FLOAT64)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_float_mask_is_added_in_float32_whatever_its_type(dtype: torch.dtype) -> None:
    problem = problem_with(mask_tensor=MaskTensor.FLOAT, head_dim=8, head_dim_v=8)
    tensors = draw(problem, torch.float16)
    assert tensors.extras.mask is not None
    mask = (tensors.extras.mask * 100.0).to(dtype)
    tensors = tensors._replace(extras=tensors.extras._replace(mask=mask))

    _, lse = forward(problem, tensors)

    torch.testing.assert_close(lse.double(), exact_forward(problem, tensors)[1], rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("loop_order", LOOP_ORDERS)
def test_a_window_as_wide_as_the_sequence_hides_nothing(loop_order: str) -> None:
    plain, tensors = problem_with(mask=Mask.CAUSAL), draw(problem_with())
    wide = plain.replace(window_left=plain.seqlen_k - 1, window_right=0)

    expected = forward(plain, tensors, loop_order)
    out, lse = forward(wide, tensors, loop_order)

    assert torch.equal(out, expected[0])
    assert torch.equal(lse, expected[1])


def test_bounds_of_a_window_may_be_larger_than_any_sequence() -> None:
    plain, tensors = problem_with(), draw(problem_with())
    wide = plain.replace(window_left=2**62, window_right=2**62)

    assert torch.equal(forward(wide, tensors)[0], forward(plain, tensors)[0])


@pytest.mark.parametrize("loop_order", LOOP_ORDERS)
@pytest.mark.parametrize("op", Pass)
def test_tiles_outside_the_window_are_not_computed(loop_order: str, op: Pass) -> None:
    sizes = {"seqlen_q": 256, "seqlen_k": 256, "batch": 1, "heads": 1, "kv_heads": 1}

    def products(window_left: int) -> int:
        problem = problem_with(op, window_left=window_left, window_right=0, **sizes)
        tensors = draw(problem)
        counter = CountProducts()
        with counter:
            if op is Pass.FORWARD:
                forward(problem, tensors, loop_order, Tiles(16, 16))
            else:
                backward(problem, tensors, tensors.dout, tensors.dlse, loop_order, Tiles(16, 16))
        return counter.count

    # A tile of queries meets its own keys and those before it, of 16 tiles; without a bound, 8.5 on average.
    assert products(16) / products(256) == pytest.approx(2 / 8.5, rel=0.1)


class CountProducts(torch.utils._python_dispatch.TorchDispatchMode):
    """Counts multiplications of tiles."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]  # torch's own
        self.count += func.overloadpacket in (torch.ops.aten.bmm, torch.ops.aten.baddbmm, torch.ops.aten.baddbmm_)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("feature", ["float mask", "bool mask", "dropout"])
def test_a_tensor_that_is_missing_is_named(feature: str) -> None:
    problem = problem_with(**FEATURES[feature])
    tensors = draw(problem)

    with pytest.raises(InvalidProblemError, match="rng" if feature == "dropout" else "mask"):
        tiled(problem).prepare_forward(problem, tensors.q, tensors.k, tensors.v, SCALE, NO_EXTRAS)


def test_inputs_and_extras_are_left_alone() -> None:
    problem = problem_with(**FEATURES["bool mask, all others"])
    tensors = draw(problem, torch.float32)
    mask, rng = tensors.extras.mask, tensors.extras.rng
    assert mask is not None
    assert rng is not None
    given = [*tensors[:5], mask, rng]
    before = [tensor.clone() for tensor in given]

    out, lse = forward(problem, tensors)
    backward(problem, tensors, out, lse)

    assert all(torch.equal(tensor, copy) for tensor, copy in zip(given, before, strict=True))
