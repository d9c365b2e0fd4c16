"""The forward pass of the Hopper family: its preconditions, and the call."""

from __future__ import annotations

import torch
from torch import Tensor

from autoflash.device import Device
from autoflash.errors import NoKernelError
from autoflash.problem import Form, Problem
from autoflash.runtime import gluon_plan, launch
from autoflash.runtime.compiled import CompiledExecutable
from autoflash.runtime.executable import NO_EXTRAS, Extras, ForwardCall
from autoflash.runtime.launch import Layout
from autoflash.runtime.layouts import Operand, descriptor_layout, strides_in_order_of
from autoflash.runtime.trivial import empty_forward
from autoflash.runtime.workspace import Buffer, Workspace
from autoflash.variant import Variant

_TICKET_BYTES = 4


def workspace(problem: Problem, variant: Variant) -> Workspace:
    """What calls keep for themselves: with a ticketed schedule, a counter for each stream; else nothing."""
    if problem.is_empty or variant.structure["schedule"] != "ticketed":
        return ()
    return (Buffer(name="ticket counter, int32", size_bytes=_TICKET_BYTES),)


class GluonForward(CompiledExecutable):
    """Executable of the forward templates of the Hopper family."""

    def __init__(self, form: Form, variant: Variant, device: Device) -> None:
        """Render and import the kernel; compile nothing yet.

        Raises:
            RenderError: for a structure that the templates do not have.
            ImportError: without Triton.
        """
        super().__init__(form, variant, device)
        self._tickets: dict[int, Tensor] = {}

    def why_not(self, problem: Problem, *tensors: Tensor) -> str | None:
        """The precondition that these tensors (q, k, v) miss; None if it can run them."""
        operands = {name: Operand.of(tensor) for name, tensor in zip("qkv", tensors, strict=False)}
        reason = gluon_plan.why_not(problem, self._device, operands)
        if reason is None and gluon_plan.forward_tiles(problem, self._variant) > launch.MAX_PROGRAMS // 2:
            return "there are more tiles than the ticket counter holds"
        return reason

    def is_loaded(self, problem: Problem, *tensors: Tensor, extras: Extras = NO_EXTRAS) -> bool:
        """Whether a prepared call would compile and load nothing."""
        return problem.is_empty or gluon_plan.forward_plan(problem, self._variant) in self._kernels

    def prepare_forward(
        self, problem: Problem, q: Tensor, k: Tensor, v: Tensor, scale: float, extras: Extras = NO_EXTRAS
    ) -> ForwardCall:
        """Compile and load what the call needs, and bind everything that does not change between calls.

        Raises:
            NoKernelError: where :meth:`why_not` has something to say.
        """
        reason = self.why_not(problem, q, k, v)
        if reason is not None:
            raise NoKernelError(reason)
        shape = (problem.batch, problem.heads, problem.seqlen_q, problem.head_dim_v)
        out = Operand.planned(shape, strides_in_order_of(shape, q), problem.dtype.itemsize)
        if problem.is_empty:
            return empty_forward(out)
        plan = gluon_plan.forward_plan(problem, self._variant, (scale > 0) - (scale < 0) if scale == scale else 1)
        inputs = [Operand.of(tensor) for tensor in (q, k, v)]
        layouts: list[Layout | None] = [
            descriptor_layout(operand.shape, operand.strides, problem.dtype.itemsize) for operand in (*inputs, out)
        ]
        programs = gluon_plan.forward_programs(problem, self._variant, self._device)
        run = self._kernel(plan).bind(
            [*layouts, None, None, None], gluon_plan.forward_numbers(problem, self._variant, out, scale), programs
        )
        out_strides, lse_shape = out.strides, shape[:3]
        like_q = tuple(q.shape) == shape and torch.empty_like(q).stride() == out_strides
        tickets = self._ticket if self._variant.structure.text("schedule") == "ticketed" else None

        def call(
            q: Tensor,
            k: Tensor,
            v: Tensor,
            out: Tensor | None = None,
            lse: Tensor | None = None,
            extras: Extras = NO_EXTRAS,
        ) -> tuple[Tensor, Tensor]:
            given = out
            if out is None or out.stride() != out_strides or out.data_ptr() % 16:
                out = (
                    torch.empty_like(q)
                    if like_q
                    else torch.empty_strided(shape, out_strides, dtype=q.dtype, device=q.device)
                )
            dense_lse = (
                lse
                if lse is not None and lse.is_contiguous()
                else torch.empty(lse_shape, dtype=torch.float32, device=q.device)
            )
            run(q, k, v, out, out, dense_lse, dense_lse if tickets is None else tickets())
            if lse is not None and lse is not dense_lse:
                lse.copy_(dense_lse)
            if given is not None and given is not out:
                given.copy_(out)
            return out if given is None else given, dense_lse if lse is None else lse

        return call

    def _ticket(self) -> Tensor:
        """A counter at 0 that no other launch draws from at the same time.

        Launches of one stream follow each other, and each clears its counter. A captured launch may be replayed on
        any stream, so it gets a counter of its own, cleared by the graph.
        """
        index = self._device.index
        if torch._C._cuda_isCurrentStreamCapturing():
            return torch.zeros(1, dtype=torch.int32, device=self._device.torch_device)
        stream = torch._C._cuda_getCurrentRawStream(index)
        ticket = self._tickets.get(stream)
        if ticket is None:
            ticket = self._tickets[stream] = torch.zeros(1, dtype=torch.int32, device=self._device.torch_device)
        return ticket
