"""Executable of the tiled torch family: it runs wherever torch does, and has no preconditions.

It never waits for a GPU, but for one thing: the host reads where packed sequences begin, once for each call, so that a
call on packed sequences of a GPU contains one synchronisation and cannot be captured in a CUDA graph.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from autoflash.codegen.expressions import parameters_of
from autoflash.codegen.render import render
from autoflash.device import Device
from autoflash.errors import InvalidProblemError, UnsupportedError
from autoflash.problem import Alignment, Feature, Form, Problem
from autoflash.runtime import dropout
from autoflash.runtime.block_map import shown_blocks
from autoflash.runtime.executable import NO_EXTRAS, NO_TERMS, BackwardCall, Extras, ForwardCall, TermGradients
from autoflash.runtime.layouts import strides_in_order_of
from autoflash.runtime.load import load
from autoflash.trial import Resources
from autoflash.variant import Variant

UNBOUNDED = 2**30
"""Reach of a window that is open to a side: more keys than there are."""

_EXTRAS = {
    Feature.VARLEN: ("cu_seqlens_q", "cu_seqlens_k"),
    Feature.FLOAT_MASK: ("mask",),
    Feature.BOOL_MASK: ("mask",),
    Feature.ALIBI: ("alibi_slopes",),
    Feature.BIAS: ("bias",),
    Feature.SINKS: ("sinks",),
    Feature.DROPOUT: ("rng",),
    Feature.BLOCK_MASK: ("query_blocks",),
}
_TERMS = {Feature.SINKS: "sinks", Feature.ALIBI_GRADIENT: "alibi_slopes", Feature.BIAS_GRADIENT: "bias"}


class TorchTiled:
    """Rendered torch code of one form and structure with its tile sizes. Compiles nothing."""

    def __init__(self, form: Form, variant: Variant, device: Device) -> None:
        """Render the module; import it when first needed.

        Raises:
            RenderError: for a structure that the templates do not have.
        """
        self._form = form
        self._variant = variant
        self._device = device
        self._source = render(form, variant.family, variant.structure)
        self._is_loaded = False
        self._tiles = {name: variant.config.number(name) for name in ("block_m", "block_n", "heads_per_step")}
        self._extras = tuple(name for feature in form.features for name in _EXTRAS.get(feature, ()))
        self._terms = tuple(_TERMS[feature] for feature in form.features if feature in _TERMS)
        self._params = parameters_of(form.score_mod, form.mask_mod)
        self._has_params_gradient = Feature.PARAMS_GRADIENT in form.features

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
        """Digest of the rendered text."""
        return self._source.digest

    def why_not(self, problem: Problem, *tensors: Tensor) -> str | None:
        """Refuses only another form than its own: any strides, sizes and floating types will do."""
        form = Form.of(problem)
        return None if form == self._form else f"this kernel computes {self._form}, the problem is {form}"

    def is_loaded(self, problem: Problem, *tensors: Tensor, extras: Extras = NO_EXTRAS) -> bool:
        """Whether the module was imported and a graph can hold the call: not one that reads lengths from a GPU."""
        return self._is_loaded and not (problem.is_varlen and any(tensor.is_cuda for tensor in tensors))

    def resources(self) -> Resources | None:
        """None: nothing is compiled."""
        return None

    def prepare_forward(
        self, problem: Problem, q: Tensor, k: Tensor, v: Tensor, scale: float, extras: Extras = NO_EXTRAS
    ) -> ForwardCall:
        """Bind the tiles, the scale and the other numbers of the problem.

        Raises:
            UnsupportedError: if :meth:`why_not` refuses.
            InvalidProblemError: if ``extras`` lacks a tensor that the problem has.
        """
        self._refuse(problem, extras)
        compute = self._bound(self._module().forward, problem, scale)
        out_shape = (*q.shape[:3], v.shape[3])
        out_strides = strides_in_order_of(out_shape, q)

        def call(
            q: Tensor,
            k: Tensor,
            v: Tensor,
            out: Tensor | None = None,
            lse: Tensor | None = None,
            extras: Extras = NO_EXTRAS,
        ) -> tuple[Tensor, Tensor]:
            if out is None:
                out = q.new_empty_strided(out_shape, out_strides)
            if lse is None:
                lse = q.new_empty(out_shape[:3], dtype=torch.float32)
            with torch.no_grad():
                compute(q, k, v, out, lse, **self._given(extras, q, k))
            return out, lse

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
        """As :meth:`prepare_forward`.

        Raises:
            UnsupportedError: if :meth:`why_not` refuses.
            InvalidProblemError: if ``extras`` lacks a tensor that the problem has.
        """
        self._refuse(problem, extras)
        compute = self._bound(self._module().backward, problem, scale)
        layouts = [(tuple(tensor.shape), strides_in_order_of(tensor.shape, tensor)) for tensor in (q, k, v)]

        def call(
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
            dq, dk, dv = (
                q.new_empty_strided(*layout) if given is None else given
                for given, layout in zip((dq, dk, dv), layouts, strict=True)
            )
            with torch.no_grad():
                sums = self._wanted(terms)
                compute(q, k, v, out, lse, dout, dlse, dq, dk, dv, **self._given(extras, q, k), **sums)
                for name in self._terms:
                    gradient, total = getattr(terms, name), sums[f"d{name}"]
                    if gradient is not None and total is not None and total is not gradient:
                        gradient.copy_(total)
            return dq, dk, dv

        return call

    def _module(self) -> ModuleType:
        module = load(self._source)
        self._is_loaded = True
        return module

    def _refuse(self, problem: Problem, extras: Extras) -> None:
        reason = self.why_not(problem)
        if reason is not None:
            raise UnsupportedError(reason)
        missing = [name for name in self._extras if getattr(extras, name) is None]
        if missing:
            raise InvalidProblemError(f"{self._form} needs {' and '.join(missing)}")
        if len(extras.params) != len(self._params):
            raise InvalidProblemError(f"{self._form} needs {' and '.join(each.name for each in self._params)}")

    def _given(self, extras: Extras, q: Tensor, k: Tensor) -> dict[str, Any]:
        """The tensors that the rendered function takes for the form's features, by the names of its parameters."""
        given: dict[str, Any] = {name: getattr(extras, name) for name in self._extras}
        if "bias" in given:
            given["bias"] = given["bias"].expand(*q.shape[:3], k.shape[2])
        if "query_blocks" in given:
            given["blocks"] = shown_blocks(given.pop("query_blocks"))
        return given | ({"params": extras.params} if self._params else {})

    def _wanted(self, terms: TermGradients) -> dict[str, Any]:
        """Sums of the gradients of the form's terms likewise, at 0, where they are wanted: in float32, or wider."""
        wanted: dict[str, Any] = {}
        for name in self._terms:
            gradient: Tensor | None = getattr(terms, name)
            if gradient is not None:
                wide = torch.promote_types(gradient.dtype, torch.float32)
                gradient = torch.zeros_like(gradient, dtype=wide) if gradient.dtype != wide else gradient.zero_()
            wanted[f"d{name}"] = gradient
        for gradient in terms.params:
            if gradient is not None:
                gradient.zero_()
        if self._has_params_gradient:
            wanted["dparams"] = terms.params or (None,) * len(self._params)
        return wanted

    def _bound(self, function: Callable[..., None], problem: Problem, scale: float) -> Callable[..., None]:
        return functools.partial(function, scale=scale, **_numbers(problem), **self._tiles)


def _numbers(problem: Problem) -> dict[str, Any]:
    """What the rendered function is told of a problem, by the names of its parameters."""
    numbers: dict[str, Any] = {}
    if problem.is_varlen:
        numbers["is_top_left"] = problem.alignment is Alignment.TOP_LEFT
    else:
        numbers["diagonal"] = problem.diagonal
    if problem.softcap:
        numbers["softcap"] = problem.softcap
    if problem.has_window:
        numbers["window"] = _reach(problem)
    if problem.block_size:
        numbers["block_size"] = problem.block_size
    if problem.dropout_p:
        numbers["threshold"] = dropout.threshold(problem.dropout_p)
        numbers["keep_scale"] = dropout.keep_scale(problem.dropout_p)
    return numbers


def _reach(problem: Problem) -> tuple[int, int]:
    """How many keys a query sees to the left and right of where it stands; a causal mask shows it none to the right."""
    left, right = (
        UNBOUNDED if bound is None else min(bound, UNBOUNDED) for bound in (problem.window_left, problem.window_right)
    )
    return left, 0 if problem.causal else right
