"""What a call of attention asks for: checked, in one place, before anything is launched."""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Integral, Real

import torch
from torch import Tensor

from autoflash import paths
from autoflash.dispatch.ladder import VendorPolicy
from autoflash.errors import InvalidProblemError, UnsupportedError
from autoflash.problem import Alignment, DType, Mask, MaskTensor, Pass, Problem
from autoflash.runtime.executable import NO_EXTRAS, Extras

DTYPES: dict[torch.dtype, DType] = {
    torch.float16: DType.FP16,
    torch.bfloat16: DType.BF16,
    torch.float32: DType.FP32,
}
LAYOUTS = ("bhsd", "bshd")
UNBOUNDED = -1
"""A side of a window without a bound."""

_SEEDS = 2**62

# Where heads, sequence and elements are.
_AXES = {"bhsd": (1, 2, 3), "bshd": (2, 1, 3), "thd": (1, 0, 2)}


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
        window_left, window_right: How many keys before and behind its own position a query sees; -1 for all.
        softcap: Bound of the scores; 0 for none.
        block_size: Queries and keys of a block of the block mask; 0 without one.
        score_mod, mask_mod: Expressions as lines of the language; empty for none.
        params_gradient: A gradient of the score_mod's parameters will be asked for.
        alibi_gradient, bias_gradient: The gradient of the slopes, or of the bias, will be asked for.
        dropout_p: Share of the probabilities to drop.
        sequences: Number of packed sequences; None where nothing is packed.
        longest_q, longest_k: Length of the longest of them, as far as the caller knows; 0 if not.
    """

    mask: str
    scale: float
    deterministic: bool
    vendor: VendorPolicy
    return_lse: bool
    training: bool
    window_left: int = UNBOUNDED
    window_right: int = UNBOUNDED
    softcap: float = 0.0
    score_mod: str = ""
    mask_mod: str = ""
    params_gradient: bool = False
    alibi_gradient: bool = False
    bias_gradient: bool = False
    dropout_p: float = 0.0
    sequences: int | None = None
    longest_q: int = 0
    longest_k: int = 0
    block_size: int = 0


def options_of(
    query: Tensor,
    causal: bool | str,
    scale: float | None,
    return_lse: bool,
    deterministic: bool,
    vendor: str | None,
    training: bool,
    *,
    window: tuple[int, int] = (UNBOUNDED, UNBOUNDED),
    softcap: float = 0.0,
    alibi_gradient: bool = False,
    bias_gradient: bool = False,
    dropout_p: float = 0.0,
    sequences: int | None = None,
    longest: tuple[int, int] = (0, 0),
    block_size: int = 0,
    score_mod: str = "",
    mask_mod: str = "",
    params_gradient: bool = False,
) -> Options:
    """The arguments of a call as the dispatcher takes them."""
    return Options(
        mask=mask_of(causal),
        scale=scale_of(scale, query.shape[3]),
        deterministic=deterministic,
        vendor=policy_of(vendor or paths.vendor_policy()),
        return_lse=return_lse,
        training=training,
        window_left=window[0],
        window_right=window[1],
        softcap=softcap,
        alibi_gradient=alibi_gradient,
        bias_gradient=bias_gradient,
        dropout_p=dropout_p,
        sequences=sequences,
        longest_q=longest[0],
        longest_k=longest[1],
        block_size=block_size,
        score_mod=score_mod,
        mask_mod=mask_mod,
        params_gradient=params_gradient,
    )


def refuse_unbuilt(**arguments: object) -> None:
    """Refuse arguments whose meaning is settled but which no kernel here computes yet.

    Raises:
        UnsupportedError: naming the first argument that is set.
    """
    for name, value in arguments.items():
        if value is not None:
            raise UnsupportedError(
                f"{name} is not built yet: leave it out, or use torch's flex_attention, or its "
                "scaled_dot_product_attention with an attn_mask"
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
    return _number("scale", "a finite number or None", scale)


def window_of(window: object) -> tuple[int, int]:
    """The bounds of a window, -1 where there is none.

    Raises:
        InvalidProblemError: for anything but None and a pair of None, -1 and whole numbers from 0 on.
    """
    if window is None:
        return UNBOUNDED, UNBOUNDED
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        raise InvalidProblemError(f"window must be a pair (left, right) or None, got {window!r}")
    left, right = (UNBOUNDED if bound is None else bound for bound in window)
    for bound in (left, right):
        if isinstance(bound, bool) or not isinstance(bound, (int, Integral)) or bound < UNBOUNDED:
            raise InvalidProblemError(
                f"each side of window must be None, -1 (both unbounded) or a number of keys from 0 on, got {window!r}"
            )
    return int(left), int(right)


def softcap_of(softcap: object) -> float:
    """The bound of the scores; 0 for none.

    Raises:
        InvalidProblemError: for anything but None and a finite number from 0 on.
    """
    if softcap is None:
        return 0.0
    return _number("softcap", "a finite number from 0 (none) on", softcap, 0.0)


def dropout_of(dropout_p: object) -> float:
    """The share of the probabilities to drop.

    Raises:
        InvalidProblemError: for anything but a number from 0 on and below 1.
    """
    return _number("dropout_p", "a number from 0 on and below 1", dropout_p, 0.0, 1.0)


def _number(name: str, words: str, value: object, least: float = -math.inf, below: float = math.inf) -> float:
    """A finite number, of Python or of numpy, from ``least`` on and below ``below``.

    Raises:
        InvalidProblemError: for anything else.
    """
    if not isinstance(value, bool) and isinstance(value, (int, float, Real)):
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        # Comparisons that a NaN fails, and that torch.compile knows of numbers that it traces.
        if -math.inf < number and least <= number < below:
            return number
    raise InvalidProblemError(f"{name} must be {words}, got {value!r}")


def draw_rng(like: Tensor) -> Tensor:
    """Seed and offset for one call's dropout, from torch's own generator of the tensor's device, [2] int64.

    So ``torch.manual_seed`` sets them, two calls differ, a checkpoint recomputes with the same ones, and each replay of
    a CUDA graph draws new ones.
    """
    return torch.randint(_SEEDS, (2,), dtype=torch.int64, device=like.device)


def policy_of(vendor: str) -> VendorPolicy:
    """The vendor policy of that name.

    Raises:
        InvalidProblemError: for an unknown name.
    """
    try:
        return VendorPolicy(vendor)
    except ValueError:
        raise InvalidProblemError(f"vendor must be 'allow', 'never' or 'only', got {vendor!r}") from None


def autocast(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
    """The tensors in autocast's dtype; None where autocast is off for their device."""
    if not all(isinstance(tensor, Tensor) for tensor in (query, key, value)):
        # For check_tensors to refuse.
        return None
    kind = query.device.type
    # Of a meta tensor, torch refuses to say. (torch.amp.is_autocast_available knows, but torch 2.11 does not trace it.)
    if query.is_meta or not torch.is_autocast_enabled(kind):
        return None
    dtype = torch.get_autocast_dtype(kind)
    # Others are for check_tensors to refuse.
    q, k, v = (x.to(dtype) if x.dtype in DTYPES else x for x in (query, key, value))
    return q, k, v


