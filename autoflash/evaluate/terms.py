"""Terms of scores with gradients that kernels are verified on."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from autoflash.problem import Problem


def draw_sinks(problem: Problem, *, around: float, flat: bool, device: str) -> Tensor:
    """The same sinks [H] on every device: some below and some above the scores, at odd lengths some of -inf.

    Args:
        problem: Gives the heads.
        around: Where the scores lie.
        flat: As much as two keys of score 0, so that every probability is a power of two.
        device: Where they shall lie.
    """
    if flat:
        return torch.full((problem.heads,), math.log(2.0), device=device)
    generator = torch.Generator().manual_seed(problem.heads * 101 + problem.seqlen_k)
    sinks = around + 2.0 * torch.randn(problem.heads, generator=generator)
    if problem.seqlen_k % 2:
        sinks[2::3] = -math.inf
    return sinks.to(device)
