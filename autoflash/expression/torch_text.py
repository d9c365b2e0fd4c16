"""Print expressions as functions of torch tensors that broadcast."""

from __future__ import annotations

from collections.abc import Sequence

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

_FUNCTIONS = {
    UnaryOp.EXP: "torch.exp",
    UnaryOp.LOG: "torch.log",
    UnaryOp.SIGMOID: "torch.sigmoid",
    UnaryOp.ABS: "torch.abs",
    UnaryOp.SQRT: "torch.sqrt",
    UnaryOp.SIN: "torch.sin",
    UnaryOp.COS: "torch.cos",
    UnaryOp.TANH: "torch.tanh",
    UnaryOp.FLOOR: "whole_below",
}

_CALLS = {
    BinaryOp.MINIMUM: "torch.minimum",
    BinaryOp.MAXIMUM: "torch.maximum",
    BinaryOp.FLOOR_DIVIDE: "floor_divide",
}

_LOOK_UP = '''def look_up(table, dtype, *indices):
    """Elements at indices, which broadcast, in a dtype; 0 where an index lies outside."""
    indices = torch.broadcast_tensors(*indices)
    if table.numel() == 0:
        return torch.zeros_like(indices[0], dtype=dtype)
    inside = torch.ones_like(indices[0], dtype=torch.bool)
    for index, size in zip(indices, table.shape):
        inside &= (index >= 0) & (index < size)
    places = tuple(index.clamp(0, size - 1).long() for index, size in zip(indices, table.shape))
    return table[places].to(dtype).masked_fill(~inside, 0)'''

_FLOOR_DIVIDE = '''def floor_divide(x, y):
    """x // y as in Python, of int32; 0 where y is 0."""
    divisor = torch.where(y == 0, 1, y).long()
    return torch.where(y == 0, 0, torch.div(x.long(), divisor, rounding_mode="floor").int())'''

_FLOOR = '''def whole_below(x):
    """The largest integer not above x, int32: the nearest that float32 holds of what is beyond, 0 for NaN."""
    return torch.nan_to_num(x.floor(), nan=0.0).clamp(-2147483648.0, 2147483520.0).int()'''

_DEFINITIONS = {"look_up": _LOOK_UP, "floor_divide": _FLOOR_DIVIDE, "whole_below": _FLOOR}


def to_torch(role: Role, functions: Sequence[Function], parameters: Sequence[Parameter]) -> str:
    """Definitions for a module that has imported ``torch``.

    Each function takes the variables of the role and ``params``, a sequence of one tensor for each parameter, in order.
    Scores are float32 or float64, which is what floats are computed in (in a mask_mod, float32); the places are int32
    tensors that broadcast to the scores, and so does what is given back. No argument is changed.

    Args:
        role: Of the expression that the results come from.
        functions: What to print, in this order.
        parameters: All that may be read, in the order of ``params``.
    """
    dialect = _Torch("score.dtype" if role is Role.SCORE_MOD else "torch.float32")
    texts = [printed(role, function, parameters, dialect) for function in functions]
    needed = [text for name, text in _DEFINITIONS.items() if name in dialect.needed]
    return "\n\n\n".join([*needed, *texts]) + "\n"


class _Torch:
    """Spells operations, and remembers which functions that takes."""

    def __init__(self, float_type: str) -> None:
        self.needed: set[str] = set()
        self._types = {Kind.FLOAT: float_type, Kind.INT: "torch.int32", Kind.BOOL: "torch.bool"}

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
                return Text(text=f"{operands[0]}.to({self._types[Kind.FLOAT]})")
            case Unary(op, operand):
                return self._call(_FUNCTIONS[op], [self.tensor(operand, operands[0])])
            case Binary(op, left, right):
                return self._call(_CALLS[op], [self.tensor(left, operands[0]), self.tensor(right, operands[1])])
            case Where(_, chosen, otherwise):
                # Two plain numbers would be of torch's default dtype.
                first = self.tensor(chosen, operands[1]) if isinstance(otherwise, Constant) else operands[1].text
                return self._call("torch.where", [operands[0].text, first, operands[2].text])
        raise TypeError(f"{type(node).__name__} has no spelling in torch")

    def _read(self, parameter: Parameter, indices: Sequence[Node], operands: Sequence[Text]) -> Text:
        dtype = self._types[parameter.kind]
        if not indices:
            return Text(text=f"param_{parameter.name}.to({dtype})")
        places = [self.tensor(index, operand) for index, operand in zip(indices, operands, strict=True)]
        return self._call("look_up", [f"param_{parameter.name}", dtype, *places])

    def _call(self, name: str, arguments: Sequence[str]) -> Text:
        if not name.startswith("torch."):
            self.needed.add(name)
        return Text(text=f"{name}({', '.join(arguments)})")

    def tensor(self, node: Node, text: Text) -> str:
        """As :meth:`autoflash.expression.program.Dialect.tensor`. One on the CPU serves any device without a copy."""
        return f"torch.tensor({text.text}, dtype={self._types[node.kind]})" if isinstance(node, Constant) else text.text
