"""Executable of the tiled torch family: it runs wherever torch does, and has no preconditions."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType

import torch
from torch import Tensor

from autoflash.codegen.render import render
from autoflash.device import Device
from autoflash.errors import UnsupportedError
from autoflash.problem import Form, Problem
from autoflash.runtime.executable import NO_EXTRAS, BackwardCall, Extras, ForwardCall
from autoflash.runtime.layouts import strides_in_order_of
from autoflash.runtime.load import load
from autoflash.trial import Resources
from autoflash.variant import Variant


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

    def is_loaded(self, problem: Problem, *tensors: Tensor) -> bool:
        """Whether the module was imported."""
        return self._is_loaded

    def resources(self) -> Resources | None:
        """None: nothing is compiled."""
        return None

    def prepare_forward(
        self, problem: Problem, q: Tensor, k: Tensor, v: Tensor, scale: float, extras: Extras = NO_EXTRAS
    ) -> ForwardCall:
        """Bind the tiles, the scale and the diagonal.

        Raises:
            UnsupportedError: if :meth:`why_not` refuses.
        """
        self._refuse(problem)
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
                compute(q, k, v, out, lse)
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
        """
        self._refuse(problem)
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
        ) -> tuple[Tensor, Tensor, Tensor]:
            dq, dk, dv = (
                q.new_empty_strided(*layout) if given is None else given
                for given, layout in zip((dq, dk, dv), layouts, strict=True)
            )
            with torch.no_grad():
                compute(q, k, v, out, lse, dout, dlse, dq, dk, dv)
            return dq, dk, dv

        return call

    def _module(self) -> ModuleType:
        module = load(self._source)
        self._is_loaded = True
        return module

    def _refuse(self, problem: Problem) -> None:
        reason = self.why_not(problem)
        if reason is not None:
            raise UnsupportedError(reason)

    def _bound(self, function: Callable[..., None], problem: Problem, scale: float) -> Callable[..., None]:
        return functools.partial(function, scale=scale, diagonal=problem.diagonal, **self._tiles)
