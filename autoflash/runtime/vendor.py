"""Torch's own attention kernels as candidates: one executable for each backend of scaled_dot_product_attention."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from autoflash.device import Device, DeviceKind
from autoflash.errors import UnsupportedError
from autoflash.problem import Alignment, Form, Pass, Problem
from autoflash.runtime.executable import (
    NO_EXTRAS,
    NO_TERMS,
    BackwardCall,
    Extras,
    ForwardCall,
    TermGradients,
    refuse_unable,
)
from autoflash.runtime.layouts import strides_in_order_of
from autoflash.trial import Resources
from autoflash.variant import Variant

BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
"""Torch's, by the name that variants give them."""
_SET_UP_AT_FIRST_USE = ("cudnn", "math")


class Vendor:
    """Executable of one backend. It allocates its own outputs, has no LSE to give, and pairs with its own backward."""

    has_lse = False
    """A vendor's log-sum-exp is not part of torch's public function: ``lse`` is an empty tensor."""

    def __init__(self, form: Form, variant: Variant, device: Device) -> None:
        """Bind to a backend; nothing is called yet.

        Raises:
            UnsupportedError: for a backend that torch does not have.
        """
        name = variant.structure.text("backend")
        if name not in BACKENDS:
            raise UnsupportedError(f"torch has no backend {name!r}: use one of {', '.join(BACKENDS)}")
        self._form = form
        self._variant = variant
        self._device = device
        self._name = name
        self._backend = BACKENDS[name]

    @property
    def variant(self) -> Variant:
        """What it runs."""
        return self._variant

    @property
    def device(self) -> Device:
        """Where it runs."""
        return self._device

    @property
    def source_digest(self) -> str:
        """Empty: nothing was rendered."""
        return ""

    def why_not(self, problem: Problem, *tensors: Tensor) -> str | None:
        """The reason why torch's backend cannot do the problem on these tensors (q, k, v); None if it can."""
        if problem.is_empty:
            return "there is no query or no key"
        if problem.features:
            return f"torch's kernels are not asked for {problem.features[0].value}"
        if problem.causal and problem.alignment is Alignment.BOTTOM_RIGHT and problem.seqlen_q != problem.seqlen_k:
            return "torch's causal mask is aligned top-left"
        if problem.op is Pass.BACKWARD and problem.deterministic and self._name != "math":
            return f"the backward of torch's {self._name} backend is not deterministic"
        if self._device.kind is DeviceKind.CPU:
            return self._cpu_refusal(problem, tensors)
        return self._gpu_refusal(problem, tensors)

    def is_loaded(self, problem: Problem, *tensors: Tensor, extras: Extras = NO_EXTRAS) -> bool:
        """Whether the call would set nothing up: the first of cuDNN or cuBLAS in a process spoils a capture."""
        return self._name not in _SET_UP_AT_FIRST_USE

    def resources(self) -> Resources | None:
        """Nothing is known of torch's kernels."""
        return None

    def prepare_forward(
        self, problem: Problem, q: Tensor, k: Tensor, v: Tensor, scale: float, extras: Extras = NO_EXTRAS
    ) -> ForwardCall:
        """Bind the arguments that do not change between calls.

        Raises:
            NoKernelError: where :meth:`why_not` has something to say.
        """
        refuse_unable(self, problem, q, k, v)
        attend = self.attend(problem, q, scale)
        wanted = strides_in_order_of((*q.shape[:3], v.shape[3]), q)

        def call(
            q: Tensor,
            k: Tensor,
            v: Tensor,
            out: Tensor | None = None,
            lse: Tensor | None = None,
            extras: Extras = NO_EXTRAS,
        ) -> tuple[Tensor, Tensor]:
            made = attend(q, k, v)
            if out is not None:
                made = out.copy_(made)
            elif made.stride() != wanted:
                made = torch.empty_strided(made.shape, wanted, dtype=made.dtype, device=made.device).copy_(made)
            return made, q.new_empty(0, dtype=torch.float32) if lse is None else lse

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
        """Run the backend's own forward and keep its graph; each call is the backward of that graph alone.

        The forward runs again where a call brings other tensors, or changed ones.

        Raises:
            NoKernelError: where :meth:`why_not` has something to say.
        """
        refuse_unable(self, problem, q, k, v)
        return KeptGraph(self.attend(problem, q, scale))

    def attend(
        self, problem: Problem, q: Tensor, scale: float, extras: Extras = NO_EXTRAS
    ) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        """Torch's function with everything bound but q, k and v; differentiable."""
        return functools.partial(
            _attend, backend=self._backend, causal=problem.causal, scale=scale, grouped=problem.group > 1
        )

    def _cpu_refusal(self, problem: Problem, tensors: Sequence[Tensor]) -> str | None:
        if self._name not in ("flash", "math"):
            return f"torch has no {self._name} backend on a CPU"
        if self._name == "flash" and problem.head_dim != problem.head_dim_v:
            return f"torch's flash backend takes equal head dims, got {problem.head_dim} and {problem.head_dim_v}"
        if self._name == "flash" and any(tensor.stride(3) != 1 for tensor in tensors):
            return "torch's flash backend takes a contiguous last dimension"
        return None

    def _gpu_refusal(self, problem: Problem, tensors: Sequence[Tensor]) -> str | None:
        if self._name == "math":
            return None
        q, k, v = tensors[:3]
        if problem.op is Pass.BACKWARD:
            q = q.detach().requires_grad_()
        try:
            asked = torch.backends.cuda.SDPAParams(q, k, v, None, 0.0, problem.causal, problem.group > 1)
        except RuntimeError as error:
            return str(error).splitlines()[0]
        able = {
            "cudnn": torch.backends.cuda.can_use_cudnn_attention,
            "flash": torch.backends.cuda.can_use_flash_attention,
            "efficient": torch.backends.cuda.can_use_efficient_attention,
        }[self._name]
        return None if able(asked) else f"torch's {self._name} backend refuses such tensors on this device"


