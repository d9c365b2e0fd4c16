"""What an expression means, in float64 or less and differentiable: the specification of score_mod and mask_mod."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from autoflash.expression.nodes import (
    Binary,
    BinaryOp,
    Constant,
    Input,
    Kind,
    Node,
    Power,
    Read,
    Unary,
    UnaryOp,
    Variable,
    Where,
)

_DTYPES = {Kind.INT: torch.int32, Kind.BOOL: torch.bool}

_UNARY: dict[UnaryOp, Callable[[Tensor], Tensor]] = {
    UnaryOp.NEGATE: torch.neg,
    UnaryOp.NOT: torch.logical_not,
    UnaryOp.EXP: torch.exp,
    UnaryOp.LOG: torch.log,
    UnaryOp.TANH: torch.tanh,
    UnaryOp.SIGMOID: torch.sigmoid,
    UnaryOp.ABS: torch.abs,
    UnaryOp.SQRT: torch.sqrt,
    UnaryOp.SIN: torch.sin,
    UnaryOp.COS: torch.cos,
}

_BINARY: dict[BinaryOp, Callable[[Tensor, Tensor], Tensor]] = {
    BinaryOp.ADD: torch.add,
    BinaryOp.SUBTRACT: torch.sub,
    BinaryOp.MULTIPLY: torch.mul,
    BinaryOp.DIVIDE: torch.div,
    BinaryOp.MINIMUM: torch.minimum,
    BinaryOp.MAXIMUM: torch.maximum,
    BinaryOp.LESS: torch.lt,
    BinaryOp.LESS_EQUAL: torch.le,
    BinaryOp.EQUAL: torch.eq,
    BinaryOp.NOT_EQUAL: torch.ne,
    BinaryOp.AND: torch.logical_and,
    BinaryOp.OR: torch.logical_or,
}


def value_of(
    node: Node,
    inputs: Mapping[Variable, Tensor],
    parameters: Mapping[str, Tensor],
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """The value of an expression at each place, with autograd by the score and the parameters.

    Integers are int32 and wrap around. ``//`` and ``%`` are Python's; x // 0 is 0 and x % 0 is x. An element outside a
    parameter is 0. What ``where``, ``minimum`` or ``maximum`` does not choose is not computed, and so has no part
    in a gradient either; of two equal ones, either has half.

    Args:
        node: Root of an expression, or of a derivative.
        inputs: The variables that it may look at: the score, and integers; their shapes broadcast.
        parameters: By name, each of the rank that was declared.
        dtype: In which floats are computed: the specification is that of float64.

    Returns:
        That type, int32 or bool, of the shape that the inputs broadcast to.
    """
    shape = torch.broadcast_shapes(*(tensor.shape for tensor in inputs.values()))  # type: ignore[no-untyped-call]  # so it is
    places = {
        variable: tensor.to(dtype if variable is Variable.SCORE else torch.int32).expand(shape).reshape(-1)
        for variable, tensor in inputs.items()
    }
    return _Places(places, parameters, dtype).value(node).reshape(shape)


class _Places:
    """Some places of the scores, one after the other, and what was computed there."""

    def __init__(self, inputs: Mapping[Variable, Tensor], parameters: Mapping[str, Tensor], dtype: torch.dtype) -> None:
        self._inputs = inputs
        self._parameters = parameters
        self._dtype = dtype
        self._known: dict[Node, Tensor] = {}

    def value(self, node: Node) -> Tensor:
        """The value at each of the places."""
        if node not in self._known:
            self._known[node] = self._computed(node)
        return self._known[node]

    def _computed(self, node: Node) -> Tensor:
        match node:
            case Constant(value):
                return self._zeros(node).fill_(value)
            case Input(variable):
                return self._inputs[variable]
            case Read(parameter, indices):
                return self._element(self._parameters[parameter.name].to(self._type(node)), indices)
            case Unary(UnaryOp.FLOOR, operand):
                whole = self.value(operand).floor().nan_to_num(nan=0.0)
                return whole.clamp(-(2.0**31), 2.0**31 - 128.0).int()
            case Unary(UnaryOp.FLOAT, operand):
                return self.value(operand).to(self._dtype)
            case Unary(op, operand):
                return _UNARY[op](self.value(operand))
            case Power(base, exponent):
                return self.value(base) ** exponent
            case Binary(BinaryOp.FLOOR_DIVIDE | BinaryOp.MODULO as op, left, right):
                return _rounded_down(op, self.value(left), self.value(right))
            case Binary(BinaryOp.MINIMUM | BinaryOp.MAXIMUM as op, left, right):
                if node.kind is Kind.FLOAT and torch.is_grad_enabled():
                    return self._extremum(node, op, left, right)
                return _BINARY[op](self.value(left), self.value(right))
            case Binary(op, left, right):
                return _BINARY[op](self.value(left), self.value(right))
            case Where(condition, chosen, otherwise):
                holds = self.value(condition)
                return self._put(node, [(holds, chosen, None), (~holds, otherwise, None)])
        raise TypeError(f"{type(node).__name__} has no value")

    def _extremum(self, node: Node, op: BinaryOp, left: Node, right: Node) -> Tensor:
        with torch.no_grad():
            plain = _Places(self._inputs, self._parameters, self._dtype)
            first, second = plain.value(left), plain.value(right)
        if op is BinaryOp.MAXIMUM:
            first, second = -first, -second
        share = torch.where(first == second, 0.5, 1.0).to(self._dtype)
        return self._put(node, [(~(second < first), left, share), (~(first < second), right, share)])

    def _put(self, node: Node, parts: list[tuple[Tensor, Node, Tensor | None]]) -> Tensor:
        """The sum of some nodes' values, each computed only where its mask holds, and times its share."""
        whole = self._zeros(node)
        for mask, part, share in parts:
            (where,) = mask.nonzero(as_tuple=True)
            chosen = {variable: tensor[where] for variable, tensor in self._inputs.items()}
            values = _Places(chosen, self._parameters, self._dtype).value(part)
            if share is None:
                whole = whole.index_put((where,), values)
            else:
                whole = whole.index_put((where,), values * share[where], accumulate=True)
        return whole

    def _element(self, parameter: Tensor, indices: tuple[Node, ...]) -> Tensor:
        if not indices:
            return parameter.expand(len(self._anyone()))
        values = [self.value(index).long() for index in indices]
        pairs = list(zip(values, parameter.shape, strict=True))
        inside = torch.stack([(value >= 0) & (value < size) for value, size in pairs]).all(dim=0)
        (where,) = inside.nonzero(as_tuple=True)
        elements = parameter[tuple(value[where] for value in values)]
        return parameter.new_zeros(inside.shape).index_put((where,), elements)

    def _anyone(self) -> Tensor:
        return next(iter(self._inputs.values()))

    def _zeros(self, node: Node) -> Tensor:
        return self._anyone().new_zeros(len(self._anyone()), dtype=self._type(node))

    def _type(self, node: Node) -> torch.dtype:
        return self._dtype if node.kind is Kind.FLOAT else _DTYPES[node.kind]


def _rounded_down(op: BinaryOp, left: Tensor, right: Tensor) -> Tensor:
    # In 64 bits, where the opposite of the least integer of 32 has a place.
    dividend, divisor = left.long(), right.long().masked_fill(right == 0, 1)
    quotient = torch.div(dividend, divisor, rounding_mode="floor").masked_fill(right == 0, 0)
    return (quotient if op is BinaryOp.FLOOR_DIVIDE else dividend - quotient * right).int()
