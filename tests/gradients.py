"""Backward calls of the Triton family beside the specification, on any device."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from autoflash.device import Device
from autoflash.evaluate import reference
from autoflash.problem import Alignment, DType, Form, Mask, Pass, Problem
from autoflash.runtime.triton_backward import TritonBackward
from autoflash.variant import Choices, Family, Variant
from tests.factories import make_problem

TORCH_TYPES = {DType.FP16: torch.float16, DType.BF16: torch.bfloat16, DType.FP32: torch.float32}

Gradients = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """Tensors of one backward call; ``dlse`` is None where LSE was not used."""

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor
    dout: Tensor
    dlse: Tensor | None

    def replace(self, **changes: Tensor | None) -> Inputs:
        return dataclasses.replace(self, **changes)


def make_variant(
    loop_order: str,
    loads: str = "pointer",
    *,
    mask_loops: str = "branch",
    dot_order: str = "textbook",
    tile_order: str = "per_head",
    tiles: tuple[int, int, int, int] = (32, 32, 32, 32),
    warps: int = 4,
    stages: int = 2,
) -> Variant:
    """A backward variant; tiles are BLOCK_M, BLOCK_N, BLOCK_M2, BLOCK_N2, as far as the loop order has them."""
    structure = Choices(
        loop_order=loop_order, loads=loads, mask_loops=mask_loops, dot_order=dot_order, tile_order=tile_order
    )
    config = {"BLOCK_M": tiles[0], "BLOCK_N": tiles[1], "num_warps": warps, "num_stages": stages}
    if loop_order != "key_outer":
        config |= {"BLOCK_M2": tiles[2], "BLOCK_N2": tiles[3], "num_stages2": stages}
    if loop_order == "split":
        config["num_warps2"] = warps
    return Variant(family=Family.TRITON, structure=structure, config=Choices(config))


def backward_problem(**sizes: object) -> Problem:
    """As ``make_problem``, of the backward pass."""
    return make_problem(op=Pass.BACKWARD, **sizes)  # type: ignore[arg-type]


def causal_argument(problem: Problem) -> str | bool:
    """The mask of a problem as the specification takes it."""
    return problem.alignment.value if problem.mask is Mask.CAUSAL else False


def make_inputs(problem: Problem, *, device: str = "cpu", scale: float | None = None, with_dlse: bool = True) -> Inputs:
    """Normal random tensors, with output and LSE as the specification has them."""
    dtype = TORCH_TYPES[problem.dtype]

    def normal(heads: int, rows: int, width: int) -> Tensor:
        return torch.randn(problem.batch, heads, rows, width, device=device).to(dtype)

    q = normal(problem.heads, problem.seqlen_q, problem.head_dim)
    k = normal(problem.kv_heads, problem.seqlen_k, problem.head_dim)
    v = normal(problem.kv_heads, problem.seqlen_k, problem.head_dim_v)
    dout = normal(problem.heads, problem.seqlen_q, problem.head_dim_v)
    out, lse = reference.attention(q, k, v, causal=causal_argument(problem), scale=scale, return_lse=True)
    dlse = torch.randn(q.shape[:3], device=device) if with_dlse else None
    return Inputs(q=q, k=k, v=v, out=out.to(dtype), lse=lse.float(), dout=dout, dlse=dlse)


def run(
    variant: Variant, problem: Problem, inputs: Inputs, device: Device, *, scale: float | None = None, **given: Tensor
) -> Gradients:
    """Prepare a call and make it; ``given`` may hold dq, dk and dv."""
    executable = TritonBackward(Form.of(problem), variant, device)
    scale = 1.0 / math.sqrt(problem.head_dim) if scale is None else scale
    call = executable.prepare_backward(problem, inputs.q, inputs.k, inputs.v, inputs.out, inputs.dout, scale)
    return call(inputs.q, inputs.k, inputs.v, inputs.out, inputs.lse, inputs.dout, inputs.dlse, **given)


def assert_gradients(got: Gradients, problem: Problem, inputs: Inputs, *, scale: float | None = None) -> None:
    """Each gradient is about as near to the specification as plain torch in the same dtype is."""
    causal = causal_argument(problem)
    expected = reference.gradients(inputs.q, inputs.k, inputs.v, inputs.dout, inputs.dlse, causal=causal, scale=scale)
    leaves = [tensor.detach().clone().requires_grad_() for tensor in (inputs.q, inputs.k, inputs.v)]
    out, lse = reference.plain(*leaves, causal=causal, scale=scale)
    loss = (out.float() * inputs.dout.float()).sum()
    if inputs.dlse is not None:
        seen = torch.isfinite(inputs.lse)
        loss = loss + (lse[seen] * inputs.dlse[seen]).sum()
    plain = torch.autograd.grad(loss, leaves)
    for name, result, usual, exact in zip(("dq", "dk", "dv"), got, plain, expected, strict=True):
        assert result.dtype == usual.dtype
        assert result.shape == exact.shape
        assert torch.isfinite(result).all(), name
        if exact.numel():
            # What one rounding to the dtype costs near values of this size.
            rounding = ((exact + 0.3).to(usual.dtype).double() - 0.3 - exact).abs().max()
            # The output and LSE came in rounded to float32, where plain torch has them exact: with few visible keys,
            # delta and dp cancel in plain torch alone.
            rounding += 8 * torch.finfo(torch.float32).eps * max(1.0, float(exact.abs().max()))
            allowed = 2 * (usual.double() - exact).abs().max() + 2 * rounding
            worst = (result.double() - exact).abs().max()
            assert worst <= allowed, f"{name}: error {worst:.3g}, allowed {allowed:.3g}"


def masks() -> list[tuple[Mask, Alignment]]:
    """Every mask and alignment."""
    return [
        (Mask.FULL, Alignment.BOTTOM_RIGHT),
        (Mask.CAUSAL, Alignment.BOTTOM_RIGHT),
        (Mask.CAUSAL, Alignment.TOP_LEFT),
    ]
