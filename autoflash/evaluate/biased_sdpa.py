"""Torch's SDPA with a bias and its gradient, by the one backend on GPUs that has both."""

from __future__ import annotations

import functools

from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from autoflash.evaluate.peer import Attend, Peer
from autoflash.problem import Feature, Pass, Problem
from autoflash.runtime.executable import Extras
from autoflash.variant import Choices, Family, Variant

BIASED = Variant(family=Family.VENDOR, structure=Choices(backend="efficient_bias"), config=Choices())


class BiasedSdpa(Peer):
    """Torch's efficient backend, on CPUs its math backend, with a bias for ``attn_mask``."""

    variant = BIASED

    def why_not(self, problem: Problem, *tensors: Tensor) -> str | None:
        """What it cannot do; None if it can run the problem."""
        if problem.is_empty:
            return "there is no query or no key"
        unable = [f.value for f in problem.features if f not in (Feature.BIAS, Feature.BIAS_GRADIENT)]
        if unable or not problem.bias:
            return f"it is compared where there is a bias alone, and not with {unable[0] if unable else 'none'}"
        if problem.causal:
            return "torch's SDPA takes a bias or a causal mask, not both"
        if problem.op is Pass.BACKWARD and problem.deterministic:
            return "the backward of torch's efficient backend is not deterministic"
        return None

    def attend(self, problem: Problem, q: Tensor, scale: float, extras: Extras) -> Attend:
        """SDPA with everything bound but q, k and v."""
        assert extras.bias is not None
        return functools.partial(_attend, bias=extras.bias, scale=scale, grouped=problem.group > 1)


def _attend(q: Tensor, k: Tensor, v: Tensor, *, bias: Tensor, scale: float, grouped: bool) -> Tensor:
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION if q.is_cuda else SDPBackend.MATH):
        whole = bias.expand(*q.shape[:3], k.shape[2])
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=whole, scale=scale, enable_gqa=grouped)
