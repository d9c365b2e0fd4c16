"""Terms of scores with gradients that kernels are verified on."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from autoflash.codegen.expressions import expression_of, parameters_of
from autoflash.expression.nodes import Input, Kind, Parameter, Read, Variable, walk
from autoflash.problem import Problem

# Of a table whose index is no variable: odd, so that few blocks end where it does.
_TABLE = 37
# Integers that tables hold: few, so that equal ones are common.
_LABELS = 5


def draw_sinks(problem: Problem, *, around: float, flat: bool, device: str) -> Tensor:
    """The same sinks [H] on every device: some below and some above the scores, at odd lengths some of -inf.

    Args:
        problem: Gives the heads.
        around: Where the scores lie.
        flat: As much as two keys of score 0, so that every probability is a power of two.
        device: Where they shall lie.
    """
    if flat:
        return torch.full((problem.heads,), math.log(2.0), device=device)
    generator = torch.Generator().manual_seed(problem.heads * 101 + problem.seqlen_k)
    sinks = around + 2.0 * torch.randn(problem.heads, generator=generator)
    if problem.seqlen_k % 2:
        sinks[2::3] = -math.inf
    return sinks.to(device)


def draw_params(problem: Problem, *, device: str) -> tuple[Tensor, ...]:
    """The same parameters of a problem's expressions on every device, in order.

    Floats lie between 0.5 and 1.5, where logarithms, roots and quotients mean something. A number that is an integer
    is the number of keys, which is what relative tables are shifted by. An axis is as long as the variable that indexes
    it goes; others are shorter than what is looked up, so that some of that lies outside.
    """
    generator = torch.Generator().manual_seed(problem.seqlen_q * 31 + problem.seqlen_k)
    parameters = parameters_of(problem.score_mod, problem.mask_mod)
    return tuple(_draw_param(problem, parameter, generator).to(device) for parameter in parameters)


def _draw_param(problem: Problem, parameter: Parameter, generator: torch.Generator) -> Tensor:
    shape = _shape_of(problem, parameter)
    if parameter.kind is Kind.FLOAT:
        return 0.5 + torch.rand(shape, generator=generator)
    if parameter.kind is Kind.BOOL:
        return torch.rand(shape, generator=generator) < 0.5
    if not shape:
        return torch.tensor(problem.seqlen_k, dtype=torch.int32)
    return torch.randint(0, _LABELS, shape, generator=generator, dtype=torch.int32)


def _shape_of(problem: Problem, parameter: Parameter) -> tuple[int, ...]:
    lengths = {
        Variable.B: problem.batch,
        Variable.H: problem.heads,
        Variable.Q_IDX: problem.seqlen_q,
        Variable.KV_IDX: problem.seqlen_k,
    }
    for line in filter(None, (problem.score_mod, problem.mask_mod)):
        for node in walk(expression_of(line).root):
            if isinstance(node, Read) and node.parameter == parameter:
                return tuple(
                    lengths[index.variable] if isinstance(index, Input) and index.variable in lengths else _TABLE
                    for index in node.indices
                )
    raise AssertionError(f"nothing reads {parameter.name}")
