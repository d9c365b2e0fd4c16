"""Torch's SDPA with a bias and its gradient, by the one backend on GPUs that has both."""

from __future__ import annotations

import functools
from collections.abc import Callable

from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from autoflash.errors import NoKernelError
from autoflash.problem import Feature, Pass, Problem
from autoflash.runtime.executable import NO_EXTRAS, BackwardCall, Extras, ForwardCall
from autoflash.runtime.vendor import KeptGraph, forward_without_lse, leaves_of
from autoflash.trial import Resources
from autoflash.variant import Choices, Family, Variant

BIASED = Variant(family=Family.VENDOR, structure=Choices(backend="efficient_bias"), config=Choices())
"""Like a vendor's kernel: it allocates its own outputs, and has no log-sum-exp to give."""


class BiasedSdpa:
    """Executable of torch's efficient backend, on CPUs of its math backend, with a bias for ``attn_mask``.

    It is no candidate of dispatch. The backward is autograd's, of a graph that is kept between calls.
    """

    has_lse = False
    variant = BIASED
    source_digest = ""

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

    def is_loaded(self, problem: Problem, *tensors: Tensor, extras: Extras = NO_EXTRAS) -> bool:
        """True: torch's kernels are compiled."""
        return True

    def resources(self) -> Resources | None:
        """Nothing is known of torch's kernels."""
        return None

    def prepare_forward(
        self, problem: Problem, q: Tensor, k: Tensor, v: Tensor, scale: float, extras: Extras = NO_EXTRAS
    ) -> ForwardCall:
        """Bind the scale and the bias.

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
        leaves = leaves_of(problem, extras)
        return KeptGraph(self._attend(problem, scale, extras, leaves.get("bias")), leaves)

    def _attend(
        self, problem: Problem, scale: float, extras: Extras, leaf: Tensor | None = None
    ) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        reason = self.why_not(problem)
        if reason is not None:
            raise NoKernelError(reason)
        bias = extras.bias if leaf is None else leaf
        assert bias is not None
        return functools.partial(_attend, bias=bias, scale=scale, grouped=problem.group > 1)


def _attend(q: Tensor, k: Tensor, v: Tensor, *, bias: Tensor, scale: float, grouped: bool) -> Tensor:
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION if q.is_cuda else SDPBackend.MATH):
        whole = bias.expand(*q.shape[:3], k.shape[2])
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=whole, scale=scale, enable_gqa=grouped)
