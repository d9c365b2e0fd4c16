"""Make nodes: each function checks kinds and simplifies, so that a tree is never simplified afterwards.

The value stays the same, bit by bit but for the sign of a zero. Arithmetic of constants is done here; what needs a
library's rounding, such as the exponential of a constant, stays as it is written.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from autoflash.errors import ExpressionError
from autoflash.expression import limits
from autoflash.expression.nodes import (
    COMMUTATIVE,
    Binary,
    BinaryOp,
    Constant,
    Input,
    Kind,
    Node,
    Parameter,
    Power,
    Read,
    Unary,
    UnaryOp,
    Variable,
    Where,
)


def constant(value: bool | int | float) -> Constant:
    """A number or truth.

    Raises:
        ExpressionError: for integers beyond 32 bits, and finite numbers beyond float32.
    """
    if type(value) is int and not limits.INT_MIN <= value <= limits.INT_MAX:
        raise ExpressionError(
            f"an integer of {value.bit_length()} bits is beyond the 32 of integers: write it as a float"
        )
    if type(value) is float:
        if limits.FLOAT_MAX < abs(value) < math.inf:
            raise ExpressionError(f"{value} is beyond float32")
        value += 0.0  # -0.0 is 0.0
    return Constant(value)


ZERO, ONE = Constant(0.0), Constant(1.0)


def variable(name: Variable) -> Node:
    """The score, or where it stands."""
    return Input(name)


def read(parameter: Parameter, indices: tuple[Node, ...]) -> Node:
    """An element of a parameter.

    Raises:
        ExpressionError: for another number of indices than its rank, or indices that are no integers.
    """
    if len(indices) != parameter.rank:
        raise ExpressionError(f"{parameter.name} takes {parameter.rank} indices, got {len(indices)}")
    for index in indices:
        if index.kind is not Kind.INT:
            raise ExpressionError(f"an index of {parameter.name} must be an integer, got a {index.kind.value}")
    return Read(parameter, indices)


def as_float(node: Node) -> Node:
    """The same number as a float.

    Raises:
        ExpressionError: for a truth.
    """
    if node.kind is Kind.FLOAT:
        return node
    if node.kind is Kind.BOOL:
        raise ExpressionError("a truth is no number: use where(condition, 1.0, 0.0)")
    if isinstance(node, Constant):
        return constant(float(node.value))
    return Unary(UnaryOp.FLOAT, node)


def positive(node: Node) -> Node:
    """``+node``."""
    _number("+", node)
    return node


def negate(node: Node) -> Node:
    """``-node``."""
    _number("-", node)
    if isinstance(node, Constant):
        return constant(limits.wrapped(-int(node.value)) if node.kind is Kind.INT else -node.value)
    if isinstance(node, Unary) and node.op is UnaryOp.NEGATE:
        return node.operand
    if isinstance(node, Binary) and node.op is BinaryOp.SUBTRACT:
        return subtract(node.right, node.left)
    if isinstance(node, Binary) and node.op is BinaryOp.MULTIPLY and isinstance(node.right, Constant):
        return multiply(node.left, negate(node.right))
    return Unary(UnaryOp.NEGATE, node)


def add(left: Node, right: Node) -> Node:
    """``left + right``."""
    left, right = _alike("+", left, right)
    folded = _folded(left, right, lambda a, b: a + b)
    if folded is not None:
        return folded
    for one, other in ((left, right), (right, left)):
        if _is(one, 0):
            return other
        if isinstance(one, Unary) and one.op is UnaryOp.NEGATE:
            return subtract(other, one.operand)
        if _is_negative(one):
            return subtract(other, negate(one))
    return _binary(BinaryOp.ADD, left, right)


def subtract(left: Node, right: Node) -> Node:
    """``left - right``."""
    left, right = _alike("-", left, right)
    folded = _folded(left, right, lambda a, b: a - b)
    if folded is not None:
        return folded
    if _is(right, 0):
        return left
    if _is(left, 0):
        return negate(right)
    if (isinstance(right, Unary) and right.op is UnaryOp.NEGATE) or _is_negative(right):
        return add(left, negate(right))
    if left.kind is Kind.INT and left == right:
        return constant(0)
    return Binary(BinaryOp.SUBTRACT, left, right)


def multiply(left: Node, right: Node) -> Node:
    """``left * right``."""
    left, right = _alike("*", left, right)
    folded = _folded(left, right, lambda a, b: a * b)
    if folded is not None:
        return folded
    for one, other in ((left, right), (right, left)):
        if _is(one, 1):
            return other
        if _is(one, -1):
            return negate(other)
        if _is(one, 0) and one.kind is Kind.INT:
            return one
        if isinstance(one, Unary) and one.op is UnaryOp.NEGATE:
            return negate(multiply(one.operand, other))
    return _binary(BinaryOp.MULTIPLY, left, right)


def divide(left: Node, right: Node) -> Node:
    """``left / right``, in floating point whatever they are.

    Raises:
        ExpressionError: for a constant 0 on the right.
    """
    left, right = as_float(left), as_float(right)
    if _is(right, 0):
        raise ExpressionError("division by the constant 0")
    folded = _folded(left, right, lambda a, b: a / b)
    if folded is not None:
        return folded
    if _is(right, 1):
        return left
    if _is(right, -1):
        return negate(left)
    return Binary(BinaryOp.DIVIDE, left, right)


def floor_divide(left: Node, right: Node) -> Node:
    """``left // right`` of integers, rounded down as in Python; 0 where the right side is 0.

    Raises:
        ExpressionError: for floats, and for a constant 0 on the right.
    """
    left, right = _integers("//", left, right)
    folded = _folded(left, right, lambda a, b: a // b)
    if folded is not None:
        return folded
    if _is(right, 1):
        return left
    return negate(left) if _is(right, -1) else Binary(BinaryOp.FLOOR_DIVIDE, left, right)


def modulo(left: Node, right: Node) -> Node:
    """``left % right`` of integers, with the sign of the right side as in Python; the left side where the right is 0.

    Raises:
        ExpressionError: for floats, and for a constant 0 on the right.
    """
    left, right = _integers("%", left, right)
    folded = _folded(left, right, lambda a, b: a % b)
    if folded is not None:
        return folded
    return constant(0) if _is(right, 1) or _is(right, -1) else Binary(BinaryOp.MODULO, left, right)


def power(base: Node, exponent: int) -> Node:
    """``base ** exponent``; an integer's negative powers are floats.

    Raises:
        ExpressionError: for an exponent that is too large.
    """
    _number("**", base)
    if abs(exponent) > limits.EXPONENT:
        raise ExpressionError(f"an exponent must be a whole number from -{limits.EXPONENT} to {limits.EXPONENT}")
    base = as_float(base) if exponent < 0 else base
    if exponent == 0:
        return ONE if base.kind is Kind.FLOAT else constant(1)
    if exponent == 1:
        return base
    if exponent == -1 or (exponent < 0 and isinstance(base, Constant)):
        return divide(ONE, power(base, -exponent))
    if isinstance(base, Constant):
        return multiply(power(base, exponent - 1), base)
    return Power(base, exponent)


def minimum(left: Node, right: Node) -> Node:
    """The smaller of two numbers; NaN where either is."""
    return _extremum(BinaryOp.MINIMUM, min, left, right)


def maximum(left: Node, right: Node) -> Node:
    """The larger of two numbers; NaN where either is."""
    return _extremum(BinaryOp.MAXIMUM, max, left, right)


def absolute(node: Node) -> Node:
    """The absolute value of a number."""
    _number("abs", node)
    if isinstance(node, Constant):
        return negate(node) if node.value < 0 else node
    if isinstance(node, Unary) and node.op is UnaryOp.NEGATE:
        return absolute(node.operand)
    if isinstance(node, Unary) and node.op is UnaryOp.ABS:
        return node
    return Unary(UnaryOp.ABS, node)


def floor(node: Node) -> Node:
    """The largest integer that is not above a number: the nearest of 32 bits that float32 holds, and 0 for NaN."""
    _number("floor", node)
    if node.kind is Kind.INT:
        return node
    if isinstance(node, Unary) and node.op is UnaryOp.FLOAT:
        return node.operand
    if isinstance(node, Constant) and limits.INT_MIN <= node.value <= limits.INT_MAX:
        return constant(math.floor(node.value))
    return Unary(UnaryOp.FLOOR, node)


def apply(function: UnaryOp, node: Node) -> Node:
    """One of exp, log, tanh, sigmoid, sqrt, sin, cos of a number."""
    return Unary(function, as_float(node))


def less(left: Node, right: Node) -> Node:
    """``left < right``."""
    return _ordered(BinaryOp.LESS, left, right, lambda a, b: a < b)


def less_equal(left: Node, right: Node) -> Node:
    """``left <= right``."""
    return _ordered(BinaryOp.LESS_EQUAL, left, right, lambda a, b: a <= b)


def equal(left: Node, right: Node) -> Node:
    """``left == right``, of two numbers or two truths."""
    return _equality(BinaryOp.EQUAL, left, right)


def not_equal(left: Node, right: Node) -> Node:
    """``left != right``, of two numbers or two truths."""
    return _equality(BinaryOp.NOT_EQUAL, left, right)


def logical_not(node: Node) -> Node:
    """``not node``."""
    _truth("not", node)
    if isinstance(node, Constant):
        return constant(not node.value)
    if isinstance(node, Unary):
        return node.operand  # of the operations of one operand, this one alone gives a truth
    if isinstance(node, Binary) and node.op is BinaryOp.EQUAL:
        return not_equal(node.left, node.right)
    if isinstance(node, Binary) and node.op is BinaryOp.NOT_EQUAL:
        return equal(node.left, node.right)
    # Not of floats: NaN is neither less nor not.
    if isinstance(node, Binary) and node.left.kind is Kind.INT:
        return (less_equal if node.op is BinaryOp.LESS else less)(node.right, node.left)
    return Unary(UnaryOp.NOT, node)


def logical_and(left: Node, right: Node) -> Node:
    """``left and right``."""
    return _junction(BinaryOp.AND, left, right, neutral=True)


def logical_or(left: Node, right: Node) -> Node:
    """``left or right``."""
    return _junction(BinaryOp.OR, left, right, neutral=False)


def where(condition: Node, chosen: Node, otherwise: Node) -> Node:
    """One of two values; the other has no part in the result, nor in its derivative.

    Raises:
        ExpressionError: if the condition is no truth, or only one of the values is.
    """
    _truth("where", condition)
    if Kind.BOOL not in (chosen.kind, otherwise.kind):
        chosen, otherwise = _alike("where", chosen, otherwise)
    elif chosen.kind is not otherwise.kind:
        raise ExpressionError("where(condition, x, y) chooses among two numbers or two truths, got one of each")
    if isinstance(condition, Constant):
        return chosen if condition.value else otherwise
    if chosen == otherwise:
        return chosen
    if isinstance(condition, Unary):
        return Where(condition.operand, otherwise, chosen)
    return Where(condition, chosen, otherwise)


def _binary(op: BinaryOp, left: Node, right: Node) -> Node:
    """With its sides in order, where their order does not matter."""
    if op in COMMUTATIVE and right.order < left.order:
        left, right = right, left
    return Binary(op, left, right)


def _extremum(op: BinaryOp, choose: Callable[[float, float], float], left: Node, right: Node) -> Node:
    left, right = _alike(op.value, left, right)
    if isinstance(left, Constant) and isinstance(right, Constant):
        return constant(choose(left.value, right.value))
    return left if left == right else _binary(op, left, right)


def _ordered(op: BinaryOp, left: Node, right: Node, holds: Callable[[float, float], bool]) -> Node:
    left, right = _alike(op.value, left, right)
    if isinstance(left, Constant) and isinstance(right, Constant):
        return constant(holds(left.value, right.value))
    return Binary(op, left, right)


def _equality(op: BinaryOp, left: Node, right: Node) -> Node:
    if Kind.BOOL not in (left.kind, right.kind):
        left, right = _alike(op.value, left, right)
    elif left.kind is not right.kind:
        raise ExpressionError(f"{op.value} compares two numbers or two truths, got one of each")
    if isinstance(left, Constant) and isinstance(right, Constant):
        return constant((left.value == right.value) is (op is BinaryOp.EQUAL))
    return _binary(op, left, right)


def _junction(op: BinaryOp, left: Node, right: Node, neutral: bool) -> Node:
    for one, other in ((left, right), (right, left)):
        _truth(op.value, one)
        _truth(op.value, other)
        if isinstance(one, Constant):
            return other if one.value is neutral else one
    return left if left == right else _binary(op, left, right)


def _alike(op: str, left: Node, right: Node) -> tuple[Node, Node]:
    """Two numbers of one kind: integers beside floats become floats."""
    _number(op, left)
    _number(op, right)
    return (left, right) if left.kind is right.kind else (as_float(left), as_float(right))


def _integers(op: str, left: Node, right: Node) -> tuple[Node, Node]:
    for side in (left, right):
        if side.kind is not Kind.INT:
            raise ExpressionError(f"{op} takes integers, got a {side.kind.value}: use floor(x / y)")
    if _is(right, 0):
        raise ExpressionError(f"{op} by the constant 0")
    return left, right


def _number(op: str, node: Node) -> None:
    if node.kind is Kind.BOOL:
        raise ExpressionError(f"{op} takes numbers, got a truth: use where(condition, 1.0, 0.0)")


def _truth(op: str, node: Node) -> None:
    if node.kind is not Kind.BOOL:
        raise ExpressionError(f"{op} takes a truth such as q_idx >= kv_idx, got a number")


def _is(node: Node, value: int) -> bool:
    return isinstance(node, Constant) and node.kind is not Kind.BOOL and node.value == value


def _is_negative(node: Node) -> bool:
    """Whether it is a constant whose opposite is positive."""
    return isinstance(node, Constant) and node.value < 0 and (node.kind, node.value) != (Kind.INT, limits.INT_MIN)


def _folded(left: Node, right: Node, value: Callable[[float, float], float]) -> Node | None:
    """The value for two constants; None for anything else.

    Raises:
        ExpressionError: for a value that is NaN or beyond float32.
    """
    if not (isinstance(left, Constant) and isinstance(right, Constant)):
        return None
    found = value(left.value, right.value)
    if left.kind is Kind.INT:
        return constant(limits.wrapped(int(found)))
    if math.isnan(found):
        raise ExpressionError(f"{left.value} and {right.value} make no number")
    return constant(found)
