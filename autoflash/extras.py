"""The tensors of a call beside query, key and value, as kernels take them: checked, and never copied without need."""

from __future__ import annotations

import itertools
from numbers import Integral

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from autoflash.arguments import DTYPES
from autoflash.calls import Triple
from autoflash.errors import InvalidProblemError
from autoflash.runtime.block_mask import BlockMask
from autoflash.runtime.executable import NO_EXTRAS, Extras
from autoflash.runtime.modifiers import has_gradients


def dense_extras(
    q: Tensor,
    k: Tensor,
    *,
    mask: object,
    bias: object,
    alibi_slopes: object,
    sinks: object,
    blocks: BlockMask | None,
    params: tuple[Tensor, ...],
) -> Extras:
    """What a call of :func:`autoflash.attention` has, dropout apart, for tensors of layout [B, H, S, D].

    Args:
        q: [B, H, M, D].
        k: [B, H_KV, N, D].
        mask: As the caller gave it, like the next three; None for none.
        bias: See there.
        alibi_slopes: See there.
        sinks: See there.
        blocks: Checked.
        params: Checked.

    Raises:
        InvalidProblemError: for what does not fit to the others.
    """
    if mask is bias is alibi_slopes is sinks is blocks is None and not params:
        return NO_EXTRAS
    return Extras(
        mask=None if mask is None else expanded_mask(mask, q, k),
        bias=None if bias is None else checked_bias(bias, q, k),
        alibi_slopes=None if alibi_slopes is None else checked_slopes(alibi_slopes, q, q.shape[0]),
        sinks=None if sinks is None else checked_sinks(sinks, q),
        query_blocks=None if blocks is None else blocks.lists.queries,
        key_blocks=None if blocks is None else blocks.lists.keys,
        params=params,
    )


def packed_extras(
    query: Tensor, key: Tensor, cu_seqlens_q: object, cu_seqlens_k: object, *, alibi_slopes: object, sinks: object
) -> Extras:
    """Likewise of :func:`autoflash.attention_varlen`, for packed tensors [T, H, D].

    Raises:
        InvalidProblemError: for offsets that are none, or that describe different numbers of sequences.
    """
    offsets_q = check_cu_seqlens("cu_seqlens_q", cu_seqlens_q, query)
    offsets_k = check_cu_seqlens("cu_seqlens_k", cu_seqlens_k, key)
    if offsets_q.shape != offsets_k.shape:
        raise InvalidProblemError(
            "cu_seqlens_q and cu_seqlens_k must describe as many sequences, got "
            f"{offsets_q.shape[0] - 1} and {offsets_k.shape[0] - 1}"
        )
    return Extras(
        cu_seqlens_q=offsets_q,
        cu_seqlens_k=offsets_k,
        alibi_slopes=None if alibi_slopes is None else checked_slopes(alibi_slopes, query, offsets_q.shape[0] - 1),
        sinks=None if sinks is None else checked_sinks(sinks, query),
    )


def asks_for_gradients(q: Tensor, k: Tensor, v: Tensor, extras: Extras) -> bool:
    """Whether autograd will want the gradient of one of these tensors."""
    return any(map(asks_for, (q, k, v, extras.sinks, extras.bias, extras.alibi_slopes, *extras.params)))


def asks_for(tensor: Tensor | None) -> bool:
    """Whether autograd will want its gradient."""
    return torch.is_grad_enabled() and tensor is not None and tensor.requires_grad


def asks_for_params(score_mod: str, mask_mod: str, extras: Extras) -> bool:
    """Whether autograd will want the gradient of a parameter of the score_mod."""
    if not extras.params or not torch.is_grad_enabled():
        return False
    return has_gradients(score_mod, mask_mod, [param.requires_grad for param in extras.params])


