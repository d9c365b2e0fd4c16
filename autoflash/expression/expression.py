"""A score_mod or mask_mod as a whole: what it computes, and from what. The noun of this package."""

from __future__ import annotations

import keyword
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

from autoflash import keys
from autoflash.errors import ExpressionError
from autoflash.expression import build, function_source, limits
from autoflash.expression.nodes import Kind, Node, Parameter, Read, Variable, walk
from autoflash.expression.parse import RESERVED, parse_text, tree_of
from autoflash.expression.text import text_of


class Role(str, Enum):
    """What an expression is for."""

    SCORE_MOD = "score_mod"
    """Gives the score that takes the place of ``score``."""
    MASK_MOD = "mask_mod"
    """Says whether the key takes part; knows no score."""

    @property
    def variables(self) -> tuple[Variable, ...]:
        """What it may look at, in the order of a function's arguments."""
        return tuple(Variable) if self is Role.SCORE_MOD else tuple(Variable)[1:]


@dataclass(frozen=True, slots=True, kw_only=True)
class Expression:
    """One expression of the language, simplified.

    Attributes:
        role: What it is for.
        root: A float for a score_mod, a truth for a mask_mod.
        parameters: Those that it reads, by name.
    """

    role: Role
    root: Node
    parameters: tuple[Parameter, ...]

    @property
    def text(self) -> str:
        """The canonical text, without the declarations of its parameters."""
        return text_of(self.root)

    def __str__(self) -> str:
        """All of it in one line, such as ``score_mod(t: float 1) = score + t[h]``; :func:`of_line` reads it."""
        declared = ", ".join(f"{each.name}: {each.kind.value} {each.rank}" for each in self.parameters)
        return f"{self.role.value}({declared}) = {self.text}"

    @property
    def key(self) -> str:
        """Identity: equal for spellings of the same tree with the same parameters."""
        return keys.key("expression", str(self))


def parse(
    source: str | Callable[..., object], parameters: Sequence[Parameter] = (), role: Role = Role.SCORE_MOD
) -> Expression:
    """Read an expression.

    The function is not called: its text is read. Its first arguments are the variables of the role, by whatever name;
    more may follow that are parameters. Any name that is neither an argument, a parameter nor of the language is
    refused, also where it was captured: a captured number would be part of the kernel's text, and a change of it lost.

    Args:
        source: One Python expression, or a lambda (or a function that only returns one).
        parameters: What it reads beside its variables; each of them is read.
        role: What it is for.

    Raises:
        ExpressionError: in one line, for whatever is not of the language.
    """
    _check_parameters(parameters)
    variables = {variable.value: variable for variable in role.variables}
    if isinstance(source, str):
        syntax = parse_text(source)
    else:
        names, syntax = function_source.syntax_of(function_source.code_of(source))
        strangers = set(names[len(variables) :]) - {parameter.name for parameter in parameters}
        if len(names) < len(variables) or strangers:
            wanted = ", ".join(variables)
            raise ExpressionError(
                f"a lambda for {role.value} takes ({wanted}) and parameters, got ({', '.join(names)})"
            )
        variables = dict(zip(names, variables.values(), strict=False))
    root = tree_of(syntax, variables, parameters)
    if (root.kind is Kind.BOOL) != (role is Role.MASK_MOD):
        wanted = "a truth such as q_idx >= kv_idx" if role is Role.MASK_MOD else "a number"
        raise ExpressionError(f"{role.value} must give {wanted}, got a {root.kind.value}")
    root = root if role is Role.MASK_MOD else build.as_float(root)
    read = {node.parameter for node in walk(root) if isinstance(node, Read)}
    unread = [parameter.name for parameter in parameters if parameter not in read]
    if unread:
        raise ExpressionError(f"{role.value} does not depend on {', '.join(unread)}: leave it out of the parameters")
    return Expression(role=role, root=root, parameters=tuple(sorted(read, key=lambda each: each.name)))


_LINE = re.compile(r"(\w+)\(([^)]*)\) = (.+)", re.DOTALL)
_DECLARATION = re.compile(r"(\w+): (\w+) (\d)")


def of_line(line: str) -> Expression:
    """Read what ``str(expression)`` wrote.

    Raises:
        ExpressionError: for any other text, also for one that means the same but is spelled otherwise.
    """
    match = _LINE.fullmatch(line[: 2 * limits.CHARACTERS])
    try:
        role, declared, text = match.groups() if match else ("", "", "")
        words = [_DECLARATION.fullmatch(each) for each in declared.split(", ")] if declared else []
        parameters = [
            Parameter(name=word[1], kind=Kind(word[2]), rank=int(word[3])) for word in words if word is not None
        ]
        expression = parse(text, parameters, Role(role))
    except ValueError as error:
        raise ExpressionError(f"{line[:60]!r} is no recorded expression: {error}") from None
    if str(expression) != line:
        raise ExpressionError(f"{line[:60]!r} is no recorded expression: it is not in canonical form")
    return expression


def _check_parameters(parameters: Sequence[Parameter]) -> None:
    if len(parameters) > limits.PARAMETERS:
        raise ExpressionError(f"an expression has at most {limits.PARAMETERS} parameters, got {len(parameters)}")
    names = [parameter.name for parameter in parameters]
    for parameter in parameters:
        name = parameter.name
        is_name = name.isidentifier() and name.isascii() and len(name) <= limits.NAME and not keyword.iskeyword(name)
        if not is_name or name.startswith("_") or name in RESERVED:
            raise ExpressionError(
                f"{name[:60]!r} is no name for a parameter: it needs a Python name of at most {limits.NAME} letters, "
                "without _ in front, that the language does not use"
            )
        if names.count(name) > 1:
            raise ExpressionError(f"the parameter {name} is declared twice")
        if not 0 <= parameter.rank <= limits.RANK:
            raise ExpressionError(
                f"the parameter {name} has rank {parameter.rank}: at most {limits.RANK} are looked up"
            )
