"""What an expression is made of: frozen trees whose every node knows its kind. :mod:`build` makes them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum


class Kind(str, Enum):
    """What a value is: a truth, an integer of 32 bits, or a floating-point number."""

    BOOL = "bool"
    INT = "int"
    FLOAT = "float"


class Variable(str, Enum):
    """What an expression may look at beside its parameters."""

    SCORE = "score"
    B = "b"
    H = "h"
    Q_IDX = "q_idx"
    KV_IDX = "kv_idx"


class UnaryOp(str, Enum):
    """Operations of one operand. The value of a function is its name in the language."""

    NEGATE = "-"
    NOT = "not"
    FLOAT = "float"
    EXP = "exp"
    LOG = "log"
    TANH = "tanh"
    SIGMOID = "sigmoid"
    ABS = "abs"
    SQRT = "sqrt"
    SIN = "sin"
    COS = "cos"
    FLOOR = "floor"


class BinaryOp(str, Enum):
    """Operations of two operands. ``>`` and ``>=`` are the other two comparisons with their sides exchanged."""

    ADD = "+"
    SUBTRACT = "-"
    MULTIPLY = "*"
    DIVIDE = "/"
    FLOOR_DIVIDE = "//"
    MODULO = "%"
    MINIMUM = "minimum"
    MAXIMUM = "maximum"
    LESS = "<"
    LESS_EQUAL = "<="
    EQUAL = "=="
    NOT_EQUAL = "!="
    AND = "and"
    OR = "or"


COMPARISONS = frozenset({BinaryOp.LESS, BinaryOp.LESS_EQUAL, BinaryOp.EQUAL, BinaryOp.NOT_EQUAL})
COMMUTATIVE = frozenset(
    {
        BinaryOp.ADD,
        BinaryOp.MULTIPLY,
        BinaryOp.MINIMUM,
        BinaryOp.MAXIMUM,
        BinaryOp.EQUAL,
        BinaryOp.NOT_EQUAL,
        BinaryOp.AND,
        BinaryOp.OR,
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """A named value that comes with the call.

    Attributes:
        name: As the expression spells it.
        kind: Of its elements.
        rank: How many indices it takes; 0 for one number.
    """

    name: str
    kind: Kind
    rank: int


Order = tuple[object, ...]

# Labels order the operands of sums, products and the like. Operations of two come first, so that a chain of them
# stays one without parentheses.
_BINARY_LABELS = {op: f"0 {place:02} {op.value}" for place, op in enumerate(BinaryOp)}
_SCORE = f"1 {Variable.SCORE.value}"


@dataclass(frozen=True, slots=True, eq=False)
class Node:
    """A value. Equal trees are equal and hash alike, at no cost that grows with them.

    Attributes:
        kind: What the value is.
        children: What it is made from.
        reads_score: Whether the score is among that.
        order: A total order of trees that is the same in every process: constants last, what reads the score first.
        digest: Its hash.
    """

    kind: Kind = field(init=False, repr=False)
    children: tuple[Node, ...] = field(init=False, repr=False)
    reads_score: bool = field(init=False, repr=False)
    order: Order = field(init=False, repr=False)
    digest: int = field(init=False, repr=False)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Node):
            return NotImplemented
        return self is other or (self.digest == other.digest and self.order == other.order)

    def __hash__(self) -> int:
        return self.digest

    def _settle(self, kind: Kind, label: str, children: tuple[Node, ...] = ()) -> None:
        reads_score = label == _SCORE or any(child.reads_score for child in children)
        is_constant = label.startswith("9")
        settled = {
            "kind": kind,
            "children": children,
            "reads_score": reads_score,
            "order": (is_constant, not reads_score, label, len(children), *(child.order for child in children)),
            "digest": hash((label, *(child.digest for child in children))),
        }
        for name, value in settled.items():
            object.__setattr__(self, name, value)


@dataclass(frozen=True, slots=True, eq=False)
class Constant(Node):
    """A number or truth that stands in the text."""

    value: bool | int | float

    def __post_init__(self) -> None:
        """The type of the value says its kind."""
        kind = {bool: Kind.BOOL, int: Kind.INT, float: Kind.FLOAT}[type(self.value)]
        self._settle(kind, f"9 {kind.value} {self.value!r}")


@dataclass(frozen=True, slots=True, eq=False)
class Input(Node):
    """The score, or a number that says where it stands."""

    variable: Variable

    def __post_init__(self) -> None:
        """A score is a floating-point number, a place an integer."""
        self._settle(Kind.FLOAT if self.variable is Variable.SCORE else Kind.INT, f"1 {self.variable.value}")


@dataclass(frozen=True, slots=True, eq=False)
class Read(Node):
    """An element of a parameter: 0 where an index lies outside."""

    parameter: Parameter
    indices: tuple[Node, ...]

    def __post_init__(self) -> None:
        """The declaration belongs to what is read."""
        declared = self.parameter
        self._settle(declared.kind, f"2 {declared.name} {declared.kind.value} {declared.rank}", self.indices)


@dataclass(frozen=True, slots=True, eq=False)
class Unary(Node):
    """An operation of one operand."""

    op: UnaryOp
    operand: Node

    def __post_init__(self) -> None:
        """Negation and absolute value keep the kind; the rest give what they say."""
        kind = {
            UnaryOp.NOT: Kind.BOOL,
            UnaryOp.FLOOR: Kind.INT,
            UnaryOp.NEGATE: self.operand.kind,
            UnaryOp.ABS: self.operand.kind,
        }.get(self.op, Kind.FLOAT)
        self._settle(kind, f"3 {self.op.value}", (self.operand,))


@dataclass(frozen=True, slots=True, eq=False)
class Power(Node):
    """A whole power, known from the text. Of an integer it is an integer, and not negative."""

    base: Node
    exponent: int

    def __post_init__(self) -> None:
        """The kind is that of the base."""
        self._settle(self.base.kind, f"4 {self.exponent}", (self.base,))


@dataclass(frozen=True, slots=True, eq=False)
class Binary(Node):
    """An operation of two operands of one kind."""

    op: BinaryOp
    left: Node
    right: Node

    def __post_init__(self) -> None:
        """Comparisons give truths, everything else what it was given."""
        kind = Kind.BOOL if self.op in COMPARISONS else self.left.kind
        self._settle(kind, _BINARY_LABELS[self.op], (self.left, self.right))


@dataclass(frozen=True, slots=True, eq=False)
class Where(Node):
    """One of two values of one kind."""

    condition: Node
    chosen: Node
    otherwise: Node

    def __post_init__(self) -> None:
        """The kind is that of either value."""
        self._settle(self.chosen.kind, "5 where", (self.condition, self.chosen, self.otherwise))


def walk(*roots: Node) -> Iterator[Node]:
    """Each different node below some trees, and they themselves, once: children first."""
    seen: set[Node] = set()
    stack = [(root, False) for root in reversed(roots)]
    while stack:
        node, is_open = stack.pop()
        if node in seen:
            continue
        if is_open:
            seen.add(node)
            yield node
        else:
            stack.append((node, True))
            stack.extend((child, False) for child in reversed(node.children))
