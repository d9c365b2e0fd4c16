"""What a call of attention asks for: checked, in one place, before anything is launched."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from autoflash.dispatch.ladder import VendorPolicy
from autoflash.errors import InvalidProblemError, UnsupportedError
from autoflash.problem import Alignment, DType, Mask, Pass, Problem

DTYPES: dict[torch.dtype, DType] = {
    torch.float16: DType.FP16,
    torch.bfloat16: DType.BF16,
    torch.float32: DType.FP32,
}
MASKS = ("full", "bottom_right", "top_left")
LAYOUTS = ("bhsd", "bshd")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The arguments that say how, apart from the tensors.

    Attributes:
        mask: One of ``full``, ``bottom_right``, ``top_left``: what ``causal`` said.
        scale: Factor of the scores.
        deterministic: The backward must give the same bits on every launch.
        vendor: Whether vendor kernels may serve.
        return_lse: The caller wants the log-sum-exp.
        training: A gradient will be asked for.
    """

    mask: str
    scale: float
    deterministic: bool
    vendor: VendorPolicy
    return_lse: bool
    training: bool


def refuse_unbuilt(**arguments: object) -> None:
    """Refuse arguments whose meaning is settled but which no kernel here computes yet.

    Raises:
        UnsupportedError: naming the first argument that is set.
    """
    for name, value in arguments.items():
        if value is not None and not (name == "dropout_p" and value == 0.0):
            raise UnsupportedError(
                f"{name} is not built yet: autoflash.attention() takes causal, scale, layout, return_lse, "
                "deterministic and vendor. Leave it out, or use torch's scaled_dot_product_attention"
            )


def mask_of(causal: bool | str) -> str:
    """The mask that ``causal`` names.

    Raises:
        InvalidProblemError: for anything but a bool, ``bottom_right`` or ``top_left``.
    """
    if causal is False:
        return "full"
    if causal is True:
        return "bottom_right"
    if causal in ("bottom_right", "top_left"):
        return str(causal)
    raise InvalidProblemError(f"causal must be True, False, 'bottom_right' or 'top_left', got {causal!r}")


def scale_of(scale: float | None, head_dim: int) -> float:
    """The factor of the scores; by default 1 / sqrt(D).

    Raises:
        InvalidProblemError: for a scale that is not a finite number.
    """
    if scale is None:
        return 1.0 / math.sqrt(head_dim) if head_dim else 1.0
    if not isinstance(scale, (int, float)) or not math.isfinite(scale):
        raise InvalidProblemError(f"scale must be a finite number or None, got {scale!r}")
    return float(scale)


def policy_of(vendor: str) -> VendorPolicy:
    """The vendor policy of that name.

    Raises:
        InvalidProblemError: for an unknown name.
    """
    try:
        return VendorPolicy(vendor)
    except ValueError:
        raise InvalidProblemError(f"vendor must be 'allow', 'never' or 'only', got {vendor!r}") from None


def check_layout(layout: str) -> None:
    """Refuse an unknown layout.

    Raises:
        InvalidProblemError: for anything but ``bhsd`` and ``bshd``.
    """
    if layout not in LAYOUTS:
        raise InvalidProblemError(f"layout must be 'bhsd' or 'bshd', got {layout!r}")


def check_tensors(query: Tensor, key: Tensor, value: Tensor, layout: str = "bhsd") -> None:
    """Refuse tensors that do not fit together, in one sentence that names the offending sizes.

    Args:
        query: [B, H, M, D], or [B, M, H, D] with layout ``bshd``.
        key: [B, H_KV, N, D] likewise.
        value: [B, H_KV, N, D_V] likewise.
        layout: Names the order for the messages.

    Raises:
        InvalidProblemError: for shapes, dtypes or devices that do not fit together.
        UnsupportedError: for a dtype or a kind of device that no kernel here serves.
    """
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if not isinstance(tensor, Tensor):
            raise InvalidProblemError(f"{name} must be a tensor, got {type(tensor).__name__}")
        if tensor.ndim != 4:
            raise InvalidProblemError(
                f"{name} must have 4 dimensions ({', '.join(layout.upper())}), got shape {tuple(tensor.shape)}"
            )
        if tensor.is_sparse or tensor.is_nested:
            raise UnsupportedError(f"{name} must be a dense strided tensor")
    if not query.dtype == key.dtype == value.dtype:
        raise InvalidProblemError(
            f"query, key and value must have one dtype, got {query.dtype}, {key.dtype} and {value.dtype}: "
            "convert them, or call under torch.autocast"
        )
    if query.dtype not in DTYPES:
        raise UnsupportedError(
            f"dtype {query.dtype} is not supported: use float16, bfloat16 or float32 "
            "(autoflash.reference.attention computes in float64)"
        )
    if not query.device == key.device == value.device:
        raise InvalidProblemError(
            f"query, key and value must be on one device, got {query.device}, {key.device} and {value.device}"
        )
    heads_at, length_at = (1, 2) if layout == "bhsd" else (2, 1)
    q, k, v = query.shape, key.shape, value.shape
    if not q[0] == k[0] == v[0]:
        raise InvalidProblemError(f"query, key and value must have one batch size, got {q[0]}, {k[0]} and {v[0]}")
    if k[heads_at] != v[heads_at]:
        raise InvalidProblemError(f"key and value must have one number of heads, got {k[heads_at]} and {v[heads_at]}")
    if k[length_at] != v[length_at]:
        raise InvalidProblemError(f"key and value must have one length, got {k[length_at]} and {v[length_at]}")
    if q[3] != k[3]:
        raise InvalidProblemError(f"query and key must have one head dimension, got {q[3]} and {k[3]}")
    if min(q[heads_at], k[heads_at], q[3], v[3]) < 1:
        raise InvalidProblemError("query, key and value must have at least one head and one element per head")
    if q[heads_at] % k[heads_at]:
        raise InvalidProblemError(
            f"query heads must be a multiple of key/value heads, got {q[heads_at]} and {k[heads_at]}"
        )


def problem_of_tensors(q: Tensor, k: Tensor, v: Tensor, options: Options, op: Pass) -> Problem:
    """The problem that checked tensors of layout [B, H, S, D] pose."""
    top_left = options.mask == "top_left"
    return Problem(
        op=op,
        dtype=DTYPES[q.dtype],
        head_dim=q.shape[3],
        head_dim_v=v.shape[3],
        batch=q.shape[0],
        heads=q.shape[1],
        kv_heads=k.shape[1],
        seqlen_q=q.shape[2],
        seqlen_k=k.shape[2],
        mask=Mask.FULL if options.mask == "full" else Mask.CAUSAL,
        alignment=Alignment.TOP_LEFT if top_left else Alignment.BOTTOM_RIGHT,
        deterministic=options.deterministic,
        tf32=wants_tf32(q),
    )


def wants_tf32(tensor: Tensor) -> bool:
    """Whether torch was told that float32 products on this GPU may be computed in TF32."""
    return tensor.is_cuda and tensor.dtype is torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32"
