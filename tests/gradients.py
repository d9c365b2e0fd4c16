"""Backward calls of the Triton family beside the specification, on any device."""

from __future__ import annotations

import dataclasses
import itertools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from autoflash.device import Device
from autoflash.evaluate import exact
from autoflash.evaluate.semantics import Semantics
from autoflash.evaluate.yardstick import plain_gradients
from autoflash.problem import Alignment, DType, Form, Mask, Pass, Problem
from autoflash.runtime.executable import NO_EXTRAS, Extras, TermGradients
from autoflash.runtime.triton_backward import TritonBackward
from autoflash.variant import Choices, Family, Variant
from tests.factories import make_problem

TORCH_TYPES = {DType.FP16: torch.float16, DType.BF16: torch.bfloat16, DType.FP32: torch.float32}

Lengths = tuple[tuple[int, int], ...]
"""Queries and keys of each packed sequence."""

Gradients = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """Tensors of one backward call; ``dlse`` is None where LSE was not used, and a mask is expanded."""

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor
    dout: Tensor
    dlse: Tensor | None
    extras: Extras = NO_EXTRAS

    def replace(self, **changes: Tensor | Extras | None) -> Inputs:
        return dataclasses.replace(self, **changes)  # type: ignore[arg-type]  # dataclasses.replace is untyped by name


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
    head_dim_tiles: str = "padded",
    batch_order: str = "",
) -> Variant:
    """A backward variant; tiles are BLOCK_M, BLOCK_N, BLOCK_M2, BLOCK_N2, as far as the loop order has them."""
    structure = Choices(
        loop_order=loop_order, loads=loads, mask_loops=mask_loops, dot_order=dot_order, tile_order=tile_order
    )
    if head_dim_tiles != "padded":
        structure = structure.replace(head_dim_tiles=head_dim_tiles)
    if batch_order:
        structure = structure.replace(batch_order=batch_order)
    config = {"BLOCK_M": tiles[0], "BLOCK_N": tiles[1], "num_warps": warps, "num_stages": stages}
    if loop_order != "key_outer":
        config |= {"BLOCK_M2": tiles[2], "BLOCK_N2": tiles[3], "num_stages2": stages}
    if loop_order == "split":
        config["num_warps2"] = warps
    return Variant(family=Family.TRITON, structure=structure, config=Choices(config))


def backward_problem(**sizes: object) -> Problem:
    """As ``make_problem``, of the backward pass."""
    return make_problem(op=Pass.BACKWARD, **sizes)  # type: ignore[arg-type]


def packed_problem(
    lengths: Lengths,
    *,
    tail: tuple[int, int] = (0, 0),
    alignment: Alignment = Alignment.BOTTOM_RIGHT,
    **sizes: object,
) -> Problem:
    """A problem of packed sequences with so many queries and keys each, and unused rows behind them."""
    rows = [sum(pair[side] for pair in lengths) + tail[side] for side in (0, 1)]
    return backward_problem(batch=len(lengths), **sizes).replace(
        packed_q=rows[0], packed_k=rows[1], alignment=alignment
    )


def packed_extras(lengths: Lengths, *, device: str = "cpu", rng: Tensor | None = None) -> Extras:
    """Where these sequences begin."""
    sides = [[0, *itertools.accumulate(pair[side] for pair in lengths)] for side in (0, 1)]
    starts = [torch.tensor(side, dtype=torch.int32, device=device) for side in sides]
    return Extras(cu_seqlens_q=starts[0], cu_seqlens_k=starts[1], rng=rng)


def dropout_rng(device: str = "cpu") -> Tensor:
    """A seed that needs more than 32 bits, and an offset that has more than kernels look at."""
    return torch.tensor([0x1234_5678_9ABC, 5 + (7 << 32)], dtype=torch.int64, device=device)


