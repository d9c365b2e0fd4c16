"""Attention as autograd records it: the prepared call of a forward, and its backward where one is asked for."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from autoflash.errors import UnsupportedError
from autoflash.runtime.executable import (
    NO_EXTRAS,
    NO_TERMS,
    SINGLE,
    SINGLE_TERMS,
    Extras,
    TermGradients,
    unwritten_params,
)

_is_autocast_on = torch._C._is_any_autocast_enabled

_INSTEAD = (
    "differentiate autoflash.reference.attention(), or torch's scaled_dot_product_attention with its math backend"
)
NO_SECOND_DERIVATIVE = f"the second derivative of autoflash.attention() is not built: {_INSTEAD}"
NO_FORWARD_MODE = (
    "forward-mode derivatives (torch.func.jvp, torch.autograd.forward_ad) of autoflash.attention() are not built: "
    f"{_INSTEAD}"
)


class Recorded(torch.autograd.Function):
    """Attention by generated kernels. Straight to the prepared calls, without the dispatcher in between.

    A call without extras has none of their arguments: each costs the host a tenth of a microsecond, each way.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, prepared: Any, *extras: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Out and LSE of a prepared call."""
        out, lse = prepared.forward(q, k, v, None, None, Extras.of_flat(extras) if extras else NO_EXTRAS)
        ctx.save_for_backward(q, k, v, out, lse, *extras)
        ctx.prepared = prepared
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        """Gradients by the prepared call's kernels; of a batch of incoming ones, by the operator."""
        dout, dlse = gradients
        q, k, v, out, lse, *extras = ctx.saved_tensors
        if dout is None:
            dout = torch.zeros_like(out)
        wanted = ctx.needs_input_grad
        if dlse is not None and _is_batched(dlse):
            return _of_many(ctx, dout, dlse, q, k, v, out, lse, *extras)
        given = Extras.of_flat(extras) if extras else NO_EXTRAS
        terms = terms_of(given, wanted[_FIRST_EXTRA:])
        arguments = (q, k, v, out, lse, dout, dlse, None, given, terms)
        try:
            if torch.is_grad_enabled() or _is_autocast_on():
                with torch.no_grad(), torch.autocast(q.device.type, enabled=False):
                    found = ctx.prepared.backward(*arguments)
            else:
                # Both at once take 7 microseconds of the host.
                found = ctx.prepared.backward(*arguments)
        except RuntimeError:
            # It has no address, so that no kernel was launched. To ask sooner would cost every call.
            if not _is_batched(dout):
                raise
            return _of_many(ctx, dout, dlse, q, k, v, out, lse, *extras)
        of_terms = tuple(terms.present.values()) if terms is not NO_TERMS else ()
        if torch.is_grad_enabled():
            found = _Once.apply(3 + len(of_terms), *found, *of_terms, q, k, v, dout)  # type: ignore[no-untyped-call]  # torch leaves apply untyped
            terms = _in_places(terms, found[3:])
        dq, dk, dv = (gradient if is_wanted else None for gradient, is_wanted in zip(found[:3], wanted, strict=False))
        if not extras:
            return dq, dk, dv, None
        of_params = terms.params or (None,) * len(given.params)
        return (dq, dk, dv, None, *(getattr(terms, name, None) for name in SINGLE), *of_params)


# Of the arguments of the function above: q, k, v and the prepared call come before them.
_FIRST_EXTRA = 4


def _is_batched(gradient: Tensor) -> bool:
    functorch = torch._C._functorch
    return functorch.is_batchedtensor(gradient) or functorch.is_legacy_batchedtensor(gradient)


def _of_many(ctx: Any, dout: Tensor, dlse: Tensor | None, *saved: Tensor | None) -> tuple[Tensor | None, ...]:
    """Gradients of a batch of incoming ones that torch.vmap maps, by the operator, which has a rule for it."""
    if any(tensor is not None and torch._C._functorch.is_legacy_batchedtensor(tensor) for tensor in (dout, dlse)):
        raise UnsupportedError(
            "a batch of incoming gradients (is_grads_batched=True, vectorize=True) is not built for "
            "autoflash.attention(): map torch.autograd.grad with torch.vmap, or take one at a time"
        )
    q, k, v, out, lse, *extras = saved
    options = ctx.prepared.options
    single, params = extras[: len(SINGLE)] or [None] * len(SINGLE), extras[len(SINGLE) :]
    wanted = ctx.needs_input_grad[_FIRST_EXTRA:] or (False,) * len(SINGLE)
    flags = dict(zip(SINGLE, wanted, strict=False))
    made = torch.ops.autoflash.attention_backward(
        *(dout, dlse if options.return_lse else None, q, k, v, out, lse),
        *(*single, params),
        *(*(flags[name] for name in SINGLE_TERMS), list(wanted[len(SINGLE) :])),
        *(options.scale, options.mask, options.deterministic, options.vendor.value, options.return_lse, True),
        *(options.window_left, options.window_right, options.softcap, options.dropout_p),
        *(options.longest_q, options.longest_k, options.block_size, options.score_mod, options.mask_mod),
    )
    # The rule refuses all that would have gradients beside these.
    return (*made[:3], None, *(None for _ in extras))


def terms_of(extras: Extras, wanted: Sequence[bool]) -> TermGradients:
    """Gradients to be written of those extras that are wanted, in the order of the extras."""
    if not any(wanted):
        return NO_TERMS
    made = TermGradients.unwritten(extras, list(itertools.compress(SINGLE, wanted)))
    return made._replace(params=unwritten_params(extras, wanted[len(SINGLE) :]))


def _in_places(terms: TermGradients, made: Sequence[Tensor]) -> TermGradients:
    """Others for those terms that there are."""
    rest = iter(made)
    single = {name: next(rest) for name in SINGLE_TERMS if getattr(terms, name) is not None}
    return TermGradients(**single, params=tuple(None if term is None else next(rest) for term in terms.params))


class _Once(torch.autograd.Function):
    """Gradients that refuse, in plain words, to be differentiated again."""

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tensors[:count]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        raise UnsupportedError(NO_SECOND_DERIVATIVE)
