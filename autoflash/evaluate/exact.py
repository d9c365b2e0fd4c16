"""Exact attention and its gradients in float64, of tensors [B, H, S, D] or packed ones [1, H, T, D]."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor

from autoflash.evaluate.semantics import Block, Semantics
from autoflash.runtime.executable import NO_TERMS, SINGLE_TERMS, TermGradients

Triple = tuple[Tensor, Tensor, Tensor]


class Tile:
    """Exact probabilities of a block of rows, and what they are made of.

    Attributes:
        block: Which rows and keys.
        queries, keys: [B, H_KV, G * m, D] and [B, H_KV, N, D].
        capped: Scores of each pair, [B, H, m, N], as a score_mod is given them.
        barred: Which are hidden whatever their score; None for none.
        scores: What becomes of them, also of hidden ones.
        slope: Derivative of the scores by the product of query and key times scale, of that shape or 1.
        p: Probabilities, [B, H, m, N]; 0 in rows that see no key.
        kept: Factor of the probabilities that a dropout leaves, of that shape or 1.
        lse: [B, H, m, 1], with the sinks.
        sinks: [H, 1, 1] where there are some.
    """

    def __init__(self, q: Tensor, k: Tensor, semantics: Semantics, block: Block) -> None:
        self.block = block
        self.queries = grouped(q[:, :, block.rows].double(), k)
        self.keys = k[:, :, block.keys].double()
        products = ungrouped(self.queries @ self.keys.mT, q)
        self.capped = semantics.capped(products)
        self.barred = semantics.hidden(self.capped, block)
        self.slope: Tensor | float = semantics.slope(products, block, self.barred)
        self.scores, hidden = semantics.scores(self.capped, block, self.barred)
        s = self.scores if hidden is None else self.scores.masked_fill(hidden, -math.inf)
        self.lse = torch.logsumexp(s, dim=-1, keepdim=True)
        self.sinks = None if semantics.sinks is None else semantics.sinks.double()[:, None, None]
        if self.sinks is not None:
            self.lse = torch.logaddexp(self.lse, self.sinks)
        # A row without keys has -inf everywhere, also here; its probabilities are to be 0 and not NaN.
        self.p = torch.exp(s - self.lse.masked_fill(self.lse == -math.inf, 0.0))
        self.kept = semantics.kept(q, block)


def tiles(q: Tensor, k: Tensor, semantics: Semantics) -> Iterator[Tile]:
    """All rows, in tiles made one after the other: together they hold the whole score matrix several times."""
    return (Tile(q, k, semantics, block) for block in semantics.blocks(q, k))


def forward(q: Tensor, v: Tensor, tiles: Iterable[Tile]) -> tuple[Tensor, Tensor]:
    """Output [B, H, M, D_V] and log-sum-exp [B, H, M]; 0 and -inf in rows that see no key, or belong to no sequence."""
    out = q.new_zeros((*q.shape[:3], v.shape[3]), dtype=torch.float64)
    lse = q.new_full(q.shape[:3], -math.inf, dtype=torch.float64)
    for tile in tiles:
        rows, values = tile.block.rows, v[:, :, tile.block.keys].double()
        out[:, :, rows] = ungrouped(grouped(tile.p * tile.kept, v) @ values, q)
        lse[:, :, rows] = tile.lse.squeeze(-1)
    return out, lse


def backward(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, dlse: Tensor | None, scale: float, tiles: Iterable[Tile]
) -> Triple:
    """Gradients by q, k and v. ``scale`` is that of the scores."""
    dq, dk, dv = (torch.zeros(tensor.shape, dtype=torch.float64, device=q.device) for tensor in (q, k, v))
    for tile in tiles:
        rows, keys, p = tile.block.rows, tile.block.keys, tile.p
        values, douts = v[:, :, keys].double(), grouped(dout[:, :, rows].double(), k)
        dp = ungrouped(douts @ values.mT, q) * tile.kept
        ds = p * (dp - (p * dp).sum(dim=-1, keepdim=True))
        if dlse is not None:
            ds += p * dlse[:, :, rows, None]
        ds = grouped(ds * tile.slope, k)
        dq[:, :, rows] = ungrouped(ds @ tile.keys, q) * scale
        dk[:, :, keys] += ds.mT @ tile.queries * scale
        dv[:, :, keys] += grouped(p * tile.kept, k).mT @ douts
    return dq, dk, dv


def empty_sums(semantics: Semantics, device: torch.device) -> TermGradients:
    """Zeros in float64, in the shape of each term that the semantics have; of parameters, none."""
    made = NO_TERMS
    for name in SINGLE_TERMS:
        term = getattr(semantics, name)
        if term is not None:
            zeros = torch.zeros(term.shape, dtype=torch.float64, device=device)
            made = made._replace(**{name: zeros})  # type: ignore[arg-type]  # parameters are no single term
    return made


def term_gradients(
    q: Tensor, v: Tensor, dout: Tensor, dlse: Tensor | None, semantics: Semantics, tiles: Iterable[Tile]
) -> TermGradients:
    """Gradients of the terms that the semantics have, in float64."""
    made = empty_sums(semantics, q.device)
    sums = param_sums(semantics)
    for tile in tiles:
        rows = tile.block.rows
        douts = grouped(dout[:, :, rows].double(), v)
        dp = ungrouped(douts @ v[:, :, tile.block.keys].double().mT, q) * tile.kept
        delta = (tile.p * dp).sum(dim=-1, keepdim=True)  # [B, H, m, 1]
        if dlse is not None:
            delta -= dlse[:, :, rows, None]
        if made.sinks is not None and tile.sinks is not None:
            share = torch.exp(tile.sinks - tile.lse.masked_fill(tile.lse == -math.inf, math.inf))
            made.sinks.sub_((share * delta).sum(dim=(0, 2, 3)))
        if made.bias is not None:
            add_shared(made.bias, tile.p * (dp - delta), tile.block)
        if made.alibi_slopes is not None:
            part = tile.p * (dp - delta) * semantics.distances(tile.block, q.device)
            add_slopes(made.alibi_slopes[semantics.slopes_at(tile.block)], -part)
        if sums and semantics.modifiers is not None:
            ds = tile.p * (dp - delta)
            found = semantics.modifiers.gradients(tile.capped, tile.block.start, tile.barred, ds)
            for name, gradient in found.items():
                sums[name] += gradient
    return made._replace(params=params_of(sums, semantics))


def param_sums(semantics: Semantics) -> dict[str, Tensor]:
    """Zeros of the shape of each differentiable parameter, in float64, by name."""
    if semantics.modifiers is None:
        return {}
    params = semantics.modifiers.params
    return {name: torch.zeros_like(params[name], dtype=torch.float64) for name in semantics.modifiers.differentiable}


def params_of(gradients: Mapping[str, Tensor], semantics: Semantics) -> tuple[Tensor | None, ...]:
    """Gradients by name as :class:`TermGradients` has them."""
    if semantics.modifiers is None or not gradients:
        return ()
    return tuple(gradients.get(name) for name in semantics.modifiers.params)


def add_slopes(total: Tensor, parts: Tensor) -> None:
    """Add parts [B, H, m, N] to sums [B, H], or [1, H] over all batch entries."""
    each = parts.sum(dim=(2, 3))
    total += each if total.shape[0] == each.shape[0] else each.sum(dim=0, keepdim=True)


def add_shared(total: Tensor, ds: Tensor, block: Block) -> None:
    """Add what belongs to the scores [B, H, m, N] of a block to a tensor, summed where its sizes are 1."""
    dims = [dim for dim in range(4) if total.shape[dim] == 1 and ds.shape[dim] != 1]
    part = ds.sum(dim=dims, keepdim=True) if dims else ds
    target = total if total.shape[2] == 1 else total[:, :, block.within]
    target += part


def grouped(rows: Tensor, k: Tensor) -> Tensor:
    """[B, H, m, X] -> [B, H_KV, G * m, X]: the queries that share a key head, as rows of one matrix."""
    batch, heads, count, width = rows.shape
    return rows.reshape(batch, k.shape[1], heads // k.shape[1] * count, width)


def ungrouped(rows: Tensor, q: Tensor) -> Tensor:
    """[B, H_KV, G * m, X] -> [B, H, m, X]."""
    batch, kv_heads, count, width = rows.shape
    return rows.reshape(batch, q.shape[1], count * kv_heads // q.shape[1], width)
