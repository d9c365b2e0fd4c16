"""Attention, dense and packed. A plain eager call of known shape is one dictionary lookup and a launch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter

from autoflash.arguments import (
    Options,
    autocast,
    check_layout,
    check_tensors,
    draw_rng,
    dropout_of,
    heads_first,
    mask_of,
    options_of,
    scale_of,
    softcap_of,
    wants_tf32,
    window_of,
)
from autoflash.autograd import NO_FORWARD_MODE
from autoflash.calls import Pair
from autoflash.errors import UnsupportedError
from autoflash.extras import (
    asks_for,
    asks_for_gradients,
    asks_for_params,
    dense_extras,
    longest_of,
    packed,
    packed_extras,
)
from autoflash.ops import CALLS, Transformable, call_key, call_key_of
from autoflash.runtime.block_mask import BlockMask, beside_blocks
from autoflash.runtime.executable import NO_EXTRAS, SINGLE, Extras

_PREPARED, _LANES = CALLS.prepared, CALLS.lanes
_PLAIN = frozenset((Tensor, Parameter))

# Read on every call: each costs a tenth of a microsecond here, several times that through torch's public wrappers.
_is_grad_enabled = torch.is_grad_enabled
_is_autocast_on = torch._C._is_any_autocast_enabled
_functorch_level = torch._C._functorch.peek_interpreter_stack
_dispatch_modes = torch._C._len_torch_dispatch_stack
_is_deterministic = torch.are_deterministic_algorithms_enabled
_is_compiling = torch.compiler.is_compiling


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    causal: bool | str = False,
    window: tuple[int | None, int | None] | None = None,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    score_mod: str | Callable[..., object] | None = None,
    mask_mod: str | Callable[..., object] | None = None,
    score_params: Mapping[str, Tensor | float] | None = None,
    block_mask: BlockMask | None = None,
    dropout_p: float = 0.0,
    scale: float | None = None,
    layout: str = "bhsd",
    return_lse: bool = False,
    deterministic: bool | None = None,
    vendor: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Scaled dot-product attention by the best kernel that is known for this device.

    softmax(query @ key^T * scale + bias + mask) @ value, exactly. A query that sees no key gives 0, an LSE of -inf (or
    its head's sink) and no gradient. Where several arguments hide keys, a key takes part that none of them hides.
    Differentiable once, in eager mode and under ``torch.compile``.

    Args:
        query: [B, H, M, D] in float16, bfloat16 or float32, with any strides.
        key: [B, H_KV, N, D]; H is a multiple of H_KV.
        value: [B, H_KV, N, D_V].
        causal: True or ``"bottom_right"``: query i stands at key i + N - M and sees the keys up to there.
            ``"top_left"``: it stands at key i, as ``is_causal`` of torch's scaled_dot_product_attention has it.
        window: (left, right): a query sees so many keys before and behind the one that it stands at, and that one; None
            or -1 is no bound on that side. Without ``causal``, it stands as with ``causal=True``.
        mask: Broadcastable to (B, H, M, N), whatever the layout of the others. bool: True takes part (so it is in
            torch's function too, and the contrary in torch.nn.MultiheadAttention). float16, bfloat16 or float32: added
            to the scores, after the softcap; it gets no gradient.
        bias: Broadcastable to (B, H, M, N) likewise, in float16, bfloat16 or float32, whatever the type of the others:
            added to the scores as a mask is, with a gradient, in its own type and shape. What is broadcast is never
            copied, and its gradient is summed up in float32; an expanded tensor gets one of its expanded shape.
        alibi_slopes: [H] or [B, H], in any floating dtype: slope * |position of the query - key| is taken from the
            scores in float32, after the softcap. A query stands where a causal mask would have it. It has a gradient.
        softcap: Scores become softcap * tanh(score / softcap); None or 0 leaves them alone.
        sinks: A score of each query head that has no key, [H], in any floating dtype: the probabilities of a row and
            that of its sink add up to 1, and the LSE contains it. It has a gradient.
        score_mod: What takes the place of each score, after the softcap: an expression as text, such as
            ``"score - slopes[h] * abs(q_idx - kv_idx)"``, or a lambda of (score, b, h, q_idx, kv_idx) and parameters
            whose text is one; :mod:`autoflash.expression` says what it may hold. h is the query head, q_idx = i and
            kv_idx = j the plain indices, wherever the query stands. -inf hides a key. It is part of the kernel.
        mask_mod: Which keys take part, beside all that hides others: an expression likewise, without ``score``, that is
            a truth, such as ``"doc[b, q_idx] == doc[b, kv_idx]"``.
        score_params: What both read, by name: numbers, truths, and tensors of rank 0 to 4, floating, bool or int32 (or
            less); an element outside a tensor is 0. Floating tensors get a gradient, as far as a score_mod reads them.
        block_mask: Which blocks of pairs are visited at all, and what hides pairs within them, as
            :func:`autoflash.block_mask` makes of a mask_mod and :meth:`autoflash.BlockMask.from_blocks` of bool blocks.
        dropout_p: Share of the probabilities that are dropped, 0 <= p < 1; the others are divided by 1 - p. Which ones
            follows from torch's generator of query's device, and the LSE does not know of it.
        scale: Factor of the scores; None is 1 / sqrt(D).
        layout: ``"bhsd"``, or ``"bshd"`` for tensors (and a result) of [B, S, H, D].
        return_lse: Also give the log-sum-exp of the scores: natural log, float32, [B, H, M]. It has a gradient.
        deterministic: Demand a backward that gives the same bits every time; None follows
            ``torch.use_deterministic_algorithms``.
        vendor: ``"allow"`` PyTorch's own kernels where they are faster, or nothing was tuned; ``"never"``;
            or ``"only"`` those. None is ``AUTOFLASH_VENDOR``, or else ``"allow"``.

    Returns:
        The output, [B, H, M, D_V] in query's dtype and memory order, or the output and the LSE.

    Raises:
        InvalidProblemError: (a ValueError) for arguments that do not fit together.
        UnsupportedError: (a NotImplementedError) for an argument that is not built yet, by name.
        NoKernelError: (a RuntimeError) where no kernel may run, as an unloaded one in a CUDA-graph capture.
    """
    is_featured = not (
        window is None
        and mask is None
        and softcap is None
        and alibi_slopes is None
        and bias is None
        and sinks is None
        and score_mod is None
        and mask_mod is None
        and score_params is None
        and block_mask is None
        and dropout_p == 0.0
    )
    if is_featured or _is_autocast_on() or _is_special(query, key, value):
        return _in_full(
            query,
            key,
            value,
            causal=causal,
            window=window,
            mask=mask,
            bias=bias,
            alibi_slopes=alibi_slopes,
            softcap=softcap,
            sinks=sinks,
            score_mod=score_mod,
            mask_mod=mask_mod,
            score_params=score_params,
            block_mask=block_mask,
            dropout_p=dropout_p,
            scale=scale,
            layout=layout,
            return_lse=return_lse,
            deterministic=deterministic,
            vendor=vendor,
        )
    training = _is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad)
    if deterministic is None:
        deterministic = _is_deterministic()
    how = (causal, scale, layout, return_lse, deterministic, vendor, training)
    known = call = None
    try:
        is_aligned = not (query.data_ptr() | key.data_ptr() | value.data_ptr()) & 15
        if is_aligned:
            for fits, prepared in _LANES.get(how, ()):
                if fits(query, key, value):
                    known = prepared
                    break
        # What torch has yet to negate, as the imaginary part of a conjugate, its own kernels alone know of.
        is_negated = known is None and (query.is_neg() or key.is_neg() or value.is_neg())
        if known is None and not is_negated:
            tf32 = query.dtype is torch.float32 and wants_tf32(query)
            call = call_key(query, key, value, *how, tf32)
            known = _PREPARED.get(call)
            if known is not None and is_aligned and query.dtype is not torch.float32:
                # Of float32, the key holds a setting of torch's that may change.
                CALLS.count(how, known, query, key, value)
    except (RuntimeError, TypeError):
        # Tensors without an address, and arguments without a hash, for the checks to refuse.
        _plain_options(query, key, value, *how)
        raise
    if known is None:
        options = _plain_options(query, key, value, *how)
        if query.is_meta or is_negated:
            return _in_full(
                query,
                key,
                value,
                causal=causal,
                scale=scale,
                layout=layout,
                return_lse=return_lse,
                deterministic=deterministic,
                vendor=vendor,
            )
        assert call is not None
        _, (out, lse) = CALLS.first(call, *heads_first(query, key, value, layout), options)
    elif layout == "bshd":
        out, lse = known.run(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2))
    else:
        out, lse = known.run(query, key, value)
    if layout == "bshd":
        out = out.transpose(1, 2)
    return (out, lse) if return_lse else out


