"""Makers of executables that fail, named to the worker by their dotted path."""

from __future__ import annotations

import os
from pathlib import Path

from autoflash.device import Device
from autoflash.problem import Form
from autoflash.runtime.bind import bind
from autoflash.runtime.executable import Executable
from autoflash.variant import Family, Variant

SEEN = "AUTOFLASH_TEST_SEEN"
"""Environment variable: an empty folder, in which ``every_second`` notes the variants it was asked for."""


def always(form: Form, variant: Variant, device: Device) -> Executable:
    """No candidate survives."""
    raise RuntimeError("the launch failed")


def every_second(form: Form, variant: Variant, device: Device) -> Executable:
    """Every second generated variant that a search asks for never works, whichever variants those are."""
    if variant.family is not Family.VENDOR and _place(variant) % 2:
        raise MemoryError("out of memory in the compiler")
    return bind(form, variant, device)


def _place(variant: Variant) -> int:
    """How many variants were asked for before this one first was, in any process of the run."""
    folder = Path(os.environ[SEEN])
    note = folder / variant.key
    if not note.exists():
        note.write_text(str(len(list(folder.iterdir()))))
    return int(note.read_text())