def cudnn_version() -> str:
    """As torch writes it, such as ``91900`` for 9.19; empty where torch has no cuDNN."""
    return str(torch.backends.cudnn.version() or "")  # type: ignore[no-untyped-call]  # torch does not type it


def forward_without_lse(attend: Callable[[Tensor, Tensor, Tensor], Tensor]) -> ForwardCall:
    """A call of a function of torch's that allocates its output and has no LSE; nothing is kept for a backward."""

    def call(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        extras: Extras = NO_EXTRAS,
    ) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            made = attend(q, k, v)
        return made if out is None else out.copy_(made), q.new_empty(0) if lse is None else lse

    return call


class KeptGraph:
    """The backward of the graph of a function of torch's, without LSE, that is kept between calls."""

    def __init__(
        self, attend: Callable[[Tensor, Tensor, Tensor], Tensor], terms: Mapping[str, Tensor] | None = None
    ) -> None:
        """Run nothing yet: the first call runs ``attend``.

        Args:
            attend: Of q, k, v.
            terms: What else it reads and has a gradient, by the names of :class:`TermGradients`: leaves of autograd.
        """
        self._attend = attend
        self._terms = dict(terms or {})
        self._made_from: tuple[tuple[int, int], ...] = ()
        self._inputs: tuple[Tensor, ...] = ()
        self._leaves: tuple[Tensor, ...] = ()
        self._out = torch.empty(0)

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        dout: Tensor,
        dlse: Tensor | None = None,
        dq: Tensor | None = None,
        dk: Tensor | None = None,
        dv: Tensor | None = None,
        extras: Extras = NO_EXTRAS,
        terms: TermGradients = NO_TERMS,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compute dq, dk, dv from the gradient of out; a gradient of LSE is refused."""
        if dlse is not None:
            raise UnsupportedError("a vendor kernel has no LSE, so none with a gradient")
        made_from = tuple((id(tensor), tensor._version) for tensor in (q, k, v))
        if made_from != self._made_from:
            with torch.enable_grad():
                self._leaves = tuple(tensor.detach().requires_grad_() for tensor in (q, k, v))
                self._out = self._attend(*self._leaves)
            # Held, so that no other tensor can get the same id.
            self._inputs, self._made_from = (q, k, v), made_from
        made = torch.autograd.grad(self._out, (*self._leaves, *self._terms.values()), dout, retain_graph=True)
        for name, gradient in zip(self._terms, made[3:], strict=True):
            if (term := getattr(terms, name)) is not None:
                term.copy_(gradient)
        first, second, third = (
            gradient if given is None else given.copy_(gradient)
            for gradient, given in zip(made[:3], (dq, dk, dv), strict=True)
        )
        return first, second, third


def _attend(
    q: Tensor, k: Tensor, v: Tensor, *, backend: SDPBackend, causal: bool, scale: float, grouped: bool
) -> Tensor:
    if scale <= 0.0:
        # cuDNN gives NaN for such a scale. The sign moves to the query without rounding.
        q, scale = (-q, -scale) if scale < 0.0 else (q * 0.0, 1.0)
    with sdpa_kernel(backend):
        return functional.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale, enable_gqa=grouped)
