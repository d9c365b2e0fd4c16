"""What the printers share: the order of computation, which values get a name, and how long a line becomes.

A printed function computes each value once. Its text is what ``ruff format`` would leave alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from autoflash.expression import build
from autoflash.expression.expression import Role
from autoflash.expression.nodes import (
    Binary,
    BinaryOp,
    Constant,
    Node,
    Parameter,
    Power,
    Read,
    Unary,
    UnaryOp,
    Where,
    walk,
)

LINE = 84
"""Characters of a value on one line: with the indent, a name and what is around it, less than 120."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Function:
    """A function to print: it gives one value, or a tuple of several.

    Attributes:
        name: Of the function.
        docstring: Its first line.
        results: What it gives.
    """

    name: str
    docstring: str
    results: tuple[Node, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """A value in the printed language.

    Attributes:
        text: A Python expression.
        is_whole: It can be an operand as it stands, without parentheses.
    """

    text: str
    is_whole: bool = True

    def __str__(self) -> str:
        return self.text if self.is_whole else f"({self.text})"


class Dialect(Protocol):
    """How one language spells the operations."""

    def spelled(self, node: Node, operands: Sequence[Text]) -> Text:
        """A value from the texts of its operands."""
        ...

    def tensor(self, node: Node, text: Text) -> str:
        """A value where a tensor is wanted, and no plain number."""
        ...


INFIX = {
    BinaryOp.ADD: "+",
    BinaryOp.SUBTRACT: "-",
    BinaryOp.MULTIPLY: "*",
    BinaryOp.DIVIDE: "/",
    BinaryOp.LESS: "<",
    BinaryOp.LESS_EQUAL: "<=",
    BinaryOp.EQUAL: "==",
    BinaryOp.NOT_EQUAL: "!=",
    BinaryOp.AND: "&",
    BinaryOp.OR: "|",
}
"""What tensors of either language spell alike."""


def literal(node: Constant) -> Text:
    """A constant as Python spells it."""
    text = repr(node.value)
    if text.endswith("inf"):
        return Text(text=f'float("{text}")')
    return Text(text=text, is_whole=not text.startswith("-"))


def infix(node: Node, operands: Sequence[Text]) -> Text | None:
    """The text of an operation that both languages spell by the same sign; None for any other."""
    match node:
        case Binary(op, _, _) if op in INFIX:
            left, right = operands
            return Text(text=f"{left} {INFIX[op]} {right}", is_whole=False)
        case Unary(UnaryOp.NEGATE, _):
            return Text(text=f"-{operands[0]}", is_whole=False)
        case Unary(UnaryOp.NOT, _):
            return Text(text=f"~{operands[0]}", is_whole=False)
    return None


def printed(role: Role, function: Function, parameters: Sequence[Parameter], dialect: Dialect) -> str:
    """The definition of a function, which takes the variables of the role and, where there are some, ``params``."""
    arguments = [variable.value for variable in role.variables] + (["params"] if parameters else [])
    read = {node.parameter for node in walk(*function.results) if isinstance(node, Read)}
    done: dict[Node, Node] = {}
    statements = [
        f'"""{function.docstring}"""',
        *(f"param_{each.name} = params[{place}]" for place, each in enumerate(parameters) if each in read),
        *_Writer([_lowered(result, done) for result in function.results], dialect).lines,
    ]
    return "\n".join([f"def {function.name}({', '.join(arguments)}):", *(f"    {line}" for line in statements)])


class _Writer:
    def __init__(self, results: Sequence[Node], dialect: Dialect) -> None:
        self.lines: list[str] = []
        self._dialect = dialect
        self._texts: dict[Node, Text] = {}
        nodes = list(walk(*results))
        self._uses = Counter(child for node in nodes for child in node.children)
        self._uses.update(results)
        for node in nodes:
            self._texts[node] = self._text(node)
        texts = [dialect.tensor(result, self._texts[result]) for result in results]
        if len(texts) > 1:
            # On one line, as far as a formatter is concerned.
            texts = [self._named(text).text if len(text) > LINE // len(texts) else text for text in texts]
        self.lines.append(f"return {', '.join(texts)}")

    def _text(self, node: Node) -> Text:
        operands = [self._texts[child] for child in node.children]
        while True:
            text = self._dialect.spelled(node, operands)
            longest = max(operands, key=lambda operand: len(operand.text), default=text)
            if len(text.text) <= LINE or longest.text.isidentifier() or not operands:
                break
            operands[operands.index(longest)] = self._named(longest.text)
        is_short = isinstance(node, Constant) or text.text.isidentifier()
        return self._named(text.text) if self._uses[node] > 1 and not is_short else text

    def _named(self, text: str) -> Text:
        name = f"t{len(self.lines)}"
        self.lines.append(f"{name} = {text}")
        return Text(text=name)


def _lowered(node: Node, done: dict[Node, Node]) -> Node:
    """The same value by what tensors of either language can do: powers are products, remainders differences."""
    if node in done:
        return done[node]
    children = tuple(_lowered(child, done) for child in node.children)
    lowered: Node
    match node:
        case Power(_, exponent):
            product = _product(children[0], abs(exponent))
            lowered = product if exponent > 0 else Binary(BinaryOp.DIVIDE, build.ONE, product)
        case Binary(BinaryOp.MODULO, _, _):
            left, right = children
            multiple = Binary(BinaryOp.MULTIPLY, Binary(BinaryOp.FLOOR_DIVIDE, left, right), right)
            lowered = Binary(BinaryOp.SUBTRACT, left, multiple)
        case Binary(op, _, _):
            lowered = Binary(op, *children)
        case Unary(op, _):
            lowered = Unary(op, *children)
        case Where():
            lowered = Where(*children)
        case Read(parameter, _):
            lowered = Read(parameter, children)
        case _:
            lowered = node
    done[node] = lowered
    return lowered


def _product(base: Node, exponent: int) -> Node:
    """A power by squaring."""
    if exponent == 1:
        return base
    half = _product(base, exponent // 2)
    square = Binary(BinaryOp.MULTIPLY, half, half)
    return Binary(BinaryOp.MULTIPLY, square, base) if exponent % 2 else square
