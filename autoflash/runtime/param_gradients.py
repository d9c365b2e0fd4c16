"""Gradients of the parameters of expressions in the Triton family: what the kernels of look-ups write, added up.

A kernel leaves sums of gradients and the places of the elements that they belong to, and they are added by place in an
order that is always the same. Where pairs share elements in a way that no kernel could walk along, it adds to the
elements itself, atomically.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor

from autoflash.codegen.expressions import LookUp, look_ups_of
from autoflash.expression.sharing import Sharing
from autoflash.problem import Problem

_Step = TypeVar("_Step")


def look_ups(problem: Problem) -> tuple[LookUp, ...]:
    """Those that have a kernel of their own, in launch order."""
    return look_ups_of(problem.score_mod, problem.mask_mod) if problem.params_gradient else ()


def tensor_names(look_up: LookUp) -> tuple[str, ...]:
    """What its kernel writes, by the names of its parameters without ``_ptr``."""
    return ("total",) if look_up.sharing is Sharing.PAIR else ("sums", "places")


def programs(problem: Problem, look_up: LookUp, rows: int) -> int:
    """How many its kernel has, with tiles of so many queries and as many keys."""
    return problem.batch * problem.heads * _tiles(problem, look_up, rows)


def sums_shape(problem: Problem, look_up: LookUp, rows: int) -> tuple[int, ...]:
    """Of the float32 sums that its kernel leaves, and of their places, int64; empty where it leaves none."""
    heads = (problem.batch, problem.heads)
    if look_up.sharing is Sharing.PAIR:
        return ()
    if look_up.sharing is Sharing.QUERY:
        return (*heads, problem.seqlen_q)
    if look_up.sharing is Sharing.KEY:
        return (*heads, problem.seqlen_k)
    tiles = _tiles(problem, look_up, rows)
    return (*heads, tiles) if look_up.sharing is Sharing.HEAD else (*heads, tiles, 2 * rows)


def _tiles(problem: Problem, look_up: LookUp, rows: int) -> int:
    """Of a head: of queries, of keys, or diagonals of tiles."""
    of_queries, of_keys = -(-problem.seqlen_q // rows), -(-problem.seqlen_k // rows)
    if look_up.sharing is Sharing.DISTANCE:
        return of_queries + of_keys - 1
    return of_keys if look_up.sharing is Sharing.KEY else of_queries


class ParamSums:
    """The workspaces of one call, of those parameters alone whose gradients are wanted."""

    def __init__(
        self, look_ups: Sequence[LookUp], shapes: Sequence[tuple[int, ...]], gradients: Sequence[Tensor | None]
    ) -> None:
        """Allocate them.

        Args:
            look_ups: Of the problem.
            shapes: Of the sums of each.
            gradients: One for each parameter, or None where it is not wanted; empty where none is.
        """
        wanted = {place: gradient for place, gradient in enumerate(gradients) if gradient is not None}
        self._gradients = wanted
        # Place 0 is for what lies outside.
        self._totals = {place: gradient.new_zeros(1 + gradient.numel()) for place, gradient in wanted.items()}
        self._of_look_ups = [
            (look_up, self._made(look_up, shape)) for look_up, shape in zip(look_ups, shapes, strict=True)
        ]

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """What the kernels write, in the order of the look-ups and of :func:`tensor_names`; None where nothing does."""
        return tuple(tensor for _, made in self._of_look_ups for tensor in made)

    def wanted(self, steps: Sequence[_Step]) -> list[_Step]:
        """The steps of a call, of which those of look-ups come last, without the ones that write what is not wanted."""
        first = len(steps) - len(self._of_look_ups)
        of_look_ups = zip(steps[first:], self._of_look_ups, strict=True)
        return [*steps[:first], *(step for step, (look_up, _) in of_look_ups if look_up.place in self._totals)]

    def add_up(self) -> None:
        """Write the gradients, once the kernels are enqueued."""
        for look_up, made in self._of_look_ups:
            if look_up.sharing is Sharing.PAIR or made[0] is None or made[1] is None:
                continue
            sums, places = made[0], made[1]
            if look_up.sharing is Sharing.HEAD:
                sums, places = torch.sum(sums, dim=2), places[:, :, 0]
            self._totals[look_up.place].index_put_((places.flatten(),), sums.flatten(), accumulate=True)
        for place, gradient in self._gradients.items():
            gradient.copy_(self._totals[place][1:].view(gradient.shape))

    def _made(self, look_up: LookUp, shape: tuple[int, ...]) -> tuple[Tensor | None, ...]:
        total = self._totals.get(look_up.place)
        if look_up.sharing is Sharing.PAIR:
            return (total,)
        if total is None:
            return (None, None)
        return total.new_empty(shape), total.new_empty(shape, dtype=torch.int64)