def make_inputs(
    problem: Problem,
    *,
    device: str = "cpu",
    scale: float | None = None,
    with_dlse: bool = True,
    extras: Extras = NO_EXTRAS,
    strength: float = 1.0,
) -> Inputs:
    """Normal random tensors, with output and LSE as the specification has them.

    Rows behind the last packed sequence are NaN, except in the output and LSE. Queries are multiplied by ``strength``.
    """
    dtype = TORCH_TYPES[problem.dtype]
    semantics = _semantics(problem, scale, extras)

    def normal(heads: int, rows: int, width: int) -> Tensor:
        return torch.randn(problem.tensor_batch, heads, rows, width, device=device).to(dtype)

    q = normal(problem.heads, problem.rows_q, problem.head_dim) * strength
    k = normal(problem.kv_heads, problem.rows_k, problem.head_dim)
    v = normal(problem.kv_heads, problem.rows_k, problem.head_dim_v)
    dout = normal(problem.heads, problem.rows_q, problem.head_dim_v)
    dlse = torch.randn(q.shape[:3], device=device) if with_dlse else None
    for starts, sides in ((extras.cu_seqlens_q, (q, dout, dlse)), (extras.cu_seqlens_k, (k, v))):
        for tensor in sides:
            if starts is not None and tensor is not None:
                tensor[:, :, int(starts[-1]) :] = math.nan
    out, lse = exact.forward(q, v, exact.tiles(q, k, semantics))
    return Inputs(q=q, k=k, v=v, out=out.to(dtype), lse=lse.float(), dout=dout, dlse=dlse, extras=extras)


def _semantics(problem: Problem, scale: float | None, extras: Extras) -> Semantics:
    return Semantics.of_problem(problem, problem.head_dim**-0.5 if scale is None else scale, extras)


def run(
    variant: Variant, problem: Problem, inputs: Inputs, device: Device, *, scale: float | None = None, **given: Tensor
) -> Gradients:
    """Prepare a call and make it; ``given`` may hold dq, dk and dv."""
    executable = TritonBackward(Form.of(problem), variant, device)
    scale = problem.head_dim**-0.5 if scale is None else scale
    tensors = (inputs.q, inputs.k, inputs.v, inputs.out)
    call = executable.prepare_backward(problem, *tensors, inputs.dout, scale, inputs.extras)
    terms = TermGradients.asked_by(problem, inputs.extras)
    return call(*tensors, inputs.lse, inputs.dout, inputs.dlse, extras=inputs.extras, terms=terms, **given)


def assert_gradients(got: Gradients, problem: Problem, inputs: Inputs, *, scale: float | None = None) -> None:
    """Each gradient is about as near to the specification as plain torch in the same dtype is."""
    semantics = _semantics(problem, scale, inputs.extras)
    given = (inputs.q, inputs.k, inputs.v, inputs.dout, inputs.dlse)
    expected = exact.backward(*given, semantics.scale, exact.tiles(inputs.q, inputs.k, semantics))
    plain = plain_gradients(*given, semantics)
    for name, result, usual, wanted in zip(("dq", "dk", "dv"), got, plain, expected, strict=True):
        assert result.dtype == usual.dtype
        assert result.shape == wanted.shape
        assert torch.isfinite(result).all(), name
        if wanted.numel():
            # What one rounding to the dtype costs near values of this size.
            rounding = ((wanted + 0.3).to(usual.dtype).double() - 0.3 - wanted).abs().max()
            # The output and LSE came in rounded to float32, where plain torch has them wanted: with few visible keys,
            # delta and dp cancel in plain torch alone.
            rounding += 8 * torch.finfo(torch.float32).eps * max(1.0, float(wanted.abs().max()))
            allowed = 2 * (usual.double() - wanted).abs().max() + 2 * rounding
            worst = (result.double() - wanted).abs().max()
            assert worst <= allowed, f"{name}: error {worst:.3g}, allowed {allowed:.3g}"


def masks() -> list[tuple[Mask, Alignment]]:
    """Every mask and alignment."""
    return [
        (Mask.FULL, Alignment.BOTTOM_RIGHT),
        (Mask.CAUSAL, Alignment.BOTTOM_RIGHT),
        (Mask.CAUSAL, Alignment.TOP_LEFT),
    ]
