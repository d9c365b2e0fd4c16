"""autoflash finds the fastest correct attention kernel for your GPU, and uses it.

Importing it opens no device and reads no file.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

# Eagerly, so that `import autoflash.attention` leaves this function, not the module of that name, behind.
from autoflash.attention import attention, attention_varlen
from autoflash.control import explain, forget, freeze, warmup
from autoflash.runtime.block_mask import BlockMask, block_mask

if TYPE_CHECKING:
    from autoflash.deploy.export import ImportSummary
    from autoflash.evaluate import reference as reference
    from autoflash.search.request import TuneSummary

__version__ = "0.1.0"

__all__ = [
    "BlockMask",
    "__version__",
    "attention",
    "attention_varlen",
    "block_mask",
    "explain",
    "export_table",
    "forget",
    "freeze",
    "import_table",
    "reference",
    "tune",
    "warmup",
]


def tune(
    preset: str | None = None,
    *,
    device: str | None = None,
    database: str | None = None,
    passes: Sequence[str] | None = None,
    dtypes: Sequence[str] | None = None,
    head_dims: Sequence[int] | None = None,
    masks: Sequence[str] | None = None,
    seqlens: Sequence[int] | None = None,
    trials: int | None = None,
    more: int | None = None,
    budget_s: float | None = None,
    seed: int | None = None,
) -> TuneSummary:
    """Search for the fastest correct kernels on a device, and record what is learnt: ``autoflash tune`` as a function.

    Later calls of :func:`attention` in this process see the new decisions.

    Args:
        preset: ``quick``, ``llm``, ``vision`` or ``all``; None is what suits the device.
        device: ``cpu``, ``cuda`` or ``cuda:1``; None is the current GPU, or the CPU where there is none.
        database: Path or SQLAlchemy URL; None takes ``AUTOFLASH_DB`` or the user's data folder.
        passes: ``forward`` and ``backward``, instead of the preset's.
        dtypes: ``fp16``, ``bf16`` and ``fp32``, instead of the preset's.
        head_dims: Instead of the preset's.
        masks: ``full`` and ``causal``, instead of the preset's.
        seqlens: Instead of the preset's.
        trials: Finished distinct variants per cell, in all; None is the preset's.
        more: Instead of ``trials``: how many to add.
        budget_s: Seconds for the whole run; None is the preset's, or no limit where ``trials`` or ``more`` is given.
        seed: Of the search; None for one that no other run has.
    """
    from autoflash.db.repository import Repository
    from autoflash.problem import DType, Mask, Pass
    from autoflash.runtime.probe import probe
    from autoflash.search.presets import Axes, Preset, cells, default_preset, effort
    from autoflash.search.request import TuneRequest
    from autoflash.search.tuner import tune as run

    described = probe(device)
    chosen = Preset(preset) if preset is not None else default_preset(described)
    usual = effort(chosen, described)
    axes = Axes(
        passes=tuple(map(Pass, passes)) if passes is not None else None,
        dtypes=tuple(map(DType, dtypes)) if dtypes is not None else None,
        head_dims=tuple(head_dims) if head_dims is not None else None,
        masks=tuple(map(Mask, masks)) if masks is not None else None,
        seqlens=tuple(seqlens) if seqlens is not None else None,
    )
    unlimited = budget_s is not None or trials is not None or more is not None
    request = TuneRequest(
        cells=cells(chosen, described, axes),
        device=described,
        trials=trials or usual.trials,
        more=more,
        budget_s=budget_s if unlimited else usual.budget_s,
        seed=seed,
    )
    with Repository.open(database) as repository:
        summary = run(request, repository)
    forget()
    return summary


def export_table(path: str | os.PathLike[str] | None = None, *, database: str | None = None) -> str:
    """The decisions of a database as a table that other machines read; equal decisions give equal bytes.

    Args:
        path: File to write as well; one that holds other decisions is not replaced.
        database: Path or SQLAlchemy URL; None takes ``AUTOFLASH_DB`` or the user's data folder.

    Returns:
        The text of the table.
    """
    from pathlib import Path

    from autoflash.db.repository import Repository
    from autoflash.deploy import export

    with Repository.open(database, read_only=True) as repository:
        text = export.export_table(repository)
    if path is not None:
        export.write_table(Path(path), text)
    return text


def import_table(path: str | os.PathLike[str], *, database: str | None = None) -> ImportSummary:
    """Put the decisions of an exported table into a database; later calls of :func:`attention` see them.

    Args:
        path: The table.
        database: Path or SQLAlchemy URL; None takes ``AUTOFLASH_DB`` or the user's data folder.
    """
    from pathlib import Path

    from autoflash.db.repository import Repository
    from autoflash.deploy import export

    with Repository.open(database) as repository:
        summary = export.import_table(Path(path).read_text(encoding="utf-8"), repository)
    forget()
    return summary


def __getattr__(name: str) -> object:
    """Load on first use what most processes never need."""
    if name == "reference":
        import importlib

        return importlib.import_module("autoflash.evaluate.reference")
    raise AttributeError(f"module 'autoflash' has no attribute {name!r}")
