"""Derivatives of an expression, in the same language.

By the chain rule from the root down: what has been multiplied so far goes into the branches of a ``where``, so that the
branch that was not taken, whose slope may be infinite there, has no part in the result.

Where there is no derivative, it is that of torch's autograd: ``abs`` has 0 at 0; ``minimum`` and ``maximum`` give each
side half where they are equal; ``floor``, ``//``, ``%``, comparisons and conditions have none.
"""

from __future__ import annotations

from dataclasses import dataclass

from autoflash.errors import ExpressionError
from autoflash.expression import build
from autoflash.expression.expression import Expression, Role
from autoflash.expression.nodes import (
    Binary,
    BinaryOp,
    Kind,
    Node,
    Parameter,
    Power,
    Read,
    Unary,
    UnaryOp,
    Variable,
    Where,
    walk,
)

ZERO, ONE, HALF = map(build.constant, (0.0, 1.0, 0.5))


@dataclass(frozen=True, slots=True, kw_only=True)
class Gradient:
    """How the modified score depends on one look-up: an element of a parameter's gradient is a sum of these.

    Attributes:
        parameter: Whose elements are read.
        indices: Which element; where an index lies outside, none.
        derivative: Of the modified score by that element.
    """

    parameter: Parameter
    indices: tuple[Node, ...]
    derivative: Node


def score_derivative(expression: Expression) -> Node:
    """Derivative of the modified score by the score.

    Raises:
        ExpressionError: for a mask_mod, which has none.
    """
    _check(expression)
    return _Derivative(build.variable(Variable.SCORE)).of(expression.root, ONE)


def parameter_gradients(expression: Expression) -> tuple[Gradient, ...]:
    """One for each different look-up of a float that the modified score depends on, in the order of evaluation.

    Raises:
        ExpressionError: for a mask_mod, which has none.
    """
    _check(expression)
    reads = [node for node in walk(expression.root) if isinstance(node, Read) and node.kind is Kind.FLOAT]
    found = ((read, _Derivative(read).of(expression.root, ONE)) for read in reads)
    return tuple(
        Gradient(parameter=read.parameter, indices=read.indices, derivative=derivative)
        for read, derivative in found
        if derivative != ZERO
    )


def _check(expression: Expression) -> None:
    if expression.role is not Role.SCORE_MOD:
        raise ExpressionError(f"a {expression.role.value} has no derivative")


class _Derivative:
    """By one input or look-up, wherever it stands in a tree."""

    def __init__(self, by: Node) -> None:
        self._by = by
        self._depends: dict[Node, bool] = {}

    def of(self, node: Node, factor: Node) -> Node:
        """Derivative of a node times a factor; a constant 0 where it does not depend at all."""
        if node == self._by:
            return factor
        if not self._is_dependent(node):
            return ZERO
        match node:
            case Unary(op, operand):
                return self.of(operand, _through(op, node, operand, factor))
            case Power(base, exponent):
                slope = build.multiply(build.constant(float(exponent)), build.power(base, exponent - 1))
                return self.of(base, build.multiply(factor, slope))
            case Where(condition, chosen, otherwise):
                return build.where(condition, self.of(chosen, factor), self.of(otherwise, factor))
            case Binary(op, left, right):
                return self._of_binary(op, left, right, factor)
        raise TypeError(f"{type(node).__name__} has no derivative")

    def _of_binary(self, op: BinaryOp, left: Node, right: Node, factor: Node) -> Node:
        if op is BinaryOp.ADD:
            return build.add(self.of(left, factor), self.of(right, factor))
        if op is BinaryOp.SUBTRACT:
            return build.subtract(self.of(left, factor), self.of(right, factor))
        if op is BinaryOp.MULTIPLY:
            return build.add(self.of(left, build.multiply(factor, right)), self.of(right, build.multiply(factor, left)))
        if op is BinaryOp.DIVIDE:
            share = build.divide(factor, right)
            quotient = build.divide(left, right)
            return build.subtract(self.of(left, share), self.of(right, build.multiply(share, quotient)))
        # Of minimum and maximum, the side that is beaten has no part.
        beaten = (build.less(right, left), build.less(left, right))
        if op is BinaryOp.MAXIMUM:
            beaten = beaten[::-1]
        share = build.where(build.equal(left, right), build.multiply(HALF, factor), factor)
        sides = (
            build.where(is_beaten, ZERO, self.of(side, share))
            for side, is_beaten in zip((left, right), beaten, strict=True)
        )
        return build.add(*sides)

    def _is_dependent(self, node: Node) -> bool:
        """Whether a change of what the derivative is by moves this float. Truths and integers only jump."""
        if node.kind is not Kind.FLOAT:
            return False
        if node not in self._depends:
            values = node.children[1:] if isinstance(node, Where) else node.children
            self._depends[node] = node == self._by or any(map(self._is_dependent, values))
        return self._depends[node]


def _through(op: UnaryOp, node: Node, operand: Node, factor: Node) -> Node:
    """The factor times the slope of a function at its operand; ``node`` is the function's value."""
    if op is UnaryOp.NEGATE:
        return build.negate(factor)
    if op is UnaryOp.EXP:
        return build.multiply(factor, node)
    if op is UnaryOp.LOG:
        return build.divide(factor, operand)
    if op is UnaryOp.SQRT:
        return build.divide(build.multiply(HALF, factor), node)
    if op is UnaryOp.SIN:
        return build.multiply(factor, build.apply(UnaryOp.COS, operand))
    if op is UnaryOp.COS:
        return build.negate(build.multiply(factor, build.apply(UnaryOp.SIN, operand)))
    if op is UnaryOp.TANH:
        return build.multiply(factor, build.multiply(build.subtract(ONE, node), build.add(ONE, node)))
    if op is UnaryOp.SIGMOID:
        return build.multiply(factor, build.multiply(node, build.subtract(ONE, node)))
    if op is UnaryOp.ABS:
        rising, falling = build.less(ZERO, operand), build.less(operand, ZERO)
        return build.where(rising, factor, build.where(falling, build.negate(factor), ZERO))
    raise TypeError(f"{op.value} has no slope")
