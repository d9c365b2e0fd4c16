"""Compile a variant without running it: whether it can be compiled, and what it takes."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from autoflash.codegen.render import render
from autoflash.device import Device, DeviceKind
from autoflash.errors import RenderError
from autoflash.problem import Form, Pass, Problem
from autoflash.runtime import launch
from autoflash.runtime.backward_features import PlacedMask
from autoflash.runtime.launch import KernelPlan
from autoflash.runtime.load import load
from autoflash.trial import Resources, Status
from autoflash.variant import Family, Variant


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileOutcome:
    """What came of compiling a variant.

    Attributes:
        status: CORRECT where everything compiled and fits, COMPILE where not, CONSTRAINTS where the device or the
            templates do not have what the variant asks for.
        resources: The most that any of its kernels takes; None where nothing was compiled.
        detail: The reason in one line; empty when correct.
        seconds: Wall clock.
        source_digest: Of the rendered text; empty where there is none.
    """

    status: Status
    resources: Resources | None = None
    detail: str = ""
    seconds: float = 0.0
    source_digest: str = ""


def compile_variant(
    problem: Problem,
    variant: Variant,
    device: Device,
    scale_sign: int = 1,
    masks: Mapping[str, PlacedMask] = MappingProxyType({}),
) -> CompileOutcome:
    """Compile the kernels that the dense specialisation of a problem needs, for the device's architecture.

    Needs no GPU. The results stay in Triton's cache, so that a later launch in any process finds them. A candidate that
    cannot be compiled is an outcome, not an exception.

    Args:
        problem: Gives form, type, head dims and divisibility.
        variant: What to compile.
        device: For which architecture.
        scale_sign: That of the softmax scale: -1, 0 or 1.
        masks: How the ``mask`` and the ``bias`` lie; where one is not there, in the usual way.
    """
    start = time.perf_counter()
    if variant.family is Family.VENDOR:
        return CompileOutcome(status=Status.CORRECT)
    try:
        source = render(Form.of(problem), variant.family, variant.structure)
    except RenderError as error:
        return _failed(Status.CONSTRAINTS, str(error), start)
    if variant.family is Family.TORCH_TILED:
        return CompileOutcome(status=Status.CORRECT, seconds=time.perf_counter() - start, source_digest=source.digest)
    reason = _missing(variant, device)
    if reason:
        return _failed(Status.CONSTRAINTS, reason, start, source.digest)
    try:
        module = load(source)
        compiled = [launch.compile_kernel(module, plan, device) for plan in _plans(problem, variant, scale_sign, masks)]
        resources = [launch.compiled_resources(kernel) for kernel in compiled]
    # Triton reports a kernel that it cannot compile as RuntimeError, AssertionError, CompilationError, KeyError ...
    except Exception as error:
        return _failed(Status.COMPILE, f"{type(error).__name__}: {_last_cause(error)}", start, source.digest)
    most = Resources(
        shared_bytes=max(kernel.shared_bytes for kernel in resources),
        registers=max(kernel.registers for kernel in resources),
        spill_bytes=max(kernel.spill_bytes for kernel in resources),
    )
    detail = (
        f"needs {most.shared_bytes} bytes of shared memory, the device has {device.shared_bytes}"
        if most.shared_bytes > device.shared_bytes
        else ""
    )
    return CompileOutcome(
        status=Status.COMPILE if detail else Status.CORRECT,
        resources=most,
        detail=detail,
        seconds=time.perf_counter() - start,
        source_digest=source.digest,
    )


def _plans(
    problem: Problem, variant: Variant, scale_sign: int, masks: Mapping[str, PlacedMask]
) -> tuple[KernelPlan, ...]:
    if variant.family is Family.GLUON_SM90:
        from autoflash.runtime import gluon_backward_plan, gluon_plan

        if problem.op is Pass.FORWARD:
            return (gluon_plan.forward_plan(problem, variant, scale_sign),)
        return gluon_backward_plan.backward_plans(problem, variant)
    if problem.op is Pass.FORWARD:
        from autoflash.runtime.triton_forward import forward_plan

        operands = {name: placed.mask for name, placed in masks.items()}
        plan = forward_plan(
            problem, variant, scale_sign=scale_sign, mask=operands.get("mask"), bias=operands.get("bias")
        )
        return (plan,)
    from autoflash.runtime.triton_backward import backward_plans

    return backward_plans(problem, variant, masks)


def _missing(variant: Variant, device: Device) -> str:
    """What the device lacks for this variant, or nothing."""
    if device.kind is DeviceKind.CPU:
        return "Triton makes no code for a CPU"
    if variant.family is Family.GLUON_SM90 and device.arch != "sm_90":
        return f"the family is made for sm_90, the device is {device.arch}"
    if variant.structure.get("loads") == "tma" and not device.has_tma:
        return f"loads=tma needs a copy engine (sm_90 or newer), the device is {device.arch}"
    return ""


def _failed(status: Status, reason: str, start: float, digest: str = "") -> CompileOutcome:
    return CompileOutcome(status=status, detail=reason, seconds=time.perf_counter() - start, source_digest=digest)


def _last_cause(error: BaseException) -> str:
    """The innermost error in one line: Triton wraps the reason in one excerpt of source for each call."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[-1] if lines else type(error).__name__)[:300]
