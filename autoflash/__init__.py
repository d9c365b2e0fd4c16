"""autoflash finds the fastest correct attention kernel for your GPU, and uses it.

Importing it opens no device and reads no file.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

# Eagerly, so that `import autoflash.attention` leaves this function, not the module of that name, behind.
from autoflash.attention import attention, explain, freeze, warmup

if TYPE_CHECKING:
    from autoflash.evaluate import reference as reference

__version__ = "0.1.0"

__all__ = ["__version__", "attention", "explain", "freeze", "reference", "warmup"]


def __getattr__(name: str) -> object:
    """Load on first use what most processes never need."""
    if name == "reference":
        import importlib

        return importlib.import_module("autoflash.evaluate.reference")
    raise AttributeError(f"module 'autoflash' has no attribute {name!r}")
