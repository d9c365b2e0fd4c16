"""Which pairs of a query and a key read one element of a parameter: how a kernel can add up its gradient."""

from __future__ import annotations

import functools
from enum import Enum

from autoflash.expression.derivative import Gradient, parameter_gradients
from autoflash.expression.expression import of_line
from autoflash.expression.nodes import (
    COMPARISONS,
    Binary,
    BinaryOp,
    Constant,
    Input,
    Node,
    Unary,
    UnaryOp,
    Variable,
    walk,
)


class Sharing(str, Enum):
    """What the index of a look-up varies with, beside the batch entry and the head."""

    HEAD = "head"
    """Nothing: all pairs of a head read one element."""
    QUERY = "query"
    """The query alone."""
    KEY = "key"
    """The key alone."""
    DISTANCE = "distance"
    """Both, by their difference alone."""
    PAIR = "pair"
    """Both, in any way, or the score."""


def sharing_of(gradient: Gradient) -> Sharing:
    """How a look-up's element is shared."""
    read = {node.variable for node in walk(*gradient.indices) if isinstance(node, Input)}
    if Variable.SCORE in read:
        return Sharing.PAIR
    has_query, has_key = Variable.Q_IDX in read, Variable.KV_IDX in read
    if not has_query and not has_key:
        return Sharing.HEAD
    if not has_key:
        return Sharing.QUERY
    if not has_query:
        return Sharing.KEY
    return Sharing.DISTANCE if all(_step(index) == 0 for index in gradient.indices) else Sharing.PAIR


@functools.lru_cache(maxsize=256)
def scattered_parameters(score_mod: str) -> tuple[str, ...]:
    """Names of the parameters whose elements many pairs share in a way that no kernel can walk along.

    Args:
        score_mod: A line.

    Raises:
        ExpressionError: for what is no canonical line.
    """
    gradients = parameter_gradients(of_line(score_mod))
    scattered = [one for one in gradients if sharing_of(one) is Sharing.PAIR and not _is_met_once(one)]
    return tuple(dict.fromkeys(gradient.parameter.name for gradient in scattered))


def _is_met_once(gradient: Gradient) -> bool:
    """Whether no two pairs read the same element: batch entry, head, query and key are each an index of its own."""
    plain = {index.variable for index in gradient.indices if isinstance(index, Input)}
    return plain >= {Variable.B, Variable.H, Variable.Q_IDX, Variable.KV_IDX}


def _step(node: Node) -> int | None:
    """What is added to an integer where the query and the key both move on by one; 0 for any other value that stays.

    None where that is not known.
    """
    match node:
        case Input(variable):
            return int(variable in (Variable.Q_IDX, Variable.KV_IDX))
        case Unary(UnaryOp.NEGATE, operand):
            step = _step(operand)
            return None if step is None else -step
        case Binary(BinaryOp.MULTIPLY, left, Constant(int() as factor)):
            step = _step(left)
            return None if step is None else step * factor
        case Binary(op, left, right) if op in (BinaryOp.ADD, BinaryOp.SUBTRACT):
            steps = (_step(left), _step(right))
            if steps[0] is None or steps[1] is None:
                return None
            return steps[0] + (steps[1] if op is BinaryOp.ADD else -steps[1])
        case Binary(op, left, right) if op in COMPARISONS:
            step = _step(left)
            return 0 if step is not None and step == _step(right) else None
    return 0 if all(_step(child) == 0 for child in node.children) else None
