"""Tensors of a problem's sizes, for asking what a call would do."""

from __future__ import annotations

import torch
from torch import Tensor

from autoflash.device import Device
from autoflash.problem import DType, Pass, Problem
from autoflash.runtime.layouts import TORCH_TYPES


def torch_dtype(dtype: DType) -> torch.dtype:
    """What torch calls it."""
    return TORCH_TYPES[dtype]


def blank_inputs(problem: Problem, device: Device) -> tuple[Tensor, Tensor, Tensor]:
    """Uninitialised q, k and v of a problem, contiguous [B, H, S, D]; for a backward they require gradients."""
    b, dtype = problem.batch, torch_dtype(problem.dtype)
    shapes = (
        (b, problem.heads, problem.seqlen_q, problem.head_dim),
        (b, problem.kv_heads, problem.seqlen_k, problem.head_dim),
        (b, problem.kv_heads, problem.seqlen_k, problem.head_dim_v),
    )
    q, k, v = (
        torch.empty(shape, dtype=dtype, device=device.torch_device, requires_grad=problem.op is Pass.BACKWARD)
        for shape in shapes
    )
    return q, k, v
