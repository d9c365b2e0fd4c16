"""Tensors that kernels are verified on: values that make mistakes show, in memory that shows who wrote where."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from autoflash.problem import DType, Pass, Problem
from autoflash.runtime.executable import NO_EXTRAS, Extras
from autoflash.runtime.layouts import TORCH_TYPES

# NaNs with a payload that no arithmetic gives: a canary that is overwritten with NaN is seen too.
_CANARIES = {torch.float16: 0x7E5A, torch.bfloat16: 0x7FDA, torch.float32: 0x7FC0A55A}
_CANARIES |= {torch.bool: 0x5A, torch.int32: 0x5AA55AA5, torch.int64: 0x5AA55AA55AA55AA5}
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

MARGIN = 1 << 15
"""Elements before and behind a tensor that are watched: more than a block of 128 rows of the widest heads may overrun.

It keeps 16-byte alignment.
"""

# Every block size is a multiple of 16, so that its first and last key are the first or last of some 16.
_BLOCK_STEP = 16

LOW = -150.0
"""Where low scores lie: a maximum that starts at 0, and not at -inf, leaves nothing of their row."""

# Of a factor of queries: their products with keys shall be finite in fp16.
_MOST = 1000.0


class Memory(str, Enum):
    """How a [B, H, S, D] tensor lies in memory."""

    DENSE = "dense"
    """[B, H, S, D], contiguous."""
    BSHD = "bshd"
    """[B, S, H, D], contiguous."""
    PACKED = "packed"
    """One of three tensors in [B, S, 3, H, D]: rows are far apart."""
    STRIDED = "strided"
    """Every second element of a row, from an odd address."""
    TRANSPOSED = "transposed"
    """[B, H, D, S]: the sequence is innermost."""
    SHARED_HEAD = "shared_head"
    """All heads at one address: a stride of 0."""
    SHARED_ELEMENT = "shared_element"
    """All elements at one address, as the gradient of a sum is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """Values of one verification, contiguous.

    Attributes:
        q, k, v: [B, H, M, D], [B, H_KV, N, D], [B, H_KV, N, D_V].
        dout: Gradient of the output, [B, H, M, D_V].
        dlse: Gradient of the log-sum-exp, [B, H, M] in float32.
        extras: What the problem has beside these; a mask is not expanded.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    dlse: Tensor
    extras: Extras = NO_EXTRAS


Lengths = tuple[tuple[int, int], ...]
"""Queries and keys of each packed sequence."""


def draw(
    problem: Problem,
    scale: float,
    *,
    shared: bool = False,
    low: bool = False,
    lengths: Lengths = (),
    device: str = "cpu",
) -> Inputs:
    """Draw the same normal numbers on every device, and plant keys in half of the rows.

    A planted row points at one key so strongly that this key decides its output: the first or the last one of some
    block, whatever the block size; under a causal mask or a window also the last key that the row sees on either side,
    or the first one that it must not see. The other half stays random, where many keys take part; under a softcap, some
    of these rows have scores of its size, and some far beyond it. Rows behind the last packed sequence are NaN.

    Args:
        problem: Gives shapes, type, mask, window and softcap.
        scale: Factor of the scores, which the strength of a plant depends on.
        shared: Keys and values are equal in all heads, and so are all elements of dout.
        low: All scores lie far below 0.
        lengths: Of packed sequences, from the first rows on; empty where nothing is packed.
        device: Where the tensors shall lie.
    """
    generator = torch.Generator().manual_seed(problem.seqlen_q * 7919 + problem.seqlen_k)
    batch, heads, kv_heads = problem.tensor_batch, problem.heads, problem.kv_heads

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float32)

    q = normal(batch, heads, problem.rows_q, problem.head_dim)
    k = normal(batch, 1 if shared else kv_heads, problem.rows_k, problem.head_dim)
    v = normal(batch, 1 if shared else kv_heads, problem.rows_k, problem.head_dim_v)
    k, v = k.expand(-1, kv_heads, -1, -1), v.expand(-1, kv_heads, -1, -1)
    dout = normal(batch, heads, problem.rows_q, problem.head_dim_v)
    if shared:
        dout = torch.ones((), dtype=torch.float32).expand_as(dout)
    dlse = normal(batch, heads, problem.rows_q)
    if not problem.is_varlen:
        _plant(q, k, problem, scale)
    end_q = end_k = 0
    for length_q, length_k in lengths:
        rows, keys = slice(end_q, end_q + length_q), slice(end_k, end_k + length_k)
        _plant(q[:, :, rows], k[:, :, keys], _one_sequence(problem, length_q, length_k), scale)
        end_q, end_k = rows.stop, keys.stop
    if low:
        k = k.clone()
        q[..., 0], k[..., 0] = 8.0, LOW / (8.0 * scale)
    if problem.is_varlen:
        k, v, dout = k.clone(), v.clone(), dout.clone()
        for tensor, end in ((q, end_q), (k, end_k), (v, end_k), (dout, end_q), (dlse, end_q)):
            tensor[:, :, end:] = math.nan
    dtype = TORCH_TYPES[problem.dtype]
    q, k, v, dout = (tensor.to(device=device, dtype=dtype).contiguous() for tensor in (q, k, v, dout))
    return Inputs(q=q, k=k, v=v, dout=dout, dlse=dlse.to(device))


def draw_flat(problem: Problem, scale: float, *, device: str = "cpu") -> Inputs:
    """Draw one query and two keys whose gradients all have one size, and would be exact but for their last rounding.

    Elsewhere the largest gradients decide what is allowed, and hide an error of one percent in bf16; here it shows.
    The scores are equal (q is orthogonal to both keys), so that each probability is a half; the values are opposite.
    Whatever the sizes, each number that a kernel rounds on the way is exact in bf16.

    Args:
        problem: One query and two keys; gives the other sizes and the type.
        scale: Factor of the scores, a power of two.
        device: Where the tensors shall lie.
    """
    generator = torch.Generator().manual_seed(0)
    batch, kv_heads, group = problem.batch, problem.kv_heads, problem.group

    def signs(width: int) -> Tensor:
        return torch.randint(0, 2, (batch, kv_heads, 1, width), generator=generator).float() * 2.0 - 1.0

    alternating = 1.0 - 2.0 * (torch.arange(problem.head_dim) % 2).float()
    alternating[problem.head_dim // 2 * 2 :] = 0.0
    towards, upwards = signs(problem.head_dim), signs(problem.head_dim_v)
    # Powers of two in place of the group and of the columns: a half of the sum over columns, ds, is 3.5.
    share, columns = 1 << (group - 1).bit_length(), 1 << (problem.head_dim_v.bit_length() - 1)
    values = upwards * (torch.arange(problem.head_dim_v) < columns)
    # Of one head, dq and dk are 7/8 times ds / 3.5, and dv is 7/8; dk and dv of a group are so many shares of it.
    k = torch.cat([towards, -towards], dim=2) * (0.125 / scale)
    v = torch.cat([values, -values], dim=2) * (4.0 * share / columns)
    q = (towards * alternating * (0.25 / (scale * share))).repeat_interleave(group, dim=1)
    dout = (upwards * (1.75 / share)).repeat_interleave(group, dim=1)
    dtype = TORCH_TYPES[problem.dtype]
    q, k, v, dout = (tensor.to(device=device, dtype=dtype) for tensor in (q, k, v, dout))
    return Inputs(
        q=q, k=k, v=v, dout=dout, dlse=torch.zeros(batch, problem.heads, 1, dtype=torch.float32, device=device)
    )


def block_borders(seqlen_k: int) -> Tensor:
    """The keys that are first or last in a block of some size, the outermost first, [C] int64."""
    keys = torch.arange(seqlen_k)
    first, last = keys % _BLOCK_STEP == 0, keys % _BLOCK_STEP == _BLOCK_STEP - 1
    inner = keys[(first | last) & (keys != 0) & (keys != seqlen_k - 1)]
    return torch.cat([keys[-1:], keys[:1], inner])


def _one_sequence(problem: Problem, seqlen_q: int, seqlen_k: int) -> Problem:
    """The problem that one packed sequence is."""
    return problem.replace(batch=1, packed_q=None, packed_k=None, seqlen_q=seqlen_q, seqlen_k=seqlen_k)


def _plant(q: Tensor, k: Tensor, problem: Problem, scale: float) -> None:
    """Turn half of the rows of q [B, H, M, D] towards a key each, in place."""
    batch, heads, seqlen_q, head_dim = q.shape
    seqlen_k = k.shape[2]
    if q.numel() == 0 or seqlen_k == 0 or scale == 0.0:
        return
    rows = torch.arange(seqlen_q)
    heads_before = torch.arange(batch * heads).view(batch, heads, 1)
    planted = (rows + heads_before) % 2 == 0  # [B, H, M]
    turn = (rows + heads_before) // 2
    borders, edges = block_borders(seqlen_k), _edges(problem)
    # 37 has no common factor with most lengths: neighbouring rows point far apart, and in time to every border.
    target = borders[(turn // (len(edges) + 1) + heads_before * 5) * 37 % len(borders)]
    for number, edge in enumerate(edges, start=1):
        at_edge = (rows + problem.diagonal + edge).clamp(0, seqlen_k - 1)
        target = torch.where(turn % (len(edges) + 1) == number, at_edge, target)
    group = heads // problem.kv_heads
    keys = k.repeat_interleave(group, dim=1).gather(2, target[..., None].expand(-1, -1, -1, head_dim))
    strength = _before_softcap(_strength(problem), problem.softcap)
    towards = keys * (strength / (scale * (keys * keys).sum(dim=-1, keepdim=True)))
    if problem.dtype is DType.FP16:
        # Of one or two elements, a key may be next to nothing.
        towards = towards.clamp(-_MOST, _MOST)
    q[planted] = towards[planted]
    if problem.softcap:
        spread = abs(scale) * math.sqrt(head_dim)
        reaching = max(problem.softcap / 2, 1.0) / spread
        beyond = min(50.0 * problem.softcap / spread, _MOST)
        q[~planted & (turn % 3 == 1)] *= min(reaching, _MOST)
        q[~planted & (turn % 9 == 2)] *= beyond


def _edges(problem: Problem) -> list[int]:
    """The last keys that a row sees and the first that it does not, counted from its position."""
    right = 0 if problem.causal else problem.window_right
    edges = [] if right is None else [right, right + 1]
    return edges + ([] if problem.window_left is None else [-problem.window_left, -problem.window_left - 1])


def _before_softcap(score: float, softcap: float) -> float:
    """The score that a softcap makes this one of, or nearly its bound."""
    return softcap * math.atanh(min(score / softcap, 0.95)) if softcap else score


def _strength(problem: Problem) -> float:
    """Score of a planted key for its row; those of other keys lie around 0, with a deviation of 1/sqrt(D) of it."""
    if problem.dtype is DType.FP32:
        # The limits are so narrow that a weight of some percent shows; more would only magnify rounding.
        return 3.0
    if problem.op is Pass.BACKWARD:
        # About half of the row's weight: a softmax that one key has all of passes no gradient on, only rounding.
        return max(math.log(problem.seqlen_k), 1.0)
    return 8.0 / max(1.0 - 3.3 / math.sqrt(problem.head_dim), 0.5)


class Guarded:
    """A tensor inside a larger buffer that nobody may write to, except for the tensor's own elements if allowed."""

    def __init__(self, values: Tensor, memory: Memory, margin: int = MARGIN) -> None:
        """Copy values [B, H, S, X] or [B, H, S] into guarded memory; those of lower rank stay contiguous.

        Of elements that share an address, the first one's value is taken. With a ``margin`` of 0 an allocation ends
        where its tensor does, for tools that watch allocations.
        """
        strides, offset = _layout(values, memory)
        span = 1 + sum((size - 1) * stride for size, stride in zip(values.shape, strides, strict=True))
        length = 2 * margin + (max(span, 1) if values.numel() else 1) + offset
        self._buffer = torch.zeros(length, dtype=values.dtype, device=values.device)
        self._bits.fill_(_CANARIES[values.dtype])
        self.tensor = self._buffer.as_strided(values.shape, strides, margin + offset)
        distinct = tuple(slice(0, 1) if stride == 0 else slice(None) for stride in strides)
        self.tensor[distinct] = values[distinct]
        self._before = self._bits.clone()

    @classmethod
    def unwritten(cls, like: Tensor, memory: Memory, margin: int = MARGIN) -> Guarded:
        """An output of the shape, type and device of ``like``, full of NaN."""
        guarded = cls(like, memory, margin)
        guarded._bits.fill_(_CANARIES[like.dtype])
        guarded._before.copy_(guarded._bits)
        return guarded

    @property
    def _bits(self) -> Tensor:
        return self._buffer.view(_BITS[self._buffer.element_size()])

    def is_unchanged(self) -> bool:
        """Whether neither the tensor nor its surroundings were written to."""
        return torch.equal(self._bits, self._before)

    def is_unchanged_outside(self) -> bool:
        """Whether nothing but the tensor's elements was written to."""
        allowed = self._before.clone()
        inside = allowed.as_strided(self.tensor.shape, self.tensor.stride(), self.tensor.storage_offset())
        inside.copy_(self.tensor.view(allowed.dtype))
        return torch.equal(self._bits, allowed)


def _layout(values: Tensor, memory: Memory) -> tuple[tuple[int, ...], int]:
    """Strides and offset in elements."""
    rank = values.dim()
    if rank < 3:
        return values.contiguous().stride(), 0
    heads, seqlen = values.shape[1:3]
    width = values.shape[3] if rank == 4 else 1
    if memory is Memory.BSHD:
        strides, offset = (seqlen * heads * width, width, heads * width, 1), 0
    elif memory is Memory.PACKED:
        strides, offset = (seqlen * 3 * heads * width, width, 3 * heads * width, 1), 0
    elif memory is Memory.STRIDED:
        strides, offset = (heads * seqlen * width * 2, seqlen * width * 2, width * 2, 2), 1
    elif memory is Memory.TRANSPOSED:
        strides, offset = (heads * seqlen * width, seqlen * width, 1, seqlen), 0
    elif memory is Memory.SHARED_HEAD:
        strides, offset = (seqlen * width, 0, width, 1), 0
    elif memory is Memory.SHARED_ELEMENT:
        strides, offset = (0, 0, 0, 0), 0
    else:
        strides, offset = (heads * seqlen * width, seqlen * width, width, 1), 0
    return strides[:rank], offset
