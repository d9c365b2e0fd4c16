"""Standard attention in plain torch: the whole score matrix in memory. The baseline that shows what it costs."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from autoflash.errors import NoKernelError
from autoflash.evaluate.cost import score_matrix_bytes
from autoflash.evaluate.semantics import Block, Semantics
from autoflash.problem import Form, Pass, Problem
from autoflash.runtime.executable import NO_EXTRAS, BackwardCall, Extras, ForwardCall
from autoflash.runtime.vendor import KeptGraph, forward_without_lse
from autoflash.trial import Resources
from autoflash.variant import Choices, Family, Variant

STANDARD = Variant(family=Family.VENDOR, structure=Choices(backend="standard"), config=Choices())
"""Like a vendor's kernel: nothing is rendered, it allocates its own outputs, and has no log-sum-exp to give."""


class StandardAttention:
    """Executable of standard attention, as a user writes it: scores, softmax and product, by whole matrices.

    It is no candidate of dispatch. The backward is autograd's, of a graph that holds the probabilities.
    """

    has_lse = False
    variant = STANDARD
    source_digest = ""

    def why_not(self, problem: Problem, *tensors: Tensor) -> str | None:
        """What it is not written for; None if it can run the problem."""
        if problem.is_empty:
            return "there is no query or no key"
        form = Form.of(problem)
        unwritten = [name for name in ("varlen", "score_mod", "mask_mod", "sinks", "dropout") if form.has(name)]
        return f"standard attention is not compared with {unwritten[0]}" if unwritten else None

    def is_loaded(self, problem: Problem, *tensors: Tensor, extras: Extras = NO_EXTRAS) -> bool:
        """True: torch's kernels are compiled."""
        return True

    def resources(self) -> Resources | None:
        """Nothing is known of torch's kernels."""
        return None

    def prepare_forward(
        self, problem: Problem, q: Tensor, k: Tensor, v: Tensor, scale: float, extras: Extras = NO_EXTRAS
    ) -> ForwardCall:
        """Bind the scale and the masks.

        Raises:
            NoKernelError: where :meth:`why_not` has something to say.
        """
        return forward_without_lse(self._attend(problem, scale, extras))

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

        Raises:
            NoKernelError: where :meth:`why_not` has something to say.
        """
        return KeptGraph(self._attend(problem, scale, extras))

    def _attend(self, problem: Problem, scale: float, extras: Extras) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        reason = self.why_not(problem)
        if reason is not None:
            raise NoKernelError(reason)
        semantics = Semantics.of_problem(problem, scale, extras)
        whole = Block(
            rows=slice(0, problem.seqlen_q),
            keys=slice(0, problem.seqlen_k),
            start=0,
            diagonal=problem.diagonal,
            sequence=0,
        )

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            if problem.group > 1:
                k, v = (tensor.repeat_interleave(problem.group, dim=1) for tensor in (k, v))
            # Where nothing else is done to the scores, the scale goes into q, which is smaller.
            is_plain = not problem.softcap and semantics.mask is None
            s = (q * scale) @ k.mT if is_plain else semantics.capped(q @ k.mT)  # [B, H, M, N]
            s, hidden = semantics.scores(s, whole, semantics.hidden(s, whole))
            if hidden is None:
                return torch.softmax(s, dim=-1) @ v
            blind = hidden.all(dim=-1, keepdim=True)
            # A blind row stays unmasked: a softmax over nothing but -inf would send NaN into the gradients.
            p = torch.softmax(s.masked_fill_(hidden & ~blind, -torch.inf), dim=-1)  # [B, H, M, N]
            return (p @ v).masked_fill(blind, 0.0)

        return attend


def kept_bytes(problem: Problem) -> int:
    """Bytes that a forward keeps for its backward beside inputs and output: the probabilities."""
    return score_matrix_bytes(problem) if problem.op is Pass.BACKWARD else 0
