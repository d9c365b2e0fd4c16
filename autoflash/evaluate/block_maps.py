"""Block masks that kernels are verified and timed on."""

from __future__ import annotations

import torch
from torch import Tensor

from autoflash.codegen.expressions import parameters_of
from autoflash.problem import Problem
from autoflash.runtime.block_map import BlockLists, blocks_in, blocks_of_mask, lists_of

# Of the blocks that are hidden at random.
_HIDDEN_SHARE = 0.3


def draw_blocks(problem: Problem, params: tuple[Tensor, ...], *, flat: bool, device: str) -> BlockLists:
    """The same map on every device, of a problem with a block mask: rows that see nothing, lists of every length.

    A part of the blocks is hidden at random, in every second head also all blocks of some queries and of some keys;
    beside a mask_mod, so is what it hides as a whole. The first queries of the last head always see the last keys. At
    odd lengths, all heads or all batch entries share a map.

    Args:
        problem: Gives the sizes, and the mask_mod.
        params: What the problem's expressions read.
        flat: Nothing is hidden at random.
        device: Where it shall lie.
    """
    batch = 1 if problem.seqlen_q % 2 else problem.batch
    heads = 1 if problem.seqlen_k % 2 else problem.heads
    generator = torch.Generator().manual_seed(problem.seqlen_q * 61 + problem.seqlen_k)
    shown = torch.rand((batch, heads, *_counts(problem)), generator=generator) >= _HIDDEN_SHARE
    shown[:, ::2, 1::3] = False
    shown[:, ::2, :, 2::3] = False
    # However few blocks there are, not all are hidden.
    shown[:, -1:, :1, -1:] = True
    return _with_mask_mod(problem, params, (shown | flat).to(device))


def timed_blocks(problem: Problem, params: tuple[Tensor, ...], share: float, generator: torch.Generator) -> BlockLists:
    """A map of which each block of queries sees the same share, at least one block, the same for all heads.

    Beside a mask_mod, what that hides as a whole is hidden too.
    """
    order = torch.rand((1, 1, *_counts(problem)), generator=generator, device=generator.device).argsort(dim=-1)
    return _with_mask_mod(problem, params, order < shown_of_a_row(problem, share)[0])


def shown_of_a_row(problem: Problem, share: float) -> tuple[int, int]:
    """How many blocks a block of queries sees of a map of :func:`timed_blocks`, and of how many."""
    blocks = _counts(problem)[1]
    return max(1, round(share * blocks)), blocks


def _counts(problem: Problem) -> tuple[int, int]:
    size = problem.block_size
    return blocks_in(problem.seqlen_q, size), blocks_in(problem.seqlen_k, size)


def _with_mask_mod(problem: Problem, params: tuple[Tensor, ...], shown: Tensor) -> BlockLists:
    whole = torch.ones_like(shown)
    if problem.mask_mod:
        names = (parameter.name for parameter in parameters_of(problem.score_mod, problem.mask_mod))
        given = dict(zip(names, params, strict=True))
        read = tuple(given[parameter.name] for parameter in parameters_of("", problem.mask_mod))
        shape = (problem.batch, problem.heads, problem.seqlen_q, problem.seqlen_k)
        seen, whole = blocks_of_mask(problem.mask_mod, read, shape, problem.block_size, str(shown.device))
        shown = shown & seen
    return lists_of(shown, whole, problem.seqlen_k, problem.block_size)
