"""The syntax of a Python lambda, read from the file that it stands in and checked against its bytecode."""

from __future__ import annotations

import ast
import functools
import linecache
from collections.abc import Iterator
from types import CodeType, FunctionType

from autoflash.errors import ExpressionError

_ADVICE = "give the expression as a string"


@functools.lru_cache(maxsize=256)
def syntax_of(code: CodeType) -> tuple[tuple[str, ...], ast.expr]:
    """Names of a lambda's arguments, and its body.

    The code of a function that only returns an expression serves as well.

    Raises:
        ExpressionError: where there is no source, it has changed since, or the function does something else.
    """
    path = code.co_filename
    linecache.checkcache(path)
    lines = linecache.getlines(path)
    if not lines:
        raise ExpressionError(f"there is no source of a function in {path!r}: {_ADVICE}")
    try:
        module = ast.parse("".join(lines))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ExpressionError(f"{path!r} cannot be read: {_ADVICE}") from None
    found = list(_functions_at(module, code.co_firstlineno))
    for function in found:
        if _fingerprint(code) in map(_fingerprint, _compiled(function, code)):
            return _names(function.args), _body(function)
    reason = "is not there any more" if found else "is no lambda"
    raise ExpressionError(f"the function of line {code.co_firstlineno} in {path!r} {reason}: {_ADVICE}")


def code_of(function: object) -> CodeType:
    """The code of a function that was written in Python.

    Raises:
        ExpressionError: for any other object.
    """
    if not isinstance(function, FunctionType):
        raise ExpressionError(f"an expression is a string or a lambda, got {type(function).__name__}")
    if function.__defaults__ or function.__kwdefaults__:
        raise ExpressionError("a lambda's arguments have no defaults: pass what it reads as parameters")
    return function.__code__


_Function = ast.Lambda | ast.FunctionDef


def _functions_at(module: ast.Module, line: int) -> Iterator[_Function]:
    for node in ast.walk(module):
        if isinstance(node, _Function) and node.lineno == line:
            yield node


def _body(function: _Function) -> ast.expr:
    if isinstance(function, ast.Lambda):
        return function.body
    statements = function.body[1:] if ast.get_docstring(function) is not None else function.body
    if len(statements) == 1 and isinstance(statements[0], ast.Return) and statements[0].value is not None:
        return statements[0].value
    raise ExpressionError(f"{function.name} does more than return an expression")


def _names(arguments: ast.arguments) -> tuple[str, ...]:
    if arguments.vararg or arguments.kwarg or arguments.kwonlyargs or arguments.posonlyargs or arguments.defaults:
        raise ExpressionError("a lambda's arguments are plain names")
    return tuple(argument.arg for argument in arguments.args)


def _compiled(function: _Function, code: CodeType) -> list[CodeType]:
    """The function, and what else comes with it, compiled where the names that it captured are known."""
    whole = ast.parse(f"def outer({', '.join(code.co_freevars)}): pass")
    (outer,) = whole.body
    assert isinstance(outer, ast.FunctionDef)
    outer.body = [ast.Return(function) if isinstance(function, ast.Lambda) else function]
    codes = [compile(ast.fix_missing_locations(whole), code.co_filename, "exec", dont_inherit=True)]
    for _ in range(2):
        codes = [each for one in codes for each in one.co_consts if isinstance(each, CodeType)]
    return codes


def _fingerprint(code: CodeType) -> object:
    """What a function does: equal for the same expression, wherever it stands."""
    # Numbers by their text, since 1 == 1.0 == True.
    constants = [_fingerprint(each) if isinstance(each, CodeType) else repr(each) for each in code.co_consts]
    return code.co_code, constants, code.co_names, code.co_varnames, code.co_freevars