def attention_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    causal: bool | str = False,
    window: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    scale: float | None = None,
    return_lse: bool = False,
    deterministic: bool | None = None,
    vendor: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """:func:`attention` of sequences of different lengths that are packed one after the other.

    Sequence b has the queries cu_seqlens_q[b] to cu_seqlens_q[b + 1] and sees only the keys cu_seqlens_k[b] to
    cu_seqlens_k[b + 1]. Sequences may be empty. Rows behind the last one give 0, an LSE of -inf and no gradient.

    Args:
        query: [T_Q, H, D] in float16, bfloat16 or float32, with any strides.
        key: [T_K, H_KV, D]; H is a multiple of H_KV.
        value: [T_K, H_KV, D_V].
        cu_seqlens_q: Where the sequences begin, and where the last one ends: [B + 1], int32 or int64, on the device of
            query. It begins with 0 and never falls; what lies on a GPU is not read by the host, and so not checked.
        cu_seqlens_k: Likewise for the keys.
        max_seqlen_q: Length of the longest sequence. Kernels that were tuned for it are chosen, and the result does not
            depend on it; None takes the mean.
        max_seqlen_k: Likewise for the keys.
        causal: As for :func:`attention`, like all that follow; positions are counted within a sequence.
        window: See there.
        softcap: See there.
        alibi_slopes: See there; B are the sequences.
        sinks: See there.
        dropout_p: See there.
        scale: See there.
        return_lse: Also give the log-sum-exp, float32, [H, T_Q].
        deterministic: See there.
        vendor: See there; no vendor kernel here takes packed sequences.

    Returns:
        The output, [T_Q, H, D_V] in query's dtype and memory order, or the output and the LSE.

    Raises:
        InvalidProblemError, UnsupportedError, NoKernelError: As :func:`attention`.
    """
    q, k, v = autocast(query, key, value) or (query, key, value)
    check_tensors(q, k, v, "thd")
    extras = packed_extras(q, k, cu_seqlens_q, cu_seqlens_k, alibi_slopes=alibi_slopes, sinks=sinks)
    dropout = dropout_of(dropout_p)
    if dropout:
        extras = extras._replace(rng=draw_rng(q))
    out, lse = _run(
        *packed(q, k, v),
        extras,
        causal=causal,
        window=window_of(window),
        softcap=softcap_of(softcap),
        dropout_p=dropout,
        scale=scale,
        return_lse=return_lse,
        deterministic=deterministic,
        vendor=vendor,
        longest=longest_of(max_seqlen_q, max_seqlen_k),
    )
    out = out.squeeze(0).transpose(0, 1)
    return (out, lse.squeeze(0)) if return_lse else out


