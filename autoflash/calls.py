"""Prepared calls: what stays between the user's tensors and the kernel after the first call of a shape.

A first call walks the dispatch ladder; what it prepared is kept under everything that the choice depended on, so that
a later call costs one dictionary lookup.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from autoflash.arguments import Options, problem_of_tensors
from autoflash.autograd import Recorded
from autoflash.dispatch.ladder import Candidate, VendorPolicy
from autoflash.dispatch.resolve import BlamelessError, Resolution, Resolver
from autoflash.dispatch.table import Table
from autoflash.errors import UnsupportedError
from autoflash.problem import Pass, Problem
from autoflash.runtime.executable import (
    NO_EXTRAS,
    NO_TERMS,
    BackwardCall,
    Executable,
    Extras,
    ForwardCall,
    TermGradients,
)
from autoflash.runtime.trivial import empty_backward, fill_empty
from autoflash.trial import Level, Verification
from autoflash.variant import Family

Pair = tuple[Tensor, Tensor]
Triple = tuple[Tensor, Tensor, Tensor]
_Call = TypeVar("_Call", bound=Callable[..., Any])

MOST_CALLS = 1024
"""Prepared calls kept; beyond it the oldest go."""

_MOST_BACKWARDS = 16
_MOST_LANES = 4
_MOST_WAYS = 256
# A lane takes as long to make as it saves in two calls.
_CALLS_TO_A_LANE = 8
_ALLOCATE: tuple[None, None, None] = (None, None, None)
# Made for torch.compile, part of torch's core; without it every call is found by its key.
_guards: Any = getattr(getattr(getattr(torch._C, "_dynamo", None), "guards", None), "TensorGuards", None)


def _verify(executable: Executable, problem: Problem) -> Verification:
    from autoflash.evaluate.verify import verify  # only where something was not verified before

    # The yardstick of a backward pass is torch's own autograd, and a first backward comes here with it off.
    # It makes small tensors of its own on the CPU, whatever the caller's default device is.
    with torch.enable_grad(), torch.device("cpu"):
        return verify(executable, problem, Level.SCREEN)


class Prepared:
    """A forward pass ready for tensors of one shape, stride, dtype, device, alignment and set of options.

    Attributes:
        run: Takes q, k, v of layout [B, H, S, D] and, where the problem has some, its extras; gives out and LSE,
            differentiable where options say training.
        forward: Runs without autograd.
        options: What it was prepared for.
        resolution: How the kernel was chosen; None where there is nothing to compute.
        found: How often it was found by its key.
    """

    __slots__ = ("_backwards", "_ladder", "_problem", "_resolver", "forward", "found", "options", "resolution", "run")

    def __init__(self, resolver: Resolver, options: Options, forward: ForwardCall, extras: Extras) -> None:
        self.forward = forward
        self.run: Callable[..., Pair] = forward if extras is NO_EXTRAS else self._with_extras
        self.resolution: Resolution | None = None
        self.found = 0
        self._resolver = resolver
        self.options = options
        self._problem: Problem | None = None
        self._ladder: tuple[Candidate, ...] = ()
        self._backwards: dict[tuple[object, ...], tuple[BackwardCall, Resolution]] = {}

    def train_with(self, problem: Problem, ladder: tuple[Candidate, ...]) -> None:
        """Take gradients by the kernels of a ladder of backward passes."""
        self._problem = problem
        self._ladder = ladder

    def backward_resolution(self) -> Resolution | None:
        """How the backward's kernel was chosen; None before the first backward."""
        return next((resolution for _, resolution in self._backwards.values()), None)

    def backward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        dout: Tensor,
        dlse: Tensor | None,
        into: Triple | None = None,
        extras: Extras = NO_EXTRAS,
        terms: TermGradients = NO_TERMS,
    ) -> Triple:
        """Gradients of q, k and v; any strides of the incoming gradients are right.

        Args:
            q: [B, H, M, D].
            k: [B, H_KV, N, D].
            v: [B, H_KV, N, D_V].
            out: What the forward gave, [B, H, M, D_V].
            lse: What the forward gave, [B, H, M] in float32.
            dout: Gradient of ``out``.
            dlse: Gradient of ``lse``; None where it was not used.
            into: dq, dk and dv to fill; None to have them allocated.
            extras: Those of the forward.
            terms: Gradients of extras to fill.
        """
        if _has_no_work(q, k, self.options):
            dq, dk, dv = into or _ALLOCATE
            return empty_backward(q, k, v, out, lse, dout, dlse, dq, dk, dv, extras, terms)
        if self._problem is None:
            return self._vendor_backward(q, k, v, dout, into)
        dout = _regular(dout.resolve_neg(), out)
        dlse = dlse.contiguous().resolve_neg() if dlse is not None else None
        key = (dout.stride(), dout.data_ptr() % 16, out.stride(), dlse is None)
        known = self._backwards.get(key)
        if known is not None:
            dq, dk, dv = into or _ALLOCATE
            return known[0](q, k, v, out, lse, dout, dlse, dq, dk, dv, extras, terms)
        return self._first_backward(key, q, k, v, out, lse, dout, dlse, into, extras, terms)

    def differentiable(self, q: Tensor, k: Tensor, v: Tensor, extras: Extras = NO_EXTRAS) -> Pair:
        """The forward pass, recorded for autograd."""
        flat = () if extras is NO_EXTRAS else extras.flat
        pair: Pair = Recorded.apply(q, k, v, self, *flat)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        return pair

    def _with_extras(self, q: Tensor, k: Tensor, v: Tensor, extras: Extras) -> Pair:
        return self.forward(q, k, v, None, None, extras)

    def _vendor_backward(self, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, into: Triple | None) -> Triple:
        """A vendor's backward where autograd did not see its forward: run that again."""
        with torch.enable_grad():
            leaves = q, k, v = q.detach(), k.detach(), v.detach()
            for leaf in leaves:
                leaf.requires_grad_()
            out, _ = self.forward(q, k, v)
            dq, dk, dv = torch.autograd.grad(out, leaves, dout)
        if into:
            dq, dk, dv = (given.copy_(gradient) for given, gradient in zip(into, (dq, dk, dv), strict=True))
        return dq, dk, dv

    def _first_backward(
        self,
        key: tuple[object, ...],
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        dout: Tensor,
        dlse: Tensor | None,
        into: Triple | None,
        extras: Extras,
        terms: TermGradients,
    ) -> Triple:
        problem, scale = self._problem, self.options.scale
        assert problem is not None
        dq, dk, dv = into or _ALLOCATE

        def run(executable: Executable) -> tuple[BackwardCall, Triple]:
            call = _on_device(executable.prepare_backward(problem, q, k, v, out, dout, scale, extras), q.device)
            return call, call(q, k, v, out, lse, dout, dlse, dq, dk, dv, extras, terms)

        with self._resolver.lock:
            resolution, (call, gradients) = self._resolver.first_call(
                problem, self._ladder, (q, k, v, dout), run, extras=extras, capturing=is_capturing(q)
            )
            if len(self._backwards) >= _MOST_BACKWARDS:
                self._backwards.pop(next(iter(self._backwards)))
            self._backwards[key] = (call, resolution)
        return gradients


