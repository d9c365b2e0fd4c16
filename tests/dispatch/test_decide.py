"""The policy from trials to a decision."""

from __future__ import annotations

import random

import pytest

from autoflash.dispatch.decide import decide
from autoflash.problem import Feature, Parallelism
from autoflash.trial import Decision, Level, Ranked, Stage, Status, Trial
from autoflash.variant import Family, Variant
from tests.factories import (
    make_cell,
    make_decision,
    make_environment,
    make_measurement,
    make_ranked,
    make_resources,
    make_trial,
    make_variant,
    make_verification,
)

DEFAULT = make_variant()
CELL = make_cell()
HERE = make_environment()


def finalist(
    variant: Variant = DEFAULT,
    median_us: float = 100.0,
    *,
    run: str = "run-1",
    taken_at: str = "2026-01-02T03:04:05+00:00",
    level: Level = Level.FULL,
    shared_bytes: int = 65536,
    spread: float = 0.001,
) -> Trial:
    return make_trial(
        variant=variant,
        measurement=make_measurement(
            median_us=median_us,
            p20_us=median_us * (1 - spread),
            p80_us=median_us * (1 + spread),
            stage=Stage.FINAL,
            run=run,
            taken_at=taken_at,
        ),
        verification=make_verification(level=level),
        resources=None if variant.family is Family.VENDOR else make_resources(shared_bytes=shared_bytes),
    )


def choose(*trials: Trial, vendor: tuple[Trial, ...] = (), neighbours: tuple[Decision, ...] = ()) -> Decision | None:
    return decide(CELL, HERE, trials, vendor, neighbours=neighbours, defaults={DEFAULT})


def first(decision: Decision | None) -> Ranked:
    assert decision is not None
    return decision.choices[0]


FAST = make_variant(BLOCK_M=128)
OTHER = make_variant(BLOCK_N=128)
TMA = make_variant(loads="tma")


def test_the_fastest_wins() -> None:
    decision = choose(finalist(), finalist(FAST, 80.0), finalist(OTHER, 90.0))

    assert first(decision).variant == FAST
    assert first(decision).median_us == 80.0
    assert decision is not None
    assert "1.25x the speed of the default" in decision.reason


def test_nothing_is_decided_without_a_finalist() -> None:
    assert choose() is None
    assert choose(make_trial(status=Status.COMPILE)) is None


def test_a_screening_time_does_not_enter() -> None:
    assert choose(make_trial(median_us=1.0)) is None


def test_a_kernel_below_full_verification_does_not_enter() -> None:
    decision = choose(finalist(), finalist(FAST, 50.0, level=Level.SCREEN))

    assert first(decision).variant == DEFAULT


def test_a_quarantined_trial_does_not_enter() -> None:
    bad = Trial(**{name: getattr(finalist(FAST, 50.0), name) for name in Trial.__slots__ if name != "id"}, id=7)

    decision = decide(CELL, HERE, [finalist(), bad], [], defaults={DEFAULT}, quarantined={7: "crashed"})

    assert first(decision).variant == DEFAULT


def test_times_of_another_run_are_not_compared() -> None:
    later = "2026-02-02T03:04:05+00:00"

    decision = choose(
        finalist(FAST, 50.0, run="run-1"),
        finalist(DEFAULT, 100.0, run="run-2", taken_at=later),
        finalist(OTHER, 90.0, run="run-2", taken_at=later),
    )

    assert first(decision).variant == OTHER
    assert decision is not None
    assert decision.decided_at == later


def test_a_later_run_without_the_default_does_not_displace_one_with_it() -> None:
    decision = choose(finalist(), finalist(FAST, 80.0), finalist(OTHER, 10.0, run="run-2", taken_at="2027-01-01"))

    assert first(decision).variant == FAST


def test_within_the_noise_band_less_shared_memory_wins() -> None:
    decision = choose(finalist(), finalist(FAST, 80.0, shared_bytes=98304), finalist(OTHER, 80.5, shared_bytes=32768))

    assert first(decision).variant == OTHER


