"""The public functions. An eager call of known shape is one dictionary lookup and a launch."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import Parameter

from autoflash import keys, paths
from autoflash.arguments import (
    Options,
    check_layout,
    check_tensors,
    mask_of,
    policy_of,
    problem_of_tensors,
    refuse_unbuilt,
    scale_of,
    wants_tf32,
)
from autoflash.calls import ladders
from autoflash.dispatch.explain import Explanation, PassExplanation, explain_pass
from autoflash.dispatch.ladder import Candidate
from autoflash.dispatch.resolve import Resolution
from autoflash.dispatch.table import load, load_decisions
from autoflash.ops import CALLS, Transformable, call_key
from autoflash.problem import Pass
from autoflash.variant import Family

_PREPARED = CALLS.prepared
_PLAIN = frozenset((Tensor, Parameter))

# Read on every call: each costs a tenth of a microsecond here, several times that through torch's public wrappers.
_is_grad_enabled = torch.is_grad_enabled
_is_autocast_enabled = torch._C._is_any_autocast_enabled
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
    window: object = None,
    mask: object = None,
    bias: object = None,
    alibi_slopes: object = None,
    softcap: object = None,
    sinks: object = None,
    score_mod: object = None,
    score_params: object = None,
    dropout_p: float = 0.0,
    scale: float | None = None,
    layout: str = "bhsd",
    return_lse: bool = False,
    deterministic: bool | None = None,
    vendor: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Scaled dot-product attention by the best kernel that is known for this device.

    softmax(query @ key^T * scale + mask) @ value, exactly. A query that sees no key gives 0, an LSE of -inf and no
    gradient. Differentiable once, in eager mode and under ``torch.compile``.

    Args:
        query: [B, H, M, D] in float16, bfloat16 or float32, with any strides.
        key: [B, H_KV, N, D]; H is a multiple of H_KV.
        value: [B, H_KV, N, D_V].
        causal: True or ``"bottom_right"``: query i sees keys up to i + N - M. ``"top_left"``: up to i, as
            ``is_causal`` of torch's scaled_dot_product_attention.
        window: Not built yet, as are the arguments down to ``dropout_p``: setting one raises UnsupportedError.
        mask: Not built yet.
        bias: Not built yet.
        alibi_slopes: Not built yet.
        softcap: Not built yet.
        sinks: Not built yet.
        score_mod: Not built yet.
        score_params: Not built yet.
        dropout_p: Not built yet; must be 0.
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
    if (
        window is not None
        or mask is not None
        or bias is not None
        or alibi_slopes is not None
        or softcap is not None
        or sinks is not None
        or score_mod is not None
        or score_params is not None
        or dropout_p != 0.0
    ):
        refuse_unbuilt(
            window=window,
            mask=mask,
            bias=bias,
            alibi_slopes=alibi_slopes,
            softcap=softcap,
            sinks=sinks,
            score_mod=score_mod,
            score_params=score_params,
            dropout_p=dropout_p,
        )
    if (
        _is_compiling()
        or type(query) not in _PLAIN
        or type(key) not in _PLAIN
        or type(value) not in _PLAIN
        or _functorch_level() is not None
        or _dispatch_modes()
    ):
        return _through_operator(query, key, value, causal, scale, layout, return_lse, deterministic, vendor)
    if _is_autocast_enabled():
        cast = _autocast(query, key, value)
        if cast is not None:
            with torch.autocast(query.device.type, enabled=False):
                return attention(
                    *cast,
                    causal=causal,
                    scale=scale,
                    layout=layout,
                    return_lse=return_lse,
                    deterministic=deterministic,
                    vendor=vendor,
                )
    training = _is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad)
    if deterministic is None:
        deterministic = _is_deterministic()
    tf32 = query.dtype is torch.float32 and wants_tf32(query)
    call = call_key(query, key, value, causal, scale, layout, return_lse, deterministic, vendor, training, tf32)
    known = _PREPARED.get(call)
    if known is None:
        check_layout(layout)
        check_tensors(query, key, value, layout)
        options = _options(query, causal, scale, return_lse, deterministic, vendor, training)
        _, (out, lse) = CALLS.first(call, *_heads_first(query, key, value, layout), options)
    elif layout == "bshd":
        out, lse = known.run(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2))
    else:
        out, lse = known.run(query, key, value)
    if layout == "bshd":
        out = out.transpose(1, 2)
    return (out, lse) if return_lse else out


def explain(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    causal: bool | str = False,
    scale: float | None = None,
    layout: str = "bhsd",
    return_lse: bool = False,
    deterministic: bool | None = None,
    vendor: str | None = None,
    **unbuilt: object,
) -> Explanation:
    """Say which kernel :func:`attention` uses for these arguments, and why. Launches and compiles nothing.

    Args:
        query: As for :func:`attention`, like all that follow. The backward is explained where one requires a gradient.
        key: See there.
        value: See there.
        causal: See there.
        scale: See there.
        layout: See there.
        return_lse: See there.
        deterministic: See there.
        vendor: See there.
        unbuilt: Arguments of :func:`attention` that are not built yet; refused by name.

    Raises:
        InvalidProblemError, UnsupportedError: As :func:`attention`.
    """
    refuse_unbuilt(**unbuilt)
    check_layout(layout)
    query, key, value = _autocast(query, key, value) or (query, key, value)
    check_tensors(query, key, value, layout)
    training = torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad)
    if deterministic is None:
        deterministic = _is_deterministic()
    call = call_key(
        query, key, value, causal, scale, layout, return_lse, deterministic, vendor, training, wants_tf32(query)
    )
    options = _options(query, causal, scale, return_lse, deterministic, vendor, training)
    q, k, v = _heads_first(query, key, value, layout)
    forwards, backwards = ladders(CALLS.resolver, q, k, v, options)
    known = _PREPARED.get(call)
    forward = known.resolution if known is not None else None
    passes = [_explain_pass(q, k, v, options, Pass.FORWARD, forward, forwards)]
    if training and passes[0].variant.family is not Family.VENDOR:
        backward = known.backward_resolution() if known is not None else None
        passes.append(_explain_pass(q, k, v, options, Pass.BACKWARD, backward, backwards))
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
    scale: float | None = None,
    layout: str = "bhsd",
    return_lse: bool = False,
    deterministic: bool | None = None,
    vendor: str | None = None,
) -> Explanation:
    """Choose, compile, load and run once what calls of this shape will use, so that a CUDA graph can be captured.

    Allocates tensors of the given sizes for the time of the call; needs none of the user's data.

    Args:
        query: Shape [B, H, M, D] of contiguous tensors, or a tensor whose shape, strides, dtype and device to take.
        key: Likewise, [B, H_KV, N, D]; None is as query.
        value: Likewise, [B, H_KV, N, D_V]; None is as key.
        dtype: For shapes.
        device: For shapes; None is the current GPU, or the CPU where there is none.
        backward: Also the backward pass. Calls with and without gradients are warmed up apart.
        causal: As for :func:`attention`, like all that follow.
        scale: See there.
        layout: Of the shapes, see there.
        return_lse: See there.
        deterministic: See there.
        vendor: See there.

    Returns:
        The explanation of what was chosen.
    """
    key = query if key is None else key
    value = key if value is None else value
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    tensors = [_blank(like, dtype, device).requires_grad_(backward) for like in (query, key, value)]
    with torch.set_grad_enabled(backward):
        result = attention(
            *tensors,
            causal=causal,
            scale=scale,
            layout=layout,
            return_lse=return_lse,
            deterministic=deterministic,
            vendor=vendor,
        )
        if backward:
            outputs = [result] if isinstance(result, Tensor) else list(result)
            torch.autograd.grad(outputs, tensors, [torch.zeros_like(output) for output in outputs])
        return explain(
            *tensors,
            causal=causal,
            scale=scale,
            layout=layout,
            return_lse=return_lse,
            deterministic=deterministic,
            vendor=vendor,
        )


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


def _through_operator(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    causal: bool | str,
    scale: float | None,
    layout: str,
    return_lse: bool,
    deterministic: bool | None,
    vendor: str | None,
) -> Tensor | tuple[Tensor, Tensor]:
    """The same by the registered operator, for whoever traces or transforms the call."""
    check_layout(layout)
    query, key, value = _autocast(query, key, value) or (query, key, value)
    check_tensors(query, key, value, layout)
    training = torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad)
    operator: Callable[..., tuple[Tensor, Tensor]] = torch.ops.autoflash.attention_forward
    if not torch.compiler.is_compiling() and _functorch_level() is not None:
        operator = Transformable.apply
    out, lse = operator(
        *_heads_first(query, key, value, layout),
        scale_of(scale, query.shape[3]),
        mask_of(causal),
        torch.are_deterministic_algorithms_enabled() if deterministic is None else deterministic,
        vendor or "",
        return_lse,
        training,
    )
    if layout == "bshd":
        out = out.transpose(1, 2)
    return (out, lse) if return_lse else out


def _autocast(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
    """The tensors in autocast's dtype; None where autocast is off for their device."""
    if not all(isinstance(tensor, Tensor) for tensor in (query, key, value)):
        # For check_tensors to refuse.
        return None
    kind = query.device.type
    if not torch.is_autocast_enabled(kind):
        return None
    dtype = torch.get_autocast_dtype(kind)
    q, k, v = (x if x.dtype is torch.float64 else x.to(dtype) for x in (query, key, value))
    return q, k, v


def _heads_first(query: Tensor, key: Tensor, value: Tensor, layout: str) -> tuple[Tensor, Tensor, Tensor]:
    if layout == "bhsd":
        return query, key, value
    return query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)


def _options(
    query: Tensor,
    causal: bool | str,
    scale: float | None,
    return_lse: bool,
    deterministic: bool,
    vendor: str | None,
    training: bool,
) -> Options:
    return Options(
        mask=mask_of(causal),
        scale=scale_of(scale, query.shape[3]),
        deterministic=deterministic,
        vendor=policy_of(vendor or paths.vendor_policy()),
        return_lse=return_lse,
        training=training,
    )


def _explain_pass(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    options: Options,
    op: Pass,
    known: Resolution | None,
    candidates: tuple[Candidate, ...],
) -> PassExplanation:
    from autoflash.evaluate.cost import tflops  # only here

    resolver = CALLS.resolver
    problem = problem_of_tensors(q, k, v, options, op)
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
    return torch.zeros(*like, dtype=dtype, device=device)