Lane = tuple[Callable[[Tensor, Tensor, Tensor], bool], "Prepared"]
"""What tells whether q, k and v are as those of a prepared call but for their addresses, and the call."""


class Calls:
    """The prepared calls of a process, and the resolver that makes new ones.

    Attributes:
        prepared: By everything that they depend on.
        lanes: By the arguments that are no tensors, those of the calls above that come most often. Torch compares
            three tensors with what is known of others in a quarter of the time that it takes Python to ask for their
            shapes, strides, dtypes and devices.
        resolver: Makes new ones.
    """

    def __init__(self) -> None:
        """Know nothing yet."""
        self.prepared: dict[tuple[object, ...], Prepared] = {}
        self.lanes: dict[tuple[object, ...], tuple[Lane, ...]] = {}
        self.resolver = Resolver(_verify)

    def reset(self, table: Table | None = None) -> None:
        """Forget every choice, so that new records are seen: those of a table, or what there is to read."""
        self.resolver = Resolver(_verify) if table is None else Resolver(_verify, loader=lambda: table)
        self.prepared.clear()
        self.lanes.clear()

    def count(self, how: tuple[object, ...], prepared: Prepared, q: Tensor, k: Tensor, v: Tensor) -> None:
        """A prepared call was found by its key: where that happens again and again, give it a lane.

        Args:
            how: The arguments that are no tensors.
            prepared: The call.
            q: As it was given, at a multiple of 16 bytes.
            k: Likewise.
            v: Likewise.
        """
        prepared.found += 1
        if prepared.found % _CALLS_TO_A_LANE == 0 and _guards is not None:
            guards = _guards(q, k, v, dynamic_dims_sizes=None, dynamic_dims_strides=None)
            if len(self.lanes) >= _MOST_WAYS:
                self.lanes.clear()
            self.lanes[how] = ((guards.check, prepared), *self.lanes.get(how, ())[: _MOST_LANES - 1])

    def first(
        self,
        key: tuple[object, ...],
        q: Tensor,
        k: Tensor,
        v: Tensor,
        options: Options,
        extras: Extras = NO_EXTRAS,
        *,
        differentiable: bool = True,
    ) -> tuple[Prepared, Pair]:
        """Choose a kernel for q, k and v of layout [B, H, S, D], call it, and keep it under a key.

        Of several threads that ask for one key at once, one chooses.

        Args:
            key: Everything that the choice and the preparation depend on.
            q: [B, H, M, D].
            k: [B, H_KV, N, D].
            v: [B, H_KV, N, D_V].
            options: The other arguments.
            extras: The tensors beside q, k and v.
            differentiable: Record the call for autograd where options say training.
        """
        resolver = self.resolver
        with resolver.lock:
            known = self.prepared.get(key)
            if known is not None:
                return known, known.run(q, k, v, *_given(extras)) if differentiable else known.forward(
                    q, k, v, None, None, extras
                )
            prepared, result = prepare(resolver, q, k, v, options, extras, differentiable=differentiable)
            if len(self.prepared) >= MOST_CALLS:
                self.prepared.pop(next(iter(self.prepared)))
            self.prepared[key] = prepared
        return prepared, result


