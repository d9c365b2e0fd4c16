"""The specification of attention: what every kernel is compared with. Float64, plain formulas, linear memory.

A score is scale * (q . k); then softcap * tanh(score / softcap); then what a score_mod makes of it; then ALiBi, bias
and float mask are added; then it is hidden where a bool mask or a mask_mod is False, or the key lies outside the causal
mask or the window. Query i stands at i + Sk - Sq among the keys (bottom-right), or at i (top-left). A sink is one more
score of a row, without a key: the log-sum-exp contains it. A row that sees no key has output 0, log-sum-exp -inf (or
its sink) and zero gradients. Dropout comes after the softmax; the log-sum-exp knows nothing of it.
"""

from __future__ import annotations

from typing import Literal, overload

from torch import Tensor

from autoflash.errors import InvalidProblemError
from autoflash.evaluate import exact, yardstick
from autoflash.evaluate.modifiers import Modifiers, Params, Source
from autoflash.evaluate.philox import Rng, dropout_keep
from autoflash.evaluate.semantics import Causal, Semantics, Window
from autoflash.runtime.executable import TermGradients

__all__ = [
    "Causal",
    "Rng",
    "Window",
    "attention",
    "attention_varlen",
    "dropout_keep",
    "gradients",
    "gradients_varlen",
    "plain",
    "term_gradients",
    "term_gradients_varlen",
]

