"""Do kernels that are timed beside each other compute the same? Coarse, and on the outputs of one call of each."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from autoflash.problem import Pass, Problem

# Root mean square of the differences over that of the values: rounding makes a quarter of it at most.
_MOST = {torch.bfloat16: 2e-2, torch.float16: 5e-3, torch.float32: 5e-3}
# Of a single row it may be so many times as much.
_OF_A_ROW = 10.0
# Values this small are none, as are the gradients of a query that sees one key.
_LEAST = 1e-2


def disagreement(problem: Problem, theirs: Sequence[Tensor], ours: Sequence[Tensor]) -> str | None:
    """How the outputs of a kernel differ from those of another by more than rounding; None where they do not.

    Both a mean over each output and its worst row are compared, since a mask that is one key off shows in the first
    rows alone. What dropout drops and the LSE are not: not every kernel has them.

    Args:
        problem: What both were asked for.
        theirs: Output [B, H, M, D_V], or dq, dk and dv of the shapes of q, k and v; what follows is not looked at.
        ours: Likewise of the kernel that is right.
    """
    names = ("out",) if problem.op is Pass.FORWARD else ("dq", "dk", "dv")
    for name, one, other in zip(names, theirs, ours, strict=False):
        if one.shape != other.shape:
            return f"its {name} is {list(one.shape)}, that of the generated kernel {list(other.shape)}"
        mean, worst = _differences(one, other)
        most = _MOST[other.dtype]
        # A NaN is larger than anything.
        if not (mean <= most and worst <= _OF_A_ROW * most):
            found = f"{_percent(mean)} in the mean, {_percent(worst)} in the worst row"
            limits = f"{_percent(most)} and {_percent(_OF_A_ROW * most)}"
            return f"its {name} differs from that of the generated kernel: by {found}, where {limits} are allowed"
    return None


def _differences(one: Tensor, other: Tensor) -> tuple[float, float]:
    """Relative ones: root mean square over everything, and of the worst row beside that mean."""
    wanted = other.float().norm(dim=-1)
    apart = (one.float() - other.float()).norm(dim=-1)
    scale = wanted.square().mean().sqrt().clamp(min=_LEAST)
    return float(apart.square().mean().sqrt() / scale), float((apart / (wanted + scale)).max())


def _percent(share: float) -> str:
    return f"{100.0 * share:.2g} %" if math.isfinite(share) else str(share)
