"""The canonical text of a tree: parsing it gives the tree again, and trees of equal meaning mostly have the same."""

from __future__ import annotations

from autoflash.expression.nodes import (
    COMPARISONS,
    Binary,
    BinaryOp,
    Constant,
    Input,
    Node,
    Power,
    Read,
    Unary,
    UnaryOp,
    Where,
)

_OR, _AND, _NOT, _COMPARE, _SUM, _PRODUCT, _SIGN, _POWER, _ATOM = range(9)

_LEVELS = {
    BinaryOp.OR: _OR,
    BinaryOp.AND: _AND,
    BinaryOp.ADD: _SUM,
    BinaryOp.SUBTRACT: _SUM,
    BinaryOp.MULTIPLY: _PRODUCT,
    BinaryOp.DIVIDE: _PRODUCT,
    BinaryOp.FLOOR_DIVIDE: _PRODUCT,
    BinaryOp.MODULO: _PRODUCT,
    **dict.fromkeys(COMPARISONS, _COMPARE),
}

_FUNCTIONS = {BinaryOp.MINIMUM, BinaryOp.MAXIMUM}


def text_of(node: Node) -> str:
    """The text of a tree, in the language that :mod:`parse` reads, with no more parentheses than it takes."""
    return _spelled(node)[0]


def _spelled(node: Node) -> tuple[str, int]:
    """Text, and how strongly its last operation binds."""
    match node:
        case Constant(value):
            text = repr(value)
            return text, _SIGN if text.startswith("-") else _ATOM
        case Input(variable):
            return variable.value, _ATOM
        case Read(parameter, indices):
            return f"{parameter.name}[{_listed(indices)}]" if indices else parameter.name, _ATOM
        case Unary(UnaryOp.NEGATE, operand):
            return f"-{_within(operand, _SIGN)}", _SIGN
        case Unary(UnaryOp.NOT, operand):
            return f"not {_within(operand, _NOT)}", _NOT
        case Unary(op, operand):
            return f"{op.value}({text_of(operand)})", _ATOM
        case Power(base, exponent):
            return f"{_within(base, _ATOM)}**{exponent}", _POWER
        case Binary(op, left, right) if op in _FUNCTIONS:
            return f"{op.value}({_listed((left, right))})", _ATOM
        case Binary(op, left, right):
            level = _LEVELS[op]
            # Comparisons do not associate, and in a chain would mean something else.
            first = _within(left, level + 1 if op in COMPARISONS else level)
            return f"{first} {op.value} {_within(right, level + 1)}", level
        case Where(condition, chosen, otherwise):
            return f"where({_listed((condition, chosen, otherwise))})", _ATOM
    raise TypeError(f"{type(node).__name__} has no text")


def _within(node: Node, level: int) -> str:
    text, own = _spelled(node)
    return text if own >= level else f"({text})"


def _listed(nodes: tuple[Node, ...]) -> str:
    return ", ".join(map(text_of, nodes))
