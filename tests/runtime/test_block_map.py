"""The lists of a block mask: what they hold, whatever the mask."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from autoflash.expression.expression import Role, parse
from autoflash.runtime import block_map
from autoflash.runtime.block_map import blocks_of_mask, expanded_blocks, lists_of, shown_blocks


def states_of(pairs: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Which blocks show some pair, and which all, looked at one by one."""
    batch, heads, m, n = pairs.shape
    shape = (batch, heads, -(-m // size), -(-n // size))
    shown, whole = (torch.zeros(shape, dtype=torch.bool) for _ in range(2))
    for row in range(shape[2]):
        for column in range(shape[3]):
            block = pairs[:, :, row * size : (row + 1) * size, column * size : (column + 1) * size].flatten(2)
            shown[:, :, row, column], whole[:, :, row, column] = block.any(dim=2), block.all(dim=2)
    return shown, whole


def test_a_list_holds_whole_blocks_then_partial_then_hidden_ones() -> None:
    shown = torch.tensor([[True, False, True, True, True]])[None, None]
    whole = torch.tensor([[False, True, True, False, True]])[None, None]

    lists = lists_of(shown, whole, 5 * 128, 128)

    assert lists.queries.tolist() == [[[[2, 4, 2, 4, 0, 3, 1]]]]
    assert lists.keys.tolist() == [[[[0, 1, 0], [0, 0, 0], [1, 1, 0], [0, 1, 0], [1, 1, 0]]]]
    assert lists.queries.dtype == lists.keys.dtype == torch.int32
    assert lists.queries.is_contiguous()
    assert lists.keys.is_contiguous()


def test_a_block_that_keys_end_in_is_never_whole() -> None:
    shown = torch.ones(1, 1, 2, 3, dtype=torch.bool)

    assert lists_of(shown, shown, 3 * 128, 128).queries[..., :2].tolist() == [[[[3, 3], [3, 3]]]]
    assert lists_of(shown, shown, 3 * 128 - 1, 128).queries[..., :2].tolist() == [[[[2, 3], [2, 3]]]]


@settings(max_examples=40, deadline=None)
@given(
    st.tuples(*(st.integers(1, 2) for _ in range(2)), *(st.integers(0, 5) for _ in range(2))),
    st.integers(0, 2**31 - 1),
)
def test_lists_give_back_the_blocks_that_they_show(shape: tuple[int, ...], seed: int) -> None:
    shown = torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < 0.5

    lists = lists_of(shown, torch.zeros_like(shown), 128 * shape[3], 128)

    assert torch.equal(shown_blocks(lists.queries), shown)
    assert torch.equal(shown_blocks(lists.keys), shown.transpose(2, 3))


TEXTS = (
    "kv_idx <= q_idx",
    "kv_idx < 200 + 20 * b",
    "abs(q_idx - kv_idx) < 90 + 60 * h",
    "q_idx % 300 < 40",
    "kv_idx < 0",
)


@pytest.mark.parametrize("text", TEXTS)
@settings(max_examples=6, deadline=None)
@given(st.integers(1, 520), st.integers(1, 520), st.sampled_from([128, 256]))
def test_blocks_of_an_expression_are_those_of_its_pairs(text: str, m: int, n: int, size: int) -> None:
    line, shape = str(parse(text, role=Role.MASK_MOD)), (2, 2, m, n)
    pairs = block_map.pairs_seen(line, (), shape, 0, "cpu")

    shown, whole = blocks_of_mask(line, (), shape, size, "cpu")

    expected = states_of(pairs, size)
    assert torch.equal(shown, expected[0])
    assert torch.equal(whole, expected[1])
    # Where nothing is hidden within a shown block, the blocks say all.
    assert bool((expanded_blocks(whole, m, n, size) <= pairs).all())
    assert bool((pairs <= expanded_blocks(shown, m, n, size)).all())


def test_queries_are_looked_at_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    line, shape = str(parse("kv_idx <= q_idx", role=Role.MASK_MOD)), (1, 1, 700, 300)
    at_once = blocks_of_mask(line, (), shape, 128, "cpu")

    monkeypatch.setattr(block_map, "_PAIRS_AT_ONCE", 1)

    in_parts = blocks_of_mask(line, (), shape, 128, "cpu")
    assert all(torch.equal(one, other) for one, other in zip(at_once, in_parts, strict=True))