def prepare(
    resolver: Resolver,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    options: Options,
    extras: Extras = NO_EXTRAS,
    *,
    differentiable: bool = True,
) -> tuple[Prepared, Pair]:
    """Choose a kernel for tensors of layout [B, H, S, D] and make the first call with it."""
    given = _given(extras)
    if _has_no_work(q, k, options):
        prepared = Prepared(resolver, options, _no_work, extras)
        if options.training and differentiable:
            prepared.run = prepared.differentiable
        return prepared, prepared.run(q, k, v, *given)
    problem = problem_of_tensors(q, k, v, options, Pass.FORWARD, extras)
    candidates, backwards = ladders(resolver, q, k, v, options, extras, differentiable=differentiable)

    def run(executable: Executable) -> tuple[Prepared, Pair]:
        call = _on_device(executable.prepare_forward(problem, q, k, v, options.scale, extras), q.device)
        prepared = Prepared(resolver, options, call, extras)
        if not options.training and not options.return_lse and extras is NO_EXTRAS:
            prepared.run = _without_lse(executable, call, q)
        # A vendor's call is made of torch's operations, which autograd knows by itself.
        if options.training and executable.variant.family is not Family.VENDOR:
            prepared.train_with(problem_of_tensors(q, k, v, options, Pass.BACKWARD, extras), backwards)
            if differentiable:
                prepared.run = prepared.differentiable
        try:
            return prepared, prepared.run(q, k, v, *given)
        except Exception as error:
            if not (options.training and differentiable):
                raise
            # Autograd may have refused, or a hook of the caller's; the kernel is at fault if it fails alone too.
            with torch.no_grad():
                call(q.detach(), k.detach(), v.detach(), None, None, extras)
            raise BlamelessError from error

    resolution, (prepared, result) = resolver.first_call(
        problem, candidates, (q, k, v), run, extras=extras, capturing=is_capturing(q)
    )
    prepared.resolution = resolution
    return prepared, result


