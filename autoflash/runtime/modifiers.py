"""From what a caller says of score_mod, mask_mod and their parameters to lines of the language and tensors."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from types import CodeType
from typing import NamedTuple

import torch
from torch import Tensor

from autoflash.codegen.expressions import differentiable, parameters_of
from autoflash.errors import InvalidProblemError
from autoflash.expression import limits
from autoflash.expression.expression import Role, parse
from autoflash.expression.function_source import code_of, syntax_of
from autoflash.expression.nodes import Kind, Parameter
from autoflash.expression.parse import parse_text

_MOST_LINES = 1024

_LINES: dict[tuple[str | CodeType, Role, tuple[tuple[str, str, int], ...]], str] = {}
"""Lines by source, so that the same text or lambda is read once; beyond so many, the oldest go."""

_INTEGERS = (torch.int32, torch.int16, torch.int8, torch.uint8)


class Modified(NamedTuple):
    """What a call asks of its scores.

    Attributes:
        score_mod, mask_mod: Lines of the language; empty for none.
        params: What they read, by name: float32, int32 or bool.
    """

    score_mod: str = ""
    mask_mod: str = ""
    params: tuple[Tensor, ...] = ()


UNMODIFIED = Modified()


def modified_by(score_mod: object, mask_mod: object, score_params: object, device: torch.device) -> Modified:
    """Read the arguments of :func:`autoflash.attention` of these names. Differentiable by floating tensors.

    Args:
        score_mod: An expression as text or a lambda; None for none.
        mask_mod: Likewise.
        score_params: What they read: numbers, truths and tensors by name.
        device: Where the tensors have to lie.

    Raises:
        ExpressionError: (an InvalidProblemError) for what is not of the language.
        InvalidProblemError: for parameters of another type or device, and those that nothing reads.
    """
    if score_mod is None and mask_mod is None:
        if score_params:
            raise InvalidProblemError("score_params belong to a score_mod or a mask_mod: give one, or leave them out")
        return UNMODIFIED
    if not isinstance(score_params, Mapping | None):
        raise InvalidProblemError(f"score_params must be a dict of names, got {type(score_params).__name__}")
    given = {str(name): _as_tensor(str(name), value, device) for name, value in (score_params or {}).items()}
    declared = tuple((name, _kind_of(tensor), tensor.dim()) for name, tensor in given.items())
    score_line, mask_line, names = _lines(score_mod, mask_mod, declared)
    return Modified(score_line, mask_line, tuple(given[name] for name in names))


def has_gradients(score_mod: str, mask_mod: str, wanted: Sequence[bool]) -> bool:
    """Whether a score_mod has a gradient by one of the parameters that are wanted; ``wanted`` is in their order."""
    able = differentiable(score_mod)
    return any(
        is_wanted and parameter.name in able
        for parameter, is_wanted in zip(parameters_of(score_mod, mask_mod), wanted, strict=True)
    )


def _lines(
    score_mod: object, mask_mod: object, declared: tuple[tuple[str, str, int], ...]
) -> tuple[str, str, tuple[str, ...]]:
    """Both lines, and the names of what they read, from what there is: names, kinds and ranks."""
    given = tuple(sorted(declared))
    lines = (_line(score_mod, Role.SCORE_MOD, given), _line(mask_mod, Role.MASK_MOD, given))
    names = tuple(parameter.name for parameter in parameters_of(*lines))
    unread = {name for name, _, _ in declared} - set(names)
    if unread:
        raise InvalidProblemError(f"nothing reads {', '.join(sorted(unread))}: leave it out of score_params")
    return lines[0], lines[1], names


def _line(source: object, role: Role, given: tuple[tuple[str, str, int], ...]) -> str:
    if source is None:
        return ""
    place = source if isinstance(source, str) else code_of(source)
    key = (place, role, given)
    if key not in _LINES:
        syntax = parse_text(place) if isinstance(place, str) else syntax_of(place)[1]
        names = {node.id for node in ast.walk(syntax) if isinstance(node, ast.Name)}
        parameters = [Parameter(name=name, kind=Kind(kind), rank=rank) for name, kind, rank in given if name in names]
        if len(_LINES) >= _MOST_LINES:
            _LINES.pop(next(iter(_LINES)))
        _LINES[key] = str(parse(source, parameters, role))  # type: ignore[arg-type]  # a text, or code_of refused it
    return _LINES[key]


# torch.compile shall call them while it traces, and not look into them. (torch.compiler.assume_constant_result says
# the same, and imports the compiler.)
has_gradients._dynamo_marked_constant = True  # type: ignore[attr-defined]  # dynamo looks for it
_lines._dynamo_marked_constant = True  # type: ignore[attr-defined]  # likewise


def _kind_of(tensor: Tensor) -> str:
    if tensor.dtype is torch.bool:
        return "bool"
    return "int" if tensor.dtype is torch.int32 else "float"


def _as_tensor(name: str, value: object, device: torch.device) -> Tensor:
    """A parameter as kernels read it. Numbers are filled in on the device, which waits for nothing."""
    if isinstance(value, bool):
        return torch.full((), value, dtype=torch.bool, device=device)
    if isinstance(value, int):
        if not limits.INT_MIN <= value <= limits.INT_MAX:
            raise InvalidProblemError(f"{name} of score_params must fit into 32 bits, got {value}")
        return torch.full((), value, dtype=torch.int32, device=device)
    if isinstance(value, float):
        return torch.full((), value, dtype=torch.float32, device=device)
    if not isinstance(value, Tensor):
        raise InvalidProblemError(f"{name} of score_params must be a number or a tensor, got {type(value).__name__}")
    if value.layout is not torch.strided:
        raise InvalidProblemError(f"{name} of score_params must be a dense strided tensor, got layout {value.layout}")
    if value.device != device:
        raise InvalidProblemError(f"{name} of score_params must be on the device of query, got {value.device}")
    if value.dtype is torch.bool or value.dtype.is_floating_point:
        return value if value.dtype is torch.bool else value.to(torch.float32)
    if value.dtype not in _INTEGERS:
        raise InvalidProblemError(
            f"{name} of score_params must be bool, int32 or floating, got {value.dtype}: convert it, as by .int()"
        )
    return value.to(torch.int32)
