"""Expressions printed to Triton, compiled without a GPU."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from autoflash.expression.expression import Expression
from tests.expression.corpus import CASES, Case
from tests.expression.modules import functions_of, imported, tile_arguments, tile_kernel

pytest.importorskip("triton")

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="nothing is compiled in Triton's interpreter"
)

PERIODIC = [case for case in CASES if case.name in ("trigonometric", "cosine_decay")]
TARGETS = {"sm_90": ("cuda", 90, 32), "gfx942": ("hip", "gfx942", 64)}


def compiled(expression: Expression, function: str, results: int, target: str, folder: Path) -> Any:
    """A tile's kernel for a target."""
    from triton import compile as triton_compile
    from triton import knobs
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = getattr(imported(tile_kernel(expression), folder), f"{function}_tile")
    types = {"score_ptr": "*fp32", **{f"result_{place}_ptr": "*fp32" for place in range(results)}}
    types |= {**dict(tile_arguments(expression)), "b": "i32", "h": "i32", "start_m": "i32"}
    constants = {"BLOCK_M": 64, "BLOCK_N": 64}
    signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
    with knobs.cache.scope():
        knobs.cache.dir = str(folder / "cache")
        source = ASTSource(kernel, signature, constexprs=constants)
        # Newer releases warn where nobody says whether products and sums are fused.
        return triton_compile(source, target=GPUTarget(*TARGETS[target]), options={"enable_fp_fusion": True})


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_function_of_an_expression_compiles(case: Case, tmp_path: Path) -> None:
    for function in functions_of(case.expression):
        code = compiled(case.expression, function.name, len(function.results), "sm_90", tmp_path)

        # All arithmetic is in float32, since that of float64 has a 64th of the speed on many GPUs; but NVIDIA's sine
        # and cosine reduce very large angles in float64.
        assert len(code.asm["cubin"]) > 0
        assert ".f64" not in code.asm["ptx"] or case in PERIODIC


@pytest.mark.parametrize("name", ["t5_buckets_by_formula", "capped", "trigonometric", "soft_clip", "causal_documents"])
def test_it_compiles_for_amd(name: str, tmp_path: Path) -> None:
    case = next(case for case in CASES if case.name == name)
    for function in functions_of(case.expression):
        code = compiled(case.expression, function.name, len(function.results), "gfx942", tmp_path)

        assert "s_endpgm" in code.asm["amdgcn"]


def test_what_nothing_depends_on_is_not_computed(tmp_path: Path) -> None:
    case = next(case for case in CASES if case.name == "alibi")

    code = compiled(case.expression, "slope", 1, "sm_90", tmp_path)

    assert "ld.global" not in code.asm["ptx"]


def test_what_is_not_a_number_stays_so(tmp_path: Path) -> None:
    case = next(case for case in CASES if case.name == "soft_clip")

    # Which the interpreter cannot tell: its minimum is numpy's.
    ptx = compiled(case.expression, "modified", 1, "sm_90", tmp_path).asm["ptx"]

    assert "min.NaN.f32" in ptx
    assert "max.NaN.f32" in ptx
    assert "min.f32" not in ptx
