"""block_mask through the public functions, on the CPU."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

import autoflash
from autoflash import BlockMask, block_mask
from autoflash.errors import ExpressionError, InvalidProblemError, UnsupportedError
from tests.grouped import DOCUMENTS, B, D, H, attended, normal

pytestmark = [
    pytest.mark.usefixtures("no_records"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

M, N = 300, 420
HEADS = "kv_idx <= q_idx + 130 * h"


def tensors(grad: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    return attended(M, N, grad)


def documents() -> Tensor:
    return (torch.arange(B * N).view(B, N) // 110 % 3).int()


def doc_mask(**options: Any) -> BlockMask:
    return block_mask(DOCUMENTS, B, None, M, N, params={"doc": documents()}, device="cpu", **options)


def random_blocks(*shape: int) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(5)) < 0.5


MASKS = {
    "documents": doc_mask,
    "documents in larger blocks": lambda: doc_mask(block_size=256),
    "heads": lambda: block_mask(HEADS, None, H, M, N, device="cpu"),
    "everything": lambda: block_mask("kv_idx >= 0", None, None, M, N, device="cpu"),
    "nothing": lambda: block_mask("kv_idx < 0", None, None, M, N, device="cpu"),
    "blocks": lambda: BlockMask.from_blocks(random_blocks(3, 4), M, N),
    "blocks of each head": lambda: BlockMask.from_blocks(random_blocks(H, 3, 4), M, N),
    "blocks of all": lambda: BlockMask.from_blocks(random_blocks(B, H, 2, 2), M, N, 256),
}
OTHERS: tuple[dict[str, Any], ...] = (
    {},
    {"causal": True},
    {"window": (70, 30), "softcap": 5.0},
    {"causal": "top_left", "score_mod": "score * 1.5", "sinks": normal(H)},
)


def results_of(tensors: tuple[Tensor, ...], call: Any) -> tuple[Tensor, ...]:
    out, lse = call(*tensors)
    weight = torch.where(lse.isfinite(), lse, 0.0).square().sum()
    return (out, lse, *torch.autograd.grad(out.square().sum() + weight, tensors))


# Two masks stand for all beside other arguments.
@pytest.mark.parametrize(
    ("name", "number"),
    [
        *((name, 0) for name in MASKS),
        *itertools.product(("documents", "blocks of each head"), range(1, len(OTHERS))),
    ],
)
def test_it_is_the_dense_mask_that_means_the_same(name: str, number: int) -> None:
    blocks, others = MASKS[name](), OTHERS[number]
    dense = blocks.dense().expand(B, H, M, N)

    ours = results_of(
        tensors(grad=True), lambda *x: autoflash.attention(*x, block_mask=blocks, return_lse=True, **others)
    )
    q, k, v = (x.detach() for x in tensors())
    out, lse = autoflash.reference.attention(q, k, v, mask=dense, return_lse=True, **others)

    torch.testing.assert_close(ours[0].double(), out, atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(ours[1].double(), lse, atol=2e-5, rtol=2e-5)
    dlse = torch.where(lse.isfinite(), 2.0 * lse, 0.0)
    gradients = autoflash.reference.gradients(q, k, v, 2.0 * out, dlse, mask=dense, **others)
    for found, expected in zip(ours[2:], gradients, strict=True):
        torch.testing.assert_close(found.double(), expected, atol=2e-4, rtol=2e-4)


def test_the_size_of_blocks_decides_no_bit_and_a_mask_mod_alone_gives_the_same() -> None:
    call = autoflash.attention
    one, other = (
        results_of(
            tensors(grad=True), lambda *x, size=size: call(*x, block_mask=doc_mask(block_size=size), return_lse=True)
        )
        for size in (128, 512)
    )
    alone = results_of(
        tensors(grad=True),
        lambda *x: call(*x, mask_mod=DOCUMENTS, score_params={"doc": documents()}, return_lse=True),
    )

    assert all(torch.equal(*pair) for pair in zip(one, other, strict=True))
    assert all(torch.equal(*pair) for pair in zip(one, alone, strict=True))


def test_a_dense_mask_is_that_of_its_expression() -> None:
    doc = documents()

    assert torch.equal(doc_mask().dense(), (doc[:, :M, None] == doc[:, None])[:, None])
    assert torch.equal(
        BlockMask.from_blocks(random_blocks(3, 4), M, N).dense()[0, 0],
        random_blocks(3, 4).repeat_interleave(128, 0)[:M].repeat_interleave(128, 1)[:, :N],
    )


def test_what_the_expression_does_not_look_at_is_shared() -> None:
    shared = block_mask("kv_idx <= q_idx", B, H, M, N, device="cpu")

    assert (shared.batch, shared.heads, tuple(shared.blocks.shape)) == (None, None, (1, 1, 3, 4))
    assert doc_mask().blocks.shape == (B, 1, 3, 4)


def test_it_never_changes() -> None:
    doc = documents()
    blocks = block_mask(DOCUMENTS, B, None, M, N, params={"doc": doc}, device="cpu")
    before = blocks.dense()

    doc.zero_()

    assert torch.equal(blocks.dense(), before)
    with pytest.raises(AttributeError):
        blocks.block_size = 256  # type: ignore[misc]
    with pytest.raises(TypeError):
        blocks.params["doc"] = doc  # type: ignore[index]


def test_a_score_mod_has_parameters_with_gradients_beside_it() -> None:
    q, k, v = tensors()
    table = normal(H).requires_grad_()

    out = autoflash.attention(q, k, v, block_mask=doc_mask(), score_mod="score * t[h]", score_params={"t": table})
    assert isinstance(out, Tensor)
    (found,) = torch.autograd.grad(out.square().sum(), table)

    dense = doc_mask().dense().expand(B, H, M, N)
    exact = autoflash.reference.term_gradients(
        q, k, v, 2.0 * out.detach(), mask=dense, score_mod="score * t[h]", score_params={"t": table.detach()}
    )
    assert exact.params[0] is not None
    torch.testing.assert_close(found.double(), exact.params[0], atol=1e-4, rtol=1e-4)


def test_a_compiled_call_is_the_eager_one() -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor, blocks: BlockMask) -> Tensor:
        out = autoflash.attention(q, k, v, block_mask=blocks)
        assert isinstance(out, Tensor)
        return out

    q, k, v = tensors(grad=True)
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    for blocks in (doc_mask(), BlockMask.from_blocks(random_blocks(3, 4), M, N)):
        pairs = [
            (out, *torch.autograd.grad(out.sum(), (q, k, v)))
            for out in (f(q, k, v, blocks) for f in (attend, compiled))
        ]
        assert all(torch.equal(eager, traced) for eager, traced in zip(*pairs, strict=True))


def test_a_call_with_another_map_of_the_same_shape_is_prepared_already() -> None:
    q, k, v = tensors()
    for seed in range(2):
        blocks = torch.rand((3, 4), generator=torch.Generator().manual_seed(seed)) < 0.5
        one = BlockMask.from_blocks(blocks, M, N)
        out = autoflash.attention(q, k, v, block_mask=one)
        count = len(autoflash.ops.CALLS.prepared) if seed == 0 else count  # noqa: F821
        expected = autoflash.reference.attention(q, k, v, mask=one.dense())
        torch.testing.assert_close(out.double(), expected, atol=2e-5, rtol=2e-5)  # type: ignore[union-attr]
    assert len(autoflash.ops.CALLS.prepared) == count


def refused(arguments: dict[str, Any], message: str) -> Any:
    return pytest.param(arguments, message, id=message)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        refused({"block_mask": random_blocks(3, 4)}, "must be an autoflash.BlockMask"),
        refused({"block_mask": doc_mask(), "mask_mod": "kv_idx < 3"}, "a mask_mod of its own"),
        refused(
            {"block_mask": BlockMask.from_blocks(random_blocks(4, 4), 512, N)}, "512 queries and 420 keys, got 300"
        ),
        refused({"block_mask": BlockMask.from_blocks(random_blocks(3, 3, 4), M, N)}, "H = 3, got 4"),
        refused({"block_mask": BlockMask.from_blocks(random_blocks(3, 1, 3, 4), M, N)}, "B = 3, got 2"),
        refused({"block_mask": BlockMask.from_blocks(random_blocks(3, 4).to("meta"), M, N)}, "on the device of query"),
        refused(
            {"block_mask": doc_mask(), "score_mod": "score + doc", "score_params": {"doc": 1.0}}, "has doc already"
        ),
        refused({"block_mask": doc_mask(), "score_params": {"x": 1.0}}, "nothing reads x"),
        refused({"block_mask": doc_mask(), "score_mod": "score", "score_params": [1.0]}, "a dict of names"),
    ],
)
def test_what_does_not_fit_a_call_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidProblemError, match=message):
        autoflash.attention(*tensors(), **arguments)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: BlockMask.from_blocks(random_blocks(3, 4).float(), M, N), "bool tensor"),
        (lambda: BlockMask.from_blocks([[True]], M, N), "bool tensor"),  # type: ignore[arg-type]
        (lambda: BlockMask.from_blocks(random_blocks(4, 3), M, N), r"\(B or 1, H or 1, 3, 4\)"),
        (lambda: BlockMask.from_blocks(random_blocks(1, 1, 1, 3, 4), M, N), r"got \(1, 1, 1, 3, 4\)"),
        (lambda: BlockMask.from_blocks(random_blocks(3, 4), M, N, 100), "power of two from 128"),
        (lambda: BlockMask.from_blocks(random_blocks(3, 4), M, N, 64), "power of two from 128"),
        (lambda: BlockMask.from_blocks(random_blocks(3, 4), -1, N), "must not be negative"),
        (lambda: block_mask(DOCUMENTS, None, None, M, N, params={"doc": documents()}, device="cpu"), "give batch"),
        (lambda: block_mask(HEADS, None, None, M, N, device="cpu"), "looks at h: give heads"),
        (lambda: block_mask(HEADS, None, 0, M, N, device="cpu"), "heads must be None or a whole number from 1 on"),
        (lambda: block_mask("kv_idx < x", None, None, M, N, device="cpu"), "x is not known"),
        (lambda: block_mask("kv_idx + 1", None, None, M, N, device="cpu"), "must give a truth"),
    ],
)
def test_what_means_nothing_is_refused(make: Any, message: str) -> None:
    with pytest.raises((InvalidProblemError, ExpressionError), match=message):
        make()


def test_a_map_of_one_batch_entry_that_is_looked_at_serves_no_other() -> None:
    one = block_mask("kv_idx < 100 * b + 50", 1, None, M, N, device="cpu")

    with pytest.raises(InvalidProblemError, match="B = 1, got 2"):
        autoflash.attention(*tensors(), block_mask=one)


def test_packed_sequences_and_vmap_refuse_it_by_name() -> None:
    with pytest.raises(TypeError, match="block_mask"):
        autoflash.attention_varlen(block_mask=None)  # type: ignore[call-arg]
    q, starts = normal(6, H, D), torch.tensor([0, 6], dtype=torch.int32)
    blocks = BlockMask.from_blocks(random_blocks(3, 4), M, N)
    with pytest.raises(InvalidProblemError, match="packed sequences have no block_mask"):
        autoflash.explain(q, q, q, block_mask=blocks, cu_seqlens_q=starts, cu_seqlens_k=starts)
    q, k, v = tensors()
    with pytest.raises(UnsupportedError, match="vmap with a block mask"):
        torch.func.vmap(lambda q: autoflash.attention(q, k, v, block_mask=blocks))(torch.stack([q, q]))


def test_functorch_s_grad_knows_blocks() -> None:
    q, k, v = tensors(grad=True)
    blocks = BlockMask.from_blocks(random_blocks(3, 4), M, N)

    def loss(q: Tensor) -> Tensor:
        return autoflash.attention(q, k.detach(), v.detach(), block_mask=blocks).square().sum()  # type: ignore[union-attr]

    (eager,) = torch.autograd.grad(loss(q), q)
    assert torch.equal(torch.func.grad(loss)(q.detach()), eager)


def test_explain_and_warmup_take_it() -> None:
    explained = autoflash.warmup(*tensors(), backward=True, block_mask=doc_mask())

    assert [one.cell.features[-1].value for one in explained.passes] == ["block_mask", "block_mask"]


def test_empty_sequences_have_blocks_too() -> None:
    q, k, v = normal(1, H, 0, D), normal(1, H, N, D), normal(1, H, N, D)
    out = autoflash.attention(q, k, v, block_mask=BlockMask.from_blocks(random_blocks(0, 4), 0, N))
    assert isinstance(out, Tensor)
    assert out.shape == (1, H, 0, D)
    nothing = autoflash.attention(k, q, q, block_mask=block_mask("kv_idx < 3", None, None, N, 0, device="cpu"))
    assert isinstance(nothing, Tensor)
    assert bool((nothing == 0.0).all())