def test_within_the_noise_band_a_winner_of_neighbouring_cells_wins() -> None:
    neighbour = make_decision(cell=make_cell(q_bucket=11), choices=[make_ranked(variant=FAST)])

    decision = choose(
        finalist(),
        finalist(FAST, 80.5, shared_bytes=98304),
        finalist(OTHER, 80.0, shared_bytes=32768),
        neighbours=(neighbour,),
    )

    assert first(decision).variant == FAST
    assert decision is not None
    assert "wins neighbouring cells" in decision.reason


@pytest.mark.parametrize(
    "cell",
    [
        make_cell(q_bucket=14),
        make_cell(head_dim=128),
        make_cell(group=4),
        make_cell(parallelism=Parallelism.LOW),
        make_cell(features=(Feature.SOFTCAP,)),
    ],
)
def test_a_distant_cell_is_no_neighbour(cell: object) -> None:
    distant = make_decision(cell=cell, choices=[make_ranked(variant=FAST)])  # type: ignore[arg-type]

    decision = choose(
        finalist(),
        finalist(FAST, 80.5, shared_bytes=98304),
        finalist(OTHER, 80.0, shared_bytes=32768),
        neighbours=(distant,),
    )

    assert first(decision).variant == OTHER


def test_a_wide_spread_widens_the_band() -> None:
    trials = [finalist(), finalist(FAST, 80.0, shared_bytes=98304), finalist(OTHER, 82.0, shared_bytes=32768)]
    noisy = [finalist(), finalist(FAST, 80.0, shared_bytes=98304, spread=0.03), trials[2]]

    assert first(choose(*trials)).variant == FAST
    assert first(choose(*noisy)).variant == OTHER


def test_a_winner_is_not_slower_than_the_default() -> None:
    """OTHER needs less than the fastest and is within the band, but the default of the run is faster."""
    decision = choose(
        finalist(DEFAULT, 100.2, shared_bytes=98304),
        finalist(FAST, 100.0, shared_bytes=131072),
        finalist(OTHER, 100.6, shared_bytes=32768),
    )

    assert first(decision).variant == DEFAULT


def test_the_ranking_ends_with_a_kernel_without_precondition() -> None:
    tma = [make_variant(loads="tma", BLOCK_M=m, num_warps=w) for m in (64, 128) for w in (4, 8)]

    decision = choose(finalist(DEFAULT, 200.0), *(finalist(v, 80.0 + 2 * i) for i, v in enumerate(tma)))

    assert decision is not None
    assert len(decision.choices) == 4
    assert decision.choices[0].variant == tma[0]
    assert decision.choices[-1].variant == DEFAULT


def test_the_fastest_vendor_of_the_same_run_stands_beside() -> None:
    cudnn, flash = make_variant(Family.VENDOR), make_variant(Family.VENDOR, backend="flash")

    decision = choose(
        finalist(),
        finalist(FAST, 80.0),
        vendor=(finalist(cudnn, 70.0), finalist(flash, 75.0), finalist(flash, 1.0, run="run-0")),
    )

    assert decision is not None
    assert decision.vendor is not None
    assert (decision.vendor.variant, decision.vendor.median_us) == (cudnn, 70.0)


def test_the_order_of_the_trials_does_not_matter() -> None:
    trials = [finalist(make_variant(BLOCK_M=m, BLOCK_N=n), 80.0) for m in (32, 64, 128) for n in (32, 64, 128)]
    shuffled = random.Random(3).sample(trials, len(trials))

    assert choose(*trials) == choose(*shuffled)


def test_records_of_another_device_do_not_enter() -> None:
    elsewhere = make_environment(device_name="NVIDIA H100 PCIe", multiprocessors=114)

    assert decide(CELL, elsewhere, [finalist()], [], defaults={DEFAULT}) is None


def test_the_catalog_gives_the_defaults() -> None:
    from autoflash.space import catalog
    from tests.factories import make_device

    default = catalog.search_space(CELL, make_device(), Family.TRITON).default()
    slow = finalist(default, 100.0)
    fast = finalist(make_variant(BLOCK_M=128, BLOCK_N=32, num_warps=8), 50.0)

    decision = decide(CELL, HERE, [slow, fast], [])

    assert decision is not None
    assert "2.00x the speed of the default" in decision.reason