def heads_first(query: Tensor, key: Tensor, value: Tensor, layout: str) -> tuple[Tensor, Tensor, Tensor]:
    """Views [B, H, S, D] of tensors of a layout."""
    if layout == "bhsd":
        return query, key, value
    return query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)


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
        query: [B, H, M, D], or [B, M, H, D] with layout ``bshd``, or packed [T, H, D] with layout ``thd``.
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
        if tensor.is_nested or tensor.layout is not torch.strided:
            raise UnsupportedError(
                f"{name} must be a dense strided tensor, got layout {tensor.layout}"
                f"{' (nested)' if tensor.is_nested else ''}: packed sequences go to autoflash.attention_varlen"
            )
        if tensor.ndim != len(layout):
            names = ", ".join(layout.upper())
            raise InvalidProblemError(
                f"{name} must have {len(layout)} dimensions ({names}), got shape {tuple(tensor.shape)}"
            )
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
    heads_at, length_at, width_at = _AXES[layout]
    q, k, v = query.shape, key.shape, value.shape
    if layout != "thd" and not q[0] == k[0] == v[0]:
        raise InvalidProblemError(f"query, key and value must have one batch size, got {q[0]}, {k[0]} and {v[0]}")
    if k[heads_at] != v[heads_at]:
        raise InvalidProblemError(f"key and value must have one number of heads, got {k[heads_at]} and {v[heads_at]}")
    if k[length_at] != v[length_at]:
        raise InvalidProblemError(f"key and value must have one length, got {k[length_at]} and {v[length_at]}")
    if q[width_at] != k[width_at]:
        raise InvalidProblemError(f"query and key must have one head dimension, got {q[width_at]} and {k[width_at]}")
    if min(q[heads_at], k[heads_at], q[width_at], v[width_at]) < 1:
        raise InvalidProblemError("query, key and value must have at least one head and one element per head")
    if q[heads_at] % k[heads_at]:
        raise InvalidProblemError(
            f"query heads must be a multiple of key/value heads, got {q[heads_at]} and {k[heads_at]}"
        )


