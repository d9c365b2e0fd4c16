"""The map of a block mask as kernels read it: made on the device, and never looked at by the host.

Queries and keys are cut into blocks of ``block_size``. A block of pairs is hidden, partial (some pairs take part) or
whole (all do). A list of a block of queries holds, as int32, how many blocks of keys are whole, how many are whole or
partial, and then the numbers of the whole ones, of the partial ones and of the hidden ones, each ascending. A block
that keys end in is partial, so that only whole ones need no look at where keys end.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from autoflash.problem import Feature, Form, Mask, Pass
from autoflash.variant import Choices, Family

# Pairs that an expression is evaluated for at once.
_PAIRS_AT_ONCE = 1 << 24

HEADER = 2
"""Numbers of a list before its blocks."""


class BlockLists(NamedTuple):
    """Which blocks are visited.

    Attributes:
        queries: A list of blocks of keys for each block of queries: [B or 1, H or 1, M blocks, N blocks + 2] int32.
        keys: A list of blocks of queries for each block of keys: [B or 1, H or 1, N blocks, M blocks + 2] int32.
    """

    queries: Tensor
    keys: Tensor


def blocks_in(length: int, block_size: int) -> int:
    """How many blocks there are of so many queries or keys."""
    return -(-length // block_size)


def lists_of(shown: Tensor, whole: Tensor, seqlen_k: int, block_size: int) -> BlockLists:
    """The lists of both sides.

    Args:
        shown: Which blocks are not hidden, [B or 1, H or 1, M blocks, N blocks] bool.
        whole: Which of them hide no pair, likewise.
        seqlen_k: N.
        block_size: Queries and keys of a block.
    """
    ends = torch.arange(1, shown.shape[3] + 1, device=shown.device) * block_size
    state = (~shown).int() * 2 + (shown & ~(whole & (ends <= seqlen_k))).int()
    return BlockLists(queries=_lists(state), keys=_lists(state.transpose(2, 3)))


def _lists(state: Tensor) -> Tensor:
    """Lists [..., rows, blocks + 2] of blocks whose state is 0 (whole), 1 (partial) or 2 (hidden)."""
    whole, shown = ((state < least).sum(dim=-1, keepdim=True) for least in (1, 2))
    return torch.cat([whole, shown, state.argsort(dim=-1, stable=True)], dim=-1).int().contiguous()


def shown_blocks(queries: Tensor) -> Tensor:
    """Which blocks the lists of queries show, [B or 1, H or 1, M blocks, N blocks] bool."""
    blocks = queries[..., HEADER:]
    places = torch.arange(blocks.shape[-1], device=queries.device)
    is_shown = (places < queries[..., 1:HEADER]).expand(blocks.shape)
    return torch.zeros_like(is_shown).scatter(-1, blocks.long(), is_shown)


def expanded_blocks(blocks: Tensor, seqlen_q: int, seqlen_k: int, block_size: int) -> Tensor:
    """What holds of a block for each of its pairs, [B or 1, H or 1, M, N]."""
    rows, columns = (torch.arange(length, device=blocks.device) // block_size for length in (seqlen_q, seqlen_k))
    return blocks[:, :, rows][..., columns]


def pairs_seen(mask_mod: str, params: tuple[Tensor, ...], shape: tuple[int, ...], start: int, device: str) -> Tensor:
    """Whether an expression lets keys take part, [B or 1, H or 1, m, N] bool: of the queries from ``start`` on.

    Args:
        mask_mod: A line of the language.
        params: What it reads, in its order.
        shape: That of the result.
        start: First of the queries.
        device: Where.
    """
    # Templates are rendered only where an expression is asked: importing the package loads no Jinja.
    from autoflash.codegen.render import render
    from autoflash.runtime.load import load

    form = Form(op=Pass.FORWARD, mask=Mask.FULL, features=(Feature.MASK_MOD,), mask_mod=mask_mod)
    module = load(render(form, Family.TORCH_TILED, Choices(loop_order="query_outer")))
    batch, heads, rows, keys = shape
    off_b, off_h, offs_n = (torch.arange(size, dtype=torch.int32, device=device) for size in (batch, heads, keys))
    offs_m = torch.arange(start, start + rows, dtype=torch.int32, device=device)
    places = (off_b.view(-1, 1, 1, 1), off_h.view(-1, 1, 1), offs_m.view(-1, 1), offs_n)
    seen: Tensor = module.mask_mod(*places, *((params,) if params else ()))
    return seen.to(device).expand(shape)


def blocks_of_mask(
    mask_mod: str,
    params: tuple[Tensor, ...],
    shape: tuple[int, ...],
    block_size: int,
    device: str,
) -> tuple[Tensor, Tensor]:
    """Which blocks an expression shows, and which of them as a whole: [B or 1, H or 1, M blocks, N blocks] bool.

    Args:
        mask_mod: A line of the language.
        params: What it reads, in its order.
        shape: (B or 1, H or 1, M, N).
        block_size: Queries and keys of a block.
        device: Where.
    """
    batch, heads, seqlen_q, seqlen_k = shape
    across = blocks_in(seqlen_k, block_size)
    at_once = max(1, _PAIRS_AT_ONCE // max(1, batch * heads * seqlen_k * block_size)) * block_size
    shown: list[Tensor] = []
    whole: list[Tensor] = []
    for start in range(0, seqlen_q, at_once):
        rows = min(at_once, seqlen_q - start)
        seen = pairs_seen(mask_mod, params, (batch, heads, rows, seqlen_k), start, device)
        missing = (0, across * block_size - seqlen_k, 0, -rows % block_size)
        for found, value in ((shown, False), (whole, True)):
            # Pairs that do not exist decide nothing.
            tiles = torch.nn.functional.pad(seen, missing, value=value)
            tiles = tiles.view(batch, heads, blocks_in(rows, block_size), block_size, across, block_size)
            found.append(tiles.all(dim=5).all(dim=3) if value else tiles.any(dim=5).any(dim=3))
    empty = torch.zeros((batch, heads, 0, across), dtype=torch.bool, device=device)
    return torch.cat([empty, *shown], dim=2), torch.cat([empty, *whole], dim=2)
