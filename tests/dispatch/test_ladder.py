"""The order of the rungs."""

from __future__ import annotations

from dataclasses import replace

from autoflash.dispatch.ladder import (
    Candidate,
    Here,
    VendorPolicy,
    inference_ladder,
    training_ladders,
)
from autoflash.dispatch.table import Table
from autoflash.problem import Cell, DType, Feature, Pass
from autoflash.trial import Decision, Tier
from autoflash.variant import Family
from tests.factories import make_cell, make_decision, make_device, make_environment, make_ranked, make_variant

# A device with one compiled family.
DEVICE = make_device("sm_80")
GPU = Here(device=DEVICE, environment=make_environment(device=DEVICE))
CELL = make_cell()
BACKWARD = make_cell(op=Pass.BACKWARD)
CUDNN = make_variant(Family.VENDOR)


def recorded(
    cell: Cell = CELL, generated_us: float = 90.0, vendor_us: float | None = 100.0, **options: object
) -> Decision:
    vendor = None if vendor_us is None else make_ranked(variant=CUDNN, median_us=vendor_us)
    choices = [
        make_ranked(variant=make_variant(op=cell.op, loads="tma"), median_us=generated_us),
        make_ranked(variant=make_variant(op=cell.op), median_us=generated_us + 15.0),
    ]
    options.setdefault("environment", GPU.environment)
    return make_decision(cell=cell, choices=choices, vendor=vendor, **options)  # type: ignore[arg-type]


def rungs(policy: VendorPolicy, *decisions: Decision, cell: Cell = CELL, here: Here = GPU) -> tuple[Candidate, ...]:
    return inference_ladder(cell, here, Table.from_decisions(decisions), policy)


def tiers(candidates: tuple[Candidate, ...]) -> list[Tier]:
    return [candidate.tier for candidate in candidates]


def test_on_an_empty_table_vendor_kernels_come_first_and_torch_tiled_last() -> None:
    candidates = rungs(VendorPolicy.ALLOW)

    assert tiers(candidates) == [Tier.VENDOR] * 4 + [Tier.DEFAULT, Tier.PORTABLE]
    assert candidates[-1].variant.family is Family.TORCH_TILED
    assert "not measured here" in candidates[0].reason


def test_never_leaves_vendor_kernels_out() -> None:
    assert tiers(rungs(VendorPolicy.NEVER)) == [Tier.DEFAULT, Tier.PORTABLE]


def test_only_leaves_generated_kernels_out() -> None:
    assert set(tiers(rungs(VendorPolicy.ONLY, recorded()))) == {Tier.VENDOR}


def test_a_generated_kernel_goes_first_where_it_was_measured_faster() -> None:
    """The second choice was slower than the vendor's kernel, so that comes between them."""
    candidates = rungs(VendorPolicy.ALLOW, recorded())

    assert tiers(candidates)[:2] == [Tier.EXACT, Tier.VENDOR]
    assert candidates[1].variant == CUDNN
    assert tiers(candidates)[5] is Tier.EXACT


def test_the_vendor_goes_first_where_it_was_measured_faster() -> None:
    candidates = rungs(VendorPolicy.ALLOW, recorded(generated_us=110.0))

    assert tiers(candidates)[0] is Tier.VENDOR
    assert "100.0 us" in candidates[0].reason


def test_a_kernel_that_beats_the_vendor_at_another_size_does_not_go_before_it_here() -> None:
    far = replace(CELL, q_bucket=CELL.q_bucket + 1)
    other = make_decision(
        cell=far,
        choices=[make_ranked(variant=make_variant(BLOCK_M=128), median_us=50.0)],
        vendor=make_ranked(variant=CUDNN, median_us=200.0),
        environment=GPU.environment,
    )

    candidates = rungs(VendorPolicy.ALLOW, recorded(generated_us=110.0), other)

    assert candidates[0].variant == CUDNN
    assert [candidate.tier for candidate in candidates[4:7]] == [Tier.EXACT, Tier.EXACT, Tier.NEAREST]


def test_the_fastest_recorded_vendor_goes_before_the_others() -> None:
    flash = make_variant(Family.VENDOR, backend="flash")
    decision = make_decision(environment=GPU.environment, vendor=make_ranked(variant=flash, median_us=50.0))

    candidates = rungs(VendorPolicy.ALLOW, decision)

    assert candidates[0].variant == flash
    assert [c.variant for c in candidates].count(flash) == 1


