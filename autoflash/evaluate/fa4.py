"""FlashAttention-4, the attention kernels in CuTe DSL of the package ``flash-attn-4``: what hand-written ones reach.

The package is none of autoflash's: it is imported when it is asked for a problem, and compared where it can be.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

from autoflash.evaluate.peer import Attend, Peer
from autoflash.problem import Alignment, DType, Feature, Problem
from autoflash.runtime.executable import Extras
from autoflash.variant import Choices, Family, Variant

FA4 = Variant(family=Family.VENDOR, structure=Choices(backend="fa4"), config=Choices())
PACKAGE: Final = "flash-attn-4"
"""The name on PyPI."""
MODULE: Final = "flash_attn.cute.interface"
_COMPILER: Final = "nvidia-cutlass-dsl"

_ABLE = (Feature.VARLEN, Feature.SOFTCAP, Feature.WINDOW, Feature.SINKS)
_MOST_HEAD_DIM = 256


class FlashAttention4(Peer):
    """The package's functions for padded and for packed sequences, which compile a kernel for each kind of call.

    Rows behind the last packed sequence are left as they are.
    """

    variant = FA4
    compiles = True

    def why_not(self, problem: Problem, *tensors: Tensor) -> str | None:
        """What it cannot do; None if it can run the problem.

        The shapes that its kernels for one GPU or another refuse beyond that, the package says when it is called.
        """
        if problem.is_empty:
            return "there is no query or no key"
        unable = [feature.value for feature in problem.features if feature not in _ABLE]
        if unable:
            return f"FlashAttention-4 is not asked for {unable[0]}"
        if problem.dtype not in (DType.BF16, DType.FP16):
            return f"FlashAttention-4 takes bf16 and fp16, not {problem.dtype.value}"
        head_dims = (problem.head_dim, problem.head_dim_v)
        if any(head_dim % 8 or head_dim > _MOST_HEAD_DIM for head_dim in head_dims):
            return f"FlashAttention-4 takes head dims up to {_MOST_HEAD_DIM} in steps of 8, not {max(head_dims)}"
        if problem.alignment is Alignment.TOP_LEFT and (problem.causal or problem.has_window):
            return "FlashAttention-4 aligns masks and windows bottom-right"
        reason = _why_not_importable()
        if reason is None and tensors and (_capability(tensors[0]) or (0, 0)) < (9, 0):
            return "FlashAttention-4 is compared on NVIDIA GPUs from sm_90 on"
        return reason

    def attend(self, problem: Problem, q: Tensor, scale: float, extras: Extras) -> Attend:
        """The package's function with everything bound but q, k and v."""
        options: dict[str, Any] = {
            "softmax_scale": scale,
            "causal": problem.causal,
            "window_size": (problem.window_left, problem.window_right),
            "learnable_sink": extras.sinks,
            "softcap": problem.softcap,
            "deterministic": problem.deterministic,
        }
        module = importlib.import_module(MODULE)
        if not problem.is_varlen:
            return functools.partial(_padded, module.flash_attn_func, options)
        for name, borders in (("q", extras.cu_seqlens_q), ("k", extras.cu_seqlens_k)):
            assert borders is not None
            options |= {f"cu_seqlens_{name}": borders, f"max_seqlen_{name}": int(borders.diff().max())}
        return functools.partial(_packed, module.flash_attn_varlen_func, options)


def version() -> str:
    """Of the installed package and of the compiler that it runs, such as ``4.0.0 (nvidia-cutlass-dsl 4.6.2)``.

    Empty where the package is not installed as one.
    """
    own, compiler = (_version_of(distribution) for distribution in (PACKAGE, _COMPILER))
    return f"{own} ({_COMPILER} {compiler})" if own and compiler else own


def _version_of(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _padded(function: Callable[..., Any], options: dict[str, Any], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Its tensors are [B, S, H, D]; the views have the strides of ours, which it takes."""
    return _output(function(*(tensor.transpose(1, 2) for tensor in (q, k, v)), **options)).transpose(1, 2)


def _packed(function: Callable[..., Any], options: dict[str, Any], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Its packed tensors are [T, H, D]."""
    made = _output(function(*(tensor[0].transpose(0, 1) for tensor in (q, k, v)), **options))
    return made.transpose(0, 1).unsqueeze(0)


def _output(made: Tensor | tuple[Tensor, ...]) -> Tensor:
    """The output alone: an LSE, or None in its place, follows it."""
    return made if isinstance(made, Tensor) else made[0]


def _capability(tensor: Tensor) -> tuple[int, int] | None:
    """Of the NVIDIA GPU that a tensor lies on; None elsewhere."""
    if not tensor.is_cuda or torch.version.hip is not None:
        return None
    return torch.cuda.get_device_capability(tensor.device)


def _why_not_importable() -> str | None:
    try:
        importlib.import_module(MODULE)
    except ImportError as error:
        return f"{MODULE} cannot be imported ({error}): pip install {PACKAGE}"
    except Exception as error:
        # It loads a compiler and its libraries, each of which may fail in a way of its own.
        return f"{MODULE} fails when imported ({type(error).__name__}: {error}): check what {PACKAGE} needs"
    return None
