"""Rendered kernels on disk, named by digest: Triton reads the source of a kernel from its file."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path

from autoflash import paths
from autoflash.codegen.render import RenderedSource


def write(source: RenderedSource, folder: Path | None = None) -> Path:
    """Write the text of a kernel, unless the same text lies there already.

    Args:
        source: What :func:`~autoflash.codegen.render.render` gave.
        folder: Where to; None is ``sources`` in the cache folder.

    Returns:
        Path of the file. It appears whole or not at all, also when several processes write it at once.
    """
    folder = paths.writable_cache_dir() / "sources" if folder is None else folder
    path = folder / f"{source.name}.py"
    with contextlib.suppress(FileNotFoundError):
        if path.read_text(encoding="utf-8") == source.text:
            return path
    folder.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=folder, prefix=f".{source.name}.", suffix=".tmp")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(source.text)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    return path
