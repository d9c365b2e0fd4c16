"""Numerics of kernels that hold vectors in two tiles, in Triton's interpreter."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from autoflash.errors import NoKernelError
from autoflash.problem import DType, Form, Mask
from autoflash.runtime.probe import probe
from autoflash.runtime.triton_forward import TritonForward
from autoflash.variant import Variant
from tests import gradients
from tests.factories import make_problem, make_variant
from tests.gradients import backward_problem
from tests.interpreter import test_backward_features, test_forward, test_forward_features

# Triton 3.6's interpreter takes arrays of one element for numbers.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0 to a scalar:DeprecationWarning")

CPU = probe("cpu")
HEAD_DIMS = {40: DType.FP32, 72: DType.FP16, 80: DType.BF16, 96: DType.FP16}
"""The second tile is filled by half, by half, just so, and just so."""

LOOP_ORDERS = test_backward_features.LOOP_ORDERS
FORWARD = {
    name: {**choices, "pv_order": "after_softmax"}
    for name, choices in test_forward_features.STRUCTURES.items()
    if name != "under"
}
"""Nothing works ahead with vectors in two tiles."""


ONE_SIDED = {"split_qk": (40, 32), "split_v": (32, 72)}
"""Only the vectors of one side take fewer columns in two tiles: of queries and keys, or of values and outputs."""


def make_forward(structure: str, head_dim_tiles: str = "split") -> Variant:
    return make_variant(head_dim_tiles=head_dim_tiles, **{"BLOCK_M": 16, "BLOCK_N": 16, **FORWARD[structure]})


@pytest.mark.parametrize("mask", list(Mask))
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("structure", FORWARD)
def test_forward_matches_softmax_in_float64(structure: str, head_dim: int, mask: Mask) -> None:
    problem = make_problem(
        dtype=HEAD_DIMS[head_dim], head_dim=head_dim, heads=2, kv_heads=1, seqlen_q=17, seqlen_k=35, mask=mask
    )

    test_forward.assert_attention(make_forward(structure), problem)


@pytest.mark.parametrize("dtype", list(DType))
@pytest.mark.parametrize("structure", ["plain", "everything"])
def test_forward_of_whole_tiles_in_every_type(structure: str, dtype: DType) -> None:
    problem = make_problem(dtype=dtype, head_dim=80, heads=1, seqlen_q=16, seqlen_k=32)

    test_forward.assert_attention(make_forward(structure), problem, scale=-0.2)


@pytest.mark.parametrize("head_dims", [(80, 40), (33, 96), (64, 80), (17, 160)], ids=str)
def test_forward_of_values_of_another_length(head_dims: tuple[int, int]) -> None:
    problem = make_problem(
        dtype=DType.FP32, head_dim=head_dims[0], head_dim_v=head_dims[1], heads=1, seqlen_q=9, seqlen_k=20
    )

    test_forward.assert_attention(make_forward("branch"), problem)


@pytest.mark.parametrize("dtype", [DType.FP32, DType.FP16])
@pytest.mark.parametrize("structure", FORWARD)
@pytest.mark.parametrize("head_dim_tiles", ONE_SIDED)
def test_forward_with_two_tiles_on_one_side(head_dim_tiles: str, structure: str, dtype: DType) -> None:
    head_dim, head_dim_v = ONE_SIDED[head_dim_tiles]
    problem = make_problem(
        dtype=dtype,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        heads=2,
        kv_heads=1,
        seqlen_q=17,
        seqlen_k=35,
        mask=Mask.CAUSAL,
    )

    test_forward.assert_attention(make_forward(structure, head_dim_tiles), problem, scale=-0.2)


@pytest.mark.parametrize("dtype", [DType.FP32, DType.FP16])
@pytest.mark.parametrize("structure", ["plain", "everything"])
def test_forward_of_192_and_128(structure: str, dtype: DType) -> None:
    problem = make_problem(dtype=dtype, head_dim=192, head_dim_v=128, heads=1, seqlen_q=20, seqlen_k=32)

    test_forward.assert_attention(make_forward(structure, "split_qk"), problem)


@pytest.mark.parametrize("structure", ["branch", "everything"])
@pytest.mark.parametrize("head_dim_tiles", ONE_SIDED)
def test_forward_with_features_and_two_tiles_on_one_side(head_dim_tiles: str, structure: str) -> None:
    head_dim, head_dim_v = ONE_SIDED[head_dim_tiles]
    problem = test_forward_features.dense(
        dtype=test_forward_features.DTYPES[structure],
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        mask=Mask.CAUSAL,
        **test_forward_features.FEATURES["softcap+terms+float_mask+window+sinks+dropout"],
    )

    test_forward_features.assert_passes_the_gate(make_forward(structure, head_dim_tiles), problem)


@pytest.mark.parametrize("features", test_forward_features.FEATURES)
@pytest.mark.parametrize("structure", ["branch", "everything"])
def test_forward_with_features_matches_the_specification(structure: str, features: str) -> None:
    mask = Mask.FULL if structure == "branch" else Mask.CAUSAL
    problem = test_forward_features.dense(
        dtype=test_forward_features.DTYPES[structure],
        head_dim=40,
        head_dim_v=40,
        mask=mask,
        **test_forward_features.FEATURES[features],
    )

    test_forward_features.assert_passes_the_gate(make_forward(structure), problem)


def test_forward_of_packed_sequences_matches_the_specification() -> None:
    lengths = test_forward_features.LENGTHS
    problem = test_forward_features.packed(
        lengths, (2, 3), dtype=DType.FP32, head_dim=80, head_dim_v=80, mask=Mask.CAUSAL, softcap=3.0
    )

    for structure in ("plain", "branch"):
        test_forward_features.assert_passes_the_gate(make_forward(structure), problem, lengths=lengths)


@pytest.mark.parametrize("structure", FORWARD)
def test_forward_touches_nothing_beside_its_tensors(structure: str) -> None:
    problem = make_problem(dtype=DType.FP16, head_dim=72, heads=2, kv_heads=1, seqlen_q=18, seqlen_k=35)
    inputs = test_forward.make_inputs(problem)
    call = TritonForward(Form.of(problem), make_forward(structure), CPU).prepare_forward
    q, k, v = surrounded(inputs.q), surrounded(inputs.k), surrounded(inputs.v)
    buffer = torch.full((1, 2, 30, 80), 7.0, dtype=torch.float16)

    expected, _ = call(problem, inputs.q, inputs.k, inputs.v, 0.1)(inputs.q, inputs.k, inputs.v)
    out, _ = call(problem, q, k, v, 0.1)(q, k, v, buffer[:, :, :18, :72])

    assert torch.equal(out, expected)
    assert (buffer[:, :, 18:] == 7.0).all()
    assert (buffer[..., 72:] == 7.0).all()


def test_forward_takes_any_strides() -> None:
    problem = make_problem(dtype=DType.FP32, head_dim=40, heads=1, seqlen_q=18, seqlen_k=20)
    inputs = test_forward.make_inputs(problem)
    turned = test_forward.Inputs(q=inputs.q.mT.contiguous().mT, k=inputs.k.mT.contiguous().mT, v=inputs.v)

    assert turned.q.stride(-1) != 1
    test_forward.assert_attention(make_forward("plain"), problem, turned)


def test_vectors_too_short_for_two_tiles_are_refused() -> None:
    problem = make_problem(dtype=DType.FP16, head_dim=80, head_dim_v=16)
    inputs = test_forward.make_inputs(problem)

    with pytest.raises(NoKernelError, match="more than 16 elements, some have 16"):
        TritonForward(Form.of(problem), make_forward("plain"), CPU).prepare_forward(
            problem, inputs.q, inputs.k, inputs.v, 1.0
        )


@pytest.mark.parametrize("mask", list(Mask))
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("loads", ["pointer", "tma"])
@pytest.mark.parametrize("loop_order", LOOP_ORDERS)
def test_backward_matches_the_specification(loop_order: str, loads: str, head_dim: int, mask: Mask) -> None:
    problem = backward_problem(
        dtype=HEAD_DIMS[head_dim], head_dim=head_dim, heads=2, kv_heads=1, seqlen_q=20, seqlen_k=35, mask=mask
    )
    variant = gradients.make_variant(
        loop_order,
        loads,
        dot_order="textbook" if mask is Mask.FULL else "scores_first",
        tiles=(16, 32, 32, 16),
        head_dim_tiles="split",
    )
    inputs = gradients.make_inputs(problem)

    gradients.assert_gradients(gradients.run(variant, problem, inputs, CPU), problem, inputs)


@pytest.mark.parametrize("dtype", list(DType))
@pytest.mark.parametrize("loop_order", LOOP_ORDERS)
def test_backward_of_whole_tiles_in_every_type(loop_order: str, dtype: DType) -> None:
    problem = backward_problem(dtype=dtype, head_dim=80, head_dim_v=40, heads=1, seqlen_q=32, seqlen_k=32)
    inputs = gradients.make_inputs(problem, scale=-0.2)
    variant = gradients.make_variant(loop_order, head_dim_tiles="split")

    gradients.assert_gradients(gradients.run(variant, problem, inputs, CPU, scale=-0.2), problem, inputs, scale=-0.2)


@pytest.mark.parametrize("dtype", [DType.FP32, DType.FP16])
@pytest.mark.parametrize("loads", ["pointer", "tma"])
@pytest.mark.parametrize("loop_order", LOOP_ORDERS)
@pytest.mark.parametrize("head_dim_tiles", ONE_SIDED)
def test_backward_with_two_tiles_on_one_side(head_dim_tiles: str, loop_order: str, loads: str, dtype: DType) -> None:
    head_dim, head_dim_v = ONE_SIDED[head_dim_tiles]
    problem = backward_problem(
        dtype=dtype,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        heads=2,
        kv_heads=1,
        seqlen_q=20,
        seqlen_k=35,
        mask=Mask.CAUSAL,
    )
    dot_order = "textbook" if loads == "tma" else "scores_first"
    tiles = (16, 32, 32, 16)
    variant = gradients.make_variant(loop_order, loads, dot_order=dot_order, tiles=tiles, head_dim_tiles=head_dim_tiles)
    inputs = gradients.make_inputs(problem)

    gradients.assert_gradients(gradients.run(variant, problem, inputs, CPU), problem, inputs)


@pytest.mark.parametrize("dtype", [DType.FP32, DType.FP16])
@pytest.mark.parametrize("loop_order", LOOP_ORDERS)
def test_backward_of_192_and_128(loop_order: str, dtype: DType) -> None:
    problem = backward_problem(dtype=dtype, head_dim=192, head_dim_v=128, heads=1, seqlen_q=20, seqlen_k=32)
    inputs = gradients.make_inputs(problem)
    variant = gradients.make_variant(loop_order, "tma", tiles=(16, 16, 16, 16), head_dim_tiles="split_qk")

    gradients.assert_gradients(gradients.run(variant, problem, inputs, CPU), problem, inputs)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("loop_order", LOOP_ORDERS)
@pytest.mark.parametrize("head_dim_tiles", ONE_SIDED)
def test_backward_with_features_and_two_tiles_on_one_side(head_dim_tiles: str, loop_order: str) -> None:
    head_dim, head_dim_v = ONE_SIDED[head_dim_tiles]
    features = "softcap bool_mask window dropout"
    problem, extras = test_backward_features.featured(features, Mask.CAUSAL, head_dim=head_dim, head_dim_v=head_dim_v)
    inputs = gradients.make_inputs(problem, extras=extras)
    variant = gradients.make_variant(loop_order, tiles=(16, 32, 32, 16), head_dim_tiles=head_dim_tiles)

    gradients.assert_gradients(gradients.run(variant, problem, inputs, CPU), problem, inputs)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("combination", test_backward_features.COMBINATIONS)
@pytest.mark.parametrize("loop_order", LOOP_ORDERS)
def test_backward_with_features_matches_the_specification(loop_order: str, combination: str) -> None:
    problem, extras = test_backward_features.featured(combination, Mask.CAUSAL, head_dim=40, head_dim_v=40)
    inputs = gradients.make_inputs(problem, extras=extras)
    variant = gradients.make_variant(loop_order, tiles=(16, 32, 32, 16), head_dim_tiles="split")

    gradients.assert_gradients(gradients.run(variant, problem, inputs, CPU), problem, inputs)


@pytest.mark.parametrize("loads", ["pointer", "tma"])
@pytest.mark.parametrize("loop_order", LOOP_ORDERS)
def test_backward_touches_nothing_beside_its_tensors(loop_order: str, loads: str) -> None:
    problem = backward_problem(dtype=DType.FP16, head_dim=72, heads=1, seqlen_q=21, seqlen_k=35)
    inputs = gradients.make_inputs(problem)
    variant = gradients.make_variant(loop_order, loads, head_dim_tiles="split")
    poisoned = inputs.replace(**{name: surrounded(getattr(inputs, name)) for name in ("q", "k", "v", "out", "dout")})
    buffer = torch.full((1, 1, 30, 80), 7.0, dtype=torch.float16)

    clean = gradients.run(variant, problem, inputs, CPU)
    got = gradients.run(variant, problem, poisoned, CPU, dq=buffer[:, :, :21, :72])

    assert all(torch.equal(one, other) for one, other in zip(clean, got, strict=True))
    assert (buffer[:, :, 21:] == 7.0).all()
    assert (buffer[..., 72:] == 7.0).all()


def test_backward_takes_any_strides() -> None:
    problem = backward_problem(dtype=DType.FP32, head_dim=40, heads=1, seqlen_q=18, seqlen_k=20)
    inputs = gradients.make_inputs(problem)
    turned = inputs.replace(q=inputs.q.mT.contiguous().mT, dout=inputs.dout.mT.contiguous().mT)

    got = gradients.run(gradients.make_variant("split", head_dim_tiles="split"), problem, turned, CPU)

    gradients.assert_gradients(got, problem, inputs)


def surrounded(tensor: Tensor) -> Tensor:
    batch, heads, rows, width = tensor.shape
    larger = torch.full((batch, heads + 1, rows + 30, width + 8), math.nan, dtype=tensor.dtype)
    larger[:, :heads, :rows, :width] = tensor
    return larger[:, :heads, :rows, :width]
