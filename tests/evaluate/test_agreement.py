"""Rounding is no disagreement; another mask, another scale or a NaN is one."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from autoflash.evaluate.agreement import disagreement
from autoflash.problem import DType, Pass
from autoflash.runtime.layouts import TORCH_TYPES
from tests.factories import make_problem

FORWARD = make_problem(batch=2, heads=2, seqlen_q=512)
BACKWARD = FORWARD.replace(op=Pass.BACKWARD)


def inputs() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    q, k, v, dout = torch.randn(4, 2, 2, 512, 64, generator=generator)
    return q, k, v, dout


def both_passes(*, diagonal: int = 0, scale: float = 0.125) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Output and gradients of a causal mask."""
    q, k, v, dout = inputs()
    leaves = [tensor.requires_grad_() for tensor in (q, k, v)]
    seen = torch.ones(512, 512, dtype=torch.bool).tril(diagonal)
    out = functional.scaled_dot_product_attention(*leaves, attn_mask=seen, scale=scale)
    return out.detach(), torch.autograd.grad(out, leaves, dout)


@pytest.mark.parametrize("dtype", list(DType))
def test_rounding_is_none(dtype: DType) -> None:
    out, gradients = both_passes()
    rounded = [tensor.to(TORCH_TYPES[dtype]) for tensor in (out, *gradients)]
    again = [(tensor * (1.0 + torch.finfo(TORCH_TYPES[dtype]).eps)).to(tensor.dtype) for tensor in rounded]

    assert disagreement(FORWARD, again[:1], rounded[:1]) is None
    assert disagreement(BACKWARD, again[1:], rounded[1:]) is None


@pytest.mark.parametrize("changes", [{"diagonal": 1}, {"diagonal": 512}, {"scale": 0.2}])
def test_another_mask_or_scale_is_one(changes: dict[str, float]) -> None:
    out, gradients = both_passes()
    other_out, other_gradients = both_passes(**changes)  # type: ignore[arg-type]

    assert "its out differs" in (disagreement(FORWARD, [other_out], [out]) or "")
    assert "its dq differs" in (disagreement(BACKWARD, other_gradients, gradients) or "")


def test_one_wrong_row_of_many_is_one() -> None:
    out, _ = both_passes()
    wrong = out.clone()
    wrong[1, 1, 200] = 0.0

    assert "in the worst row" in (disagreement(FORWARD, [wrong], [out]) or "")


@pytest.mark.parametrize("spoil", [lambda t: t * math.nan, lambda t: t * math.inf])
def test_what_is_no_number_is_one(spoil: Callable[[Tensor], Tensor]) -> None:
    out, _ = both_passes()

    assert disagreement(FORWARD, [spoil(out)], [out]) is not None


def test_another_shape_is_one() -> None:
    out, _ = both_passes()

    assert "[2, 512, 2, 64]" in (disagreement(FORWARD, [out.transpose(1, 2)], [out]) or "")


def test_gradients_that_are_none_agree() -> None:
    nothing = torch.zeros(1, 2, 1, 64)

    assert disagreement(BACKWARD, [nothing + 1e-6] * 3, [nothing] * 3) is None


def test_an_lse_is_not_compared() -> None:
    out, _ = both_passes()

    assert disagreement(FORWARD, [out, torch.zeros(0)], [out, torch.ones(2, 2, 512)]) is None
