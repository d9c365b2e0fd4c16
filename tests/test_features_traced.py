"""Calls with features under torch.compile, vmap, autocast and opcheck, and what explain and warmup say of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import autoflash
from autoflash.arguments import draw_rng
from autoflash.errors import InvalidProblemError, UnsupportedError
from autoflash.runtime.executable import NO_EXTRAS
from tests.featured import (
    LENGTHS_K,
    LENGTHS_Q,
    B,
    Case,
    H,
    M,
    N,
    bool_mask,
    float_mask,
    offsets,
    packed,
    tensors,
)

pytestmark = pytest.mark.usefixtures("no_records")


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
    extras: list[object] = [*NO_EXTRAS[:-1], []]
    features: tuple[object, ...] = (-1, -1, 0.0, 0.0, 0, 0)
    q, k, v = tensors(grad=True)
    if name == "varlen":
        q, k, v = (x.detach().transpose(0, 1)[None].requires_grad_() for x in packed(3))
        extras[1:4] = [offsets(LENGTHS_Q), offsets(LENGTHS_K), draw_rng(q)]
        features = (9, -1, 0.0, 0.1, 0, 0)
    elif name == "window":
        features = (7, 3, 0.0, 0.0, 0, 0)
    else:
        extras[0] = FEATURES[name]["mask"].expand(B, H, M, N)
        features = (-1, -1, 2.0, 0.0, 0, 0)
    arguments = (q, k, v, *extras, *options, *features, 0, "", "")

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


def test_a_plain_call_explains_no_featured_one() -> None:
    q, k, v = tensors()
    autoflash.attention(q, k, v, vendor="never")

    (plain,) = autoflash.explain(q, k, v, vendor="never").passes
    (featured,) = autoflash.explain(q, k, v, softcap=3.5, vendor="never").passes

    assert plain.has_run
    assert not featured.has_run
    assert "+softcap/" in str(featured.cell)


@pytest.mark.parametrize("call", [autoflash.explain, autoflash.warmup])
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"cu_seqlens_q": offsets(LENGTHS_Q)}, "cu_seqlens_k must be a tensor, got NoneType"),
        ({"cu_seqlens_k": offsets(LENGTHS_K)}, "cu_seqlens_q must be a tensor, got NoneType"),
        ({"cu_seqlens_q": offsets(LENGTHS_Q), "cu_seqlens_k": offsets([3])}, "as many sequences, got 6 and 1"),
        (
            {"cu_seqlens_q": offsets(LENGTHS_Q), "cu_seqlens_k": offsets(LENGTHS_K), "mask": bool_mask(M, N)},
            "packed sequences have no mask",
        ),
    ],
)
def test_what_packed_calls_cannot_mean_is_refused_by_explain_and_warmup(
    call: Any, arguments: dict[str, Any], words: str
) -> None:
    q, k, v = packed()

    with pytest.raises(InvalidProblemError, match=words):
        call(q, k, v, vendor="never", **arguments)


def test_warmup_of_featured_calls_prepares_them_and_leaves_the_generator_alone() -> None:
    q, k, v = tensors()
    before = torch.get_rng_state()

    explained = autoflash.warmup(q, k, v, backward=True, window=(7, 3), dropout_p=0.1, vendor="never")

    assert torch.equal(torch.get_rng_state(), before)
    assert len(explained.passes) == 2
