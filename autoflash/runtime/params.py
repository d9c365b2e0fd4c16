"""The parameters of expressions as arguments of Triton kernels, in the order of ``params``.

A kernel takes a pointer to each; of one with a rank also its sizes and strides.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from autoflash.codegen.expressions import parameters_of
from autoflash.errors import InvalidProblemError
from autoflash.expression.nodes import Kind, Parameter
from autoflash.problem import Form, Problem
from autoflash.runtime.executable import Extras
from autoflash.runtime.launch import Constant, Number, NumberArgument, TensorArgument

_TYPES = {Kind.FLOAT: "fp32", Kind.INT: "i32", Kind.BOOL: "u8"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamOperand:
    """A parameter of a call as far as its kernels look at it.

    Attributes:
        parameter: As it is declared.
        sizes, strides: Of the tensor, strides in elements.
    """

    parameter: Parameter
    sizes: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def name(self) -> str:
        """Its name among a kernel's arguments."""
        return f"param_{self.parameter.name}"

    @property
    def tensor(self) -> TensorArgument:
        """The pointer."""
        return TensorArgument(name=f"{self.name}_ptr", dtype=_TYPES[self.parameter.kind], aligned=False)

    def constants(self) -> dict[str, Constant]:
        """What kernels are compiled with: a last stride of 1."""
        last = len(self.strides) - 1
        return {f"{self.name}_stride_{last}": 1} if self.strides[-1:] == (1,) else {}

    def numbers(self) -> dict[NumberArgument, Number]:
        """What kernels are given at launch, in the order of their parameters."""
        sizes = {NumberArgument(name=f"{self.name}_size_{axis}"): size for axis, size in enumerate(self.sizes)}
        strides = {
            NumberArgument(name=f"{self.name}_stride_{axis}", type="i64"): stride
            for axis, stride in enumerate(self.strides)
        }
        known = self.constants()
        return {argument: number for argument, number in (sizes | strides).items() if argument.name not in known}


def param_operands(problem: Problem, extras: Extras) -> tuple[ParamOperand, ...]:
    """How the parameters of a call lie.

    Raises:
        InvalidProblemError: where the call gives others than the problem's expressions read.
    """
    declared = parameters_of(problem.score_mod, problem.mask_mod)
    if len(declared) != len(extras.params):
        raise InvalidProblemError(f"{' and '.join(one.name for one in declared)} must be given to {Form.of(problem)}")
    return tuple(
        ParamOperand(parameter=parameter, sizes=tuple(tensor.shape), strides=tensor.stride())
        for parameter, tensor in zip(declared, extras.params, strict=True)
    )


def usual_params(problem: Problem) -> tuple[ParamOperand, ...]:
    """As :func:`param_operands`, of parameters that are not at hand: contiguous."""
    declared = parameters_of(problem.score_mod, problem.mask_mod)
    return tuple(ParamOperand(parameter=one, sizes=(1,) * one.rank, strides=(1,) * one.rank) for one in declared)


def has_params(problem: Problem) -> bool:
    """Whether the problem's expressions read any."""
    return bool(parameters_of(problem.score_mod, problem.mask_mod))


def as_kernels_read(params: Iterable[Tensor]) -> list[Tensor]:
    """The tensors, truths as bytes."""
    return [param.view(torch.uint8) if param.dtype is torch.bool else param for param in params]
