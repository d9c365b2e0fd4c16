"""The space of the Hopper family: what it offers for which cell, and why not."""

from __future__ import annotations

import pytest

from autoflash.device import CROSS_TARGETS
from autoflash.problem import Cell, DType, Mask, Pass
from autoflash.space import catalog, hopper
from autoflash.space.catalog import search_space
from autoflash.variant import Family
from tests.factories import make_cell, make_variant

H200 = CROSS_TARGETS["sm_90"]


@pytest.mark.parametrize("mask", list(Mask))
@pytest.mark.parametrize("op", list(Pass))
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 192, 256])
def test_the_default_is_in_the_space(op: Pass, mask: Mask, head_dim: int) -> None:
    space = search_space(make_cell(op=op, head_dim=head_dim, mask=mask), H200, Family.GLUON_SM90)

    assert space.default() in space.variants()


def test_the_family_is_offered_on_hopper_alone() -> None:
    able = {
        arch for arch, device in CROSS_TARGETS.items() if Family.GLUON_SM90 in catalog.families(Pass.FORWARD, device)
    }

    assert able == {"sm_90"}


@pytest.mark.parametrize(
    ("cell", "words"),
    [
        (make_cell(dtype=DType.FP32), "fp16 and bf16"),
        (make_cell(head_dim=64, head_dim_v=128), "equal head dims"),
        (make_cell(head_dim=36), "multiples of 8"),
        (make_cell(head_dim=512), "up to 256"),
    ],
)
def test_what_the_templates_cannot_do_is_refused_with_the_reason(cell: Cell, words: str) -> None:
    space = search_space(cell, H200, Family.GLUON_SM90)

    assert space.variants() == []
    assert words in (space.why_not(space.default()) or "")


def test_shared_memory_is_what_the_compiler_takes_but_for_barriers() -> None:
    # Metadata of Triton 3.6 for sm_90: 197152 and 198112 bytes.
    forward = hopper.shared_need(make_variant(Family.GLUON_SM90), make_cell(head_dim=128))
    backward = hopper.shared_need(
        make_variant(Family.GLUON_SM90, op=Pass.BACKWARD), make_cell(op=Pass.BACKWARD, head_dim=128)
    )

    assert 0 <= 197152 - forward < 1024
    assert 0 <= 198112 - backward < 2048


def test_consumers_of_wide_heads_share_the_columns_of_the_gradients() -> None:
    cell = make_cell(op=Pass.BACKWARD, head_dim=256)
    space = search_space(cell, H200, Family.GLUON_SM90)
    by_keys = make_variant(Family.GLUON_SM90, op=Pass.BACKWARD)

    assert {variant.structure["consumer_owns"] for variant in space.variants()} == {"columns"}
    orders = {(v.structure.get("loop_order"), v.structure.get("s_issue")) for v in space.variants()}
    assert orders == {(None, None), ("split", None), ("split", "step_before")}
    assert "head dims up to 128" in (hopper.why_not(by_keys, cell, H200.shared_bytes) or "")
    # Metadata of Triton 3.6 for sm_90: 230880 bytes.
    assert 0 <= 230880 - hopper.shared_need(space.default(), cell) < 2048


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_deterministic_gradients_of_queries_have_a_kernel_of_their_own(head_dim: int) -> None:
    cell = make_cell(op=Pass.BACKWARD, head_dim=head_dim, deterministic=True)
    space = search_space(cell, H200, Family.GLUON_SM90)
    added_up = make_variant(Family.GLUON_SM90, op=Pass.BACKWARD)

    assert space.default() in space.variants()
    assert {variant.structure["loop_order"] for variant in space.variants()} == {"split"}
    assert "not deterministic" in (hopper.why_not(added_up, cell, H200.shared_bytes) or "")


def test_tickets_are_offered_for_causal_tiles_on_a_grid_that_stays() -> None:
    full = search_space(make_cell(head_dim=128), H200, Family.GLUON_SM90).variants()
    causal = search_space(make_cell(head_dim=128, mask=Mask.CAUSAL), H200, Family.GLUON_SM90).variants()

    assert {variant.structure["schedule"] for variant in full} == {"round_robin"}
    assert all(variant.config["persistent"] for variant in causal if variant.structure["schedule"] == "ticketed")


def test_spills_cost_rank() -> None:
    from autoflash.trial import Resources

    cell, variant = make_cell(head_dim=128), make_variant(Family.GLUON_SM90)

    assert hopper.score(variant, cell, Resources(spill_bytes=100)) < hopper.score(variant, cell, Resources())


def test_the_softmax_has_choices_up_to_128_columns_and_keeps_its_maximum_where_exponentials_are_whole() -> None:
    wide = search_space(make_cell(head_dim=256), H200, Family.GLUON_SM90).variants()
    narrow = search_space(make_cell(head_dim=128), H200, Family.GLUON_SM90).variants()

    assert not any({"rescale", "exp2"} & set(variant.structure) for variant in wide)
    assert {variant.structure.get("exp2") for variant in narrow} == {None, "polynomial"}
    assert {v.structure["exponentials"] for v in narrow if "rescale" in v.structure} == {"whole"}
