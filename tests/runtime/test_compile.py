"""Compiling a variant ends in a status and a reason, whatever the compiler thinks of it."""

from __future__ import annotations

import dataclasses
import os

import pytest

from autoflash.codegen.render import render
from autoflash.problem import Form
from autoflash.runtime import launch
from autoflash.runtime.compile import compile_variant
from autoflash.trial import Status
from autoflash.variant import Family
from tests.factories import make_device, make_problem, make_variant

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("compiles kernels", allow_module_level=True)

PROBLEM = make_problem(seqlen_q=64)
SMALL = {"BLOCK_M": 64, "BLOCK_N": 32, "num_stages": 1}


def test_good_variant_gives_resources_and_the_digest_of_its_source() -> None:
    variant = make_variant(**SMALL)

    outcome = compile_variant(PROBLEM, variant, make_device())

    assert (outcome.status, outcome.detail) == (Status.CORRECT, "")
    assert outcome.source_digest == render(Form.of(PROBLEM), Family.TRITON, variant.structure).digest
    assert outcome.resources is not None
    assert outcome.resources.registers > 0
    assert outcome.seconds > 0


def test_too_much_shared_memory_is_named_with_its_limit() -> None:
    device = dataclasses.replace(make_device(), shared_bytes=4096)

    outcome = compile_variant(PROBLEM, make_variant(**SMALL), device)

    assert outcome.status is Status.COMPILE
    assert outcome.resources is not None
    assert outcome.detail == f"needs {outcome.resources.shared_bytes} bytes of shared memory, the device has 4096"


def test_number_that_the_compiler_refuses_is_an_outcome() -> None:
    outcome = compile_variant(PROBLEM, make_variant(**{**SMALL, "BLOCK_M": 48}), make_device())

    assert outcome.status is Status.COMPILE
    assert "power of 2" in outcome.detail
    assert "\n" not in outcome.detail


@pytest.mark.parametrize("error", [RuntimeError("PassManager::run failed"), AssertionError(), KeyError("layout")])
def test_any_failure_of_the_compiler_is_an_outcome(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(launch, "compile_kernel", fail)

    outcome = compile_variant(PROBLEM, make_variant(**SMALL), make_device())

    assert outcome.status is Status.COMPILE
    assert outcome.detail.startswith(f"{type(error).__name__}: ")


@pytest.mark.parametrize(
    ("change", "arch", "reason"),
    [
        ({"loads": "tma"}, "sm_80", "loads=tma needs a copy engine (sm_90 or newer), the device is sm_80"),
        ({"loads": "tma"}, "gfx942", "loads=tma needs a copy engine (sm_90 or newer), the device is gfx942"),
        ({"loads": "none_such"}, "sm_90", "unknown loads: none_such"),
        ({}, "cpu", "Triton makes no code for a CPU"),
    ],
)
def test_variant_that_the_device_or_templates_lack_breaks_a_constraint(
    change: dict[str, str], arch: str, reason: str
) -> None:
    outcome = compile_variant(PROBLEM, make_variant(**SMALL, **change), make_device(arch))

    assert (outcome.status, outcome.detail, outcome.resources) == (Status.CONSTRAINTS, reason, None)


@pytest.mark.parametrize("family", [Family.TORCH_TILED, Family.VENDOR])
def test_families_without_a_compiler_have_nothing_to_compile(family: Family) -> None:
    outcome = compile_variant(PROBLEM, make_variant(family), make_device("cpu"))

    assert (outcome.status, outcome.resources) == (Status.CORRECT, None)
