"""What tests of the tiled torch family share: executables of any tiles, tensors of any problem, what is expected."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from autoflash.evaluate import exact
from autoflash.evaluate.semantics import Semantics
from autoflash.problem import DType, Form, MaskTensor, Pass, Problem
from autoflash.runtime.executable import Extras
from autoflash.runtime.torch_module import TorchTiled
from autoflash.variant import Choices, Family, Variant
from tests.factories import make_device

LOOP_ORDERS = ("query_outer", "key_outer")
SCALE = 0.3
RNG = torch.tensor([-(2**61) + 12345, 2**33 + 77])
FLOAT64 = {"rtol": 1e-9, "atol": 1e-10}

FEATURES: dict[str, dict[str, object]] = {
    "softcap": {"softcap": 1.5},
    "float mask": {"mask_tensor": MaskTensor.FLOAT},
    "bool mask": {"mask_tensor": MaskTensor.BOOL},
    "window": {"window_left": 9, "window_right": 4},
    "window open to the left": {"window_right": 3},
    "window open to the right": {"window_left": 6},
    "dropout": {"dropout_p": 0.3},
    "float mask, all others": {
        "softcap": 1.5,
        "mask_tensor": MaskTensor.FLOAT,
        "window_left": 17,
        "window_right": 8,
        "dropout_p": 0.3,
    },
    "bool mask, all others": {
        "softcap": 1.5,
        "mask_tensor": MaskTensor.BOOL,
        "window_left": 17,
        "window_right": 8,
        "dropout_p": 0.3,
    },
}


class Tiles(NamedTuple):
    """How the work is cut: queries and keys in a tile, heads at once (0 is all)."""

    block_m: int = 16
    block_n: int = 32
    heads_per_step: int = 0


class Tensors(NamedTuple):
    """q [B, H, M, D], k [B, H_KV, N, D], v [B, H_KV, N, D_V], dout [B, H, M, D_V], dlse [B, H, M], and the extras."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    dlse: Tensor
    extras: Extras


def problem_with(op: Pass = Pass.FORWARD, **fields: object) -> Problem:
    """A problem with heads in groups, values wider than keys, and what is asked for."""
    sizes: dict[str, object] = {
        "dtype": DType.FP32,
        "head_dim": 8,
        "head_dim_v": 12,
        "batch": 2,
        "heads": 6,
        "kv_heads": 2,
        "seqlen_q": 37,
        "seqlen_k": 53,
    }
    return Problem(op=op, **{**sizes, **fields})  # type: ignore[arg-type]  # fields of a problem, by name


def tiled(problem: Problem, loop_order: str = "query_outer", tiles: Tiles = Tiles()) -> TorchTiled:  # noqa: B008  # an immutable tuple
    """The executable of a problem's form."""
    variant = Variant(
        family=Family.TORCH_TILED,
        structure=Choices(loop_order=loop_order),
        config=Choices(**tiles._asdict()),
    )
    return TorchTiled(Form.of(problem), variant, make_device("cpu"))


def draw(problem: Problem, dtype: torch.dtype = torch.float64, mask_shape: tuple[int, ...] | None = None) -> Tensors:
    """Random tensors; a mask is drawn in ``mask_shape`` (all of it by default) and expanded."""
    heads, kv_heads = problem.heads, problem.kv_heads

    def normal(*shape: int) -> Tensor:
        return torch.randn(problem.tensor_batch, *shape, dtype=torch.float64).to(dtype)

    return Tensors(
        q=normal(heads, problem.rows_q, problem.head_dim),
        k=normal(kv_heads, problem.rows_k, problem.head_dim),
        v=normal(kv_heads, problem.rows_k, problem.head_dim_v),
        dout=normal(heads, problem.rows_q, problem.head_dim_v),
        dlse=normal(heads, problem.rows_q),
        extras=Extras(mask=draw_mask(problem, mask_shape), rng=RNG if problem.dropout_p else None),
    )


def draw_mask(problem: Problem, shape: tuple[int, ...] | None = None) -> Tensor | None:
    """A mask that hides a third of all pairs, and of the second row all of them."""
    if problem.mask_tensor is MaskTensor.NONE:
        return None
    full = (problem.batch, problem.heads, problem.seqlen_q, problem.seqlen_k)
    visible = torch.rand(shape or full) > 0.3
    visible[:, :, 1:2] = False
    if problem.mask_tensor is MaskTensor.BOOL:
        return visible.expand(full)
    return torch.randn(visible.shape).masked_fill(~visible, -torch.inf).expand(full)


def forward(
    problem: Problem,
    tensors: Tensors,
    loop_order: str = "query_outer",
    tiles: Tiles = Tiles(),  # noqa: B008  # an immutable tuple
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of the family."""
    q, k, v, extras = tensors.q, tensors.k, tensors.v, tensors.extras
    call = tiled(problem, loop_order, tiles).prepare_forward(problem, q, k, v, SCALE, extras)
    return call(q, k, v, extras=extras)


def backward(
    problem: Problem,
    tensors: Tensors,
    out: Tensor,
    lse: Tensor,
    loop_order: str = "query_outer",
    tiles: Tiles = Tiles(),  # noqa: B008  # an immutable tuple
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the family."""
    q, k, v, dout, dlse, extras = tensors
    problem = problem.replace(op=Pass.BACKWARD)
    call = tiled(problem, loop_order, tiles).prepare_backward(problem, q, k, v, out, dout, SCALE, extras)
    return call(q, k, v, out, lse, dout, dlse, extras=extras)


def exact_forward(problem: Problem, tensors: Tensors) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of the specification."""
    semantics = Semantics.of_problem(problem, SCALE, tensors.extras)
    return exact.forward(tensors.q, tensors.v, exact.tiles(tensors.q, tensors.k, semantics))


def exact_backward(problem: Problem, tensors: Tensors) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the specification."""
    q, k, v, dout, dlse, extras = tensors
    tiles = exact.tiles(q, k, Semantics.of_problem(problem, SCALE, extras))
    return exact.backward(q, k, v, dout, dlse, SCALE, tiles)


def packed(tensors: Tensors, lengths: list[tuple[int, int]]) -> Tensors:
    """The same tensors as packed sequences of these numbers of queries and keys; rows behind the last one are NaN."""
    ends_q, ends_k = (
        torch.tensor([0, *column], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        for column in zip(*lengths, strict=True)
    )
    cut = [tensor.clone() for tensor in tensors[:5]]
    for tensor, ends in zip(cut, (ends_q, ends_k, ends_k, ends_q, ends_q), strict=True):
        tensor[:, :, int(ends[-1]) :] = torch.nan
    return Tensors(*cut, tensors.extras._replace(cu_seqlens_q=ends_q, cu_seqlens_k=ends_k))
