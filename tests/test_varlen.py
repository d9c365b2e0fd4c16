"""Packed sequences through the public function, on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import autoflash
from autoflash.errors import InvalidProblemError
from tests.featured import (
    LENGTHS_K,
    LENGTHS_Q,
    Case,
    D,
    H,
    expected_of,
    gradients_of,
    offsets,
    packed,
)

pytestmark = pytest.mark.usefixtures("no_records")


@pytest.mark.parametrize("tail", [0, 9])
@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"causal": True},
        {"causal": "top_left"},
        {"window": (11, 4)},
        {"causal": True, "window": (9, 0), "softcap": 1.0},
    ],
    ids=str,
)
def test_packed_sequences_match_each_alone(arguments: Case, tail: int) -> None:
    q, k, v = packed(tail, grad=True)
    cu_q, cu_k = offsets(LENGTHS_Q), offsets(LENGTHS_K, torch.int64)
    dout = torch.randn_like(q)

    out, lse = autoflash.attention_varlen(q, k, v, cu_q, cu_k, return_lse=True, vendor="never", **arguments)
    found = torch.autograd.grad(out, (q, k, v), dout)

    assert lse.shape == (H, q.shape[0])
    start_q = start_k = 0
    for length_q, length_k in zip(LENGTHS_Q, LENGTHS_K, strict=True):
        rows, keys = slice(start_q, start_q + length_q), slice(start_k, start_k + length_k)
        one = [x.detach()[part].transpose(0, 1)[None] for x, part in ((q, rows), (k, keys), (v, keys))]
        expected, expected_lse = expected_of(*one, arguments)
        torch.testing.assert_close(out[rows].transpose(0, 1)[None].double(), expected, atol=2e-5, rtol=1e-5)
        torch.testing.assert_close(lse[:, rows][None].double(), expected_lse, atol=2e-5, rtol=1e-5)
        weights = dout[rows].transpose(0, 1)[None]
        exact = gradients_of(*one, weights, torch.zeros(1, H, length_q), arguments)
        for ours, part, wanted in zip(found, (rows, keys, keys), exact, strict=True):
            torch.testing.assert_close(ours[part].transpose(0, 1)[None].double(), wanted, atol=1e-4, rtol=1e-4)
        start_q, start_k = start_q + length_q, start_k + length_k
    assert not out[start_q:].any()
    assert bool((lse[:, start_q:] == -torch.inf).all())
    for gradient, start in zip(found, (start_q, start_k, start_k), strict=True):
        assert not gradient[start:].any()


def test_case_a50_gradients_of_packed_sequences_repeat_bit_for_bit() -> None:
    cu = offsets([5, 63, 65, 1, 130])
    rows = int(cu[-1])
    found = []
    for _ in range(3):
        torch.full((4, rows, H, D), torch.nan)
        q, k, v = (torch.randn(rows, heads, D, generator=torch.Generator().manual_seed(heads)) for heads in (8, 2, 4))
        q, k, v = q.requires_grad_(), k.requires_grad_(), v[:, :2].detach().requires_grad_()
        out = autoflash.attention_varlen(q, k, v, cu, cu, causal=True, deterministic=True, vendor="never")
        found.append(torch.autograd.grad(out.sum(), (q, k, v)))  # type: ignore[union-attr]

    for later in found[1:]:
        assert all(torch.equal(a, b) and bool(a.isfinite().all()) for a, b in zip(found[0], later, strict=True))


def test_the_longest_sequence_is_a_hint_only() -> None:
    q, k, v = packed()
    cu_q, cu_k = offsets(LENGTHS_Q), offsets(LENGTHS_K)

    hinted = autoflash.attention_varlen(q, k, v, cu_q, cu_k, max_seqlen_q=65, max_seqlen_k=130, vendor="never")

    torch.testing.assert_close(hinted, autoflash.attention_varlen(q, k, v, cu_q, cu_k, vendor="never"))


def test_no_sequence_at_all_gives_zeros() -> None:
    q, k, v = packed(grad=True)
    nothing = torch.zeros(1, dtype=torch.int32)

    out, lse = autoflash.attention_varlen(q, k, v, nothing, nothing, return_lse=True, vendor="never")

    assert not out.any()
    assert bool((lse == -torch.inf).all())
    assert not any(gradient.any() for gradient in torch.autograd.grad(out.sum(), (q, k, v)))


@pytest.mark.parametrize(
    ("cu_q", "cu_k", "words"),
    [
        (offsets([5, 3]), offsets([8]), "as many sequences, got 2 and 1"),
        (offsets([5, 3]).float(), offsets([5, 3]), "cu_seqlens_q must be int32 or int64"),
        (offsets([500, 3]), offsets([5, 3]), "end at most at the 167 rows"),
        (torch.tensor([0, 9, 5], dtype=torch.int32), offsets([5, 3]), "never fall"),
        (torch.tensor([1, 9], dtype=torch.int32), offsets([5]), "begin with 0"),
        (offsets([5, 3])[None], offsets([5, 3]), r"of shape \(sequences \+ 1,\)"),
        ([0, 5], offsets([5]), "cu_seqlens_q must be a tensor, got list"),
    ],
)
def test_offsets_that_describe_no_sequences_are_refused(cu_q: Any, cu_k: Any, words: str) -> None:
    q, k, v = packed()

    with pytest.raises(InvalidProblemError, match=words):
        autoflash.attention_varlen(q, k, v, cu_q, cu_k)