def problem_of_tensors(
    q: Tensor, k: Tensor, v: Tensor, options: Options, op: Pass, extras: Extras = NO_EXTRAS
) -> Problem:
    """The problem that checked tensors of layout [B, H, S, D] pose, without bounds of a window that hide nothing."""
    packed = options.sequences is not None
    rows_q, rows_k, sequences = q.shape[2], k.shape[2], max(options.sequences or 0, 1)
    top_left = options.mask == "top_left"
    return Problem(
        op=op,
        dtype=DTYPES[q.dtype],
        head_dim=q.shape[3],
        head_dim_v=v.shape[3],
        batch=q.shape[0] if options.sequences is None else options.sequences,
        heads=q.shape[1],
        kv_heads=k.shape[1],
        seqlen_q=(options.longest_q or -(-rows_q // sequences)) if packed else rows_q,
        seqlen_k=(options.longest_k or -(-rows_k // sequences)) if packed else rows_k,
        mask=Mask.FULL if options.mask == "full" else Mask.CAUSAL,
        alignment=Alignment.TOP_LEFT if top_left else Alignment.BOTTOM_RIGHT,
        deterministic=options.deterministic,
        tf32=wants_tf32(q),
        window_left=None if options.window_left == UNBOUNDED else options.window_left,
        window_right=None if options.window_right == UNBOUNDED else options.window_right,
        softcap=options.softcap,
        score_mod=options.score_mod,
        mask_mod=options.mask_mod,
        params_gradient=options.params_gradient,
        block_size=options.block_size,
        mask_tensor=_kind_of(extras.mask),
        alibi=extras.alibi_slopes is not None,
        alibi_gradient=options.alibi_gradient,
        bias=extras.bias is not None,
        bias_gradient=options.bias_gradient,
        sinks=extras.sinks is not None,
        dropout_p=options.dropout_p,
        packed_q=rows_q if packed else None,
        packed_k=rows_k if packed else None,
    ).without_idle_bounds()


def _kind_of(mask: Tensor | None) -> MaskTensor:
    if mask is None:
        return MaskTensor.NONE
    return MaskTensor.BOOL if mask.dtype is torch.bool else MaskTensor.FLOAT


def wants_tf32(tensor: Tensor) -> bool:
    """Whether torch was told that float32 products on this GPU may be computed in TF32."""
    return tensor.is_cuda and tensor.dtype is torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32"
