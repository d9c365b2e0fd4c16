"""What to tune when nobody names cells: sets of shapes that people use."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, fields, replace
from enum import Enum

from autoflash.device import Device, DeviceKind
from autoflash.dispatch.buckets import cell_of
from autoflash.problem import Cell, DType, Mask, MaskTensor, Pass, Problem

# The grid of the published FlashAttention benchmarks on a GPU; what a CPU does in a tenth of a second.
_GPU_TOKENS, _GPU_MODEL_DIM = 16384, 2048
_CPU_TOKENS, _CPU_MODEL_DIM = 1024, 512


class Preset(str, Enum):
    """A named set of shapes."""

    QUICK = "quick"
    LLM = "llm"
    VISION = "vision"
    FEATURES = "features"
    ALL = "all"


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What shapes ask for beyond plain attention; by default nothing.

    Attributes:
        window: Left and right bound; None has no bound there.
        softcap, score_mod, mask_mod, params_gradient, block_size, mask_tensor: As in :class:`Problem`.
        alibi, alibi_gradient, bias, bias_gradient, sinks, dropout_p: As in :class:`Problem`.
        packed: Sequences are packed one after the other.
    """

    window: tuple[int | None, int | None] = (None, None)
    softcap: float = 0.0
    score_mod: str = ""
    mask_mod: str = ""
    params_gradient: bool = False
    block_size: int = 0
    dropout_p: float = 0.0
    mask_tensor: MaskTensor = MaskTensor.NONE
    alibi: bool = False
    alibi_gradient: bool = False
    bias: bool = False
    bias_gradient: bool = False
    sinks: bool = False
    packed: bool = False

    def of(self, problem: Problem) -> Problem:
        """The problem with this asked for as well, in the plainest words: those in which a call is looked up.

        Raises:
            InvalidProblemError: for numbers that mean nothing, and for what does not go together.
        """
        return problem.replace(
            window_left=self.window[0],
            window_right=self.window[1],
            softcap=self.softcap,
            score_mod=self.score_mod,
            mask_mod=self.mask_mod,
            params_gradient=self.params_gradient,
            block_size=self.block_size,
            dropout_p=self.dropout_p,
            mask_tensor=self.mask_tensor,
            alibi=self.alibi,
            alibi_gradient=self.alibi_gradient,
            bias=self.bias,
            bias_gradient=self.bias_gradient,
            sinks=self.sinks,
            packed_q=problem.batch * problem.seqlen_q if self.packed else None,
            packed_k=problem.batch * problem.seqlen_k if self.packed else None,
        ).without_idle_bounds()


@dataclass(frozen=True, slots=True, kw_only=True)
class Axes:
    """A grid of shapes: every combination is a cell. An axis that is None is the preset's.

    ``groups`` are query heads per key/value head. Presets that do not say so have 1, values as long as queries, and
    ask for nothing.
    """

    passes: tuple[Pass, ...] | None = None
    dtypes: tuple[DType, ...] | None = None
    head_dims: tuple[int, ...] | None = None
    head_dims_v: tuple[int, ...] | None = None
    masks: tuple[Mask, ...] | None = None
    seqlens: tuple[int, ...] | None = None
    groups: tuple[int, ...] | None = None
    asked: tuple[Asked, ...] | None = None


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
_PACKED = Asked(packed=True)

_GPU_FEATURES = (
    # Llama 3, Mistral and Qwen: grouped heads, windows of 4096 keys, prompts of many lengths in one batch.
    Axes(
        passes=_BOTH_PASSES,
        dtypes=(DType.BF16,),
        head_dims=(128,),
        masks=(Mask.CAUSAL,),
        seqlens=(2048, 8192),
        groups=(4,),
        asked=(Asked(), Asked(window=(4095, 0)), _PACKED),
    ),
    # Gemma 2: capped scores, every second layer with a window.
    Axes(
        passes=_BOTH_PASSES,
        dtypes=(DType.BF16,),
        head_dims=(256,),
        masks=(Mask.CAUSAL,),
        seqlens=(8192,),
        groups=(2,),
        asked=(Asked(softcap=50.0), Asked(softcap=50.0, window=(4095, 0))),
    ),
    # gpt-oss: sinks, windows of 128 keys in every second layer.
    Axes(
        passes=_BOTH_PASSES,
        dtypes=(DType.BF16,),
        head_dims=(64,),
        masks=(Mask.CAUSAL,),
        seqlens=(4096,),
        groups=(8,),
        asked=(Asked(sinks=True), Asked(sinks=True, window=(127, 0)), Asked(sinks=True, packed=True)),
    ),
    # Encoders (ModernBERT sees 64 to each side; T5, Swin and AlphaFold learn a bias), and training with dropout.
    Axes(
        passes=_BOTH_PASSES,
        dtypes=(DType.BF16,),
        head_dims=(64,),
        masks=(Mask.FULL,),
        seqlens=(512, 2048),
        asked=(
            _PACKED,
            Asked(dropout_p=0.1),
            Asked(mask_tensor=MaskTensor.BOOL),
            Asked(mask_tensor=MaskTensor.FLOAT),
            Asked(bias=True, bias_gradient=True),
            Asked(window=(64, 64)),
        ),
    ),
)

