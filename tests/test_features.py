"""Windows, masks, softcap and dropout through the public functions, on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import autoflash
from autoflash.arguments import draw_rng
from autoflash.errors import InvalidProblemError, NoKernelError
from tests.featured import (
    B,
    Case,
    D,
    H,
    M,
    N,
    bool_mask,
    expected_of,
    float_mask,
    gradients_of,
    tensors,
)

pytestmark = pytest.mark.usefixtures("no_records")


CASES: dict[str, Case] = {
    "window": {"window": (7, 3)},
    "window-left": {"window": (7, None)},
    "window-right": {"window": (-1, 5)},
    "window-causal": {"window": (9, 9), "causal": True},
    "window-top-left": {"window": (4, 2), "causal": "top_left"},
    "softcap": {"softcap": 1.5},
    "bool": {"mask": bool_mask(B, H, M, N)},
    "bool-rows": {"mask": bool_mask(B, 1, M, N)},
    "bool-keys": {"mask": bool_mask(B, 1, 1, N)},
    "bool-2d": {"mask": bool_mask(M, N)},
    "float": {"mask": float_mask(B, H, M, N)},
    "float-broadcast": {"mask": float_mask(1, H, 1, N, dtype=torch.bfloat16)},
    "float-inf": {"mask": float_mask(M, N).masked_fill(~bool_mask(M, N), -torch.inf)},
    "all": {"mask": bool_mask(B, 1, M, N), "softcap": 2.0, "window": (20, 4), "causal": True, "scale": -0.4},
}


@pytest.mark.parametrize("name", CASES)
def test_output_lse_and_gradients_match_float64(name: str) -> None:
    arguments = CASES[name]
    q, k, v = tensors(grad=True)
    dout, dlse = torch.randn(B, H, M, D), torch.randn(B, H, M)

    out, lse = autoflash.attention(q, k, v, return_lse=True, vendor="never", **arguments)
    expected, expected_lse = expected_of(q.detach(), k.detach(), v.detach(), arguments)
    torch.testing.assert_close(out.double(), expected, atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(lse.double(), expected_lse, atol=2e-5, rtol=1e-5)

    found = torch.autograd.grad((out, lse), (q, k, v), (dout, dlse.masked_fill(lse == -torch.inf, 0.0)))
    wanted = gradients_of(q, k, v, dout, dlse.masked_fill(lse == -torch.inf, 0.0), arguments)
    for ours, exact in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours.double(), exact, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("vendor", ["never", "allow"])
@pytest.mark.parametrize(
    "arguments",
    [{"window": (5, 5)}, {"softcap": 0.5}, {"mask": bool_mask(M, N)}, {"mask": float_mask(M, N)}, {"dropout_p": 0.4}],
    ids=["window", "softcap", "bool", "float", "dropout"],
)
def test_case_a05_a51_an_argument_that_is_accepted_is_obeyed(arguments: Case, vendor: str) -> None:
    q, k, v = tensors()

    plain = autoflash.attention(q, k, v, vendor=vendor)
    featured = autoflash.attention(q, k, v, vendor=vendor, **arguments)

    assert isinstance(plain, Tensor)
    assert isinstance(featured, Tensor)
    assert (plain - featured).abs().max() > 1e-2


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_case_a03_fully_masked_rows_give_zero_and_no_nan_gradients(dtype: torch.dtype) -> None:
    q, k, v = tensors(6, 10, grad=True, dtype=dtype)
    mask = torch.ones(B, H, 6, 10, dtype=torch.bool)
    mask[:, :, 4:] = False
    mask[0, 1] = False
    weights = torch.randn(B, H, 6, D, dtype=dtype)

    out, lse = autoflash.attention(q, k, v, mask=mask, return_lse=True, vendor="never")
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), weights)

    blind = ~mask.any(-1)
    assert not out[blind].any()
    assert torch.equal(lse == -torch.inf, blind)
    assert not dq[blind].any()
    exact = gradients_of(q, k, v, weights, torch.zeros(B, H, 6), {"mask": mask})
    for ours, wanted in zip((dq, dk, dv), exact, strict=True):
        tolerance = {torch.float16: 4e-3, torch.bfloat16: 3e-2, torch.float32: 1e-5}[dtype]
        torch.testing.assert_close(ours.double(), wanted, atol=tolerance, rtol=tolerance)


def test_case_a11_very_low_scores_after_a_hidden_first_tile_keep_their_maximum() -> None:
    q, k, v = (x[:, :, :, :] for x in tensors(88, 448))
    q, k = q * 0.1, k * 0.1
    q[..., 0], k[..., 0] = 1.0, -150.0 * D**0.5
    hide_first = torch.ones(1, 1, 1, 448, dtype=torch.bool)
    hide_first[..., :200] = False

    for arguments in ({"causal": True}, {"window": (64, 0)}, {"mask": hide_first}, {"mask": ~hide_first}):
        out = autoflash.attention(q, k, v, vendor="never", **arguments)  # type: ignore[arg-type]
        expected, _ = expected_of(q, k, v, arguments)
        torch.testing.assert_close(out.double(), expected, atol=1e-4, rtol=1e-4)  # type: ignore[union-attr]


@pytest.mark.parametrize("width", [1, 2, 4, 15, 16, 17])
def test_case_a30_a_window_counts_the_keys_that_the_documentation_says(width: int) -> None:
    """One-hot values: the output of a row is where its keys are."""
    q = torch.zeros(1, 1, 16, 16)
    v = torch.eye(16)[None, None]

    out = autoflash.attention(q, q, v, causal=True, window=(width, None), vendor="never")

    assert isinstance(out, Tensor)
    assert (out[0, 0] > 0).sum(-1).tolist() == [min(i, width) + 1 for i in range(16)]


def test_case_a30_a_window_that_hides_nothing_is_causal_bit_for_bit() -> None:
    q, k, v = tensors(N, N)

    windowed = autoflash.attention(q, k, v, window=(N - 1, 0), vendor="never")

    assert torch.equal(windowed, autoflash.attention(q, k, v, causal=True, vendor="never"))  # type: ignore[arg-type]


def test_case_a41_what_lies_outside_the_window_may_be_nan() -> None:
    q, k, v = tensors(512, 512)
    k[:, :, :256] = v[:, :, :256] = torch.nan

    out = autoflash.attention(q, k, v, causal=True, window=(63, 0), vendor="never")

    alone = autoflash.attention(
        q[:, :, 256:], k[:, :, 256:], v[:, :, 256:], causal=True, window=(63, 0), vendor="never"
    )
    torch.testing.assert_close(out[:, :, 384:], alone[:, :, 128:])  # type: ignore[index]


@pytest.mark.parametrize("kind", ["bool", "float"])
@pytest.mark.parametrize("vendor", ["never", "allow"])
def test_case_a42_a_mask_and_causal_hide_together(kind: str, vendor: str) -> None:
    q, k, v = tensors(32, 32)
    mask = bool_mask(32, 32)
    mask[:, 0] = True
    given = mask if kind == "bool" else torch.zeros(32, 32).masked_fill(~mask, -torch.inf)

    out = autoflash.attention(q, k, v, mask=given, causal=True, vendor=vendor)

    expected, _ = expected_of(q, k, v, {"mask": mask & torch.ones(32, 32).tril().bool()})
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)  # type: ignore[union-attr]


@pytest.mark.parametrize("n", [33, 65, 97])
def test_case_a15_broadcast_keys_and_masks_need_no_copies(n: int) -> None:
    q, base, _ = tensors(64, n)
    k = base[:, :1].expand(B, H, n, D)
    mask = bool_mask(1, 1, 64, n)

    out = autoflash.attention(q, k, k, mask=mask, vendor="never")

    copied = autoflash.attention(
        q, k.contiguous(), k.contiguous(), mask=mask.expand(B, H, 64, n).contiguous(), vendor="never"
    )
    assert torch.equal(out, copied)  # type: ignore[arg-type]


# Dropout


def dropped(**arguments: Any) -> Tensor:
    q = torch.zeros(1, 2, 64, 64)
    out = autoflash.attention(q, q, torch.eye(64).expand(1, 2, 64, 64), vendor="never", **arguments)
    assert isinstance(out, Tensor)
    return out


def test_case_a06_calls_differ_and_a_seed_repeats_them() -> None:
    torch.manual_seed(0)
    first, second = dropped(dropout_p=0.3), dropped(dropout_p=0.3)
    torch.manual_seed(0)
    again = dropped(dropout_p=0.3)

    assert not torch.equal(first, second)
    assert torch.equal(first, again)
    assert (first == 0).float().mean().item() == pytest.approx(0.3, abs=0.03)


def test_case_a06_no_dropout_leaves_the_generator_alone() -> None:
    before = torch.get_rng_state()

    dropped(dropout_p=0.0)

    assert torch.equal(torch.get_rng_state(), before)


def test_dropout_is_what_the_specification_says_with_gradients() -> None:
    q, k, v = tensors(grad=True)
    dout, dlse = torch.randn(B, H, M, D), torch.randn(B, H, M)
    torch.manual_seed(7)
    rng = draw_rng(q)
    torch.manual_seed(7)

    out, lse = autoflash.attention(q, k, v, dropout_p=0.25, causal=True, return_lse=True, vendor="never")

    how: Case = {"dropout_p": 0.25, "causal": True, "rng": rng}
    expected, expected_lse = expected_of(q.detach(), k.detach(), v.detach(), how)
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(lse.double(), expected_lse, atol=1e-5, rtol=1e-5)
    found = torch.autograd.grad((out, lse), (q, k, v), (dout, dlse))
    for ours, exact in zip(found, gradients_of(q, k, v, dout, dlse, how), strict=True):
        torch.testing.assert_close(ours.double(), exact, atol=1e-4, rtol=1e-4)


def test_case_a06_a_checkpoint_recomputes_with_the_same_dropout() -> None:
    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return autoflash.attention(q, k, v, dropout_p=0.3, vendor="never")  # type: ignore[return-value]

    gradients = []
    for saved in (False, True):
        q, k, v = tensors(grad=True)
        torch.manual_seed(3)
        out = checkpoint(run, q, k, v, use_reentrant=False) if saved else run(q, k, v)
        gradients.append(torch.autograd.grad(out.square().sum(), (q, k, v)))

    for plain, recomputed in zip(*gradients, strict=True):
        assert torch.equal(plain, recomputed)


# Refusals


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"window": (-2, 0)}, r"each side of window must be None, -1 .* got \(-2, 0\)"),
        ({"window": (1.5, 0)}, "each side of window"),
        ({"window": (True, 0)}, "each side of window"),
        ({"window": 128}, r"window must be a pair \(left, right\) or None, got 128"),
        ({"softcap": -1.0}, "softcap must be a finite number from 0"),
        ({"softcap": float("inf")}, "softcap must be a finite number"),
        ({"dropout_p": 1.0}, "dropout_p must be a number from 0 on and below 1, got 1.0"),
        ({"dropout_p": -0.1}, "dropout_p must be"),
        ({"mask": torch.ones(M, N, dtype=torch.int64)}, "mask must be bool .* got torch.int64: use mask.bool"),
        ({"mask": torch.ones(M, N, dtype=torch.float64)}, "got torch.float64"),
        ({"mask": torch.ones(M, N + 1, dtype=torch.bool)}, r"broadcastable to \(B, H, Sq, Sk\) = \(2, 4, 37, 53\)"),
        ({"mask": torch.ones(1, 1, 1, M, N, dtype=torch.bool)}, "broadcastable"),
        ({"mask": torch.ones(M, N, dtype=torch.bool, device="meta")}, "on the device of query, got meta and cpu"),
        ({"mask": torch.ones(M, N, requires_grad=True)}, "mask has no gradient: pass it as bias"),
        ({"mask": [[True]]}, "mask must be a tensor or None, got list"),
    ],
)
def test_what_cannot_be_meant_is_refused_before_any_launch(arguments: Case, words: str) -> None:
    q, k, v = tensors()

    with pytest.raises(InvalidProblemError, match=words):
        autoflash.attention(q, k, v, **arguments)


def test_vendor_kernels_are_said_to_have_no_features() -> None:
    q, k, v = tensors()

    with pytest.raises(NoKernelError, match="has softcap, window: vendor kernels have none"):
        autoflash.attention(q, k, v, softcap=3.0, window=(2, 2), vendor="only")
