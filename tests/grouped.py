"""Small tensors of a batch whose query heads share key heads, and what a mask_mod may say of them."""

from __future__ import annotations

import torch
from torch import Tensor

B, H, H_KV, D = 2, 4, 2, 16
DOCUMENTS = "doc[b, q_idx] == doc[b, kv_idx]"


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def attended(m: int, n: int, grad: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value for m queries and n keys; vectors of values are longer."""
    q, k, v = normal(B, H, m, D), normal(B, H_KV, n, D), normal(B, H_KV, n, D + 8)
    for x in (q, k, v):
        x.requires_grad_(grad)
    return q, k, v
