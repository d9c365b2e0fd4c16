"""Print expressions as Triton device functions of tiles, in float32 and int32."""

from __future__ import annotations

from collections.abc import Sequence

from autoflash.expression import triton_functions
from autoflash.expression.expression import Role
from autoflash.expression.nodes import (
    Binary,
    BinaryOp,
    Constant,
    Input,
    Kind,
    Node,
    Parameter,
    Read,
    Unary,
    UnaryOp,
    Where,
)
from autoflash.expression.program import Function, Text, infix, literal, printed

_TYPES = {Kind.FLOAT: "tl.float32", Kind.INT: "tl.int32", Kind.BOOL: "tl.int1"}

_FUNCTIONS = {
    UnaryOp.EXP: "tl.exp",
    UnaryOp.LOG: "tl.log",
    UnaryOp.SIGMOID: "tl.sigmoid",
    UnaryOp.ABS: "tl.abs",
    UnaryOp.SQRT: "tl.sqrt_rn",
    UnaryOp.SIN: "tl.sin",
    UnaryOp.COS: "tl.cos",
    UnaryOp.TANH: "hyperbolic_tangent",
    UnaryOp.FLOOR: "whole_below",
}

_EXTREMA = {BinaryOp.MINIMUM: "tl.minimum", BinaryOp.MAXIMUM: "tl.maximum"}


def to_triton(role: Role, functions: Sequence[Function], parameters: Sequence[Parameter]) -> str:
    """Definitions for a module that has imported ``tl``, ``triton`` and ``NamedTuple``.

    Each function takes the variables of the role and a tuple ``params`` with one item for each parameter, in order: a
    float32 or int32 scalar (0 is False) of rank 0, else a ``Table<rank>``, printed with them. Scores are float32
    tiles, ``b`` and ``h`` scalars, ``q_idx`` and ``kv_idx`` int32 tensors. The shapes of all broadcast to the tile, and
    so does that of what is given back. Elements outside a table are not touched.

    Args:
        role: Of the expression that the results come from.
        functions: What to print, in this order.
        parameters: All that may be read, in the order of ``params``.
    """
    dialect = _Triton()
    texts = [f"@triton.jit\n{printed(role, function, parameters, dialect)}" for function in functions]
    return "\n\n\n".join([*triton_functions.definitions(dialect.needed), *texts]) + "\n"


class _Triton:
    """Spells operations, and remembers which device functions that takes."""

    def __init__(self) -> None:
        self.needed: set[str] = set()

    def spelled(self, node: Node, operands: Sequence[Text]) -> Text:
        """As :meth:`autoflash.expression.program.Dialect.spelled`."""
        same = infix(node, operands)
        if same is not None:
            return same
        match node:
            case Constant():
                return literal(node)
            case Input(variable):
                return Text(text=variable.value)
            case Read(parameter, indices):
                return self._read(parameter, indices, operands)
            case Unary(UnaryOp.FLOAT, _):
                return Text(text=f"tl.cast({operands[0].text}, tl.float32)")
            case Unary(op, operand):
                return self._call(_FUNCTIONS[op], [self.tensor(operand, operands[0])])
            case Binary(BinaryOp.FLOOR_DIVIDE, left, right):
                return self._call("floor_divide", [self.tensor(left, operands[0]), self.tensor(right, operands[1])])
            case Binary(op, _, _):
                # NaN is not lost, as in torch.
                rule = ["propagate_nan=tl.PropagateNan.ALL"] if node.kind is Kind.FLOAT else []
                return self._call(_EXTREMA[op], [*(operand.text for operand in operands), *rule])
            case Where():
                return self._call("tl.where", [operand.text for operand in operands])
        raise TypeError(f"{type(node).__name__} has no spelling in Triton")

    def tensor(self, node: Node, text: Text) -> str:
        """As :meth:`autoflash.expression.program.Dialect.tensor`."""
        return f"tl.full((), {text.text}, {_TYPES[node.kind]})" if isinstance(node, Constant) else text.text

    def _read(self, parameter: Parameter, indices: Sequence[Node], operands: Sequence[Text]) -> Text:
        text = f"param_{parameter.name}"
        if indices:
            places = [self.tensor(index, operand) for index, operand in zip(indices, operands, strict=True)]
            text = self._call(f"look_up_{len(indices)}", [text, *places]).text
        elif parameter.kind is not Kind.BOOL:
            return Text(text=text)
        if parameter.kind is Kind.BOOL:
            return Text(text=f"{text} != 0", is_whole=False)
        return Text(text=f"tl.cast({text}, {_TYPES[parameter.kind]})")

    def _call(self, name: str, arguments: Sequence[str]) -> Text:
        if not name.startswith("tl."):
            self.needed.add(name)
        return Text(text=f"{name}({', '.join(arguments)})")
