"""The backward pass of the Hopper family: its preconditions; the call is the Triton family's."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from autoflash.errors import NoKernelError
from autoflash.problem import Problem
from autoflash.runtime import gluon_backward_plan, gluon_plan, launch
from autoflash.runtime.backward_plan import Step
from autoflash.runtime.executable import NO_EXTRAS, BackwardCall, Extras
from autoflash.runtime.layouts import Operand
from autoflash.runtime.triton_backward import TritonBackward, row_workspace
from autoflash.runtime.workspace import Workspace
from autoflash.space import hopper
from autoflash.variant import Variant


def workspace(problem: Problem, variant: Variant) -> Workspace:
    """What a call allocates for itself."""
    if problem.is_empty:
        return ()
    return row_workspace(
        problem, gluon_backward_plan.padded_rows(problem), gluon_backward_plan.accumulator_shape(problem, variant)
    )


class GluonBackward(TritonBackward):
    """Executable of the backward templates of the Hopper family."""

    uses_descriptors = True

    def steps(
        self, problem: Problem, operands: Mapping[str, Operand], scale: float, *, has_dlse: bool
    ) -> tuple[Step, ...]:
        """The kernels of a call in launch order."""
        return gluon_backward_plan.backward_steps(problem, self._variant, operands, scale, has_dlse=has_dlse)

    def padded_rows(self, problem: Problem) -> int:
        """Rows of the workspaces of each head."""
        return gluon_backward_plan.padded_rows(problem)

    def accumulator_shape(self, problem: Problem) -> tuple[int, ...] | None:
        """Of the float32 workspace that dQ is added up in; None where it has a kernel of its own."""
        return gluon_backward_plan.accumulator_shape(problem, self._variant)

    def why_not(self, problem: Problem, *tensors: Tensor) -> str | None:
        """The precondition that these tensors (q, k, v, dout) miss; None if it can run them."""
        if problem.deterministic and not hopper.is_split(self._variant.structure):
            return "loop_order=key_outer adds to dq in any order: it is not deterministic"
        operands = {name: Operand.of(tensor) for name, tensor in zip(("q", "k", "v", "dout"), tensors, strict=False)}
        reason = gluon_plan.why_not(problem, self._device, operands)
        if reason is None and problem.head_dim > 128 and not hopper.owns_columns(self._variant.structure):
            reason = f"two accumulators of head_dim {problem.head_dim} are more registers than a consumer has"
        rows = problem.batch * problem.heads * gluon_backward_plan.padded_rows(problem)
        if reason is None and rows > launch.MAX_PROGRAMS:
            reason = f"{rows} rows of queries are more than a tensor map counts"
        return reason

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
        """Compile and load what the call needs, and bind everything that does not change between calls.

        Raises:
            NoKernelError: where :meth:`why_not` has something to say, or for an ``out`` that no forward here makes.
        """
        if not Operand.of(out).is_dense:
            raise NoKernelError("out needs a last stride of 1 and the rest aligned to 16 bytes")
        return super().prepare_backward(problem, q, k, v, out, dout, scale)
