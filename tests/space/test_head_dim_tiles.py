"""Where vectors may be held in two tiles, and what that takes."""

from __future__ import annotations

import pytest

from autoflash.problem import Pass
from autoflash.space import catalog, cost
from autoflash.variant import Choice, Family, Variant
from tests.factories import make_cell, make_device

_H200 = make_device("sm_90")


@pytest.mark.parametrize("op", list(Pass))
def test_heads_are_split_where_two_tiles_have_fewer_columns_than_one(op: Pass) -> None:
    def offered(head_dim: int, head_dim_v: int) -> tuple[Choice, ...]:
        cell = make_cell(op=op, head_dim=head_dim, head_dim_v=head_dim_v)
        knobs = {knob.name: knob.values for knob in catalog.search_space(cell, _H200, Family.TRITON).knobs}
        return knobs.get("head_dim_tiles", ())

    dims = [*range(33, 49), *range(65, 97), *range(129, 193)]
    assert [dim for dim in range(1, 257) if offered(dim, dim)] == dims
    assert {offered(dim, dim) for dim in dims} == {("padded", "split")}
    assert offered(80, 40) == ("padded", "split")
    assert offered(192, 128) == offered(96, 64) == ("padded", "split_qk")
    assert offered(128, 96) == offered(64, 80) == ("padded", "split_v")
    assert offered(576, 512) == ("padded", "split_qk")
    assert offered(128, 64) == ()


@pytest.mark.parametrize("op", list(Pass))
def test_padded_heads_have_the_variants_that_they_had_before_there_was_a_choice(op: Pass) -> None:
    def variants(head_dim: int) -> set[Variant]:
        return set(catalog.search_space(make_cell(op=op, head_dim=head_dim), _H200, Family.TRITON).variants())

    padded = {variant for variant in variants(80) if "head_dim_tiles" not in variant.structure}
    split = variants(80) - padded

    assert padded == variants(128)
    assert {variant.structure["head_dim_tiles"] for variant in split} == {"split"}
    assert len(split) > len(padded) / 2


def test_split_heads_take_the_memory_of_their_columns_and_rank_above_padded_ones() -> None:
    cell = make_cell(head_dim=80)
    space = catalog.search_space(cell, _H200, Family.TRITON)
    padded = space.default()
    split = space.variant({**padded.structure, **padded.config, "head_dim_tiles": "split"})

    # What Triton 3.6 takes for a kernel with these tiles, loaded by pointer.
    at_64 = {"BLOCK_M": 64, "BLOCK_N": 64, "num_stages": 2}
    assert cost.shared_bytes(space.variant({**at_64}), cell) == 81920
    assert cost.shared_bytes(space.variant({**at_64, "head_dim_tiles": "split"}), cell) == 51200
    assert padded == space.normalise(space.variant({**padded.structure, "head_dim_tiles": "padded", **padded.config}))
    assert cost.score(split, cell, _H200) > cost.score(padded, cell, _H200)


def test_one_side_in_two_tiles_takes_the_memory_of_its_columns_alone() -> None:
    cell = make_cell(head_dim=192, head_dim_v=128)
    space = catalog.search_space(cell, _H200, Family.TRITON)
    padded = space.variant({"BLOCK_M": 64, "BLOCK_N": 32, "num_stages": 2})
    split = space.variant({**padded.structure, **padded.config, "head_dim_tiles": "split_qk"})

    # 64 columns less of Q, and of K in each of two stages.
    assert cost.shared_bytes(padded, cell) - cost.shared_bytes(split, cell) == 64 * (64 + 2 * 32) * 2
    assert space.why_not(split) is None
    assert cost.score(split, cell, _H200) > cost.score(padded, cell, _H200)


def test_a_forward_with_keys_outside_has_padded_heads() -> None:
    space = catalog.search_space(make_cell(head_dim=80), _H200, Family.TRITON)
    variant = space.variant({"loop_order": "key_outer", "head_dim_tiles": "split"})

    assert "head_dim_tiles" not in variant.structure