Triple = tuple[Tensor, Tensor, Tensor]


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: Causal = ...,
    scale: float | None = ...,
    window: Window = ...,
    softcap: float | None = ...,
    mask: Tensor | None = ...,
    bias: Tensor | None = ...,
    alibi_slopes: Tensor | None = ...,
    sinks: Tensor | None = ...,
    score_mod: Source = ...,
    mask_mod: Source = ...,
    score_params: Params = ...,
    dropout_p: float = ...,
    rng: Rng | None = ...,
    return_lse: Literal[False] = ...,
) -> Tensor: ...
@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: Causal = ...,
    scale: float | None = ...,
    window: Window = ...,
    softcap: float | None = ...,
    mask: Tensor | None = ...,
    bias: Tensor | None = ...,
    alibi_slopes: Tensor | None = ...,
    sinks: Tensor | None = ...,
    score_mod: Source = ...,
    mask_mod: Source = ...,
    score_params: Params = ...,
    dropout_p: float = ...,
    rng: Rng | None = ...,
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: Causal = False,
    scale: float | None = None,
    window: Window = None,
    softcap: float | None = 0.0,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    score_mod: Source = None,
    mask_mod: Source = None,
    score_params: Params = None,
    dropout_p: float = 0.0,
    rng: Rng | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact attention, computed in float64 from inputs of any dtype.

    Args:
        q: [B, H, M, D].
        k: [B, H_KV, N, D], where H is a multiple of H_KV.
        v: [B, H_KV, N, D_V].
        causal: False, ``"bottom_right"`` (the same as True) or ``"top_left"``.
        scale: Factor of the scores; 1/sqrt(D) by default.
        window: How many keys a query sees left and right of its position, both included; None or -1 has no bound.
        softcap: Bound that the scores approach; 0 or None for none.
        mask: Broadcastable to [B, H, M, N]: bool (True takes part), or numbers that are added to the scores.
        bias: As a mask of numbers, but with a gradient.
        alibi_slopes: [H] or [B, H]: slope * |position of the query - key| is taken from the scores.
        sinks: A score of each head without a key, [H]: it takes its share of the softmax, and is in the log-sum-exp.
        score_mod: An expression, as text or a lambda, that gives what takes the place of a score; see
            :mod:`autoflash.expression`.
        mask_mod: An expression that says whether a key takes part.
        score_params: Numbers and tensors that they read, by name.
        dropout_p: Share of the probabilities that are dropped.
        rng: Seed and offset of the dropout, [2] int64 or two numbers.
        return_lse: Also return the natural log of the sum of exponentials of each row.

    Returns:
        The output [B, H, M, D_V] and, if asked, the log-sum-exp [B, H, M]; both float64.

    Raises:
        InvalidProblemError: if the shapes do not belong together, or an argument means nothing.
        ValueError: if ``causal`` names no alignment.
    """
    modifiers = Modifiers.of_call(score_mod, mask_mod, score_params, q.device)
    semantics = _semantics(
        q, k, v, causal, scale, window, softcap, mask, bias, alibi_slopes, sinks, modifiers, dropout_p, rng
    )
    out, lse = exact.forward(q, v, exact.tiles(q, k, semantics))
    return (out, lse) if return_lse else out


def gradients(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    dlse: Tensor | None = None,
    *,
    causal: Causal = False,
    scale: float | None = None,
    window: Window = None,
    softcap: float | None = 0.0,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    score_mod: Source = None,
    mask_mod: Source = None,
    score_params: Params = None,
    dropout_p: float = 0.0,
    rng: Rng | None = None,
) -> Triple:
    """Exact gradients of :func:`attention` by q, k and v, in float64.

    ``dout`` [B, H, M, D_V] is the gradient of the output and ``dlse`` [B, H, M] that of the log-sum-exp, if it was
    used; the rest is as in :func:`attention`. A mask has no gradient; those of terms are :func:`term_gradients`.

    Returns:
        dq, dk and dv in the shapes of q, k and v; those of shared key/value heads are summed over their query heads.
    """
    modifiers = Modifiers.of_call(score_mod, mask_mod, score_params, q.device)
    semantics = _semantics(
        q, k, v, causal, scale, window, softcap, mask, bias, alibi_slopes, sinks, modifiers, dropout_p, rng
    )
    return exact.backward(q, k, v, dout, dlse, semantics.scale, exact.tiles(q, k, semantics))


def term_gradients(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    dlse: Tensor | None = None,
    *,
    causal: Causal = False,
    scale: float | None = None,
    window: Window = None,
    softcap: float | None = 0.0,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    score_mod: Source = None,
    mask_mod: Source = None,
    score_params: Params = None,
    dropout_p: float = 0.0,
    rng: Rng | None = None,
) -> TermGradients:
    """As :func:`gradients`, by the terms that are given: a tuple with the name of each, in its shape; else None."""
    modifiers = Modifiers.of_call(score_mod, mask_mod, score_params, q.device)
    semantics = _semantics(
        q, k, v, causal, scale, window, softcap, mask, bias, alibi_slopes, sinks, modifiers, dropout_p, rng
    )
    made = exact.term_gradients(q, v, dout, dlse, semantics, exact.tiles(q, k, semantics))
    given = {"bias": bias, "alibi_slopes": alibi_slopes}
    return _in_shape(made, {name: term for name, term in given.items() if term is not None})


@overload
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    causal: Causal = ...,
    scale: float | None = ...,
    window: Window = ...,
    softcap: float | None = ...,
    alibi_slopes: Tensor | None = ...,
    sinks: Tensor | None = ...,
    dropout_p: float = ...,
    rng: Rng | None = ...,
    return_lse: Literal[False] = ...,
) -> Tensor: ...
@overload
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    causal: Causal = ...,
    scale: float | None = ...,
    window: Window = ...,
    softcap: float | None = ...,
    alibi_slopes: Tensor | None = ...,
    sinks: Tensor | None = ...,
    dropout_p: float = ...,
    rng: Rng | None = ...,
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    causal: Causal = False,
    scale: float | None = None,
    window: Window = None,
    softcap: float | None = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    rng: Rng | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """:func:`attention` of each of several sequences, packed one after the other.

    Args:
        q: [T, H, D].
        k: [T_K, H_KV, D].
        v: [T_K, H_KV, D_V].
        cu_seqlens_q: Where the sequences' queries begin, and the end of the last, [B + 1].
        cu_seqlens_k: Likewise of keys and values.
        causal: As for one sequence: each has a position of its own for its first query.
        scale: As in :func:`attention`, and so are the others. A dropout takes the sequence's number for the batch.
        window: See there.
        softcap: See there.
        alibi_slopes: See there; B are the sequences.
        sinks: See there.
        dropout_p: See there.
        rng: See there.
        return_lse: See there.

    Returns:
        The output [T, H, D_V] and, if asked, the log-sum-exp [H, T]. Rows behind the last sequence get 0 and -inf.
    """
    packed = _packed(q, k, v)
    semantics = _semantics(
        *packed, causal, scale, window, softcap, None, None, alibi_slopes, sinks, None, dropout_p, rng
    ).packed(cu_seqlens_q, cu_seqlens_k)
    out, lse = exact.forward(packed[0], packed[2], exact.tiles(*packed[:2], semantics))
    return (_unpacked(out), lse[0]) if return_lse else _unpacked(out)


def gradients_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    dlse: Tensor | None = None,
    *,
    causal: Causal = False,
    scale: float | None = None,
    window: Window = None,
    softcap: float | None = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    rng: Rng | None = None,
) -> Triple:
    """Exact gradients of :func:`attention_varlen`: dq, dk, dv in the shapes of q, k, v. ``dlse`` is [H, T]."""
    packed = _packed(q, k, v)
    semantics = _semantics(
        *packed, causal, scale, window, softcap, None, None, alibi_slopes, sinks, None, dropout_p, rng
    ).packed(cu_seqlens_q, cu_seqlens_k)
    douts, dlses = dout.transpose(0, 1)[None], None if dlse is None else dlse[None]
    tiles = exact.tiles(*packed[:2], semantics)
    dq, dk, dv = exact.backward(*packed, douts, dlses, semantics.scale, tiles)
    return _unpacked(dq), _unpacked(dk), _unpacked(dv)


def term_gradients_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    dlse: Tensor | None = None,
    *,
    causal: Causal = False,
    scale: float | None = None,
    window: Window = None,
    softcap: float | None = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    rng: Rng | None = None,
) -> TermGradients:
    """As :func:`gradients_varlen`, by the terms that are given. ``dlse`` is [H, T]."""
    packed = _packed(q, k, v)
    semantics = _semantics(
        *packed, causal, scale, window, softcap, None, None, alibi_slopes, sinks, None, dropout_p, rng
    ).packed(cu_seqlens_q, cu_seqlens_k)
    douts, dlses = dout.transpose(0, 1)[None], None if dlse is None else dlse[None]
    made = exact.term_gradients(packed[0], packed[2], douts, dlses, semantics, exact.tiles(*packed[:2], semantics))
    return _in_shape(made, {} if alibi_slopes is None else {"alibi_slopes": alibi_slopes})


def plain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: Causal = False,
    scale: float | None = None,
    window: Window = None,
    softcap: float | None = 0.0,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    score_mod: Source = None,
    mask_mod: Source = None,
    score_params: Params = None,
    dropout_p: float = 0.0,
    rng: Rng | None = None,
) -> tuple[Tensor, Tensor]:
    """:func:`attention` as a user would write it in torch: differentiable, each step in the dtype of the inputs.

    Returns:
        The output in q's dtype, and the log-sum-exp [B, H, M] in float32.
    """
    modifiers = Modifiers.of_call(score_mod, mask_mod, score_params, q.device)
    semantics = _semantics(
        q, k, v, causal, scale, window, softcap, mask, bias, alibi_slopes, sinks, modifiers, dropout_p, rng
    )
    return yardstick.plain(q, k, v, semantics)


def _in_shape(made: TermGradients, given: dict[str, Tensor]) -> TermGradients:
    """The gradients in the shapes of the terms as they were given."""
    return made._replace(**{name: getattr(made, name).view(term.shape) for name, term in given.items()})


def _semantics(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: Causal,
    scale: float | None,
    window: Window,
    softcap: float | None,
    mask: Tensor | None,
    bias: Tensor | None,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    modifiers: Modifiers | None,
    dropout_p: float,
    rng: Rng | None,
) -> Semantics:
    """What the arguments of these functions mean, for tensors whose shapes belong together."""
    shapes = f"q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}"
    if not q.dim() == k.dim() == v.dim() == 4:
        raise InvalidProblemError(f"q, k and v must have four dimensions [B, H, S, D], got {shapes}")
    if k.shape[:3] != v.shape[:3] or q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise InvalidProblemError(f"batch, key/value heads, key length and head_dim must agree, got {shapes}")
    if q.shape[1] % k.shape[1]:
        raise InvalidProblemError(f"query heads must be a multiple of key/value heads, got {shapes}")
    return Semantics.of(
        q,
        k,
        causal=causal,
        scale=scale,
        window=window,
        softcap=softcap,
        mask=mask,
        bias=bias,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        modifiers=modifiers,
        dropout_p=dropout_p,
        rng=rng,
    )


def _packed(q: Tensor, k: Tensor, v: Tensor) -> Triple:
    """[T, H, D] -> [1, H, T, D]."""
    if not q.dim() == k.dim() == v.dim() == 3:
        shapes = f"q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}"
        raise InvalidProblemError(f"packed q, k and v must have three dimensions [T, H, D], got {shapes}")
    return q.transpose(0, 1)[None], k.transpose(0, 1)[None], v.transpose(0, 1)[None]


def _unpacked(rows: Tensor) -> Tensor:
    """[1, H, T, D] -> [T, H, D]."""
    return rows[0].transpose(0, 1)
