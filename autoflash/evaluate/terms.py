"""Terms of scores with gradients that kernels are verified on."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from autoflash.codegen.expressions import expression_of, parameters_of
from autoflash.evaluate.inputs import Memory
from autoflash.expression.nodes import Input, Kind, Node, Parameter, Read, Variable, walk
from autoflash.problem import DType, Problem
from autoflash.runtime.layouts import TORCH_TYPES

# Of a table whose index is no variable: odd, so that few blocks end where it does.
_TABLE = 37
# Integers that tables hold: few, so that equal ones are common.
_LABELS = 5
# Of a bias with holes.
_HIDDEN_SHARE = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class BiasForm:
    """A bias as far as a problem leaves it open.

    Attributes:
        own: The letters among ``bhmn`` of the dimensions that it has; it is shared over the others.
        memory: How its elements lie.
        dtype: Its type; None is the inputs' own.
        has_holes: Some of its elements are -inf.
        is_zero: All are 0.
    """

    own: str = "bhmn"
    memory: Memory = Memory.DENSE
    dtype: DType | None = None
    has_holes: bool = False
    is_zero: bool = False

    def __str__(self) -> str:
        """For people, such as ``bias hmn fp32 transposed``."""
        parts = [self.own or "of one element", *([self.dtype.value] if self.dtype else [])]
        parts += ["with holes"] if self.has_holes else []
        return " ".join(["bias", *parts, *([] if self.memory is Memory.DENSE else [self.memory.value])])


def draw_slopes(problem: Problem, *, own: bool, flat: bool, device: str) -> Tensor:
    """The same slopes on every device, [B, H] if each batch entry or sequence has its own, else [1, H]; 0 if flat."""
    heads = 0.5 ** (1.0 + torch.arange(problem.heads, dtype=torch.float32) % 5)
    entries = torch.arange(problem.batch if own else 1, dtype=torch.float32)[:, None] % 7
    slopes = heads * (1.0 - 0.25 * entries)
    return (torch.zeros_like(slopes) if flat else slopes).to(device)


def draw_bias(problem: Problem, form: BiasForm, *, device: str) -> Tensor:
    """The same bias on every device, of rank 4 and not expanded."""
    sizes = {"b": problem.batch, "h": problem.heads, "m": problem.seqlen_q, "n": problem.seqlen_k}
    shape = [size if letter in form.own else 1 for letter, size in sizes.items()]
    generator = torch.Generator().manual_seed(problem.seqlen_q * 43 + problem.seqlen_k)
    bias = torch.zeros(shape, dtype=torch.float32)
    if not form.is_zero:
        bias = torch.randn(shape, generator=generator, dtype=torch.float32) * 2.0
    if form.has_holes:
        bias[torch.rand(shape, generator=generator) < _HIDDEN_SHARE] = -math.inf
    return bias.to(device=device, dtype=TORCH_TYPES[form.dtype or problem.dtype])


def draw_sinks(problem: Problem, *, around: float, flat: bool, device: str) -> Tensor:
    """The same sinks [H] on every device: some below and some above the scores, at odd lengths some of -inf.

    Args:
        problem: Gives the heads.
        around: Where the scores lie.
        flat: As much as two keys of score 0, so that every probability is a power of two.
        device: Where they shall lie.
    """
    if flat:
        return torch.full((problem.heads,), math.log(2.0), dtype=torch.float32, device=device)
    generator = torch.Generator().manual_seed(problem.heads * 101 + problem.seqlen_k)
    sinks = around + 2.0 * torch.randn(problem.heads, generator=generator, dtype=torch.float32)
    if problem.seqlen_k % 2:
        sinks[2::3] = -math.inf
    return sinks.to(device)


def draw_params(problem: Problem, *, device: str) -> tuple[Tensor, ...]:
    """The same parameters of a problem's expressions on every device, in order.

    Floats lie between 0.5 and 1.5, where logarithms, roots and quotients mean something. A number that is an integer
    is the number of keys, which is what relative tables are shifted by. An axis is as long as the variable that indexes
    it goes; one whose index varies with both the query and the key reaches over three quarters of their differences,
    and others are short, so that some of what is looked up lies outside.
    """
    generator = torch.Generator().manual_seed(problem.seqlen_q * 31 + problem.seqlen_k)
    parameters = parameters_of(problem.score_mod, problem.mask_mod)
    return tuple(_draw_param(problem, parameter, generator).to(device) for parameter in parameters)


def _draw_param(problem: Problem, parameter: Parameter, generator: torch.Generator) -> Tensor:
    shape = _shape_of(problem, parameter)
    if parameter.kind is Kind.FLOAT:
        return 0.5 + torch.rand(shape, generator=generator, dtype=torch.float32)
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
                return tuple(_length_of(index, lengths) for index in node.indices)
    raise AssertionError(f"nothing reads {parameter.name}")


def _length_of(index: Node, lengths: Mapping[Variable, int]) -> int:
    """Of an axis with this index."""
    if isinstance(index, Input):
        return lengths[index.variable]
    read = {node.variable for node in walk(index) if isinstance(node, Input)}
    if read >= {Variable.Q_IDX, Variable.KV_IDX}:
        return max(_TABLE, lengths[Variable.KV_IDX] + lengths[Variable.Q_IDX] // 2)
    return _TABLE
