"""Numerics of the forward templates in Triton's interpreter, against softmax in float64.

Tiles are small, so that few elements make many tiles.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from autoflash.problem import Alignment, DType, Form, Mask, Problem
from autoflash.runtime.probe import probe
from autoflash.runtime.triton_forward import TritonForward
from autoflash.variant import Variant
from tests.factories import make_problem, make_variant

# Triton 3.6's interpreter takes arrays of one element for numbers.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0 to a scalar:DeprecationWarning")

CPU = probe("cpu")
TORCH_TYPES = {DType.FP16: torch.float16, DType.BF16: torch.bfloat16, DType.FP32: torch.float32}
TOLERANCE = {DType.FP16: 2e-3, DType.BF16: 1.6e-2, DType.FP32: 5e-6}

STRUCTURES = {
    "plain": {},
    "tma": {"loads": "tma"},
    "pv_under_softmax": {"pv_order": "under_next_softmax"},
    "pv_under_softmax_branch": {"pv_order": "under_next_softmax", "mask_loops": "branch"},
    "sums_per_thread": {"row_sum": "per_thread"},
    "branch": {"mask_loops": "branch"},
    "heads_first": {"tile_order": "heads_first"},
    "everything": {
        "loads": "tma",
        "pv_order": "under_next_softmax",
        "row_sum": "per_thread",
        "mask_loops": "branch",
        "tile_order": "heads_first",
    },
    "key_outer": {"loop_order": "key_outer"},
}
CAUSAL = {"mask": Mask.CAUSAL}
TOP_LEFT = {"mask": Mask.CAUSAL, "alignment": Alignment.TOP_LEFT}


@dataclass(frozen=True, kw_only=True)
class Inputs:
    q: Tensor
    k: Tensor
    v: Tensor


def make_kernel(structure: str, **config: int) -> Variant:
    return make_variant(**{"BLOCK_M": 16, "BLOCK_N": 16, **config}, **STRUCTURES[structure])


def make_inputs(problem: Problem) -> Inputs:
    dtype = TORCH_TYPES[problem.dtype]

    def tensor(heads: int, rows: int, width: int) -> Tensor:
        return torch.randn(problem.batch, heads, rows, width).to(dtype)

    return Inputs(
        q=tensor(problem.heads, problem.seqlen_q, problem.head_dim),
        k=tensor(problem.kv_heads, problem.seqlen_k, problem.head_dim),
        v=tensor(problem.kv_heads, problem.seqlen_k, problem.head_dim_v),
    )


def run(variant: Variant, problem: Problem, inputs: Inputs, scale: float) -> tuple[Tensor, Tensor]:
    executable = TritonForward(Form.of(problem), variant, CPU)
    call = executable.prepare_forward(problem, inputs.q, inputs.k, inputs.v, scale)
    return call(inputs.q, inputs.k, inputs.v)


def softmax_in_float64(problem: Problem, inputs: Inputs, scale: float) -> tuple[Tensor, Tensor]:
    q, k, v = inputs.q.double(), inputs.k.double(), inputs.v.double()
    k, v = k.repeat_interleave(problem.group, 1), v.repeat_interleave(problem.group, 1)
    scores = q @ k.mT * scale
    if problem.causal:
        queries, keys = torch.arange(problem.seqlen_q)[:, None], torch.arange(problem.seqlen_k)[None, :]
        scores = scores.masked_fill(keys > queries + problem.diagonal, -math.inf)
    lse = torch.logsumexp(scores, -1)
    shift = lse.masked_fill(lse == -math.inf, 0.0)
    return torch.exp(scores - shift[..., None]) @ v, lse


def assert_attention(
    variant: Variant, problem: Problem, inputs: Inputs | None = None, scale: float | None = None
) -> None:
    inputs = make_inputs(problem) if inputs is None else inputs
    scale = problem.head_dim**-0.5 if scale is None else scale
    out, lse = run(variant, problem, inputs, scale)
    expected_out, expected_lse = softmax_in_float64(problem, inputs, scale)

    tolerance = TOLERANCE[problem.dtype]
    assert out.dtype == TORCH_TYPES[problem.dtype]
    torch.testing.assert_close(out.double(), expected_out, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("dtype", [DType.FP16, DType.BF16])
@pytest.mark.parametrize("structure", STRUCTURES)
def test_whole_tiles(structure: str, dtype: DType) -> None:
    problem = make_problem(dtype=dtype, head_dim=16, batch=2, heads=2, kv_heads=1, seqlen_q=16, seqlen_k=48)

    assert_attention(make_kernel(structure), problem)


@pytest.mark.parametrize(
    ("seqlen_q", "seqlen_k", "masking"),
    [(17, 35, {}), (17, 50, CAUSAL), (35, 17, CAUSAL), (35, 17, TOP_LEFT)],
    ids=["full", "wide", "tall", "top_left"],
)
@pytest.mark.parametrize("structure", STRUCTURES)
def test_ragged_tiles(structure: str, seqlen_q: int, seqlen_k: int, masking: dict[str, Mask]) -> None:
    problem = make_problem(
        dtype=DType.FP32,
        head_dim=24,
        head_dim_v=40,
        heads=2,
        kv_heads=1,
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        **masking,
    )

    assert_attention(make_kernel(structure), problem)


@pytest.mark.parametrize(("block_m", "block_n"), [(32, 16), (16, 32)])
@pytest.mark.parametrize("structure", STRUCTURES)
def test_causal_tiles_that_are_not_square(structure: str, block_m: int, block_n: int) -> None:
    problem = make_problem(dtype=DType.FP32, head_dim=16, heads=1, seqlen_q=32, seqlen_k=64, mask=Mask.CAUSAL)

    assert_attention(make_kernel(structure, BLOCK_M=block_m, BLOCK_N=block_n), problem)


@pytest.mark.parametrize("masking", [{}, CAUSAL], ids=["full", "causal"])
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(0, 5), (5, 0), (1, 1), (2, 1), (1, 33), (33, 1)])
@pytest.mark.parametrize("structure", ["plain", "everything", "key_outer"])
def test_sizes_at_the_edge(structure: str, seqlen_q: int, seqlen_k: int, masking: dict[str, Mask]) -> None:
    problem = make_problem(dtype=DType.FP32, head_dim=16, heads=1, seqlen_q=seqlen_q, seqlen_k=seqlen_k, **masking)

    assert_attention(make_kernel(structure), problem)


@pytest.mark.parametrize("head_dim", [8, 64, 72, 80, 96, 128, 256])
@pytest.mark.parametrize("structure", ["plain", "everything"])
def test_head_dims(structure: str, head_dim: int) -> None:
    problem = make_problem(dtype=DType.FP16, head_dim=head_dim, heads=1, seqlen_q=9, seqlen_k=33, mask=Mask.CAUSAL)

    assert_attention(make_kernel(structure), problem)


@pytest.mark.parametrize("head_dim", [1, 33])
def test_head_dims_that_vector_loads_cannot_take(head_dim: int) -> None:
    problem = make_problem(dtype=DType.FP16, head_dim=head_dim, heads=2, seqlen_q=17, seqlen_k=33)

    assert_attention(make_kernel("plain"), problem)


@pytest.mark.parametrize("scale", [-0.5, 0.0, 3.0])
@pytest.mark.parametrize("structure", ["plain", "everything", "key_outer"])
def test_any_scale(structure: str, scale: float) -> None:
    problem = make_problem(dtype=DType.BF16, head_dim=16, heads=1, seqlen_q=9, seqlen_k=35, mask=Mask.CAUSAL)

    assert_attention(make_kernel(structure), problem, scale=scale)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_very_negative_scores_after_tiles_without_a_key(structure: str) -> None:
    # Rows whose first tiles are hidden, or whose scores are all about -150: 0 must not become their maximum.
    problem = make_problem(dtype=DType.BF16, head_dim=16, heads=1, seqlen_q=50, seqlen_k=34, mask=Mask.CAUSAL)
    inputs = make_inputs(problem)
    inputs = Inputs(q=inputs.q.abs() + 2, k=-(inputs.k.abs() + 4), v=inputs.v)

    assert softmax_in_float64(problem, inputs, 1.0)[1][0, 0, 20:].max() < -100.0
    assert_attention(make_kernel(structure), problem, inputs, scale=1.0)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_tensors_inside_larger_buffers_of_nan(structure: str) -> None:
    problem = make_problem(
        dtype=DType.FP16, head_dim=24, head_dim_v=40, heads=2, kv_heads=1, seqlen_q=18, seqlen_k=35, mask=Mask.CAUSAL
    )
    whole = make_inputs(problem)

    def inside(tensor: Tensor) -> Tensor:
        batch, heads, rows, width = tensor.shape
        larger = torch.full((batch, heads + 1, rows + 30, width + 8), math.nan, dtype=tensor.dtype)
        larger[:, :heads, :rows, :width] = tensor
        return larger[:, :heads, :rows, :width]

    assert_attention(make_kernel(structure), problem, Inputs(q=inside(whole.q), k=inside(whole.k), v=inside(whole.v)))


@pytest.mark.parametrize("structure", ["plain", "everything", "key_outer"])
def test_views_of_tensors_in_other_orders(structure: str) -> None:
    problem = make_problem(dtype=DType.FP16, head_dim=24, batch=2, heads=2, seqlen_q=18, seqlen_k=35)
    whole = make_inputs(problem)
    bshd = Inputs(**{name: getattr(whole, name).transpose(1, 2).contiguous().transpose(1, 2) for name in "qkv"})

    out, _ = run(make_kernel(structure), problem, bshd, 1.0)

    assert out.transpose(1, 2).is_contiguous()
    assert_attention(make_kernel(structure), problem, bshd)


@pytest.mark.parametrize("structure", ["plain", "key_outer"])
def test_last_dimension_that_is_not_contiguous_and_expanded_heads(structure: str) -> None:
    problem = make_problem(dtype=DType.FP16, head_dim=24, heads=2, seqlen_q=18, seqlen_k=35)
    whole = make_inputs(problem)
    inputs = Inputs(q=whole.q.mT.contiguous().mT, k=whole.k[:, :1].expand(-1, 2, -1, -1), v=whole.v.mT.contiguous().mT)

    assert_attention(make_kernel(structure), problem, inputs)


@pytest.mark.parametrize("structure", ["plain", "everything", "key_outer"])
def test_given_outputs_are_filled_wherever_they_lie(structure: str) -> None:
    problem = make_problem(dtype=DType.FP16, head_dim=24, heads=2, seqlen_q=18, seqlen_k=35)
    inputs = make_inputs(problem)
    call = TritonForward(Form.of(problem), make_kernel(structure), CPU).prepare_forward(
        problem, inputs.q, inputs.k, inputs.v, 1.0
    )
    expected_out, expected_lse = call(inputs.q, inputs.k, inputs.v)
    buffer, rows = torch.full((1, 2, 18, 27), 7.0, dtype=torch.float16), torch.full((1, 2, 18, 2), 7.0)

    out, lse = call(inputs.q, inputs.k, inputs.v, buffer[..., 1:25], rows[..., 0])

    assert out.data_ptr() == buffer[..., 1:25].data_ptr()
    assert lse.data_ptr() == rows.data_ptr()
    assert torch.equal(out, expected_out)
    assert torch.equal(lse, expected_lse)
    assert (buffer[..., [0, 25, 26]] == 7.0).all()
    assert (rows[..., 1] == 7.0).all()


def test_descriptors_refuse_what_a_tensor_map_cannot_hold() -> None:
    problem = make_problem(dtype=DType.FP16, head_dim=24, heads=2, seqlen_q=16)
    q, k, v = (getattr(make_inputs(problem), name) for name in "qkv")
    executable = TritonForward(Form.of(problem), make_kernel("tma"), CPU)

    assert executable.why_not(problem, q, k, v) is None
    assert "q with a last stride of 1" in str(executable.why_not(problem, q.mT.contiguous().mT, k, v))
    assert "stride is 0" in str(executable.why_not(problem, q, k[:, :1].expand(-1, 2, -1, -1), v))
    assert "head_dim is 25" in str(executable.why_not(problem.replace(head_dim=25), q, k, v))
