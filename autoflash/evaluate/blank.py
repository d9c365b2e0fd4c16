"""Tensors of a problem's sizes, for asking what a call would do."""

from __future__ import annotations

from typing import TypedDict

import torch
from torch import Tensor

from autoflash.codegen.expressions import expression_of, parameters_of
from autoflash.device import Device
from autoflash.evaluate.terms import draw_params
from autoflash.expression.expression import Role
from autoflash.problem import DType, MaskTensor, Pass, Problem
from autoflash.runtime.block_map import blocks_in
from autoflash.runtime.block_mask import BlockMask, block_mask
from autoflash.runtime.layouts import TORCH_TYPES, usual_bias_shape


def torch_dtype(dtype: DType) -> torch.dtype:
    """What torch calls it."""
    return TORCH_TYPES[dtype]


class CallArguments(TypedDict, total=False):
    """Arguments of ``autoflash.explain`` and ``autoflash.warmup`` beside the tensors."""

    causal: bool | str
    window: tuple[int | None, int | None] | None
    softcap: float
    dropout_p: float
    mask: Tensor
    alibi_slopes: Tensor
    bias: Tensor
    sinks: Tensor
    score_mod: str
    mask_mod: str
    score_params: dict[str, Tensor]
    block_mask: BlockMask
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: int
    max_seqlen_k: int


def blank_shapes(problem: Problem) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Shapes of q, k and v as people pass them: [B, H, S, D], or [T, H, D] of packed sequences."""

    def shape(heads: int, seqlen: int, rows: int, width: int) -> tuple[int, ...]:
        return (rows, heads, width) if problem.is_varlen else (problem.batch, heads, seqlen, width)

    return (
        shape(problem.heads, problem.seqlen_q, problem.rows_q, problem.head_dim),
        shape(problem.kv_heads, problem.seqlen_k, problem.rows_k, problem.head_dim),
        shape(problem.kv_heads, problem.seqlen_k, problem.rows_k, problem.head_dim_v),
    )


def blank_inputs(problem: Problem, device: Device) -> tuple[Tensor, Tensor, Tensor]:
    """Uninitialised q, k and v of a problem, contiguous; for a backward they require gradients."""
    dtype = torch_dtype(problem.dtype)
    q, k, v = (
        torch.empty(shape, dtype=dtype, device=device.torch_device, requires_grad=problem.op is Pass.BACKWARD)
        for shape in blank_shapes(problem)
    )
    return q, k, v


def call_arguments(problem: Problem, device: Device) -> CallArguments:
    """What a call of attention, or attention_varlen, is given beside its tensors to pose a problem.

    A mask is shared by all sequences and heads. Packed sequences are of one length each.
    """
    arguments = CallArguments(
        causal=problem.alignment.value if problem.causal else False,
        window=(problem.window_left, problem.window_right) if problem.has_window else None,
        softcap=problem.softcap,
        dropout_p=problem.dropout_p,
    )
    if problem.is_varlen:
        arguments["cu_seqlens_q"], arguments["cu_seqlens_k"] = (
            torch.arange(problem.batch + 1, dtype=torch.int32, device=device.torch_device) * seqlen
            for seqlen in (problem.seqlen_q, problem.seqlen_k)
        )
        arguments["max_seqlen_q"], arguments["max_seqlen_k"] = problem.seqlen_q, problem.seqlen_k
    if problem.alibi:
        arguments["alibi_slopes"] = torch.zeros(
            problem.heads, device=device.torch_device, requires_grad=problem.alibi_gradient
        )
    if problem.bias:
        arguments["bias"] = torch.zeros(
            usual_bias_shape(problem),
            dtype=torch_dtype(problem.dtype),
            device=device.torch_device,
            requires_grad=problem.bias_gradient,
        )
    if problem.sinks:
        arguments["sinks"] = torch.zeros(problem.heads, device=device.torch_device)
    parameters = parameters_of(problem.score_mod, problem.mask_mod)
    params = dict(zip((one.name for one in parameters), draw_params(problem, device=device.torch_device), strict=True))
    if problem.block_size:
        arguments["block_mask"] = _block_mask(problem, params, device)
        params = {one.name: params[one.name] for one in parameters_of(problem.score_mod, "")}
    for role, line in ((Role.SCORE_MOD, problem.score_mod), (Role.MASK_MOD, problem.mask_mod)):
        if line and not (role is Role.MASK_MOD and problem.block_size):
            arguments[role.value] = expression_of(line).text
    if params:
        arguments["score_params"] = {
            name: tensor.requires_grad_(problem.params_gradient and tensor.is_floating_point())
            for name, tensor in params.items()
        }
    if problem.mask_tensor is not MaskTensor.NONE:
        dtype = torch.bool if problem.mask_tensor is MaskTensor.BOOL else torch_dtype(problem.dtype)
        shape = (1, 1, problem.seqlen_q, problem.seqlen_k)
        arguments["mask"] = torch.ones(shape, dtype=dtype, device=device.torch_device)
    return arguments


def _block_mask(problem: Problem, params: dict[str, Tensor], device: Device) -> BlockMask:
    """That of the problem's mask_mod, or one that shows every block."""
    sizes = (problem.seqlen_q, problem.seqlen_k)
    if problem.mask_mod:
        expression = expression_of(problem.mask_mod)
        return block_mask(
            expression.text,
            problem.batch,
            problem.heads,
            *sizes,
            params={one.name: params[one.name] for one in expression.parameters},
            block_size=problem.block_size,
            device=device.torch_device,
        )
    blocks = torch.ones([blocks_in(size, problem.block_size) for size in sizes], dtype=torch.bool)
    return BlockMask.from_blocks(blocks.to(device.torch_device), *sizes, problem.block_size)
