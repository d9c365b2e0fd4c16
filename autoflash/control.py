"""What a process may ask of its dispatcher beside attention itself: explain, warm up, fix or forget its choices."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from autoflash import keys
from autoflash.arguments import (
    Options,
    autocast,
    check_layout,
    check_tensors,
    dropout_of,
    heads_first,
    options_of,
    problem_of_tensors,
    refuse_unbuilt,
    softcap_of,
    wants_tf32,
    window_of,
)
from autoflash.attention import attention, attention_varlen
from autoflash.calls import ladders
from autoflash.dispatch.explain import Explanation, PassExplanation, explain_pass
from autoflash.dispatch.ladder import Candidate
from autoflash.dispatch.resolve import Resolution
from autoflash.dispatch.table import load, load_decisions
from autoflash.errors import InvalidProblemError
from autoflash.extras import (
    asks_for,
    asks_for_gradients,
    asks_for_params,
    dense_extras,
    longest_of,
    packed,
    packed_extras,
)
from autoflash.ops import CALLS, call_key, call_key_of
from autoflash.problem import Pass
from autoflash.runtime.block_mask import BlockMask, beside_blocks
from autoflash.runtime.executable import Extras
from autoflash.variant import Family


def explain(
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
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    **unbuilt: object,
) -> Explanation:
    """Say which kernel :func:`attention` uses for these arguments, and why. Launches and compiles nothing.

    With ``cu_seqlens_q`` and ``cu_seqlens_k``, say so of :func:`attention_varlen`.

    Args:
        query: As for :func:`attention`, like all that follow. The backward is explained where one requires a gradient.
        key: See there.
        value: See there.
        causal: See there.
        window: See there.
        mask: See there.
        bias: See there.
        alibi_slopes: See there.
        softcap: See there.
        sinks: See there.
        score_mod: See there.
        mask_mod: See there.
        score_params: See there.
        block_mask: See there.
        dropout_p: See there.
        scale: See there.
        layout: See there.
        return_lse: See there.
        deterministic: See there.
        vendor: See there.
        cu_seqlens_q: As for :func:`attention_varlen`, like all that follow.
        cu_seqlens_k: See there.
        max_seqlen_q: See there.
        max_seqlen_k: See there.
        unbuilt: Arguments of :func:`attention` that are not built yet; refused by name.

    Raises:
        InvalidProblemError, UnsupportedError: As :func:`attention`.
    """
    refuse_unbuilt(**unbuilt)
    query, key, value = autocast(query, key, value) or (query, key, value)
    if cu_seqlens_q is not None or cu_seqlens_k is not None:
        _refuse_dense(mask=mask, bias=bias, score_mod=score_mod, mask_mod=mask_mod, block_mask=block_mask)
        check_tensors(query, key, value, "thd")
        q, k, v = packed(query, key, value)
        blocks, modified = beside_blocks(None, None, None, score_params, q, k)
        extras = packed_extras(query, key, cu_seqlens_q, cu_seqlens_k, alibi_slopes=alibi_slopes, sinks=sinks)
    else:
        check_layout(layout)
        check_tensors(query, key, value, layout)
        q, k, v = heads_first(query, key, value, layout)
        blocks, modified = beside_blocks(block_mask, score_mod, mask_mod, score_params, q, k)
        extras = dense_extras(
            q, k, mask=mask, bias=bias, alibi_slopes=alibi_slopes, sinks=sinks, blocks=blocks, params=modified.params
        )
    training = asks_for_gradients(q, k, v, extras)
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    options = options_of(
        q,
        causal,
        scale,
        return_lse,
        deterministic,
        vendor,
        training,
        window=window_of(window),
        softcap=softcap_of(softcap),
        alibi_gradient=asks_for(extras.alibi_slopes),
        bias_gradient=asks_for(extras.bias),
        dropout_p=dropout_of(dropout_p),
        sequences=extras.sequences,
        longest=longest_of(max_seqlen_q, max_seqlen_k),
        block_size=0 if blocks is None else blocks.block_size,
        score_mod=modified.score_mod,
        mask_mod=modified.mask_mod,
        params_gradient=asks_for_params(modified.score_mod, modified.mask_mod, extras),
    )
    forwards, backwards = ladders(CALLS.resolver, q, k, v, options, extras)
    known = CALLS.prepared.get(call_key_of(q, k, v, options, extras))
    if known is None and not problem_of_tensors(q, k, v, options, Pass.FORWARD, extras).features:
        # An eager plain call is kept under a key of its own.
        plain = (causal, scale, layout, return_lse, deterministic, vendor, training, wants_tf32(query))
        known = CALLS.prepared.get(call_key(query, key, value, *plain))
    forward = known.resolution if known is not None else None
    passes = [_explain_pass(q, k, v, options, extras, Pass.FORWARD, forward, forwards)]
    if training and passes[0].variant.family is not Family.VENDOR:
        backward = known.backward_resolution() if known is not None else None
        passes.append(_explain_pass(q, k, v, options, extras, Pass.BACKWARD, backward, backwards))
    return Explanation(device=CALLS.resolver.here(q.device).device.name, passes=tuple(passes))


def warmup(
    query: Tensor | Sequence[int],
    key: Tensor | Sequence[int] | None = None,
    value: Tensor | Sequence[int] | None = None,
    *,
    dtype: torch.dtype = torch.bfloat16,
    device: str | torch.device | None = None,
    backward: bool = False,
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
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
) -> Explanation:
    """Choose, compile, load and run once what calls of this shape will use, so that a CUDA graph can be captured.

    Allocates tensors of the given sizes for the time of the call; needs none of the user's data, and leaves torch's
    generators as they were. With ``cu_seqlens_q`` and ``cu_seqlens_k``, warms up :func:`attention_varlen`.

    Args:
        query: Shape [B, H, M, D] of contiguous tensors, or a tensor whose shape, strides, dtype and device to take.
        key: Likewise, [B, H_KV, N, D]; None is as query.
        value: Likewise, [B, H_KV, N, D_V]; None is as key.
        dtype: For shapes.
        device: For shapes; None is the current GPU, or the CPU where there is none.
        backward: Also the backward pass. Calls with and without gradients are warmed up apart; so are those with and
            without a gradient of ``bias`` or ``alibi_slopes``, which they have where they require one.
        causal: As for :func:`attention`, like all that follow.
        window: See there.
        mask: See there.
        bias: See there.
        alibi_slopes: See there.
        softcap: See there.
        sinks: See there.
        score_mod: See there.
        mask_mod: See there.
        score_params: See there.
        block_mask: See there.
        dropout_p: See there.
        scale: See there.
        layout: Of the shapes, see there.
        return_lse: See there.
        deterministic: See there.
        vendor: See there.
        cu_seqlens_q: As for :func:`attention_varlen`, like all that follow.
        cu_seqlens_k: See there.
        max_seqlen_q: See there.
        max_seqlen_k: See there.

    Returns:
        The explanation of what was chosen.
    """
    key = query if key is None else key
    value = key if value is None else value
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    tensors = [_blank(like, dtype, device).requires_grad_(backward) for like in (query, key, value)]
    common: dict[str, Any] = {
        "causal": causal,
        "window": window,
        "softcap": softcap,
        "alibi_slopes": alibi_slopes,
        "sinks": sinks,
        "dropout_p": dropout_p,
        "scale": scale,
        "return_lse": return_lse,
        "deterministic": deterministic,
        "vendor": vendor,
    }
    is_packed = cu_seqlens_q is not None or cu_seqlens_k is not None
    if is_packed:
        _refuse_dense(mask=mask, bias=bias, score_mod=score_mod, mask_mod=mask_mod, block_mask=block_mask)
        common |= {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
        common |= {"max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k}
    else:
        common |= {"mask": mask, "bias": bias, "layout": layout}
        common |= {"score_mod": score_mod, "mask_mod": mask_mod, "score_params": score_params}
        common |= {"block_mask": block_mask}
    call = attention_varlen if is_packed else attention
    with torch.set_grad_enabled(backward), torch.random.fork_rng(enabled=dropout_p != 0.0):
        result = call(*tensors, **common)
        if backward:
            outputs = [result] if isinstance(result, Tensor) else list(result)
            torch.autograd.grad(outputs, tensors, [torch.zeros_like(output) for output in outputs])
        return explain(*tensors, **common)


def freeze(table: str | os.PathLike[str] | None = None) -> str:
    """Fix the decisions of this process: read them now, and never again.

    Args:
        table: An exported table that replaces the database; None takes what :func:`attention` would read.

    Returns:
        Digest of the decisions. Ranks of a distributed job that hold equal digests choose equal kernels.

    Raises:
        TableError: if the table is damaged.
    """
    if table is not None:
        # What load() only warns of is an error where a table was named.
        load_decisions(Path(table).read_text(encoding="utf-8"))
    decisions = load(table_file=os.fspath(table) if table is not None else None)
    CALLS.reset(decisions)
    rows = [
        keys.canonical_json(
            {
                "cell": decision.cell.to_dict(),
                "environment": decision.environment.identity(),
                "choices": [ranked.variant.key for ranked in decision.choices],
                "times_us": [ranked.median_us for ranked in decision.choices],
                "vendor": decision.vendor.variant.key if decision.vendor is not None else None,
                "vendor_us": decision.vendor.median_us if decision.vendor is not None else None,
            }
        )
        for decision in decisions.decisions()
    ]
    return keys.key("decisions", sorted(rows))


def forget() -> None:
    """Drop every choice of this process, so that the next call reads the records anew."""
    CALLS.reset()


def _refuse_dense(**arguments: object) -> None:
    for name, value in arguments.items():
        if value is not None:
            raise InvalidProblemError(f"packed sequences have no {name}: leave {name} out")


def _explain_pass(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    options: Options,
    extras: Extras,
    op: Pass,
    known: Resolution | None,
    candidates: tuple[Candidate, ...],
) -> PassExplanation:
    from autoflash.evaluate.cost import tflops  # only here

    resolver = CALLS.resolver
    problem = problem_of_tensors(q, k, v, options, op, extras)
    resolution = known or resolver.peek(problem, candidates, (q, k, v))
    here = resolver.here(q.device)
    return explain_pass(
        resolution.cell,
        resolution.candidate,
        here,
        rate=tflops,
        has_run=known is not None,
        source_digest=resolution.executable.source_digest,
        verification=resolver.verification(resolution.cell, resolution.candidate.variant),
        alternatives=resolution.alternatives,
        passed_over=resolution.passed_over,
        ignored=tuple(resolver.table.ignored(resolution.cell, here.environment)),
    )


def _blank(like: Tensor | Sequence[int], dtype: torch.dtype, device: str | torch.device) -> Tensor:
    if isinstance(like, Tensor):
        return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device).zero_()
    is_shape = isinstance(like, Sequence) and all(isinstance(size, int) and size >= 0 for size in like)
    if not is_shape:
        raise InvalidProblemError(f"warmup takes tensors, or shapes such as (1, 8, 512, 64), got {like!r}")
    return torch.zeros(tuple(like), dtype=dtype, device=device)