def test_the_nearest_bucket_serves_and_says_so() -> None:
    candidates = rungs(VendorPolicy.NEVER, recorded(cell=make_cell(q_bucket=12)))

    assert candidates[0].tier is Tier.NEAREST
    assert "is not tuned; the nearest that is" in candidates[0].reason


def test_a_record_of_another_triton_is_stale_and_has_to_be_verified() -> None:
    candidates = rungs(VendorPolicy.NEVER, recorded(environment=make_environment(device=DEVICE, triton="3.5")))

    assert candidates[0].tier is Tier.STALE
    assert candidates[0].to_verify
    assert "triton is '3.6' here, the record is for '3.5'" in candidates[0].reason


def test_a_record_of_another_torch_is_not_stale() -> None:
    candidates = rungs(
        VendorPolicy.NEVER, recorded(environment=make_environment(device=DEVICE, torch="2.10.0", driver="1"))
    )

    assert candidates[0].tier is Tier.EXACT
    assert not candidates[0].to_verify


def test_a_default_has_to_be_verified() -> None:
    assert all(candidate.to_verify for candidate in rungs(VendorPolicy.NEVER))


def test_on_a_cpu_torch_tiled_is_the_default() -> None:
    cpu = make_device("cpu")

    candidates = rungs(VendorPolicy.NEVER, here=Here(device=cpu, environment=make_environment(device=cpu)))

    assert tiers(candidates) == [Tier.DEFAULT]
    assert candidates[0].variant.family is Family.TORCH_TILED


def pair(policy: VendorPolicy, *decisions: Decision) -> tuple[tuple[Candidate, ...], tuple[Candidate, ...]]:
    return training_ladders(CELL, BACKWARD, GPU, Table.from_decisions(decisions), policy)


def test_training_compares_the_sum_of_both_passes() -> None:
    """Slower forward, but faster in sum: generated. Faster forward, but slower in sum: the vendor's."""
    better, _ = pair(VendorPolicy.ALLOW, recorded(CELL, 110.0), recorded(BACKWARD, 250.0, 300.0))
    worse, _ = pair(VendorPolicy.ALLOW, recorded(CELL, 90.0), recorded(BACKWARD, 350.0, 300.0))

    assert better[0].tier is Tier.EXACT
    assert worse[0].tier is Tier.VENDOR


def test_a_vendor_forward_that_runs_twice_costs_twice() -> None:
    decisions = (recorded(CELL, 140.0), recorded(BACKWARD, 350.0, 300.0))

    once = training_ladders(CELL, BACKWARD, GPU, Table.from_decisions(decisions), VendorPolicy.ALLOW)
    twice = training_ladders(
        CELL, BACKWARD, GPU, Table.from_decisions(decisions), VendorPolicy.ALLOW, vendor_forwards=2
    )

    assert once[0][0].tier is Tier.VENDOR
    assert twice[0][0].tier is Tier.EXACT


def test_training_without_a_tuned_backward_takes_the_vendor() -> None:
    forwards, _ = pair(VendorPolicy.ALLOW, recorded(CELL, 10.0))

    assert forwards[0].tier is Tier.VENDOR


def test_a_generated_forward_never_meets_a_vendor_backward() -> None:
    _, backwards = pair(VendorPolicy.ALLOW, recorded(CELL, 90.0), recorded(BACKWARD, 250.0, 300.0))

    assert all(candidate.variant.family is not Family.VENDOR for candidate in backwards)


def test_training_never_uses_a_vendor_where_none_is_allowed() -> None:
    forwards, backwards = pair(VendorPolicy.NEVER, recorded(CELL, 200.0), recorded(BACKWARD, 400.0))

    assert tiers(forwards) == [Tier.EXACT, Tier.EXACT, Tier.DEFAULT, Tier.PORTABLE]
    assert tiers(backwards) == [Tier.EXACT, Tier.EXACT, Tier.DEFAULT, Tier.PORTABLE]


SOFTCAP = make_cell(features=(Feature.SOFTCAP,))


def test_without_records_of_features_the_choice_for_plain_attention_is_borrowed() -> None:
    candidates = rungs(VendorPolicy.ALLOW, recorded(), cell=SOFTCAP)

    assert tiers(candidates) == [Tier.BORROWED, Tier.BORROWED, Tier.DEFAULT, Tier.PORTABLE]
    first = candidates[0]
    assert first.variant == recorded().choices[0].variant
    assert first.to_verify
    assert (first.ranked, first.hit) == (None, None)
    assert f"{SOFTCAP} is not tuned; the choice for {CELL}, without softcap: fastest of 2" in first.reason
    assert "from the tuning database" in first.reason


