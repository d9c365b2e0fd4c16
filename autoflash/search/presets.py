"""What to tune when nobody names cells: sets of shapes that people use."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum

from autoflash.device import Device, DeviceKind
from autoflash.dispatch.buckets import cell_of
from autoflash.problem import Cell, DType, Mask, Pass, Problem

# The grid of the published FlashAttention benchmarks on a GPU; what a CPU does in a tenth of a second.
_GPU_TOKENS, _GPU_MODEL_DIM = 16384, 2048
_CPU_TOKENS, _CPU_MODEL_DIM = 1024, 512


class Preset(str, Enum):
    """A named set of shapes."""

    QUICK = "quick"
    LLM = "llm"
    VISION = "vision"
    ALL = "all"


@dataclass(frozen=True, slots=True, kw_only=True)
class Axes:
    """A grid of shapes: every combination is a cell. An axis that is None is the preset's."""

    passes: tuple[Pass, ...] | None = None
    dtypes: tuple[DType, ...] | None = None
    head_dims: tuple[int, ...] | None = None
    masks: tuple[Mask, ...] | None = None
    seqlens: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How much a preset spends where the user does not say.

    Attributes:
        trials: Per cell.
        budget_s: Wall clock of the run; None for no limit.
    """

    trials: int
    budget_s: float | None


_BOTH_PASSES = (Pass.FORWARD, Pass.BACKWARD)
_BOTH_MASKS = (Mask.FULL, Mask.CAUSAL)
_HALF = (DType.BF16, DType.FP16)
_LONG = (512, 1024, 2048, 4096, 8192, 16384)

_GPU_AXES = {
    Preset.QUICK: Axes(
        passes=_BOTH_PASSES, dtypes=(DType.BF16,), head_dims=(64, 128), masks=(Mask.CAUSAL,), seqlens=(4096,)
    ),
    Preset.LLM: Axes(passes=_BOTH_PASSES, dtypes=_HALF, head_dims=(64, 128, 256), masks=_BOTH_MASKS, seqlens=_LONG),
    # 40, 80, 160: Stable Diffusion's U-Net; 64, 72, 80, 88: vision transformers and DiT; 128: video.
    Preset.VISION: Axes(
        passes=_BOTH_PASSES,
        dtypes=_HALF,
        head_dims=(40, 64, 72, 80, 88, 128, 160),
        masks=(Mask.FULL,),
        seqlens=(256, 1024, 4096, 16384),
    ),
    Preset.ALL: Axes(
        passes=_BOTH_PASSES,
        dtypes=(*_HALF, DType.FP32),
        head_dims=(16, 32, 40, 64, 72, 80, 88, 96, 112, 128, 160, 192, 256),
        masks=_BOTH_MASKS,
        seqlens=(256, *_LONG),
    ),
}

_CPU_AXES = {
    Preset.QUICK: Axes(
        passes=_BOTH_PASSES, dtypes=(DType.FP32,), head_dims=(64,), masks=_BOTH_MASKS, seqlens=(256, 1024)
    ),
    Preset.LLM: Axes(
        passes=_BOTH_PASSES,
        dtypes=(DType.FP32, DType.BF16),
        head_dims=(64, 128),
        masks=_BOTH_MASKS,
        seqlens=(256, 512, 1024, 2048),
    ),
    Preset.VISION: Axes(
        passes=_BOTH_PASSES, dtypes=(DType.FP32,), head_dims=(64, 80), masks=(Mask.FULL,), seqlens=(256, 1024)
    ),
    Preset.ALL: Axes(
        passes=_BOTH_PASSES,
        dtypes=(DType.FP32, DType.BF16, DType.FP16),
        head_dims=(32, 64, 80, 128, 256),
        masks=_BOTH_MASKS,
        seqlens=(128, 256, 512, 1024, 2048),
    ),
}


def default_preset(device: Device) -> Preset:
    """What a person on a new machine wants: something to see on a CPU, language-model shapes on a GPU."""
    return Preset.QUICK if device.kind is DeviceKind.CPU else Preset.LLM


def effort(preset: Preset, device: Device) -> Effort:
    """How much a preset spends by default."""
    if preset is Preset.QUICK:
        return Effort(trials=16 if device.kind is DeviceKind.CPU else 32, budget_s=120.0)
    return Effort(trials=32, budget_s=None if preset is Preset.ALL else 3600.0)


def cells(preset: Preset, device: Device, chosen: Axes | None = None) -> tuple[Cell, ...]:
    """Cells of a preset on a device, each once, ordered so that neighbours warm-start one another.

    Args:
        preset: Gives the axes that are not chosen.
        device: Decides sizes: a CPU gets what it can do.
        chosen: Axes to use instead of the preset's, which need not be among them.
    """
    axes = _merged((_CPU_AXES if device.kind is DeviceKind.CPU else _GPU_AXES)[preset], chosen or Axes())
    found: dict[Cell, None] = {}
    for op, head_dim, dtype, mask, seqlen in itertools.product(
        axes.passes or (), axes.head_dims or (), axes.dtypes or (), axes.masks or (), sorted(axes.seqlens or ())
    ):
        found[cell_of(_problem(op, dtype, head_dim, mask, seqlen, device), device)] = None
    return tuple(found)


def _merged(preset: Axes, chosen: Axes) -> Axes:
    names: Sequence[str] = ("passes", "dtypes", "head_dims", "masks", "seqlens")
    given = {name: getattr(chosen, name) for name in names if getattr(chosen, name) is not None}
    return replace(preset, **given)


def _problem(op: Pass, dtype: DType, head_dim: int, mask: Mask, seqlen: int, device: Device) -> Problem:
    """A problem of the usual amount of work for the device."""
    on_cpu = device.kind is DeviceKind.CPU
    tokens, model_dim = (_CPU_TOKENS, _CPU_MODEL_DIM) if on_cpu else (_GPU_TOKENS, _GPU_MODEL_DIM)
    heads = max(1, model_dim // head_dim)
    return Problem(
        op=op,
        dtype=dtype,
        head_dim=head_dim,
        head_dim_v=head_dim,
        batch=max(1, tokens // max(1, seqlen)),
        heads=heads,
        kv_heads=heads,
        seqlen_q=seqlen,
        seqlen_k=seqlen,
        mask=mask,
    )
