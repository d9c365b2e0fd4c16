from __future__ import annotations

import pytest

from autoflash.device import CROSS_TARGETS
from autoflash.problem import DType, Feature, Pass
from autoflash.space import catalog, cost
from autoflash.trial import Resources
from autoflash.variant import Choice, Family
from tests.factories import make_cell

_H200 = CROSS_TARGETS["sm_90"]

# Shared memory that Triton 3.6 reported for sm_90 (bf16, TMA loads, head dimension 128), from the recorded sweep.
_FORWARD = [
    ({"BLOCK_M": 64, "BLOCK_N": 64, "num_stages": 2}, 81952),
    ({"BLOCK_M": 64, "BLOCK_N": 128, "num_stages": 1}, 50176),
    ({"BLOCK_M": 128, "BLOCK_N": 64, "num_stages": 3}, 131128),
    ({"BLOCK_M": 64, "BLOCK_N": 64, "num_stages": 2, "pv_order": "under_next_softmax"}, 90144),
    ({"BLOCK_M": 128, "BLOCK_N": 64, "num_stages": 4, "pv_order": "under_next_softmax"}, 180288),
]
_BACKWARD = [
    ({"BLOCK_M": 64, "BLOCK_N": 64, "num_stages": 2, "BLOCK_M2": 64, "BLOCK_N2": 64, "num_stages2": 2}, 98848),
    ({"BLOCK_M": 64, "BLOCK_N": 64, "num_stages": 1, "BLOCK_M2": 64, "BLOCK_N2": 128, "num_stages2": 1}, 98312),
    ({"BLOCK_M": 64, "BLOCK_N": 128, "num_stages": 3, "BLOCK_M2": 128, "BLOCK_N2": 64, "num_stages2": 2}, 164920),
]


@pytest.mark.parametrize(("choices", "reported"), _FORWARD)
def test_shared_memory_of_a_forward_is_what_the_compiler_reports(choices: dict[str, Choice], reported: int) -> None:
    space = catalog.search_space(make_cell(head_dim=128), _H200, Family.TRITON)

    estimate = cost.shared_bytes(space.variant({"loads": "tma", **choices}), space.cell)

    assert reported - 1100 <= estimate <= reported


@pytest.mark.parametrize(("choices", "reported"), _BACKWARD)
def test_shared_memory_of_a_backward_is_what_the_compiler_reports(choices: dict[str, Choice], reported: int) -> None:
    space = catalog.search_space(make_cell(op=Pass.BACKWARD, head_dim=128), _H200, Family.TRITON)
    variant = space.variant({"loop_order": "fused", "loads": "tma", **choices})

    assert reported - 1100 <= cost.shared_bytes(variant, space.cell) <= reported


# The same for masks that are tensors (head dimension 64, a float mask in bf16; 4 bytes are reckoned with).
_MASKED = [
    (Feature.BOOL_MASK, {"BLOCK_M": 128, "BLOCK_N": 64, "num_stages": 2}, 57376),
    (Feature.BOOL_MASK, {"BLOCK_M": 128, "BLOCK_N": 64, "num_stages": 3}, 81976),
    (Feature.FLOAT_MASK, {"BLOCK_M": 128, "BLOCK_N": 64, "num_stages": 3}, 98360 + 2 * 128 * 64 * 2),
]


@pytest.mark.parametrize(("feature", "choices", "reported"), _MASKED)
def test_shared_memory_of_a_mask_is_what_the_compiler_reports(
    feature: Feature, choices: dict[str, Choice], reported: int
) -> None:
    space = catalog.search_space(make_cell(features=(feature,)), _H200, Family.TRITON)

    estimate = cost.shared_bytes(space.variant({"loads": "tma", **choices}), space.cell)

    assert reported - 1100 <= estimate <= reported


@pytest.mark.parametrize("op", list(Pass))
def test_the_lower_bound_is_below_the_estimate(op: Pass) -> None:
    space = catalog.search_space(make_cell(op=op, head_dim=128), _H200, Family.TRITON)

    variants = space.variants()[::37]

    tiles = [tile for variant in variants for tile in cost.tiles(variant, space.cell)]
    assert all(tile.shared_floor(DType.BF16) <= tile.shared_bytes(DType.BF16.itemsize) for tile in tiles)


def test_what_cannot_fit_is_refused_with_the_bytes() -> None:
    space = catalog.search_space(make_cell(head_dim=256), CROSS_TARGETS["sm_86"], Family.TRITON)
    variant = space.variant({"BLOCK_M": 64, "BLOCK_N": 64, "num_stages": 4})

    assert "bytes of shared memory" in (space.why_not(variant) or "")


def test_accumulators_beyond_the_register_file_are_refused() -> None:
    space = catalog.search_space(make_cell(head_dim=256), _H200, Family.TRITON)
    variant = space.variant({"BLOCK_M": 128, "BLOCK_N": 32, "num_warps": 4})

    assert "registers per thread" in (space.why_not(variant) or "")


def test_spills_and_few_programs_per_multiprocessor_lower_the_score() -> None:
    space = catalog.search_space(make_cell(head_dim=128), _H200, Family.TRITON)
    variant = space.variant({"BLOCK_M": 64, "BLOCK_N": 64})

    def score(resources: Resources) -> float:
        return cost.score(variant, space.cell, _H200, resources)

    roomy = score(Resources(shared_bytes=32776, registers=122))
    assert roomy > score(Resources(shared_bytes=180000, registers=122))
    assert roomy > score(Resources(shared_bytes=32776, registers=122, spill_bytes=400))


def test_state_in_memory_scores_below_everything_else() -> None:
    space = catalog.search_space(make_cell(dtype=DType.FP16), _H200, Family.TRITON)

    scores = space.scores()

    worst = min(score for variant, score in scores.items() if variant.structure["loop_order"] == "query_outer")
    assert max(s for v, s in scores.items() if v.structure["loop_order"] == "key_outer") < worst + 4.0


def test_programs_per_multiprocessor_are_limited_by_the_scarcest_resource() -> None:
    assert cost.occupancy(registers=255, shared=50_000, warps=4, device=_H200) == 2
    assert cost.occupancy(registers=64, shared=100_000, warps=4, device=_H200) == 2
    assert cost.occupancy(registers=32, shared=0, warps=8, device=_H200) == 8
    assert cost.occupancy(registers=64, shared=300_000, warps=4, device=_H200) == 0
