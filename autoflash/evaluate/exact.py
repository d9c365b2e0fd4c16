"""Exact attention and its gradients in float64, of tensors [B, H, S, D] or packed ones [1, H, T, D]."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from autoflash.evaluate.semantics import Block, Semantics

Triple = tuple[Tensor, Tensor, Tensor]


def forward(q: Tensor, k: Tensor, v: Tensor, semantics: Semantics) -> tuple[Tensor, Tensor]:
    """Output [B, H, M, D_V] and log-sum-exp [B, H, M]; 0 and -inf in rows that see no key, or belong to no sequence."""
    out = q.new_zeros((*q.shape[:3], v.shape[3]), dtype=torch.float64)
    lse = q.new_full(q.shape[:3], -math.inf, dtype=torch.float64)
    for block in semantics.blocks(q, k):
        tile = Tile(q, k, semantics, block)
        values = v[:, :, block.keys].double()
        out[:, :, block.rows] = ungrouped(grouped(tile.p * semantics.kept(q, block), k) @ values, q)
        lse[:, :, block.rows] = tile.lse.squeeze(-1)
    return out, lse


def backward(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, dlse: Tensor | None, semantics: Semantics) -> Triple:
    """Gradients by q, k and v, for tensors as in :func:`forward`."""
    dq, dk, dv = (torch.zeros(tensor.shape, dtype=torch.float64, device=q.device) for tensor in (q, k, v))
    for block in semantics.blocks(q, k):
        tile = Tile(q, k, semantics, block)
        values, douts = v[:, :, block.keys].double(), grouped(dout[:, :, block.rows].double(), k)
        kept = semantics.kept(q, block)
        p = tile.p
        dp = ungrouped(douts @ values.mT, q) * kept
        ds = p * (dp - (p * dp).sum(dim=-1, keepdim=True))
        if dlse is not None:
            ds += p * dlse[:, :, block.rows, None]
        ds = grouped(ds * semantics.slope(tile.products), k)
        dq[:, :, block.rows] = ungrouped(ds @ tile.keys, q) * semantics.scale
        dk[:, :, block.keys] += ds.mT @ tile.queries * semantics.scale
        dv[:, :, block.keys] += grouped(p * kept, k).mT @ douts
    return dq, dk, dv


class Tile:
    """Exact probabilities of a block of rows.

    Attributes:
        queries, keys: [B, H_KV, G * m, D] and [B, H_KV, N, D].
        products: Of queries and keys, [B, H, m, N].
        scores: Of each pair, whether it is hidden or not, [B, H, m, N].
        p: Probabilities, [B, H, m, N]; 0 in rows that see no key.
        lse: [B, H, m, 1].
    """

    def __init__(self, q: Tensor, k: Tensor, semantics: Semantics, block: Block) -> None:
        self.queries = grouped(q[:, :, block.rows].double(), k)
        self.keys = k[:, :, block.keys].double()
        self.products = ungrouped(self.queries @ self.keys.mT, q)
        self.scores = semantics.scores(self.products, block)
        hidden = semantics.hidden(block, q.device)
        s = self.scores if hidden is None else self.scores.masked_fill(hidden, -math.inf)
        self.lse = torch.logsumexp(s, dim=-1, keepdim=True)
        # A row without keys has -inf everywhere, also here; its probabilities are to be 0 and not NaN.
        self.p = torch.exp(s - self.lse.masked_fill(self.lse == -math.inf, 0.0))


def grouped(rows: Tensor, k: Tensor) -> Tensor:
    """[B, H, m, X] -> [B, H_KV, G * m, X]: the queries that share a key head, as rows of one matrix."""
    batch, heads, count, width = rows.shape
    return rows.reshape(batch, k.shape[1], heads // k.shape[1] * count, width)


def ungrouped(rows: Tensor, q: Tensor) -> Tensor:
    """[B, H_KV, G * m, X] -> [B, H, m, X]."""
    batch, kv_heads, count, width = rows.shape
    return rows.reshape(batch, q.shape[1], count * kv_heads // q.shape[1], width)
