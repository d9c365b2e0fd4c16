"""What others have beside torch's SDPA backends, made to look like a kernel of ours for a comparison."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from autoflash.problem import Problem
from autoflash.runtime.executable import NO_EXTRAS, BackwardCall, Extras, ForwardCall, asked_terms, refuse_unable
from autoflash.runtime.vendor import KeptGraph, forward_without_lse
from autoflash.trial import Resources
from autoflash.variant import Variant

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""From q, k, v to the output."""


class Peer(ABC):
    """Executable of a function of somebody else's that allocates its own outputs, and has no log-sum-exp to give.

    It is no candidate of dispatch. The backward is autograd's, of a graph that is kept between calls.
    """

    has_lse = False
    source_digest = ""
    variant: Variant
    compiles = False
    """Whether a first call compiles; then preparing makes one, so that no call that is timed does."""

    @abstractmethod
    def why_not(self, problem: Problem, *tensors: Tensor) -> str | None:
        """What it cannot do; None if it can run the problem."""

    @abstractmethod
    def attend(self, problem: Problem, q: Tensor, scale: float, extras: Extras) -> Attend:
        """The function for a problem that it can do; differentiable by the tensors of ``extras``."""

    def is_loaded(self, problem: Problem, *tensors: Tensor, extras: Extras = NO_EXTRAS) -> bool:
        """Whether a first call has nothing to compile."""
        return not self.compiles

    def compiling(self) -> AbstractContextManager[None]:
        """What a call that compiles is made in."""
        return nullcontext()

    def resources(self) -> Resources | None:
        """Nothing is known of others' kernels."""
        return None

    def prepare_forward(
        self, problem: Problem, q: Tensor, k: Tensor, v: Tensor, scale: float, extras: Extras = NO_EXTRAS
    ) -> ForwardCall:
        """Bind the scale and the extras, and compile.

        Raises:
            NoKernelError: where :meth:`why_not` has something to say.
        """
        refuse_unable(self, problem, q, k, v)
        call = forward_without_lse(self.attend(problem, q, scale, extras))
        if self.compiles:
            with self.compiling():
                call(q, k, v)
        return call

    def prepare_backward(
        self,
        problem: Problem,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        dout: Tensor,
        scale: float,
        extras: Extras = NO_EXTRAS,
    ) -> BackwardCall:
        """Each call is the backward of a forward's graph, which is kept as long as the tensors stay the same.

        Both passes are compiled here.

        Raises:
            NoKernelError: where :meth:`why_not` has something to say.
        """
        refuse_unable(self, problem, q, k, v)
        leaves = {name: getattr(extras, name).detach().requires_grad_() for name in asked_terms(problem)}
        call = KeptGraph(self.attend(problem, q, scale, extras.replaced(leaves)), leaves)
        if self.compiles:
            with self.compiling():
                call(q, k, v, out, torch.empty(0), dout)
        return call
