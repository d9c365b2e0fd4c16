"""Printed text as modules, read from files as Triton wants them."""

from __future__ import annotations

import hashlib
import importlib.util
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from torch import Tensor

from autoflash.expression.derivative import parameter_gradients, score_derivative
from autoflash.expression.expression import Expression, Role
from autoflash.expression.nodes import Variable
from autoflash.expression.program import Function
from autoflash.expression.torch_text import to_torch
from autoflash.expression.triton_text import to_triton


def functions_of(expression: Expression) -> list[Function]:
    """All that a kernel needs of an expression: ``modified``, and for a score ``slope`` and ``gradient_0`` onwards."""
    functions = [Function(name="modified", docstring="What the expression gives.", results=(expression.root,))]
    if expression.role is Role.SCORE_MOD:
        slope = score_derivative(expression)
        functions.append(Function(name="slope", docstring="Derivative by the score.", results=(slope,)))
        functions += [
            Function(
                name=f"gradient_{place}",
                docstring=f"Derivative by an element of {gradient.parameter.name}, and which one.",
                results=(gradient.derivative, *gradient.indices),
            )
            for place, gradient in enumerate(parameter_gradients(expression))
        ]
    return functions


def torch_functions(expression: Expression) -> dict:
    """The printed torch functions of an expression, by name."""
    names: dict = {}
    exec(f"import torch\n{to_torch(expression.role, functions_of(expression), expression.parameters)}", names)
    return names


def called(
    function: Callable[..., Tensor | tuple[Tensor, ...]],
    expression: Expression,
    tensors: dict[str, Tensor],
    given: dict[Variable, Tensor],
) -> Tensor | tuple[Tensor, ...]:
    """What a printed torch function gives at some places."""
    params = [tensors[parameter.name] for parameter in expression.parameters]
    return function(*given.values(), *([params] if params else []))


def imported(text: str, folder: Path) -> ModuleType:
    """The module of a text, written into a folder."""
    name = f"printed_{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    path = folder / f"{name}.py"
    path.write_text(text, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def assert_tidy(folder: Path) -> None:
    """Neither ruff's formatter nor its linter has anything to say of the modules in a folder."""
    ruff = Path(sys.executable).with_name("ruff")
    for command in (["format", "--check", "--diff"], ["check", "--select=F,E"]):
        options = ["--line-length=120", "--isolated", "--no-cache", "--quiet"]
        done = subprocess.run([ruff, *command, *options, folder], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout


def tile_kernel(expression: Expression) -> str:
    """A module with a kernel ``<name>_tile`` for each function of an expression: one tile of one head."""
    functions = functions_of(expression)
    text = to_triton(expression.role, functions, expression.parameters)
    kernels = [_kernel(expression, function) for function in functions]
    return "\n\n\n".join(
        ["from typing import NamedTuple\n\nimport triton\nimport triton.language as tl", text.rstrip(), *kernels, ""]
    )


def tile_arguments(expression: Expression) -> list[tuple[str, str]]:
    """Names and types (``fp32``, ``i32``, ``*fp32`` ...) of what a tile's kernel takes for the parameters."""
    arguments = []
    for each in expression.parameters:
        element = {"float": "fp32", "int": "i32", "bool": "i1" if each.rank else "i32"}[each.kind.value]
        fields = [f"{each.name}_{word}_{axis}" for word in ("size", "stride") for axis in range(each.rank)]
        arguments.append((f"{each.name}_ptr", f"*{element}") if each.rank else (each.name, element))
        arguments += [(field, "i32") for field in fields]
    return arguments


def _kernel(expression: Expression, function: Function) -> str:
    params = []
    for each in expression.parameters:
        fields = [f"{each.name}_{word}_{axis}" for word in ("size", "stride") for axis in range(each.rank)]
        params.append(f"Table{each.rank}({each.name}_ptr, {', '.join(fields)})" if each.rank else each.name)
    results = [f"result_{place}" for place in range(len(function.results))]
    given = ["score_ptr", *(f"{result}_ptr" for result in results), *(name for name, _ in tile_arguments(expression))]
    constants = ["BLOCK_M: tl.constexpr", "BLOCK_N: tl.constexpr"]
    variables = [variable.value for variable in expression.role.variables]
    passed = [*variables, *([f"({', '.join(params)},)"] if params else [])]
    lines = [
        "@triton.jit",
        f"def {function.name}_tile({', '.join([*given, 'b', 'h', 'start_m', *constants])}):",
        "    rows, cols = tl.arange(0, BLOCK_M)[:, None], tl.arange(0, BLOCK_N)[None, :]",
        "    places = rows * BLOCK_N + cols",
        "    score = tl.load(score_ptr + places)",
        "    q_idx, kv_idx = start_m + rows, cols",
        f"    {', '.join(results)} = {function.name}({', '.join(passed)})",
        *(f"    tl.store({result}_ptr + places, tl.cast({result}, tl.float32))" for result in results),
    ]
    return "\n".join(lines)