def test_a_record_of_the_features_goes_before_a_borrowed_one() -> None:
    far = make_cell(features=(Feature.SOFTCAP,), q_bucket=13)

    candidates = rungs(VendorPolicy.NEVER, recorded(), recorded(far, vendor_us=None), cell=SOFTCAP)

    # The variants are the same, and stand once.
    assert tiers(candidates) == [Tier.NEAREST, Tier.NEAREST, Tier.DEFAULT, Tier.PORTABLE]


def test_as_few_features_as_possible_are_dropped() -> None:
    asked = make_cell(features=(Feature.SOFTCAP, Feature.WINDOW, Feature.DROPOUT), window_bucket=7)
    window = make_cell(features=(Feature.WINDOW,), window_bucket=7)
    softcap = make_cell(features=(Feature.SOFTCAP, Feature.WINDOW), window_bucket=7)
    small, large = (make_variant(BLOCK_M=rows) for rows in (32, 128))
    decisions = [
        make_decision(cell=cell, environment=GPU.environment, choices=[make_ranked(variant=variant)])
        for cell, variant in ((window, small), (softcap, large))
    ]

    candidates = rungs(VendorPolicy.NEVER, *decisions, cell=asked)

    assert [candidate.variant for candidate in candidates[:2]] == [large, small]
    assert "without dropout:" in candidates[0].reason
    assert "without softcap, dropout:" in candidates[1].reason


def test_windows_and_packed_sequences_are_never_dropped() -> None:
    for features in ((Feature.WINDOW,), (Feature.VARLEN,), (Feature.VARLEN, Feature.WINDOW)):
        assert tiers(rungs(VendorPolicy.NEVER, recorded(), cell=make_cell(features=features)))[0] is Tier.DEFAULT


def test_a_kernel_that_does_not_walk_over_lists_is_not_borrowed_for_a_block_mask() -> None:
    able, ahead = make_variant(BLOCK_M=32), make_variant(pv_order="under_next_softmax")
    choices = [make_ranked(variant=variant) for variant in (ahead, able)]

    candidates = rungs(
        VendorPolicy.NEVER,
        make_decision(environment=GPU.environment, choices=choices),
        cell=make_cell(features=(Feature.BLOCK_MASK,)),
    )

    assert candidates[0].variant == able
    assert "without block_mask:" in candidates[0].reason


def test_what_cannot_do_the_features_is_not_borrowed() -> None:
    hopper = Here(device=make_device(), environment=make_environment())
    able = make_variant()
    choices = [
        make_ranked(variant=variant)
        for variant in (make_variant(Family.GLUON_SM90), make_variant(loop_order="key_outer"), able)
    ]

    cell = make_cell(features=(Feature.DROPOUT,))
    candidates = rungs(VendorPolicy.NEVER, make_decision(choices=choices), cell=cell, here=hopper)

    assert candidates[0].variant == able
    assert tiers(candidates) == [Tier.BORROWED, Tier.DEFAULT, Tier.PORTABLE]
    assert all(candidate.variant.family is not Family.GLUON_SM90 for candidate in candidates)


def test_a_borrowed_record_of_another_triton_says_so() -> None:
    old = recorded(environment=make_environment(device=DEVICE, triton="3.5"))

    first = rungs(VendorPolicy.NEVER, old, cell=SOFTCAP)[0]

    assert first.tier is Tier.BORROWED
    assert first.reason.startswith("triton is '3.6' here, the record is for '3.5'; ")


def test_features_have_no_vendor_kernel() -> None:
    backward = make_cell(op=Pass.BACKWARD, features=(Feature.SOFTCAP,))
    table = Table.from_decisions([recorded(), recorded(BACKWARD)])

    assert rungs(VendorPolicy.ONLY, recorded(), cell=SOFTCAP) == ()
    forwards, backwards = training_ladders(SOFTCAP, backward, GPU, table, VendorPolicy.ALLOW)
    assert tiers(forwards)[0] is tiers(backwards)[0] is Tier.BORROWED
    assert all(candidate.variant.family is not Family.VENDOR for candidate in (*forwards, *backwards))


def test_heads_too_long_for_the_compiled_family_go_on_to_the_portable_one() -> None:
    long = make_cell(dtype=DType.FP32, head_dim=576, head_dim_v=512)
    small = Here(device=make_device("sm_86"), environment=make_environment(device=make_device("sm_86")))

    assert tiers(rungs(VendorPolicy.NEVER, cell=long, here=small)) == [Tier.PORTABLE]
    assert tiers(rungs(VendorPolicy.NEVER, cell=long)) == [Tier.DEFAULT, Tier.PORTABLE]
