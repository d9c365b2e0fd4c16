"""Masks given as tensors that kernels are verified on: whole tiles hidden, rows without keys, elements shared."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from autoflash.evaluate.inputs import Memory
from autoflash.problem import DType, MaskTensor, Problem
from autoflash.runtime.layouts import TORCH_TYPES

# More than the keys of any block; hidden at one end where a sequence is so long, else half of it.
_MORE_THAN_A_BLOCK = 257

# Far enough that a maximum which starts at 0, and not at -inf, leaves nothing of the row.
_FAR_BELOW = -200.0

# Its row's other scores still count where nothing else is visible.
_VERY_LOW = -1e4


class Pattern(str, Enum):
    """Which pairs a mask hides, and over what it is broadcast."""

    MIXED = "mixed"
    """A third of all pairs at random; of some rows all keys, or all but one; of some heads the first or last 64."""
    FIRST_KEYS = "first keys"
    """The first keys of all rows, more than a block."""
    LAST_KEYS = "last keys"
    """The last keys of all rows, more than a block."""
    PADDING = "padding"
    """[B, 1, 1, N]: the last keys of each batch entry, every second one as a whole."""
    ROWS = "rows"
    """[B, 1, M, 1]: whole rows, so that all keys share an element."""
    EACH_HEAD = "each head"
    """[1, H, M, N], at random."""
    EACH_BATCH = "each batch"
    """[B, 1, M, N], at random; no row is without keys. A float mask has a finite number for -inf: the least one, unless
    some row may see nothing else."""
    FAR_BELOW = "far below"
    """As FIRST_KEYS; a float mask also takes much from all other scores."""
    NOTHING = "nothing hidden"
    """[1, 1, 1, 1]."""
    EVERYTHING = "everything hidden"
    """[1, 1, 1, 1]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskForm:
    """A mask as far as a problem leaves it open.

    Attributes:
        pattern: What it hides.
        memory: How its elements lie before they are broadcast.
        dtype: Of a float mask; None is the inputs' own.
    """

    pattern: Pattern = Pattern.MIXED
    memory: Memory = Memory.DENSE
    dtype: DType | None = None

    def __str__(self) -> str:
        """For people, such as ``mask padding fp16 transposed``."""
        parts = [self.pattern.value, *([self.dtype.value] if self.dtype else [])]
        return " ".join(["mask", *parts, *([] if self.memory is Memory.DENSE else [self.memory.value])])


def draw_mask(problem: Problem, form: MaskForm, *, device: str = "cpu") -> Tensor:
    """The same mask on every device, of rank 4 and not yet expanded to [B, H, M, N].

    Args:
        problem: Gives the sizes, and says whether it is a bool or a float mask.
        form: What it hides.
        device: Where it shall lie.
    """
    generator = torch.Generator().manual_seed(problem.seqlen_q * 31 + problem.seqlen_k)
    visible = _visible(problem, form.pattern, generator)
    if problem.mask_tensor is MaskTensor.BOOL:
        return visible.to(device)
    dtype = TORCH_TYPES[form.dtype or problem.dtype]
    values = torch.randn(visible.shape, generator=generator, dtype=torch.float32) * 2.0
    if form.pattern in (Pattern.NOTHING, Pattern.EVERYTHING):
        values = torch.zeros_like(values)
    if form.pattern is Pattern.FAR_BELOW:
        values += _FAR_BELOW
    hidden = -math.inf
    if form.pattern is Pattern.EACH_BATCH:
        hidden = _VERY_LOW if problem.causal or problem.has_window else torch.finfo(dtype).min
    return values.to(dtype).masked_fill(~visible, hidden).to(device)


def _visible(problem: Problem, pattern: Pattern, generator: torch.Generator) -> Tensor:
    batch, heads, seqlen_q, seqlen_k = problem.batch, problem.heads, problem.seqlen_q, problem.seqlen_k
    keys, rows = torch.arange(seqlen_k).view(1, 1, 1, -1), torch.arange(seqlen_q).view(1, 1, -1, 1)

    def random(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator) > 0.3

    if pattern is Pattern.MIXED:
        mixed = random(batch, heads, seqlen_q, seqlen_k)
        head = torch.arange(heads).view(1, -1, 1, 1)
        mixed &= ~((head % 3 == 1) & (keys < min(64, seqlen_k // 2)))
        mixed &= ~((head % 3 == 2) & (keys >= seqlen_k - min(64, seqlen_k // 2)))
        mixed &= (rows + head) % 7 != 3
        return torch.where((rows + head) % 7 == 5, keys == (rows * 5 + head) % max(seqlen_k, 1), mixed)
    some = min(_MORE_THAN_A_BLOCK, seqlen_k // 2)
    if pattern in (Pattern.FIRST_KEYS, Pattern.FAR_BELOW):
        return random(1, heads, 1, seqlen_k) & (keys >= some)
    if pattern is Pattern.LAST_KEYS:
        return random(1, heads, 1, seqlen_k) & (keys < seqlen_k - some)
    if pattern is Pattern.PADDING:
        entries = torch.arange(batch).view(-1, 1, 1, 1)
        return keys < torch.where(entries % 2 == 0, seqlen_k // 3 + 1 + entries, 0)
    if pattern is Pattern.ROWS:
        return random(batch, 1, seqlen_q, 1)
    if pattern is Pattern.EACH_HEAD:
        return random(1, heads, seqlen_q, seqlen_k)
    if pattern is Pattern.EACH_BATCH:
        return random(batch, 1, seqlen_q, seqlen_k) | (keys == rows % max(seqlen_k, 1))
    return torch.full((1, 1, 1, 1), pattern is Pattern.NOTHING)
