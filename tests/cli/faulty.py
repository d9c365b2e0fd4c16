"""Makers of executables that fail, named to the worker by their dotted path."""

from __future__ import annotations

from autoflash.device import Device
from autoflash.problem import Mask, Pass
from autoflash.runtime.bind import bind
from autoflash.runtime.executable import Executable
from autoflash.variant import Variant


def always(op: Pass, mask: Mask, variant: Variant, device: Device) -> Executable:
    """No candidate survives."""
    raise RuntimeError("the launch failed")


def sometimes(op: Pass, mask: Mask, variant: Variant, device: Device) -> Executable:
    """One value of one knob never works."""
    if variant.config.get("heads_per_step") == 1:
        raise MemoryError("out of memory in the compiler")
    return bind(op, mask, variant, device)
