"""From Python syntax to a tree, by an allow-list: what is not named here is refused, and never evaluated."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping, Sequence

from autoflash.errors import ExpressionError
from autoflash.expression import build, limits
from autoflash.expression.nodes import Node, Parameter, UnaryOp, Variable

_UNARY: dict[type[ast.unaryop], Callable[[Node], Node]] = {
    ast.UAdd: build.positive,
    ast.USub: build.negate,
    ast.Not: build.logical_not,
    ast.Invert: build.logical_not,
}

_BINARY: dict[type[ast.operator], Callable[[Node, Node], Node]] = {
    ast.Add: build.add,
    ast.Sub: build.subtract,
    ast.Mult: build.multiply,
    ast.Div: build.divide,
    ast.FloorDiv: build.floor_divide,
    ast.Mod: build.modulo,
    ast.BitAnd: build.logical_and,
    ast.BitOr: build.logical_or,
}

_COMPARISONS: dict[type[ast.cmpop], Callable[[Node, Node], Node]] = {
    ast.Lt: build.less,
    ast.LtE: build.less_equal,
    ast.Gt: lambda left, right: build.less(right, left),
    ast.GtE: lambda left, right: build.less_equal(right, left),
    ast.Eq: build.equal,
    ast.NotEq: build.not_equal,
}

_PLAIN = (
    UnaryOp.EXP,
    UnaryOp.LOG,
    UnaryOp.TANH,
    UnaryOp.SIGMOID,
    UnaryOp.SQRT,
    UnaryOp.SIN,
    UnaryOp.COS,
)


def _plain(op: UnaryOp) -> Callable[..., Node]:
    return lambda operand: build.apply(op, operand)


FUNCTIONS: Mapping[str, tuple[int, Callable[..., Node]]] = {
    **{op.value: (1, _plain(op)) for op in _PLAIN},
    UnaryOp.FLOAT.value: (1, build.as_float),
    UnaryOp.ABS.value: (1, build.absolute),
    UnaryOp.FLOOR.value: (1, build.floor),
    "minimum": (2, build.minimum),
    "maximum": (2, build.maximum),
    "where": (3, build.where),
}
"""Every function of the language: how many operands it takes, and what makes its node."""

INFINITY = "inf"

RESERVED = frozenset({*FUNCTIONS, INFINITY, *(variable.value for variable in Variable)})
"""Names that no parameter can have."""


def parse_text(text: str) -> ast.expr:
    """The syntax tree of one expression. Nothing is said yet of what it means.

    Raises:
        ExpressionError: for text that is too long, or no expression.
    """
    if len(text) > limits.CHARACTERS:
        raise ExpressionError(f"an expression has at most {limits.CHARACTERS} characters, got {len(text)}")
    try:
        return ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        reason = error.msg if isinstance(error, SyntaxError) else "it cannot be read"
        raise ExpressionError(f"{_shown(text)} is no expression: {_shown(reason, quoted=False)}") from None


def tree_of(syntax: ast.expr, variables: Mapping[str, Variable], parameters: Sequence[Parameter]) -> Node:
    """The tree that a syntax tree means.

    Args:
        syntax: Of one expression.
        variables: What the names of variables stand for.
        parameters: What else it may read.

    Raises:
        ExpressionError: for whatever is not of the language, and trees that are too large or too deep.
    """
    _check_size(syntax)
    return _Reader(variables, {parameter.name: parameter for parameter in parameters}).node(syntax)


def _check_size(syntax: ast.expr) -> None:
    count = 0
    level: list[ast.AST] = [syntax]
    for _ in range(limits.DEPTH):
        count += sum(isinstance(node, ast.expr) for node in level)
        level = [child for node in level for child in ast.iter_child_nodes(node)]
        if count > limits.NODES:
            raise ExpressionError(f"an expression has at most {limits.NODES} names, numbers and operations")
        if not level:
            return
    raise ExpressionError(f"an expression is nested at most {limits.DEPTH} deep")


class _Reader:
    """Turns syntax into nodes; what it has no rule for, it refuses."""

    def __init__(self, variables: Mapping[str, Variable], parameters: Mapping[str, Parameter]) -> None:
        self._variables = variables
        self._parameters = parameters

    def node(self, syntax: ast.expr) -> Node:
        match syntax:
            case ast.Constant(value=bool() | int() | float() as value):
                if value == float("inf"):
                    raise ExpressionError(f"a number in the text is beyond float32: write {INFINITY} for infinity")
                return build.constant(value)
            case ast.Name(id=name):
                return self._named(name)
            # The least integer is the opposite of one that is none.
            case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() as value)) if type(value) is int:
                return build.constant(-value)
            case ast.UnaryOp(op=op, operand=operand):
                return _UNARY[type(op)](self.node(operand))
            case ast.BinOp(op=ast.Pow(), left=base, right=exponent):
                return build.power(self.node(base), _exponent(exponent))
            case ast.BinOp(op=op, left=left, right=right) if type(op) in _BINARY:
                return _BINARY[type(op)](self.node(left), self.node(right))
            case ast.BoolOp(op=junction, values=values):
                first, *others = map(self.node, values)
                join = build.logical_and if isinstance(junction, ast.And) else build.logical_or
                for other in others:
                    first = join(first, other)
                return first
            case ast.Compare():
                return self._compared(syntax)
            case ast.IfExp(test=test, body=body, orelse=otherwise):
                return build.where(self.node(test), self.node(body), self.node(otherwise))
            case ast.Subscript(value=ast.Name(id=name), slice=index):
                return self._looked_up(name, index)
            case ast.Call():
                return self._called(syntax)
        raise ExpressionError(f"{_shown(_source(syntax))} is not of the language: {_advice(syntax)}")

    def _named(self, name: str) -> Node:
        if name in self._variables:
            return build.variable(self._variables[name])
        if name == INFINITY:
            return build.constant(float("inf"))
        if name in self._parameters:
            declared = self._parameters[name]
            if declared.rank:
                raise ExpressionError(f"{name} is a tensor of rank {declared.rank}: give it as many indices")
            return build.read(declared, ())
        raise self._unknown(name)

    def _unknown(self, name: str) -> ExpressionError:
        if name in FUNCTIONS:
            return ExpressionError(f"{name} is a function: call it")
        known = ", ".join([*self._variables, *self._parameters])
        return ExpressionError(
            f"{_shown(name, quoted=False)} is not known here: an expression reads {known}; "
            "pass anything else as a parameter by that name"
        )

    def _looked_up(self, name: str, index: ast.expr) -> Node:
        if name not in self._parameters:
            raise ExpressionError(f"{name} has no elements") if name in RESERVED else self._unknown(name)
        indices = index.elts if isinstance(index, ast.Tuple) else [index]
        return build.read(self._parameters[name], tuple(map(self.node, indices)))

    def _compared(self, syntax: ast.Compare) -> Node:
        sides = [self.node(side) for side in (syntax.left, *syntax.comparators)]
        whole: Node = build.constant(True)
        for op, left, right in zip(syntax.ops, sides, sides[1:], strict=False):
            if type(op) not in _COMPARISONS:
                raise ExpressionError(f"{_shown(_source(syntax))} is not of the language: compare by < <= > >= == !=")
            whole = build.logical_and(whole, _COMPARISONS[type(op)](left, right))
        return whole

    def _called(self, syntax: ast.Call) -> Node:
        name = syntax.func.id if isinstance(syntax.func, ast.Name) else ""
        if name not in FUNCTIONS or name in self._variables:
            raise ExpressionError(
                f"{_shown(_source(syntax.func))} is no function of the language: it has {', '.join(sorted(FUNCTIONS))}"
            )
        count, make = FUNCTIONS[name]
        if syntax.keywords or len(syntax.args) != count or any(isinstance(each, ast.Starred) for each in syntax.args):
            raise ExpressionError(f"{name} takes {count} operand{'s' if count > 1 else ''}, by position")
        return make(*map(self.node, syntax.args))


def _exponent(syntax: ast.expr) -> int:
    sign = 1
    if isinstance(syntax, ast.UnaryOp) and isinstance(syntax.op, ast.USub):
        sign, syntax = -1, syntax.operand
    value = syntax.value if isinstance(syntax, ast.Constant) else None
    if type(value) is int or (type(value) is float and value.is_integer()):
        return sign * int(value)
    raise ExpressionError("an exponent must be a whole number in the text: use sqrt, or exp and log, for others")


def _advice(syntax: ast.expr) -> str:
    if isinstance(syntax, ast.Attribute):
        return "it has no attributes; functions are called by their name alone, as in where(...)"
    if isinstance(syntax, ast.Subscript):
        return "only parameters have elements"
    if isinstance(syntax, ast.Constant):
        return "constants are numbers, True, False and inf"
    return "it has numbers, names, look-ups, arithmetic, comparisons, and/or/not and calls of its functions"


def _source(syntax: ast.expr) -> str:
    """Text of a part; short parts alone are worth printing."""
    return ast.unparse(syntax)


def _shown(text: str, quoted: bool = True) -> str:
    """At most one line of a text, with nothing that a terminal would act on."""
    short = text if len(text) <= 60 else f"{text[:57]}..."
    return repr(short) if quoted else short.encode("unicode_escape").decode("ascii")
