"""Which problems a kernel is verified on: its own specialisation, and the grid that every tuned kernel has passed."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from autoflash.evaluate.inputs import Memory
from autoflash.problem import Alignment, DType, Pass, Problem

_MAX_HEADS = 8

# Longer sequences are brought down to this plus their remainder by the largest block, which keeps every divisibility.
_REDUCED_SEQLEN = 512
_LARGEST_BLOCK = 256

# Prime, and many blocks of any size.
_LONG_SEQLEN = 4099


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One problem to verify a kernel on.

    Attributes:
        problem: With the sizes of the tensors.
        memory: How the tensors lie.
        scale: Factor of the scores; None is 1/sqrt(D).
        with_dlse: A backward also gets a gradient of the log-sum-exp.
        shared: Keys and values are expanded over the heads, and dout over everything.
        flat: All gradients have one size: see :func:`~autoflash.evaluate.inputs.draw_flat`.
    """

    problem: Problem
    memory: Memory = Memory.DENSE
    scale: float | None = None
    with_dlse: bool = False
    shared: bool = False
    flat: bool = False

    @property
    def score_scale(self) -> float:
        """The factor of the scores as a number."""
        return 1.0 / math.sqrt(self.problem.head_dim) if self.scale is None else self.scale

    @property
    def values(self) -> Case:
        """The case without what has no influence on the right results: equal cases have equal ones."""
        return dataclasses.replace(self, memory=Memory.DENSE, problem=self.problem.replace(deterministic=False))

    def __str__(self) -> str:
        """For people, such as ``113x203 causal, heads 4/2, strided``."""
        problem = self.problem
        mask = f"{problem.mask.value} {problem.alignment.value}" if problem.causal else problem.mask.value
        parts = [f"{problem.seqlen_q}x{problem.seqlen_k} {mask}", f"heads {problem.heads}/{problem.kv_heads}"]
        parts += [] if self.memory is Memory.DENSE else [self.memory.value]
        parts += [] if self.scale is None else [f"scale {self.scale}"]
        parts += ["with dlse"] if self.with_dlse else []
        parts += ["expanded"] if self.shared else []
        parts += ["gradients of one size"] if self.flat else []
        return ", ".join(parts)


def screen_cases(problem: Problem) -> tuple[Case, ...]:
    """The specialisation that is about to be timed, on sequences as short as it allows, and one irregular shape.

    A backward in bf16 also gets the smallest problem that has gradients of one size: of the other cases, none shows an
    error of one percent there. In the other types each does.
    """
    cases = (_own(problem), _case(problem, 113, 203, with_dlse=True))
    if problem.op is Pass.BACKWARD and problem.dtype is DType.BF16:
        return (*cases, _case(problem, 1, 2, flat=True))
    return cases


def full_cases(problem: Problem) -> tuple[Case, ...]:
    """The grid: every specialisation that dispatch can select, and every border that a kernel can get wrong."""
    top_left = Alignment.TOP_LEFT
    cases = (
        *screen_cases(problem),
        # Sequences that fill every block; one head for each key head, and several.
        _case(problem, 256, 256, batch=2, kv_heads=2, group=1, with_dlse=True),
        _case(problem, 256, 512, batch=2, kv_heads=2, group=2, memory=Memory.BSHD),
        _case(problem, 256, 256, memory=Memory.PACKED),
        _case(problem, 256, 256, memory=Memory.STRIDED, with_dlse=True),
        # Sequences that fill none; rows without keys under a causal mask where Sq > Sk.
        _case(problem, 331, 331, kv_heads=1, group=3),
        _case(problem, 203, 113, with_dlse=True),
        _case(problem, 203, 113, alignment=top_left, memory=Memory.BSHD),
        _case(problem, 113, 203, alignment=top_left, group=1),
        _case(problem, 131, 197, memory=Memory.STRIDED, group=2),
        _case(problem, 97, 160, memory=Memory.TRANSPOSED),
        _case(problem, 96, 65, shared=True, kv_heads=2),
        # One visible key, one row, nothing at all.
        _case(problem, 70, 1, group=2),
        _case(problem, 1, 300, memory=Memory.BSHD),
        _case(problem, 1, 1),
        _case(problem, 5, 0),
        _case(problem, 0, 5),
        # Many blocks one way or the other.
        _case(problem, 48, _LONG_SEQLEN, kv_heads=1),
        _case(problem, _LONG_SEQLEN, 48, alignment=top_left, kv_heads=1),
        # Other scales than the usual one.
        _case(problem, 64, 128, scale=-0.15),
        _case(problem, 64, 128, scale=0.0),
    )
    return tuple(dict.fromkeys(cases))


def determinism_case(problem: Problem, multiprocessors: int) -> Case:
    """Enough heads that there are more tiles of 128 queries or keys than multiprocessors, so that the order varies."""
    heads = _case(problem, 512, 512).problem.heads
    return _case(problem, 512, 512, batch=multiprocessors // (heads * 4) + 1)


def _own(problem: Problem) -> Case:
    batch, kv_heads = min(problem.batch, 2), min(problem.kv_heads, 2)
    if problem.group * kv_heads > _MAX_HEADS:
        batch, kv_heads = min(batch, 1), 1
    return Case(
        problem=problem.replace(
            batch=batch,
            heads=problem.group * kv_heads,
            kv_heads=kv_heads,
            seqlen_q=reduced_seqlen(problem.seqlen_q),
            seqlen_k=reduced_seqlen(problem.seqlen_k),
        )
    )


def reduced_seqlen(seqlen: int) -> int:
    """A short sequence length that fills the same blocks: longer ones keep their remainder by the largest block."""
    return min(seqlen, _REDUCED_SEQLEN + seqlen % _LARGEST_BLOCK)


def _case(
    problem: Problem,
    seqlen_q: int,
    seqlen_k: int,
    *,
    batch: int = 1,
    kv_heads: int = 2,
    group: int | None = None,
    alignment: Alignment = Alignment.BOTTOM_RIGHT,
    memory: Memory = Memory.DENSE,
    scale: float | None = None,
    with_dlse: bool = False,
    shared: bool = False,
    flat: bool = False,
) -> Case:
    """A case with the problem's own type, head dims, mask and (unless given) group."""
    group = min(problem.group, _MAX_HEADS) if group is None else group
    return Case(
        problem=problem.replace(
            batch=batch,
            heads=kv_heads * group,
            kv_heads=kv_heads,
            seqlen_q=seqlen_q,
            seqlen_k=seqlen_k,
            alignment=alignment,
        ),
        memory=memory,
        scale=scale,
        with_dlse=with_dlse and problem.op is Pass.BACKWARD,
        shared=shared,
        flat=flat,
    )