_CPU_FEATURES = (
    Axes(
        passes=_BOTH_PASSES,
        dtypes=(DType.FP32,),
        head_dims=(64,),
        masks=(Mask.CAUSAL,),
        seqlens=(512,),
        groups=(4,),
        asked=(Asked(), Asked(window=(127, 0)), Asked(softcap=50.0), Asked(softcap=50.0, window=(127, 0)), _PACKED),
    ),
    Axes(
        passes=_BOTH_PASSES,
        dtypes=(DType.FP32,),
        head_dims=(64,),
        masks=(Mask.FULL,),
        seqlens=(512,),
        asked=(
            Asked(dropout_p=0.1),
            Asked(mask_tensor=MaskTensor.BOOL),
            Asked(mask_tensor=MaskTensor.FLOAT),
            Asked(bias=True, bias_gradient=True),
        ),
    ),
)

_GPU_AXES = {
    Preset.QUICK: (
        Axes(passes=_BOTH_PASSES, dtypes=(DType.BF16,), head_dims=(64, 128), masks=(Mask.CAUSAL,), seqlens=(4096,)),
    ),
    Preset.LLM: (Axes(passes=_BOTH_PASSES, dtypes=_HALF, head_dims=(64, 128, 256), masks=_BOTH_MASKS, seqlens=_LONG),),
    # 40, 80, 160: Stable Diffusion's U-Net; 64, 72, 80, 88: vision transformers and DiT; 128: video.
    Preset.VISION: (
        Axes(
            passes=_BOTH_PASSES,
            dtypes=_HALF,
            head_dims=(40, 64, 72, 80, 88, 128, 160),
            masks=(Mask.FULL,),
            seqlens=(256, 1024, 4096, 16384),
        ),
    ),
    Preset.FEATURES: _GPU_FEATURES,
    Preset.ALL: (
        Axes(
            passes=_BOTH_PASSES,
            dtypes=(*_HALF, DType.FP32),
            head_dims=(16, 32, 40, 64, 72, 80, 88, 96, 112, 128, 160, 192, 256),
            masks=_BOTH_MASKS,
            seqlens=(256, *_LONG),
        ),
        *_GPU_FEATURES,
    ),
}

_CPU_AXES = {
    Preset.QUICK: (
        Axes(passes=_BOTH_PASSES, dtypes=(DType.FP32,), head_dims=(64,), masks=_BOTH_MASKS, seqlens=(256, 1024)),
    ),
    Preset.LLM: (
        Axes(
            passes=_BOTH_PASSES,
            dtypes=(DType.FP32, DType.BF16),
            head_dims=(64, 128),
            masks=_BOTH_MASKS,
            seqlens=(256, 512, 1024, 2048),
        ),
    ),
    Preset.VISION: (
        Axes(passes=_BOTH_PASSES, dtypes=(DType.FP32,), head_dims=(64, 80), masks=(Mask.FULL,), seqlens=(256, 1024)),
    ),
    Preset.FEATURES: _CPU_FEATURES,
    Preset.ALL: (
        Axes(
            passes=_BOTH_PASSES,
            dtypes=(DType.FP32, DType.BF16, DType.FP16),
            head_dims=(32, 64, 80, 128, 256),
            masks=_BOTH_MASKS,
            seqlens=(128, 256, 512, 1024, 2048),
        ),
        *_CPU_FEATURES,
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
    grids = (_CPU_AXES if device.kind is DeviceKind.CPU else _GPU_AXES)[preset]
    found: dict[Cell, None] = {}
    for axes in (_merged(grid, chosen or Axes()) for grid in grids):
        for op, head_dim, head_dim_v, group, dtype, mask, asked, seqlen in itertools.product(
            axes.passes or (),
            axes.head_dims or (),
            axes.head_dims_v or (None,),
            axes.groups or (1,),
            axes.dtypes or (),
            axes.masks or (),
            axes.asked or (Asked(),),
            sorted(axes.seqlens or ()),
        ):
            problem = _problem(op, dtype, head_dim, group, mask, seqlen, device)
            problem = problem.replace(head_dim_v=head_dim if head_dim_v is None else head_dim_v)
            found[cell_of(asked.of(problem), device)] = None
    return tuple(found)


def _merged(preset: Axes, chosen: Axes) -> Axes:
    names = [field.name for field in fields(Axes)]
    given = {name: getattr(chosen, name) for name in names if getattr(chosen, name) is not None}
    return replace(preset, **given)


def _problem(op: Pass, dtype: DType, head_dim: int, group: int, mask: Mask, seqlen: int, device: Device) -> Problem:
    """A problem of the usual amount of work for the device."""
    on_cpu = device.kind is DeviceKind.CPU
    tokens, model_dim = (_CPU_TOKENS, _CPU_MODEL_DIM) if on_cpu else (_GPU_TOKENS, _GPU_MODEL_DIM)
    kv_heads = max(1, model_dim // head_dim // group)
    return Problem(
        op=op,
        dtype=dtype,
        head_dim=head_dim,
        head_dim_v=head_dim,
        batch=max(1, tokens // max(1, seqlen)),
        heads=kv_heads * group,
        kv_heads=kv_heads,
        seqlen_q=seqlen,
        seqlen_k=seqlen,
        mask=mask,
    )