def _plain_options(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    causal: bool | str,
    scale: float | None,
    layout: str,
    return_lse: bool,
    deterministic: bool,
    vendor: str | None,
    training: bool,
) -> Options:
    """The checked arguments of a plain call, for tensors of its layout."""
    check_layout(layout)
    check_tensors(query, key, value, layout)
    return options_of(query, causal, scale, return_lse, deterministic, vendor, training)


def _is_special(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether somebody traces, transforms or subclasses: then a call is more than its kernel."""
    return (
        _is_compiling()
        or type(query) not in _PLAIN
        or type(key) not in _PLAIN
        or type(value) not in _PLAIN
        or _functorch_level() is not None
        or bool(_dispatch_modes())
        or forward_ad._current_level >= 0
    )


def _refuse_tangents(*tensors: Tensor | None) -> None:
    """Kernels know nothing of forward-mode derivatives: what they give would have none, silently.

    Raises:
        UnsupportedError: where a tensor has a tangent.
    """
    if forward_ad._current_level < 0:
        return
    if any(tensor is not None and forward_ad.unpack_dual(tensor)[1] is not None for tensor in tensors):  # type: ignore[no-untyped-call]  # torch leaves it untyped
        raise UnsupportedError(NO_FORWARD_MODE)


def _in_full(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    causal: bool | str,
    scale: float | None,
    layout: str,
    return_lse: bool,
    deterministic: bool | None,
    vendor: str | None,
    window: object = None,
    mask: object = None,
    bias: object = None,
    alibi_slopes: object = None,
    softcap: object = None,
    sinks: object = None,
    score_mod: object = None,
    mask_mod: object = None,
    score_params: object = None,
    block_mask: object = None,
    dropout_p: object = 0.0,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention with features, or for whoever traces or transforms the call."""
    check_layout(layout)
    query, key, value = autocast(query, key, value) or (query, key, value)
    check_tensors(query, key, value, layout)
    q, k, v = heads_first(query, key, value, layout)
    dropout = dropout_of(dropout_p)
    blocks, modified = beside_blocks(block_mask, score_mod, mask_mod, score_params, q, k)
    extras = dense_extras(
        q, k, mask=mask, bias=bias, alibi_slopes=alibi_slopes, sinks=sinks, blocks=blocks, params=modified.params
    )
    if dropout:
        extras = extras._replace(rng=draw_rng(q))
    out, lse = _run(
        q,
        k,
        v,
        extras,
        causal=causal,
        window=window_of(window),
        softcap=softcap_of(softcap),
        dropout_p=dropout,
        scale=scale,
        return_lse=return_lse,
        deterministic=deterministic,
        vendor=vendor,
        score_mod=modified.score_mod,
        mask_mod=modified.mask_mod,
        block_size=0 if blocks is None else blocks.block_size,
    )
    if layout == "bshd":
        out = out.transpose(1, 2)
    return (out, lse) if return_lse else out


def _run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    extras: Extras,
    *,
    causal: bool | str,
    window: tuple[int, int],
    softcap: float,
    dropout_p: float,
    scale: float | None,
    return_lse: bool,
    deterministic: bool | None,
    vendor: str | None,
    longest: tuple[int, int] = (0, 0),
    score_mod: str = "",
    mask_mod: str = "",
    block_size: int = 0,
) -> Pair:
    """Out and LSE for checked tensors of layout [B, H, S, D], by the prepared call or the registered operator."""
    training = asks_for_gradients(q, k, v, extras)
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    if _is_special(q, k, v) or q.is_meta:
        operator: Callable[..., Pair] = torch.ops.autoflash.attention_forward
        # torch 2.10 traces no property of a named tuple, such as Extras.flat.
        single: list[Tensor | None] = [getattr(extras, name) for name in SINGLE]
        params = list(extras.params)
        if not torch.compiler.is_compiling() and _functorch_level() is not None:
            if score_mod or mask_mod:
                name = "score_mod" if score_mod else "mask_mod"
                raise UnsupportedError(f"{name} under the transforms of torch.func is not built: use torch.autograd")
            operator = Transformable.apply
        else:
            _refuse_tangents(q, k, v, *single, *params)
        how: tuple[object, ...] = (
            scale_of(scale, q.shape[3]),
            mask_of(causal),
            deterministic,
            vendor or "",
            return_lse,
            training,
        )
        how += (*window, softcap, dropout_p, *longest, block_size, score_mod, mask_mod)
        return operator(q, k, v, *single, params, *how)
    q, k, v = q.resolve_neg(), k.resolve_neg(), v.resolve_neg()
    if any(extra is not None and extra.is_neg() for extra in extras.flat):
        extras = Extras.of_flat([None if extra is None else extra.resolve_neg() for extra in extras.flat])
    options = options_of(
        q,
        causal,
        scale,
        return_lse,
        deterministic,
        vendor,
        training,
        window=window,
        softcap=softcap,
        alibi_gradient=asks_for(extras.alibi_slopes),
        bias_gradient=asks_for(extras.bias),
        dropout_p=dropout_p,
        sequences=extras.sequences,
        longest=longest,
        block_size=block_size,
        score_mod=score_mod,
        mask_mod=mask_mod,
        params_gradient=asks_for_params(score_mod, mask_mod, extras),
    )
    call = call_key_of(q, k, v, options, extras)
    known = _PREPARED.get(call)
    with torch.autocast(q.device.type, enabled=False) if _is_autocast_on() else contextlib.nullcontext():
        if known is None:
            return CALLS.first(call, q, k, v, options, extras)[1]
        return known.run(q, k, v) if extras is NO_EXTRAS else known.run(q, k, v, extras)
