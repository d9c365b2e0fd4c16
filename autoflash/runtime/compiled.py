"""What every executable has whose kernels Triton compiles: the module, and the kernels loaded so far."""

from __future__ import annotations

import threading

from torch import Tensor

from autoflash.codegen.render import render
from autoflash.device import Device
from autoflash.errors import UnsupportedError
from autoflash.problem import Form, Problem
from autoflash.runtime import launch
from autoflash.runtime.executable import NO_EXTRAS, BackwardCall, Extras, ForwardCall
from autoflash.runtime.launch import Kernel, KernelPlan
from autoflash.runtime.load import load
from autoflash.trial import Resources
from autoflash.variant import Variant


class CompiledExecutable:
    """Base of the executables of the compiled families: each kernel is compiled and loaded once, at first need."""

    def __init__(self, form: Form, variant: Variant, device: Device) -> None:
        """Render and import the kernels; compile nothing yet.

        Raises:
            RenderError: for a structure that the templates do not have.
            ImportError: without Triton.
        """
        source = render(form, variant.family, variant.structure)
        self._module = load(source)
        self._variant = variant
        self._digest = source.digest
        self._device = device
        self._kernels: dict[KernelPlan, Kernel] = {}
        self._lock = threading.Lock()

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
        return self._digest

    def resources(self) -> Resources | None:
        """The most that any of the loaded kernels takes; None before the first."""
        return launch.most_of(self._kernels.values())

    def prepare_forward(
        self, problem: Problem, q: Tensor, k: Tensor, v: Tensor, scale: float, extras: Extras = NO_EXTRAS
    ) -> ForwardCall:
        """Refuse, unless overridden: these are templates of the other pass.

        Raises:
            UnsupportedError: always.
        """
        raise UnsupportedError(f"a {problem.op.value} pass was asked of a backward kernel")

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
        """Refuse, unless overridden: these are templates of the other pass.

        Raises:
            UnsupportedError: always.
        """
        raise UnsupportedError(f"a {problem.op.value} pass was asked of a forward kernel")

    def _kernel(self, plan: KernelPlan) -> Kernel:
        with self._lock:
            if plan not in self._kernels:
                self._kernels[plan] = launch.load_kernel(self._module, plan, self._device)
            return self._kernels[plan]