def ladders(
    resolver: Resolver,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    options: Options,
    extras: Extras = NO_EXTRAS,
    *,
    differentiable: bool = True,
) -> tuple[tuple[Candidate, ...], tuple[Candidate, ...]]:
    """Candidates for the forward pass and, when training, for a generated backward.

    Args:
        resolver: Knows the records.
        q: [B, H, M, D].
        k: [B, H_KV, N, D].
        v: [B, H_KV, N, D_V].
        options: The other arguments.
        extras: The tensors beside q, k and v.
        differentiable: Autograd records a vendor's forward; where not, its backward has to run it again.
    """
    problem = problem_of_tensors(q, k, v, options, Pass.FORWARD, extras)
    if options.return_lse and options.vendor is VendorPolicy.ONLY:
        raise UnsupportedError("return_lse is not possible with vendor='only': torch's kernels give no LSE")
    # No vendor kernel gives the LSE.
    vendor = VendorPolicy.NEVER if options.return_lse else options.vendor
    if not options.training:
        return resolver.inference(problem, q.device, vendor), ()
    backward = problem_of_tensors(q, k, v, options, Pass.BACKWARD, extras)
    return resolver.training(problem, backward, q.device, vendor, vendor_forwards=1 if differentiable else 2)


def is_capturing(tensor: Tensor) -> bool:
    """Whether work on the tensor's device would be recorded into a CUDA graph."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def _on_device(call: _Call, device: torch.device) -> _Call:
    """Kernels launch on the current device: where there are several, make it the tensors' own."""
    if device.type != "cuda" or torch.cuda.device_count() == 1:
        return call

    current_device = torch._C._cuda_getDevice

    def guarded(*arguments: object) -> object:
        if current_device() == device.index:
            return call(*arguments)
        with torch.cuda.device(device):
            return call(*arguments)

    return guarded  # type: ignore[return-value]  # same arguments, same results


# 64 KiB a device; longer calls are not bound by the host.
_SCRATCH_LSES = 2**14
_SCRATCH: dict[torch.device, Tensor] = {}
"""By device, where kernels write log-sum-exps that nobody reads; never freed, since a launch may still write there."""


def _without_lse(executable: Executable, call: ForwardCall, q: Tensor) -> ForwardCall:
    """A call that allocates no LSE where nobody asked for one: of small calls, the host's part is most of the time."""
    count = q.shape[0] * q.shape[1] * q.shape[2]
    if executable.variant.family is Family.TORCH_TILED or count > _SCRATCH_LSES or is_capturing(q):
        return call
    if q.device not in _SCRATCH:
        _SCRATCH[q.device] = torch.empty(_SCRATCH_LSES, dtype=torch.float32, device=q.device)
    scratch = _SCRATCH[q.device][:count].view(q.shape[:3])

    def run(q: Tensor, k: Tensor, v: Tensor) -> Pair:
        return call(q, k, v, None, scratch)

    return run  # type: ignore[return-value]  # nobody gives it more


def _given(extras: Extras) -> tuple[Extras, ...]:
    """What :attr:`Prepared.run` takes behind q, k and v: extras, where there are some."""
    return () if extras is NO_EXTRAS else (extras,)


def _has_no_work(q: Tensor, k: Tensor, options: Options) -> bool:
    return q.numel() == 0 or k.shape[2] == 0 or options.sequences == 0


def _no_work(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    extras: Extras = NO_EXTRAS,
) -> Pair:
    """No query, or no key: outputs are empty or 0, and LSE is -inf or the sink."""
    out = q.new_empty(*q.shape[:3], v.shape[3]) if out is None else out
    lse = q.new_empty(q.shape[:3], dtype=torch.float32) if lse is None else lse
    return out.zero_(), fill_empty(lse, extras)


def _regular(dout: Tensor, out: Tensor) -> Tensor:
    """The incoming gradient, copied where its strides (expanded, sliced, transposed) would need a kernel of its own."""
    if dout.stride() == out.stride() or (dout.stride(3) == 1 and min(dout.stride()) > 0):
        return dout
    return torch.empty_like(out).copy_(dout)
