"""Standard attention in plain torch: the whole score matrix in memory. The baseline that shows what it costs."""

from __future__ import annotations

import torch
from torch import Tensor

from autoflash.evaluate.cost import score_matrix_bytes
from autoflash.evaluate.peer import Attend, Peer
from autoflash.evaluate.semantics import Block, Semantics
from autoflash.problem import Form, Pass, Problem
from autoflash.runtime.executable import Extras
from autoflash.variant import Choices, Family, Variant

STANDARD = Variant(family=Family.VENDOR, structure=Choices(backend="standard"), config=Choices())


class StandardAttention(Peer):
    """Standard attention as a user writes it: scores, softmax and product, by whole matrices.

    The graph of its backward holds the probabilities.
    """

    variant = STANDARD

    def why_not(self, problem: Problem, *tensors: Tensor) -> str | None:
        """What it is not written for; None if it can run the problem."""
        if problem.is_empty:
            return "there is no query or no key"
        form = Form.of(problem)
        unwritten = [name for name in ("varlen", "score_mod", "mask_mod", "sinks", "dropout") if form.has(name)]
        return f"standard attention is not compared with {unwritten[0]}" if unwritten else None

    def attend(self, problem: Problem, q: Tensor, scale: float, extras: Extras) -> Attend:
        """The three steps with everything bound but q, k and v."""
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