def longest_of(max_seqlen_q: int | None, max_seqlen_k: int | None) -> tuple[int, int]:
    """What the caller knows of the longest packed sequence; 0 for nothing.

    Raises:
        InvalidProblemError: for what is no length.
    """
    for name, longest in (("max_seqlen_q", max_seqlen_q), ("max_seqlen_k", max_seqlen_k)):
        if longest is not None and (not isinstance(longest, (int, Integral)) or longest < 0):
            raise InvalidProblemError(f"{name} must be None or a whole number that is not negative, got {longest!r}")
    return int(max_seqlen_q or 0), int(max_seqlen_k or 0)


def packed(query: Tensor, key: Tensor, value: Tensor) -> Triple:
    """Views [1, H, T, D] of packed tensors [T, H, D]."""
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (query, key, value))
    return q, k, v


def _check_place(name: str, tensor: Tensor, query: Tensor) -> None:
    if tensor.layout is not torch.strided or tensor.is_nested:
        raise InvalidProblemError(f"{name} must be a dense strided tensor, got layout {tensor.layout}")
    if tensor.device != query.device:
        raise InvalidProblemError(f"{name} must be on the device of query, got {tensor.device} and {query.device}")


def _has_values(tensor: Tensor) -> bool:
    """Whether it is more than the shape of one, as a fake tensor is, and what vmap maps over."""
    return not isinstance(tensor, FakeTensor) and not torch._C._functorch.is_batchedtensor(tensor)


def expanded_mask(mask: object, query: Tensor, key: Tensor) -> Tensor:
    """A mask as [B, H, M, N] without a copy, for query and key of layout [B, H, S, D].

    Raises:
        InvalidProblemError: for a mask that is no bool or floating tensor, lies elsewhere, cannot be broadcast, or
            wants a gradient.
    """
    if not isinstance(mask, Tensor):
        raise InvalidProblemError(f"mask must be a tensor or None, got {type(mask).__name__}")
    if mask.dtype is not torch.bool and mask.dtype not in DTYPES:
        raise InvalidProblemError(
            "mask must be bool (True takes part) or float16, bfloat16 or float32 (added to the scores), got "
            f"{mask.dtype}: use mask.bool() if its elements say which keys take part"
        )
    _check_place("mask", mask, query)
    if mask.requires_grad and torch.is_grad_enabled():
        raise InvalidProblemError("mask has no gradient: pass it as bias, or give mask.detach()")
    return _of_rank_4("mask", mask, query, key).detach().expand(*query.shape[:3], key.shape[2])


def checked_slopes(slopes: object, query: Tensor, batch: int) -> Tensor:
    """Slopes of ALiBi as kernels read them, [B, H] or [1, H] float32, contiguous. Differentiable.

    Args:
        slopes: As the caller gave them: (H,) or (B, H), in any floating dtype.
        query: [B, H, S, D], or packed [T, H, D].
        batch: B; of packed sequences, their number.

    Raises:
        InvalidProblemError: for what is no floating tensor of such a shape on the device of query.
    """
    if not isinstance(slopes, Tensor):
        raise InvalidProblemError(f"alibi_slopes must be a tensor or None, got {type(slopes).__name__}")
    heads = query.shape[1]
    if not slopes.dtype.is_floating_point or tuple(slopes.shape) not in ((heads,), (batch, heads)):
        raise InvalidProblemError(
            f"alibi_slopes must be floating, of shape (H,) = ({heads},) or (B, H) = ({batch}, {heads}), got "
            f"{slopes.dtype} {tuple(slopes.shape)}"
        )
    _check_place("alibi_slopes", slopes, query)
    return slopes.to(torch.float32).contiguous().view(-1, heads)


