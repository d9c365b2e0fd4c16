"""The backward pass of the Triton family: from tensors to prepared launches, and the call itself."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from types import MappingProxyType

import torch
from torch import Tensor

from autoflash.device import Device
from autoflash.expression.sharing import scattered_parameters
from autoflash.problem import Form, Problem
from autoflash.runtime import launch
from autoflash.runtime.backward_features import PlacedMask, in_order, knows_layouts, mask_operands, usual_masks
from autoflash.runtime.backward_plan import Step, backward_steps
from autoflash.runtime.backward_sizes import bias_sums_shape, padded_rows, param_sums_shapes, slopes_sums_shape
from autoflash.runtime.compiled import CompiledExecutable
from autoflash.runtime.executable import NO_EXTRAS, NO_TERMS, BackwardCall, Extras, TermGradients, refuse_unable
from autoflash.runtime.launch import KernelPlan, Launch
from autoflash.runtime.layouts import ALIGNMENT_BYTES, TORCH_TYPES, Operand, strides_in_order_of, why_not_structure
from autoflash.runtime.param_gradients import ParamSums, look_ups
from autoflash.runtime.params import has_params
from autoflash.runtime.term_gradients import bias_gradient_of_sums, sinks_gradient_of_rows, slopes_gradient_of_sums
from autoflash.runtime.trivial import empty_backward
from autoflash.runtime.workspace import Buffer, Workspace
from autoflash.space import constraint
from autoflash.variant import Variant

_Shapes = dict[str, tuple[int, ...]]
_Launches = tuple[tuple[Launch, Callable[[tuple[Tensor | None, ...]], tuple[Tensor, ...]]], ...]


def backward_plans(
    problem: Problem, variant: Variant, masks: Mapping[str, PlacedMask] = MappingProxyType({})
) -> tuple[KernelPlan, ...]:
    """Every kernel that the regular dense specialisation of a problem launches, in order.

    Args:
        problem: Of any form.
        variant: Of the Triton family, backward.
        masks: How the ``mask`` and the ``bias`` lie, where that is known; else in the usual way.
    """
    operands = {name: _contiguous(shape, problem) for name, shape in _shapes(problem).items()}
    operands |= usual_masks(problem) | dict(masks)
    return tuple(step.plan for step in backward_steps(problem, variant, operands, 1.0, has_dlse=False))


def accumulator_shape(problem: Problem, variant: Variant) -> tuple[int, ...] | None:
    """Of the float32 workspace that dQ is added up in; None where each dQ has one program."""
    queries = (problem.tensor_batch, problem.heads, problem.rows_q, problem.head_dim)
    return queries if variant.structure["loop_order"] == "key_outer" else None


def workspace(problem: Problem, variant: Variant) -> Workspace:
    """What a call allocates for itself, where a bias is shared by the batch at most.

    A parameter of an expression takes a float32 copy of its gradient beside, of a size that the problem does not say.
    """
    if problem.is_empty:
        return ()
    rows = row_workspace(problem, padded_rows(problem, variant), accumulator_shape(problem, variant))
    slopes = 4 * math.prod(slopes_sums_shape(problem, variant)) if problem.alibi_gradient else 0
    # A sum and the place of its element.
    params = 12 * sum(math.prod(shape) for shape in param_sums_shapes(problem, variant) if shape)
    terms = {"shares of the slopes' gradient, float32": slopes, "sums of parameters' gradients, with places": params}
    return *rows, *(Buffer(name=name, size_bytes=size) for name, size in terms.items() if size)


def row_shape(problem: Problem, rows_per_head: int) -> tuple[int, int]:
    """Of the float32 workspace of base-2 log-sum-exp and delta, for so many padded rows of each head."""
    return 2, problem.tensor_batch * problem.heads * rows_per_head


def row_workspace(problem: Problem, rows_per_head: int, accumulator: tuple[int, ...] | None) -> Workspace:
    """What a call with these workspaces allocates."""
    rows = Buffer(
        name="base-2 log-sum-exp and delta, float32", size_bytes=4 * math.prod(row_shape(problem, rows_per_head))
    )
    if accumulator is None:
        return (rows,)
    return rows, Buffer(name="sum of dq, float32", size_bytes=4 * math.prod(accumulator))


class TritonBackward(CompiledExecutable):
    """Executable of the backward templates of the Triton family.

    Each prepared call is bound to the compiled forms that its tensors need: every tensor dense or strided, rows and
    keys that fill their tiles or do not.
    """

    def __init__(self, form: Form, variant: Variant, device: Device) -> None:
        """Render and import the kernels; compile nothing yet.

        Raises:
            RenderError: for a structure that the templates do not have.
            ImportError: without Triton.
        """
        super().__init__(form, variant, device)
        self._is_key_outer = variant.structure.get("loop_order") == "key_outer"

    @property
    def uses_descriptors(self) -> bool:
        """Whether gradients are written by the copy engine, which asks for dense ones."""
        return self._variant.structure["loads"] == "tma"

    def steps(
        self, problem: Problem, operands: Mapping[str, Operand], scale: float, *, has_dlse: bool
    ) -> tuple[Step, ...]:
        """The kernels of a call in launch order."""
        return backward_steps(problem, self._variant, operands, scale, has_dlse=has_dlse)

    def padded_rows(self, problem: Problem) -> int:
        """Rows of the workspaces of each head."""
        return padded_rows(problem, self._variant)

    def accumulator_shape(self, problem: Problem) -> tuple[int, ...] | None:
        """Of the float32 workspace that dQ is added up in; None where each dQ has one program."""
        return accumulator_shape(problem, self._variant)

    def slopes_sums_shape(self, problem: Problem) -> tuple[int, int, int]:
        """Of the shares of the gradient of the slopes of ALiBi."""
        return slopes_sums_shape(problem, self._variant)

    def param_sums_shapes(self, problem: Problem) -> tuple[tuple[int, ...], ...]:
        """Of the sums of the gradients of parameters, one for each look-up."""
        return param_sums_shapes(problem, self._variant)

    def why_not(self, problem: Problem, *tensors: Tensor) -> str | None:
        """The precondition that these tensors (q, k, v, dout) miss; None if it can run them."""
        if problem.deterministic and self._is_key_outer:
            return "loop_order=key_outer adds to dq in any order: it is not deterministic"
        if problem.deterministic and problem.params_gradient and (scattered := scattered_parameters(problem.score_mod)):
            return f"the gradient of {scattered[0]} is added up in any order: it is not deterministic"
        if constraint.is_left_to_torch(problem.features):
            return "gradients of terms beside a block mask are left to tiled torch: these kernels walk no lists"
        if (reason := why_not_structure(problem, self._variant.structure)) is not None:
            return reason
        if problem.is_empty:
            return None
        shapes = _shapes(problem)
        planned = {name: _contiguous(shape, problem) for name, shape in shapes.items()} | usual_masks(problem)
        for step in self.steps(problem, planned, 1.0, has_dlse=False):
            if step.programs > launch.MAX_PROGRAMS:
                return f"{step.programs} programs of {step.plan.function} are more than one launch has"
        if not self.uses_descriptors:
            return None
        if not self._device.has_tma and not launch.is_interpreted():
            return f"loads=tma needs a copy engine (sm_90 or newer), the device is {self._device.arch}"
        for name, head_dim in (("head_dim", problem.head_dim), ("head_dim_v", problem.head_dim_v)):
            if head_dim * problem.dtype.itemsize % ALIGNMENT_BYTES:
                return f"loads=tma needs vectors of a multiple of 16 bytes, {name} is {head_dim}"
        for name, tensor in zip(("q", "k", "v", "dout"), tensors, strict=False):
            operand = Operand.of(tensor)
            if not operand.is_dense:
                return f"loads=tma needs {name} with a last stride of 1 and the rest aligned to 16 bytes"
            if operand.overlaps:
                return f"loads=tma needs every element of {name} at its own address, a stride is 0"
        return None

    def is_loaded(self, problem: Problem, *tensors: Tensor, extras: Extras = NO_EXTRAS) -> bool:
        """Whether a call with an output as a forward call makes it would compile and load nothing.

        That depends on how a mask and a bias lie: where they are not given, nothing is known to be loaded.
        """
        if problem.is_empty:
            return True
        if not knows_layouts(problem, extras):
            return False
        if has_params(problem) and not extras.params:
            return False
        q, k, v, dout = tensors
        operands = self._operands(problem, q, k, v, dout)
        operands["out"] = _in_order_of(_shapes(problem)["out"], q, problem)
        given = (extras.mask, extras.bias, extras.alibi_slopes, extras.query_blocks)
        if any(x is not None for x in given) or extras.params:
            operands |= mask_operands(problem, extras)
        steps = self.steps(problem, operands, 1.0, has_dlse=False)
        return all(step.plan in self._kernels for step in steps)

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
            NoKernelError: where :meth:`why_not` has something to say.
            InvalidProblemError: if ``extras`` lacks a tensor that the problem has.
        """
        refuse_unable(self, problem, q, k, v, dout)
        masks = mask_operands(problem, extras)
        if problem.is_empty:
            return empty_backward
        operands = self._operands(problem, q, k, v, dout)
        operands["out"] = Operand.of(out)
        return _Call(self, problem, operands | masks, scale)

    def bind(self, problem: Problem, operands: Mapping[str, Operand], scale: float, *, has_dlse: bool) -> _Launches:
        """Loaded kernels in launch order, each with the choice of its tensors from those of a call."""
        steps = self.steps(problem, operands, scale, has_dlse=has_dlse)
        return tuple((self._bound(step), itemgetter(*step.tensors)) for step in steps)

    def _bound(self, step: Step) -> Launch:
        return self._kernel(step.plan).bind(step.layouts, step.numbers, step.programs)

    def _operands(self, problem: Problem, q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> dict[str, Operand]:
        """The inputs as they are, and the gradients as a call allocates them."""
        given = {"q": q, "k": k, "v": v}
        operands = {name: Operand.of(tensor) for name, tensor in given.items()}
        operands["dout"] = Operand.of(dout)
        shapes = _shapes(problem)
        return operands | {f"d{name}": _in_order_of(shapes[f"d{name}"], like, problem) for name, like in given.items()}


class _Call:
    """A prepared backward call."""

    def __init__(
        self, executable: TritonBackward, problem: Problem, operands: dict[str, Operand], scale: float
    ) -> None:
        self._executable = executable
        self._problem = problem
        self._operands = operands
        self._scale = scale
        placed = ("mask", "bias", "slopes", "query_blocks")
        self._has_mask = any(name in operands for name in placed) or has_params(problem)
        self._slopes_sums = executable.slopes_sums_shape(problem) if problem.alibi_gradient else ()
        self._bias_sums = bias_sums_shape(problem, operands["bias"].shape) if problem.bias_gradient else None
        self._look_ups = look_ups(problem)
        self._param_sums = executable.param_sums_shapes(problem)
        self._has_term_kernels = problem.bias_gradient or problem.alibi_gradient or bool(self._look_ups)
        self._has_features = bool(problem.features)
        self._uses_descriptors = executable.uses_descriptors
        self._dtype = TORCH_TYPES[problem.dtype]
        self._row_shape = row_shape(problem, executable.padded_rows(problem))
        self._accumulator_shape = executable.accumulator_shape(problem)
        # What lies as its model does is asked of torch in the way that takes it the least time.
        self._made = tuple(
            None if (made.shape, made.strides) == (like.shape, like.strides) else (made.shape, made.strides)
            for made, like in ((operands[f"d{name}"], operands[name]) for name in "qkv")
        )
        self._without_dlse = executable.bind(problem, operands, scale, has_dlse=False)
        # The same kernels with another number: nothing is compiled.
        self._with_dlse = executable.bind(problem, operands, scale, has_dlse=True)
        self._elsewhere: dict[tuple[Operand, ...], _Call] = {}

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
        """Compute dq, dk, dv, and what is given of terms, from the gradients of out and, if given, of lse."""
        if dq is not None or dk is not None or dv is not None:
            return self._into(q, k, v, out, lse, dout, dlse, (dq, dk, dv), extras, terms)
        call = self._for(mask_operands(self._problem, extras)) if self._has_mask else self
        return call._run(q, k, v, out, lse, dout, dlse, self._made_gradients(q, k, v), extras, terms)

    def _for(self, operands: dict[str, Operand]) -> _Call:
        """The call for gradients, a mask or a bias that lie so: itself, unless it is bound to others."""
        key = tuple(operands.values())
        if key == tuple(self._operands[name] for name in operands):
            return self
        if key not in self._elsewhere:
            self._elsewhere[key] = _Call(self._executable, self._problem, self._operands | operands, self._scale)
        return self._elsewhere[key]

    def _made_gradients(self, *models: Tensor) -> list[Tensor]:
        return [
            torch.empty_like(like)
            if layout is None
            else torch.empty_strided(*layout, dtype=self._dtype, device=like.device)
            for like, layout in zip(models, self._made, strict=True)
        ]

    def _run(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        dout: Tensor,
        dlse: Tensor | None,
        gradients: Sequence[Tensor],
        extras: Extras,
        terms: TermGradients,
    ) -> tuple[Tensor, Tensor, Tensor]:
        dq, dk, dv = gradients
        lse = lse.contiguous()
        launches, dlse = (self._without_dlse, lse) if dlse is None else (self._with_dlse, dlse.contiguous())
        log2_sum, delta = torch.empty(self._row_shape, dtype=torch.float32, device=q.device).unbind()
        accumulator = (
            None
            if self._accumulator_shape is None
            else torch.empty(self._accumulator_shape, dtype=torch.float32, device=q.device)
        )
        # In the order of backward_plan.TENSORS.
        tensors: tuple[Tensor | None, ...] = (q, k, v, out, lse, dout, dlse, log2_sum, delta, accumulator, dq, dk, dv)
        if self._has_features:
            tensors += in_order(extras)
        sums: Tensor | None = None
        shares: Tensor | None = None
        if self._problem.bias_gradient and terms.bias is None:
            terms = terms._replace(bias=TermGradients.unwritten(extras, ("bias",)).bias)
        params: ParamSums | None = None
        if self._look_ups or terms.params:
            params = ParamSums(self._look_ups, self._param_sums, terms.params)
        if self._has_term_kernels:
            if self._bias_sums is not None:
                sums = torch.empty(self._bias_sums, dtype=torch.float32, device=q.device)
            if self._problem.alibi_gradient:
                shares = torch.empty(self._slopes_sums, dtype=torch.float32, device=q.device)
            tensors += (terms.bias if sums is None else sums, shares, *(params.tensors if params else ()))
        for run, choose in launches if params is None else params.wanted(launches):
            run(*choose(tensors))
        if sums is not None and terms.bias is not None:
            bias_gradient_of_sums(sums, terms.bias)
        if shares is not None and terms.alibi_slopes is not None:
            slopes_gradient_of_sums(shares, terms.alibi_slopes)
        if params is not None:
            params.add_up()
        if terms.sinks is not None and extras.sinks is not None:
            sinks_gradient_of_rows(extras.sinks, log2_sum, delta, self._problem.tensor_batch, terms.sinks)
        return dq, dk, dv

    def _into(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        dout: Tensor,
        dlse: Tensor | None,
        given: Sequence[Tensor | None],
        extras: Extras,
        terms: TermGradients,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Write to given gradients where kernels can, else to fresh ones that are copied."""
        gradients = self._made_gradients(q, k, v)
        copies: list[tuple[Tensor, Tensor]] = []
        for index, target in enumerate(given):
            if target is None:
                continue
            operand = Operand.of(target)
            if self._uses_descriptors and (not operand.is_dense or operand.overlaps):
                copies.append((target, gradients[index]))
            else:
                gradients[index] = target
        written = {name: Operand.of(gradient) for name, gradient in zip(("dq", "dk", "dv"), gradients, strict=True)}
        call = self._for(written | mask_operands(self._problem, extras))
        call._run(q, k, v, out, lse, dout, dlse, gradients, extras, terms)
        for target, source in copies:
            target.copy_(source)
        dq, dk, dv = (made if target is None else target for target, made in zip(given, gradients, strict=True))
        return dq, dk, dv


def _shapes(problem: Problem) -> _Shapes:
    queries = (problem.tensor_batch, problem.heads, problem.rows_q)
    keys = (problem.tensor_batch, problem.kv_heads, problem.rows_k)
    q, k = (*queries, problem.head_dim), (*keys, problem.head_dim)
    v, out = (*keys, problem.head_dim_v), (*queries, problem.head_dim_v)
    return {"q": q, "k": k, "v": v, "out": out, "dout": out, "dq": q, "dk": k, "dv": v}


def _contiguous(shape: tuple[int, ...], problem: Problem) -> Operand:
    _, heads, seqlen, width = shape
    strides = (heads * seqlen * width, seqlen * width, width, 1)
    return Operand.planned(shape, strides, problem.dtype.itemsize)


def _in_order_of(shape: tuple[int, ...], model: Tensor, problem: Problem) -> Operand:
    return Operand.planned(shape, strides_in_order_of(shape, model), problem.dtype.itemsize)
