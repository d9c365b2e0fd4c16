"""Tensors that kernels are timed on: what people have, not what a kernel gets wrong."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from autoflash.device import Device
from autoflash.evaluate.block_maps import timed_blocks
from autoflash.evaluate.terms import draw_params
from autoflash.problem import Form, MaskTensor, Pass, Problem
from autoflash.runtime.bind import bind
from autoflash.runtime.executable import Extras
from autoflash.runtime.layouts import TORCH_TYPES, usual_bias_shape
from autoflash.variant import Choices, Family, Variant

# A forward that any device can run: its output and LSE are what a backward is timed on.
_PORTABLE = Variant(
    family=Family.TORCH_TILED,
    structure=Choices(loop_order="query_outer"),
    config=Choices(block_m=1024, block_n=1024, heads_per_step=1),
)

# Packed sequences are up to so much shorter or longer than the mean: two per cent more pairs than with equal lengths.
_SPREAD = 0.25


class TimedInputs(NamedTuple):
    """Inputs of both passes.

    Attributes:
        q, k, v, dout: Contiguous, normal random numbers.
        out, lse: What the forward gives; not computed for a forward, which only writes them.
        extras: What the features of the problem need beside them.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor
    dout: Tensor
    extras: Extras


@lru_cache(maxsize=2)
def timed_inputs(problem: Problem, device: Device, seed: int, shown: float = 1.0) -> TimedInputs:
    """Inputs of a problem, the same for equal seeds. The last two problems are kept.

    Args:
        problem: Gives the sizes.
        device: Where they lie.
        seed: Of the random numbers.
        shown: Share of the blocks that a block mask shows; all of them, as the problem's operations are counted.
    """
    dtype = TORCH_TYPES[problem.dtype]
    generator = torch.Generator(device=device.torch_device).manual_seed(seed)

    def normal(heads: int, rows: int, width: int) -> Tensor:
        shape = (problem.tensor_batch, heads, rows, width)
        return torch.randn(shape, generator=generator, device=device.torch_device, dtype=dtype)

    q = normal(problem.heads, problem.rows_q, problem.head_dim)
    k = normal(problem.kv_heads, problem.rows_k, problem.head_dim)
    v = normal(problem.kv_heads, problem.rows_k, problem.head_dim_v)
    dout = normal(problem.heads, problem.rows_q, problem.head_dim_v)
    extras = _extras(problem, generator, dtype, seed, shown)
    if problem.op is Pass.FORWARD:
        out = torch.empty_like(dout)
        lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    else:
        forward = problem.replace(op=Pass.FORWARD)
        executable = bind(Form.of(forward), _PORTABLE, device)
        scale = 1.0 / math.sqrt(problem.head_dim)
        out, lse = executable.prepare_forward(forward, q, k, v, scale, extras)(q, k, v, extras=extras)
    return TimedInputs(q=q, k=k, v=v, out=out, lse=lse, dout=dout, extras=extras)


def _extras(problem: Problem, generator: torch.Generator, dtype: torch.dtype, seed: int, shown: float) -> Extras:
    device = generator.device
    cu_seqlens_q = cu_seqlens_k = None
    if problem.is_varlen:
        shares = _shares(problem.batch, seed)
        cu_seqlens_q, cu_seqlens_k = (
            torch.tensor(_borders(shares, rows), dtype=torch.int32, device=device)
            for rows in (problem.rows_q, problem.rows_k)
        )
    params = draw_params(problem, device=str(device))
    blocks = timed_blocks(problem, params, shown, generator) if problem.block_size else None
    return Extras(
        mask=_mask(problem, generator, dtype),
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        rng=torch.tensor([seed, 0], dtype=torch.int64, device=device) if problem.dropout_p else None,
        alibi_slopes=torch.rand(1, problem.heads, generator=generator, device=device) if problem.alibi else None,
        bias=_bias(problem, generator, dtype),
        sinks=torch.randn(problem.heads, generator=generator, device=device) if problem.sinks else None,
        query_blocks=None if blocks is None else blocks.queries,
        key_blocks=None if blocks is None else blocks.keys,
        params=params,
    )


def _mask(problem: Problem, generator: torch.Generator, dtype: torch.dtype) -> Tensor | None:
    """One for each sequence, shared by its heads: half of the pairs, or numbers of the inputs' type."""
    if problem.mask_tensor is MaskTensor.NONE:
        return None
    shape = (problem.batch, 1, problem.seqlen_q, problem.seqlen_k)
    if problem.mask_tensor is MaskTensor.BOOL:
        mask = torch.empty(shape, dtype=torch.bool, device=generator.device).bernoulli_(0.5, generator=generator)
    else:
        mask = torch.randn(shape, generator=generator, device=generator.device, dtype=dtype)
    return mask.expand(-1, problem.heads, -1, -1)


def _bias(problem: Problem, generator: torch.Generator, dtype: torch.dtype) -> Tensor | None:
    """One that all sequences share, as that of relative positions."""
    if not problem.bias:
        return None
    return torch.randn(usual_bias_shape(problem), generator=generator, device=generator.device, dtype=dtype)


def _shares(sequences: int, seed: int) -> list[float]:
    """Length of each packed sequence in units of the mean, in no order; they leave no row over."""
    generator = torch.Generator().manual_seed(seed)
    spread = _SPREAD * (2.0 * torch.rand(sequences // 2, generator=generator) - 1.0)
    shares = torch.cat([1.0 + spread, 1.0 - spread, torch.ones(sequences % 2)])
    return [float(share) for share in shares[torch.randperm(sequences, generator=generator)]]


def _borders(shares: list[float], rows: int) -> list[int]:
    """Where sequences with these shares of the rows begin, and the end of the last."""
    borders, reached = [0], 0.0
    for share in shares:
        reached += share / len(shares)
        borders.append(min(rows, round(reached * rows)))
    return [*borders[:-1], rows] if shares else borders
