"""What the outputs of a case should be, and how far from it they may be. DESIGN decision 5 states the rule."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from autoflash.evaluate import exact, yardstick
from autoflash.evaluate.block_maps import draw_blocks
from autoflash.evaluate.grid import Case
from autoflash.evaluate.inputs import LOW, Guarded, Inputs, draw, draw_flat
from autoflash.evaluate.masks import draw_mask
from autoflash.evaluate.semantics import Semantics
from autoflash.evaluate.terms import draw_bias, draw_params, draw_sinks, draw_slopes
from autoflash.problem import Pass, Problem
from autoflash.runtime.backward_features import PlacedMask, placed_masks
from autoflash.runtime.executable import NO_TERMS, SINGLE_TERMS, Extras, TermGradients

_MAX_FACTOR, _MAX_FACTOR_WITH_SOFTCAP = 2.0, 3.0
_MEAN_FACTORS = {torch.float16: 1.1, torch.bfloat16: 1.1, torch.float32: 3.0}
_TERM_ROUNDINGS = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """What one output should be, and how far from it it may be.

    Attributes:
        exact: The float64 reference.
        max_error, mean_error: Allowed absolute errors.
        zero: Elements that must be exactly 0: those of rows that see no key, or that lie behind the last packed
            sequence. None where there are none.
    """

    exact: Tensor
    max_error: float
    mean_error: float
    zero: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """Inputs of a case with everything that its outputs are compared with.

    Attributes:
        inputs: What the kernel gets.
        out, lse: Exact output and log-sum-exp, float64; a backward gets them rounded.
        limits: By name of output: ``out``, or ``dq``, ``dk``, ``dv`` and those of the terms, such as ``dsinks``.
        lse_slack: Allowed error of each log-sum-exp beside the fixed rule; 0 but for TF32 and softcaps.
    """

    inputs: Inputs
    out: Tensor
    lse: Tensor
    limits: tuple[tuple[str, Limit], ...]
    lse_slack: Tensor


def expanded(extras: Extras, q: Tensor, k: Tensor) -> Extras:
    """The mask as kernels get it: [B, H, M, N], by strides of 0."""
    return extras if extras.mask is None else extras._replace(mask=extras.mask.expand(*q.shape[:3], k.shape[2]))


@functools.lru_cache(maxsize=64)
def expected(case: Case, device: str, has_lse: bool) -> Expected:
    """Inputs, exact results and limits of a case; computed once for all the kernels that are compared on it."""
    problem = case.problem
    inputs = draw_case(case, device)
    q, k, v = inputs.q, inputs.k, inputs.v
    semantics = Semantics.of_problem(problem, case.score_scale, expanded(inputs.extras, q, k))
    factor = _MAX_FACTOR_WITH_SOFTCAP if problem.softcap or problem.score_mod else _MAX_FACTOR
    tiles = list(exact.tiles(q, k, semantics))
    out, lse = exact.forward(q, v, tiles)
    blind = _blind(lse, tiles)
    used = sum(length for _, length in case.lengths) if problem.is_varlen else problem.seqlen_k
    behind = (torch.arange(problem.rows_k, device=device) >= used)[:, None]  # [N, 1]
    if problem.op is Pass.FORWARD:
        plain, plain_lse = yardstick.plain(q, k, v, semantics)
        limit = _limit(out, (plain - out).abs(), yardstick.magnitude(q, v, semantics, tiles), blind, factor, q.dtype)
        slack = torch.zeros_like(lse)
        if problem.tf32:
            slack += 2.0 * _largest((plain_lse - lse)[lse > -math.inf])
        if problem.softcap or problem.score_mod:
            # Scores far beyond the cap are sums of terms that are large beside what is left of them.
            eps = torch.finfo(torch.float32).eps
            slack += _TERM_ROUNDINGS * eps * yardstick.lse_magnitude(q, semantics, tiles)
        return Expected(inputs=inputs, out=out, lse=lse, limits=(("out", limit),), lse_slack=slack)
    dout, dlse = inputs.dout, inputs.dlse if case.with_dlse and has_lse else None
    right = exact.backward(q, k, v, dout, dlse, semantics.scale, tiles)
    by_torch = yardstick.plain_gradients(q, k, v, dout, dlse, semantics)
    errors = [(plain - formula).abs() for plain, formula in zip(by_torch, right, strict=True)]
    # Autograd has the probabilities, where a kernel has only the output that it is given, which is rounded.
    rounding = (dout.double() * (out - out.to(q.dtype).double())).sum(dim=-1)
    effects = exact.backward(q, k, v, torch.zeros_like(dout), rounding, semantics.scale, tiles)
    magnitudes = yardstick.gradient_magnitudes(q, k, v, dout, semantics, tiles)
    limits = tuple(
        (name, _limit(formula, error, terms, blind if name == "dq" else behind, factor, q.dtype, effect.abs()))
        for name, formula, error, terms, effect in zip(
            ("dq", "dk", "dv"), right, errors, magnitudes, effects, strict=True
        )
    )
    limits += _term_limits(problem, inputs, dlse, rounding, semantics, tiles, factor)
    return Expected(inputs=inputs, out=out, lse=lse, limits=limits, lse_slack=torch.zeros_like(lse))


def _blind(lse: Tensor, tiles: Sequence[exact.Tile]) -> Tensor:
    """Rows that see no key, or belong to no sequence, [B, H, M, 1]. With sinks, their log-sum-exp does not show it."""
    blind = torch.ones_like(lse, dtype=torch.bool)[..., None]
    for tile in tiles:
        blind[:, :, tile.block.rows] = (tile.p == 0.0).all(dim=-1, keepdim=True)
    return blind


def _term_limits(
    problem: Problem,
    inputs: Inputs,
    dlse: Tensor | None,
    rounding: Tensor,
    semantics: Semantics,
    tiles: Sequence[exact.Tile],
    factor: float,
) -> tuple[tuple[str, Limit], ...]:
    """Limits of the gradients of the terms that a problem asks for.

    Those of sinks and slopes are sums in float32 over what a kernel is given: they err by the rounding of that alone.
    Those of parameters come from scores that a kernel made itself, in float32 whatever the inputs are.
    """
    asked = TermGradients.asked_by(problem, inputs.extras)
    if asked == NO_TERMS:
        return ()
    q, k, v, dout = inputs.q, inputs.k, inputs.v, inputs.dout
    right = exact.term_gradients(q, v, dout, dlse, semantics, tiles)
    effects = exact.term_gradients(q, v, torch.zeros_like(dout), rounding, semantics, tiles)
    magnitudes = yardstick.term_magnitudes(q, v, dout, dlse, semantics, tiles)
    by_torch = yardstick.plain_term_gradients(q, k, v, dout, dlse, semantics)
    limits = []
    for name in SINGLE_TERMS:
        made = getattr(asked, name)
        if made is None:
            continue
        formula, effect, terms = (getattr(gradients, name) for gradients in (right, effects, magnitudes))
        is_sum = name == "sinks" or (name == "alibi_slopes" and not problem.tf32)
        error = torch.zeros_like(formula) if is_sum else (getattr(by_torch, name) - formula).abs()
        nowhere = torch.zeros_like(formula, dtype=torch.bool)
        limits.append((f"d{name}", _limit(formula, error, terms, nowhere, factor, made.dtype, effect.abs(), sums=True)))
    if problem.params_gradient:
        in_float32 = yardstick.plain_term_gradients(q.float(), k.float(), v.float(), dout.float(), dlse, semantics)
        each = zip(right.params, in_float32.params, effects.params, magnitudes.params, strict=True)
        for place, (formula, plain, rounded, terms) in enumerate(each):
            if formula is None or plain is None or rounded is None or terms is None:
                continue
            nowhere = torch.zeros_like(formula, dtype=torch.bool)
            error = (plain.double() - formula).abs()
            limit = _limit(formula, error, terms, nowhere, _MAX_FACTOR_WITH_SOFTCAP, torch.float32, rounded.abs())
            limits.append((f"dparam_{place}", limit))
    return tuple(limits)


def draw_case(case: Case, device: str) -> Inputs:
    """The inputs of a case, its extra tensors included."""
    problem, scale = case.problem, case.score_scale
    if case.flat:
        inputs = draw_flat(problem, scale, device=device)
    else:
        inputs = draw(problem, scale, shared=case.shared, low=case.low, lengths=case.lengths, device=device)
    starts = [
        torch.tensor([0, *itertools.accumulate(length[side] for length in case.lengths)], dtype=torch.int32)
        for side in (0, 1)
    ]
    sinks = draw_sinks(problem, around=LOW if case.low else 0.0, flat=case.flat, device=device)
    params = draw_params(problem, device=device)
    blocks = draw_blocks(problem, params, flat=case.flat, device=device) if problem.block_size else None
    slopes = draw_slopes(problem, own=case.own_slopes, flat=case.flat, device=device)
    extras = Extras(
        mask=None if case.mask is None else draw_mask(problem, case.mask, device=device),
        cu_seqlens_q=starts[0].to(device) if problem.is_varlen else None,
        cu_seqlens_k=starts[1].to(device) if problem.is_varlen else None,
        rng=None if case.rng is None else torch.tensor(case.rng, device=device),
        sinks=sinks if problem.sinks else None,
        alibi_slopes=slopes if problem.alibi else None,
        bias=None if case.bias is None else draw_bias(problem, case.bias, device=device),
        query_blocks=None if blocks is None else blocks.queries,
        key_blocks=None if blocks is None else blocks.keys,
        params=params,
    )
    return dataclasses.replace(inputs, extras=extras)


@functools.lru_cache(maxsize=64)
def masks_of(case: Case) -> dict[str, PlacedMask]:
    """How the mask and the bias of a case lie when it is verified: as far as kernels are compiled for that."""
    problem, mask, bias = case.problem, None, None
    if case.mask is not None:
        pairs = (problem.batch, problem.heads, problem.seqlen_q, problem.seqlen_k)
        mask = Guarded(draw_mask(problem, case.mask), case.mask.memory).tensor.expand(pairs)
    if case.bias is not None:
        bias = Guarded(draw_bias(problem, case.bias, device="cpu"), case.bias.memory).tensor
    return placed_masks(Extras(mask=mask, bias=bias))


def _limit(
    exact: Tensor,
    error: Tensor,
    terms: Tensor,
    zero: Tensor,
    factor: float,
    dtype: torch.dtype,
    effect: Tensor | None = None,
    *,
    sums: bool = False,
) -> Limit:
    """Allowed errors: those of torch math in the same dtype times a factor, and a few roundings of the output.

    ``effect`` is what the rounding of the kernel's own inputs makes of the output, and is rounded on its way like all
    that a kernel computes: no kernel can do without that error.

    In float32, where right kernels differ by the order of their sums alone and few elements decide the largest error,
    a few roundings of what is summed are allowed as well (``terms``, as :func:`yardstick.magnitude` gives them); and of
    what is summed in float32, whatever that is rounded to (``sums``).
    """
    rounded = exact.to(dtype).double()
    # Each step is rounded to the output's dtype, but 0.3 itself is not: it differs between devices if torch does it.
    there = (rounded + 0.3).to(dtype).double()
    atol = 2.0 * _largest((there - 0.3).to(dtype).double() - rounded)
    if dtype is torch.float32 or sums:
        atol += _TERM_ROUNDINGS * torch.finfo(torch.float32).eps * _largest(terms)
    # To the type of the inputs it goes with ds, and with the gradient.
    inherited = 1.0 + 2.0 * torch.finfo(dtype).eps
    return Limit(
        exact=exact,
        max_error=factor * _largest(error) + inherited * _largest(effect) + atol,
        mean_error=_MEAN_FACTORS[dtype] * _mean(error) + inherited * _mean(effect) + atol / 8.0,
        zero=zero if bool(zero.any()) else None,
    )


def _largest(values: Tensor | None) -> float:
    return float(values.abs().max().item()) if values is not None and values.numel() else 0.0


def _mean(values: Tensor | None) -> float:
    return float(values.mean().item()) if values is not None and values.numel() else 0.0
