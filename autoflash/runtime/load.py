"""Rendered text as an imported module. Triton reads a kernel's source from its file, so it is imported from one."""

from __future__ import annotations

import importlib.util
import sys
import threading
from types import ModuleType

from autoflash.codegen.render import RenderedSource
from autoflash.codegen.store import write

_modules: dict[str, ModuleType] = {}
_lock = threading.Lock()


def load(source: RenderedSource) -> ModuleType:
    """Import the module of a rendered kernel; once per process and digest.

    Args:
        source: What :func:`~autoflash.codegen.render.render` gave.
    """
    with _lock:
        if source.name not in _modules:
            _modules[source.name] = _import(source)
        return _modules[source.name]


def _import(source: RenderedSource) -> ModuleType:
    name = f"autoflash_generated.{source.name}"
    spec = importlib.util.spec_from_file_location(name, write(source))
    if spec is None or spec.loader is None:
        raise ImportError(f"{name} cannot be imported from the cache folder")
    module = importlib.util.module_from_spec(spec)
    # Listed first: the module's own functions look it up there, for example when they are pickled or inspected.
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
