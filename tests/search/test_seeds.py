from __future__ import annotations

from autoflash.problem import DType, Feature, Mask, Pass
from autoflash.search.seeds import neighbours_winners
from autoflash.variant import Family
from tests.factories import make_cell, make_decision, make_ranked, make_variant


def test_the_nearest_cells_winners_come_first() -> None:
    near = make_decision(cell=make_cell(q_bucket=11), choices=(make_ranked(variant=make_variant(BLOCK_M=64)),))
    far = make_decision(cell=make_cell(q_bucket=14), choices=(make_ranked(variant=make_variant(BLOCK_M=128)),))

    winners = neighbours_winners(make_cell(q_bucket=10), [far, near])

    assert [variant.config["BLOCK_M"] for variant in winners] == [64, 128]


def test_winners_of_another_pass_or_head_dimension_or_element_size_do_not_carry_over() -> None:
    others = [
        make_decision(cell=make_cell(op=Pass.BACKWARD)),
        make_decision(cell=make_cell(head_dim=128)),
        make_decision(cell=make_cell(dtype=DType.FP32)),
    ]

    assert neighbours_winners(make_cell(), others) == []


def test_the_other_mask_and_the_other_half_type_do() -> None:
    causal = make_decision(cell=make_cell(mask=Mask.CAUSAL))
    half = make_decision(cell=make_cell(dtype=DType.FP16))

    assert len(neighbours_winners(make_cell(), [causal])) == 2
    assert len(neighbours_winners(make_cell(), [half])) == 2


def test_vendor_kernels_are_no_seeds() -> None:
    vendor = make_decision(choices=(make_ranked(variant=make_variant(family=Family.VENDOR)),))

    assert neighbours_winners(make_cell(q_bucket=9), [vendor]) == []


def test_winners_carry_over_to_features_and_those_with_as_many_of_them_come_first() -> None:
    softcap, plain, both = (
        make_decision(cell=make_cell(features=features), choices=(make_ranked(variant=make_variant(BLOCK_M=rows)),))
        for features, rows in (
            ((Feature.SOFTCAP,), 64),
            ((), 128),
            ((Feature.SOFTCAP, Feature.DROPOUT), 32),
        )
    )

    winners = neighbours_winners(make_cell(features=(Feature.SOFTCAP, Feature.DROPOUT)), [plain, softcap, both])

    assert [variant.config["BLOCK_M"] for variant in winners] == [32, 64, 128]