def checked_bias(bias: object, query: Tensor, key: Tensor) -> Tensor:
    """A bias as a view of rank 4, each size of which is that of [B, H, M, N] or 1. Differentiable.

    For query and key of layout [B, H, S, D].

    Raises:
        InvalidProblemError: for what is no floating tensor on the device of query, or cannot be broadcast.
    """
    if not isinstance(bias, Tensor):
        raise InvalidProblemError(f"bias must be a tensor or None, got {type(bias).__name__}")
    if bias.dtype not in DTYPES:
        raise InvalidProblemError(f"bias must be float16, bfloat16 or float32, got {bias.dtype}")
    _check_place("bias", bias, query)
    return _of_rank_4("bias", bias, query, key)


def _of_rank_4(name: str, tensor: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """A view of rank 4 that can be broadcast to [B, H, M, N]."""
    shape = (query.shape[0], query.shape[1], query.shape[2], key.shape[2])
    given = (1,) * (4 - tensor.ndim) + tuple(tensor.shape)
    if tensor.ndim > 4 or any(size not in (1, full) for size, full in zip(given, shape, strict=False)):
        raise InvalidProblemError(
            f"{name} must be broadcastable to (B, H, Sq, Sk) = {tuple(shape)}, got shape {tuple(tensor.shape)}"
        )
    return tensor[(None,) * (4 - tensor.ndim)] if tensor.ndim < 4 else tensor


def checked_sinks(sinks: object, query: Tensor) -> Tensor:
    """Sinks as kernels read them, [H] float32, contiguous, for a query [B, H, S, D] or [T, H, D]. Differentiable.

    Raises:
        InvalidProblemError: for what is no floating tensor of that shape on the device of query.
    """
    if not isinstance(sinks, Tensor):
        raise InvalidProblemError(f"sinks must be a tensor or None, got {type(sinks).__name__}")
    if not sinks.dtype.is_floating_point or tuple(sinks.shape) != (query.shape[1],):
        raise InvalidProblemError(
            f"sinks must be floating, one for each query head: (H,) = ({query.shape[1]},), got {sinks.dtype} "
            f"{tuple(sinks.shape)}"
        )
    _check_place("sinks", sinks, query)
    return sinks.to(torch.float32).contiguous()


def check_cu_seqlens(name: str, cu_seqlens: object, like: Tensor) -> Tensor:
    """Where packed sequences begin, as kernels read it: [B + 1] int32, contiguous.

    What a CPU tensor holds is checked; of one on a GPU it is not, as that would wait for the GPU.

    Args:
        name: For the messages.
        cu_seqlens: As the caller gave it, int32 or int64.
        like: The packed tensor [T, H, D] that it describes.

    Raises:
        InvalidProblemError: for another type, shape or device, or for offsets that are none.
    """
    if not isinstance(cu_seqlens, Tensor):
        raise InvalidProblemError(f"{name} must be a tensor, got {type(cu_seqlens).__name__}")
    if cu_seqlens.dtype not in (torch.int32, torch.int64) or cu_seqlens.ndim != 1 or cu_seqlens.shape[0] < 1:
        raise InvalidProblemError(
            f"{name} must be int32 or int64 of shape (sequences + 1,), got {cu_seqlens.dtype} {tuple(cu_seqlens.shape)}"
        )
    _check_place(name, cu_seqlens, like)
    offsets = cu_seqlens.to(torch.int32).contiguous()
    if cu_seqlens.device.type == "cpu" and not torch.compiler.is_compiling() and _has_values(cu_seqlens):
        check_offsets(name, cu_seqlens, like.shape[0])
    return offsets


def check_offsets(name: str, offsets: Tensor, rows: int) -> None:
    """Refuse offsets on a CPU that do not describe sequences within so many rows.

    Raises:
        InvalidProblemError: with their values.
    """
    values = offsets.tolist()
    if values[0] != 0 or values[-1] > rows or any(a > b for a, b in itertools.pairwise(values)):
        raise InvalidProblemError(
            f"{name} must begin with 0, never fall, and end at most at the {rows} rows there are, "
            f"got {values if len(values) <= 16 else [*values[:8], '...', *values[-8:]]}"
        )
