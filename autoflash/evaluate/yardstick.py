"""The unit in which the errors of kernels are measured: what ordinary torch math makes of the same inputs."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor

from autoflash.evaluate.exact import (
    Tile,
    Triple,
    add_shared,
    add_slopes,
    empty_sums,
    grouped,
    param_sums,
    params_of,
    ungrouped,
)
from autoflash.evaluate.semantics import Semantics
from autoflash.runtime.executable import SINGLE_TERMS, TermGradients


def plain(q: Tensor, k: Tensor, v: Tensor, semantics: Semantics) -> tuple[Tensor, Tensor]:
    """Attention as a user would write it in torch, every step rounded to the dtype of the inputs. Differentiable.

    Rows that see no key are set to 0 (and get zero gradients), where the formula itself would give NaN.

    Returns:
        The output in q's dtype, and the log-sum-exp [B, H, M] of the same scores, summed in float32.
    """
    group = q.shape[1] // k.shape[1]
    out = q.new_zeros((*q.shape[:3], v.shape[3]))
    lse = q.new_full(q.shape[:3], -math.inf, dtype=torch.float32)
    for block in semantics.blocks(q, k):
        keys, values = (tensor[:, :, block.keys].repeat_interleave(group, dim=1) for tensor in (k, v))
        s = semantics.capped(q[:, :, block.rows] @ keys.mT)  # [B, H, m, N]
        s, hidden = semantics.scores(s, block, semantics.hidden(s, block))
        hidden = torch.zeros_like(s, dtype=torch.bool) if hidden is None else hidden.expand_as(s)
        blind = hidden.all(dim=-1, keepdim=True)
        # A blind row stays unmasked: a softmax over nothing but -inf would send NaN into the gradients.
        p = _softmax(s.masked_fill(hidden & ~blind, -math.inf), semantics).masked_fill(blind, 0.0)
        p = (p * semantics.kept(q, block)).to(q.dtype)
        out[:, :, block.rows] = p @ values
        seen = s.float().masked_fill(hidden, -math.inf)
        lse[:, :, block.rows] = torch.logsumexp(_beside_sinks(seen, semantics), dim=-1)
    return out, lse


def _beside_sinks(s: Tensor, semantics: Semantics) -> Tensor:
    """Scores [B, H, m, N] with one more that has no key, where there are sinks.

    A sink of -inf becomes a number of no weight: a softmax over nothing but -inf would send NaN into the gradients.
    """
    if semantics.sinks is None:
        return s
    sinks = semantics.sinks.clamp(min=torch.finfo(s.dtype).min).to(s.dtype)
    return torch.cat([s, sinks[:, None, None].expand(*s.shape[:3], 1)], dim=-1)


def _softmax(s: Tensor, semantics: Semantics) -> Tensor:
    """Probabilities of the keys, [B, H, m, N]."""
    return torch.softmax(_beside_sinks(s, semantics), dim=-1)[..., : s.shape[3]]


def plain_gradients(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, dlse: Tensor | None, semantics: Semantics) -> Triple:
    """Gradients of :func:`plain` by q, k and v, by autograd, in the dtype of the inputs."""
    leaves = [tensor.detach().requires_grad_() for tensor in (q, k, v)]
    with torch.enable_grad():
        out, lse = plain(leaves[0], leaves[1], leaves[2], semantics)
    if not out.requires_grad:
        dq, dk, dv = (torch.zeros_like(leaf) for leaf in leaves)
        return dq, dk, dv
    roots, seeds = ([out], [dout]) if dlse is None or not lse.requires_grad else ([out, lse], [dout, dlse])
    # A score_mod need not look at the score.
    found = torch.autograd.grad(roots, leaves, seeds, allow_unused=True)
    dq, dk, dv = (torch.zeros_like(leaf) if x is None else x for leaf, x in zip(leaves, found, strict=True))
    return dq, dk, dv


def plain_term_gradients(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, dlse: Tensor | None, semantics: Semantics
) -> TermGradients:
    """Gradients of :func:`plain` by the terms that the semantics have, by autograd."""
    given = {name: getattr(semantics, name) for name in SINGLE_TERMS}
    single = {name: term.detach().requires_grad_() for name, term in given.items() if term is not None}
    modifiers, params = semantics.modifiers, dict[str, Tensor]()
    if modifiers is not None:
        params = {name: modifiers.params[name].detach().requires_grad_() for name in modifiers.differentiable}
        modifiers = replace(modifiers, params={**modifiers.params, **params})
    with torch.enable_grad():
        out, lse = plain(q, k, v, replace(semantics, **single, modifiers=modifiers))
    leaves = [*single.values(), *params.values()]
    found = [torch.zeros_like(leaf) for leaf in leaves]
    if out.requires_grad:
        roots, seeds = ([out], [dout]) if dlse is None or not lse.requires_grad else ([out, lse], [dout, dlse])
        made = torch.autograd.grad(roots, leaves, seeds, allow_unused=True)
        found = [zero if gradient is None else gradient for zero, gradient in zip(found, made, strict=True)]
    of_params = dict(zip(params, found[len(single) :], strict=True))
    return TermGradients(**dict(zip(single, found[: len(single)], strict=True)), params=params_of(of_params, semantics))


def magnitude(q: Tensor, v: Tensor, semantics: Semantics, tiles: Iterable[Tile]) -> Tensor:
    """What the rounding of the output is proportional to, [B, H, M, D_V] in float64.

    It is the sum that makes up the output with every term taken absolutely, and a probability counted as often as
    the terms of its score add up to: the rounding of a score is a relative error of its exponential.
    """
    out = q.new_zeros((*q.shape[:3], v.shape[3]), dtype=torch.float64)
    for tile in tiles:
        p = tile.p * (1.0 + _terms(tile, semantics)) * tile.kept
        out[:, :, tile.block.rows] = ungrouped(grouped(p, v) @ v[:, :, tile.block.keys].double().abs(), q)
    return out


def lse_magnitude(q: Tensor, semantics: Semantics, tiles: Iterable[Tile]) -> Tensor:
    """As :func:`magnitude`, for the log-sum-exp, [B, H, M]."""
    lse = q.new_zeros(q.shape[:3], dtype=torch.float64)
    for tile in tiles:
        lse[:, :, tile.block.rows] = (tile.p * _terms(tile, semantics)).sum(dim=-1)
    return lse


def gradient_magnitudes(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, semantics: Semantics, tiles: Iterable[Tile]
) -> Triple:
    """As :func:`magnitude`, for dq, dk and dv.

    Where one key is visible, for example, dq is exactly 0 as the difference of two equal numbers, and this is not.
    """
    dq, dk, dv = (torch.zeros(tensor.shape, dtype=torch.float64, device=q.device) for tensor in (q, k, v))
    scale = abs(semantics.scale)
    for tile in tiles:
        rows, keys = tile.block.rows, tile.block.keys
        douts = grouped(dout[:, :, rows].double().abs(), k)
        p = tile.p * (1.0 + _terms(tile, semantics))
        dp = ungrouped(douts @ v[:, :, keys].double().abs().mT, q) * tile.kept
        ds = p * dp + p * (p * dp).sum(dim=-1, keepdim=True)
        ds = grouped(ds if semantics.modifiers is None else ds * _steepness(tile), k)
        dq[:, :, rows] = ungrouped(ds @ tile.keys.abs(), q) * scale
        dk[:, :, keys] += ds.mT @ tile.queries.abs() * scale
        dv[:, :, keys] += grouped(p * tile.kept, k).mT @ douts
    return dq, dk, dv


def term_magnitudes(
    q: Tensor, v: Tensor, dout: Tensor, dlse: Tensor | None, semantics: Semantics, tiles: Iterable[Tile]
) -> TermGradients:
    """As :func:`magnitude`, for the gradients of the terms."""
    made = empty_sums(semantics, q.device)
    sums = param_sums(semantics)
    for tile in tiles:
        rows = tile.block.rows
        douts = grouped(dout[:, :, rows].double().abs(), v)
        dp = ungrouped(douts @ v[:, :, tile.block.keys].double().abs().mT, q) * tile.kept
        delta = (tile.p * dp).sum(dim=-1, keepdim=True)
        if dlse is not None:
            delta += dlse[:, :, rows, None].abs()
        if made.sinks is not None and tile.sinks is not None:
            share = torch.exp(tile.sinks - tile.lse.masked_fill(tile.lse == -math.inf, math.inf))
            terms = 1.0 + tile.lse.abs() + tile.sinks.abs()
            made.sinks.add_((share * terms * delta).nan_to_num(0.0).sum(dim=(0, 2, 3)))
        if made.bias is not None:
            add_shared(made.bias, tile.p * (1.0 + _terms(tile, semantics)) * (dp + delta), tile.block)
        if made.alibi_slopes is not None:
            part = tile.p * (1.0 + _terms(tile, semantics)) * (dp + delta)
            part = part * semantics.distances(tile.block, q.device)
            add_slopes(made.alibi_slopes[semantics.slopes_at(tile.block)], part)
        if sums and semantics.modifiers is not None:
            ds = tile.p * (1.0 + _terms(tile, semantics)) * (dp + delta)
            found = semantics.modifiers.magnitudes(tile.capped, tile.block.start, tile.barred, ds)
            for name, magnitude in found.items():
                sums[name] += magnitude
    return made._replace(params=params_of(sums, semantics))


def _terms(tile: Tile, semantics: Semantics) -> Tensor:
    """What the terms of each score add up to, [B, H, m, N]."""
    terms = ungrouped(tile.queries.abs() @ tile.keys.abs().mT, tile.scores) * abs(semantics.scale)
    added = (semantics.mask, semantics.bias, semantics.alibi_slopes, semantics.modifiers)
    if semantics.softcap or any(x is not None for x in added):
        # The cap takes on little of the products' rounding where it is near; the sum with a mask is rounded again.
        terms = terms * _steepness(tile) + tile.scores.abs()
    if semantics.modifiers is not None:
        # What is added to a score, or multiplied with it, may be as large as the score, and the sum small.
        terms = terms + tile.capped.abs() * _steepness(tile)
    return terms


def _steepness(tile: Tile) -> Tensor | float:
    return tile.slope.abs() if isinstance(tile.slope, Tensor) else abs(tile.slope)
