"""Inputs of calls with windows, masks, softcap, dropout and packed sequences, and what they should give."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autoflash.evaluate import reference

Case = dict[str, Any]

B, H, H_KV, M, N, D = 2, 4, 2, 37, 53, 16


def tensors(m: int = M, n: int = N, *, grad: bool = False, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(1)
    shapes = ((B, H, m, D), (B, H_KV, n, D), (B, H_KV, n, D))
    return tuple(torch.randn(shape, generator=generator).to(dtype).requires_grad_(grad) for shape in shapes)


def bool_mask(*shape: int) -> Tensor:
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(2)) < 0.6
    mask[..., 3:5, :] &= shape[-2] == 1  # Rows without any key.
    return mask


def float_mask(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(3)).to(dtype)


def expected_of(q: Tensor, k: Tensor, v: Tensor, arguments: Case, **more: Any) -> tuple[Tensor, Tensor]:
    arguments = {**arguments, "softcap": arguments.get("softcap") or 0.0}
    return reference.attention(q, k, v, return_lse=True, **arguments, **more)


def gradients_of(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, dlse: Tensor, arguments: Case, **more: Any) -> Any:
    arguments = {**arguments, "softcap": arguments.get("softcap") or 0.0}
    return reference.gradients(q.detach(), k.detach(), v.detach(), dout, dlse, **arguments, **more)


LENGTHS_Q = [5, 0, 63, 65, 1, 33]
LENGTHS_K = [7, 4, 63, 0, 130, 20]


def offsets(lengths: list[int], dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=dtype)


def packed(tail: int = 0, *, grad: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    total_q, total_k = sum(LENGTHS_Q) + tail, sum(LENGTHS_K) + tail
    shapes = ((total_q, H, D), (total_k, H_KV, D), (total_k, H_KV, D))
    q, k, v = (torch.randn(shape, generator=generator).requires_grad_(grad) for shape in shapes)
    return q, k, v
