"""Windows, masks, softcap, dropout and packed sequences through the public functions, on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import autoflash
from autoflash.arguments import draw_rng
from autoflash.errors import InvalidProblemError, UnsupportedError
from autoflash.evaluate import reference

Case = dict[str, Any]

B, H, H_KV, M, N, D = 2, 4, 2, 37, 53, 16


@pytest.fixture(scope="module", autouse=True)
def _no_records() -> Iterator[None]:
    """Choices are made anew, and kept for the whole module: each form is verified once."""
    autoflash.forget()
    yield
    autoflash.forget()


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


def expected_of(q: Tensor, k: Tensor, v: Tensor, arguments: Case, **more: Any) -> tuple[Tensor, Tensor]:
    arguments = {**arguments, "softcap": arguments.get("softcap") or 0.0}
    return reference.attention(q, k, v, return_lse=True, **arguments, **more)


def gradients_of(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, dlse: Tensor, arguments: Case, **more: Any) -> Any:
    arguments = {**arguments, "softcap": arguments.get("softcap") or 0.0}
    return reference.gradients(q.detach(), k.detach(), v.detach(), dout, dlse, **arguments, **more)


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


# Packed sequences

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
        ({"mask": torch.ones(M, N, requires_grad=True)}, "mask has no gradient"),
        ({"mask": [[True]]}, "mask must be a tensor or None, got list"),
    ],
)
def test_what_cannot_be_meant_is_refused_before_any_launch(arguments: Case, words: str) -> None:
    q, k, v = tensors()

    with pytest.raises(InvalidProblemError, match=words):
        autoflash.attention(q, k, v, **arguments)


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


# Whoever traces or transforms the call


FEATURES: dict[str, Case] = {
    "window": {"window": (7, 3)},
    "mask": {"mask": bool_mask(B, 1, M, N)},
    "all": {"mask": float_mask(M, N), "softcap": 2.0, "window": (20, 4), "causal": True},
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", FEATURES)
def test_a_compiled_call_gives_the_bits_of_an_eager_one(name: str) -> None:
    torch.compiler.reset()
    arguments = FEATURES[name]

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return autoflash.attention(q, k, v, vendor="never", **arguments)  # type: ignore[return-value]

    results = []
    for call in (run, torch.compile(run, fullgraph=True, backend="aot_eager")):
        q, k, v = tensors(grad=True)
        out = call(q, k, v)
        results.append((out, *torch.autograd.grad(out.square().sum(), (q, k, v))))

    assert all(torch.equal(eager, traced) for eager, traced in zip(*results, strict=True))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiled_packed_sequences_and_dropout_run_whole() -> None:
    torch.compiler.reset()
    cu_q, cu_k = offsets(LENGTHS_Q), offsets(LENGTHS_K)

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return autoflash.attention_varlen(q, k, v, cu_q, cu_k, causal=True, dropout_p=0.2, vendor="never")  # type: ignore[return-value]

    q, k, v = packed(grad=True)
    torch.manual_seed(11)
    eager = run(q, k, v)
    torch.manual_seed(11)
    traced = torch.compile(run, fullgraph=True, backend="aot_eager")(q, k, v)

    assert torch.equal(eager, traced)


@pytest.mark.parametrize("name", [*FEATURES, "varlen"])
def test_opcheck_accepts_featured_calls(name: str) -> None:
    options: tuple[object, ...] = (0.25, "full", False, "never", True, True)
    extras: list[Tensor | None] = [None, None, None, None]
    features: tuple[object, ...] = (-1, -1, 0.0, 0.0, 0, 0)
    q, k, v = tensors(grad=True)
    if name == "varlen":
        q, k, v = (x.detach().transpose(0, 1)[None].requires_grad_() for x in packed(3))
        extras[1:] = [offsets(LENGTHS_Q), offsets(LENGTHS_K), draw_rng(q)]
        features = (9, -1, 0.0, 0.1, 0, 0)
    elif name == "window":
        features = (7, 3, 0.0, 0.0, 0, 0)
    else:
        extras[0] = FEATURES[name]["mask"].expand(B, H, M, N)
        features = (-1, -1, 2.0, 0.0, 0, 0)
    arguments = (q, k, v, *extras, *options, *features)

    found = torch.library.opcheck(
        torch.ops.autoflash.attention_forward.default,
        arguments,
        test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
    )

    assert set(found.values()) == {"SUCCESS"}


def test_vmap_over_masks_is_right() -> None:
    q, k, v = tensors()
    masks = torch.stack([bool_mask(M, N), ~bool_mask(M, N)])

    mapped = torch.func.vmap(lambda mask: autoflash.attention(q, k, v, mask=mask, vendor="never"))(masks)

    for mask, out in zip(masks, mapped, strict=True):
        torch.testing.assert_close(out, autoflash.attention(q, k, v, mask=mask, vendor="never"))


def test_vmap_with_dropout_or_packed_sequences_is_refused() -> None:
    q, k, v = tensors()
    several = torch.stack([q, q])
    with pytest.raises(UnsupportedError, match="vmap with dropout is not built"):
        torch.func.vmap(lambda q: autoflash.attention(q, k, v, dropout_p=0.1), randomness="different")(several)
    one, two, three = packed()
    cu_q, cu_k = offsets(LENGTHS_Q), offsets(LENGTHS_K)
    with pytest.raises(UnsupportedError, match="vmap of packed sequences is not built"):
        torch.func.vmap(lambda q: autoflash.attention_varlen(q, two, three, cu_q, cu_k))(torch.stack([one, one]))


def test_autocast_casts_featured_calls() -> None:
    q, k, v = tensors(grad=True)

    with torch.autocast("cpu", torch.bfloat16):
        out = autoflash.attention(q, k, v, window=(7, 3), softcap=2.0, vendor="never")

    assert isinstance(out, Tensor)
    assert out.dtype is torch.bfloat16
    assert torch.autograd.grad(out.float().sum(), q)[0].dtype is torch.float32


def test_explain_knows_the_features() -> None:
    q, k, v = tensors(grad=True)

    explained = autoflash.explain(q, k, v, window=(7, 3), softcap=2.0, dropout_p=0.1, vendor="never")

    assert ["/full+softcap+window+dropout/" in str(one.cell) for one in explained.passes] == [True, True]


def test_warmup_of_featured_calls_prepares_them_and_leaves_the_generator_alone() -> None:
    q, k, v = tensors()
    before = torch.get_rng_state()

    explained = autoflash.warmup(q, k, v, backward=True, window=(7, 3), dropout_p=0.1, vendor="never")

    assert torch.equal(torch.get_rng_state(), before)
    assert len(explained.passes) == 2
