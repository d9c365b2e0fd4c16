"""The order in which kernels are considered for a call. Pure: a cell, a device and a table in, candidates out."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

from autoflash.device import Device, DeviceKind
from autoflash.dispatch.table import Hit, Table
from autoflash.problem import Cell, Feature
from autoflash.space import catalog, constraint
from autoflash.trial import Environment, Ranked, Tier
from autoflash.variant import Family, Variant

_MOST_HITS = 3

# A kernel does a little more for each pair with these, but visits the same tiles, or some of them: what is fast without
# is seldom slow with them. A window changes which tiles there are, and packed sequences how long they are.
_NEUTRAL = (
    Feature.SOFTCAP,
    Feature.SCORE_MOD,
    Feature.ALIBI,
    Feature.BIAS,
    Feature.FLOAT_MASK,
    Feature.BOOL_MASK,
    Feature.MASK_MOD,
    Feature.BLOCK_MASK,
    Feature.SINKS,
    Feature.DROPOUT,
    Feature.PARAMS_GRADIENT,
    Feature.ALIBI_GRADIENT,
    Feature.BIAS_GRADIENT,
)


class VendorPolicy(str, Enum):
    """Whether vendor kernels may be used beside the generated ones."""

    ALLOW = "allow"
    NEVER = "never"
    ONLY = "only"


@dataclass(frozen=True, slots=True, kw_only=True)
class Here:
    """The device that a call runs on, and the environment that records have to match."""

    device: Device
    environment: Environment


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One kernel that may serve a cell.

    Attributes:
        variant: What to run.
        tier: The rung it stands on.
        reason: Why it stands there, in words.
        ranked: Its record; None where it was never measured here.
        hit: The decision that the record belongs to.
        to_verify: It has to pass a local verification before its first use.
    """

    variant: Variant
    tier: Tier
    reason: str
    ranked: Ranked | None = None
    hit: Hit | None = None
    to_verify: bool = False

    @property
    def vendor_us(self) -> float | None:
        """Time of the fastest vendor kernel in the run that measured this one."""
        vendor = self.hit.decision.vendor if self.hit is not None else None
        return vendor.median_us if vendor is not None else None

    @property
    def beats_vendor(self) -> bool:
        """Whether it was measured at least as fast as every vendor kernel of the same run."""
        return self.ranked is not None and (self.vendor_us is None or self.ranked.median_us <= self.vendor_us)


def inference_ladder(cell: Cell, here: Here, table: Table, policy: VendorPolicy) -> tuple[Candidate, ...]:
    """Candidates for a forward pass whose gradient nobody asks for, best first.

    A generated kernel goes before the vendor's where it was measured at least as fast.
    """
    tuned, fallbacks = _tuned(cell, here, table), _fallbacks(cell, here)
    if policy is VendorPolicy.NEVER:
        return (*tuned, *fallbacks)
    vendors = _vendors(cell, here, tuned)
    if policy is VendorPolicy.ONLY:
        return vendors
    # The nearest record has the word: that kernels of another size beat the vendor's there says less.
    nearest = [candidate for candidate in tuned if candidate.hit is tuned[0].hit]
    if tuned and not any(candidate.beats_vendor for candidate in nearest):
        return (*vendors, *tuned, *fallbacks)
    faster = [candidate for candidate in tuned if candidate.beats_vendor]
    slower = [candidate for candidate in tuned if not candidate.beats_vendor]
    return (*faster, *vendors, *slower, *fallbacks)


def training_ladders(
    forward: Cell, backward: Cell, here: Here, table: Table, policy: VendorPolicy, *, vendor_forwards: int = 1
) -> tuple[tuple[Candidate, ...], tuple[Candidate, ...]]:
    """Candidates for a forward pass and its backward, best first.

    A vendor's forward pairs with its own backward, so generated kernels go first where the sum of both passes was
    measured at least as fast. The second ladder serves generated forwards and holds no vendor kernel, unless only
    those are allowed.

    Args:
        forward: Cell of the forward pass.
        backward: Cell of its backward.
        here: The device.
        table: The records.
        policy: Whether vendor kernels may serve.
        vendor_forwards: How often a vendor's forward runs for one backward.
    """
    tuned, fallbacks = _tuned(forward, here, table), _fallbacks(forward, here)
    tuned_backward = _tuned(backward, here, table)
    backwards = (*tuned_backward, *_fallbacks(backward, here))
    if policy is VendorPolicy.NEVER:
        return (*tuned, *fallbacks), backwards
    vendors = _vendors(forward, here, tuned_backward or tuned)
    if policy is VendorPolicy.ONLY:
        return vendors, vendors
    if tuned and tuned_backward and _sum_beats_vendor(tuned[0], tuned_backward[0], vendor_forwards):
        return (*tuned, *vendors, *fallbacks), backwards
    return (*vendors, *tuned, *fallbacks), backwards


def _sum_beats_vendor(forward: Candidate, backward: Candidate, vendor_forwards: int) -> bool:
    if forward.ranked is None or backward.ranked is None:
        return False
    if forward.vendor_us is None or backward.vendor_us is None:
        # No vendor kernel could do one of the passes when they were timed.
        return True
    vendor_us = vendor_forwards * forward.vendor_us + backward.vendor_us
    return forward.ranked.median_us + backward.ranked.median_us <= vendor_us


def _tuned(cell: Cell, here: Here, table: Table) -> tuple[Candidate, ...]:
    """The recorded choices for the cell, then those of the nearest cells, then those without neutral features."""
    candidates: dict[Variant, Candidate] = {}
    for hit in table.hits(cell, here.environment)[:_MOST_HITS]:
        for ranked in hit.decision.choices:
            candidates.setdefault(ranked.variant, _recorded(cell, here, hit, ranked))
    for lender in _lenders(cell):
        for hit in table.hits(lender, here.environment)[:1]:
            for ranked in hit.decision.choices:
                if constraint.why_unable(ranked.variant, cell) is None:
                    candidates.setdefault(ranked.variant, _borrowed(cell, here, hit, ranked))
    return tuple(candidates.values())


def _lenders(cell: Cell) -> Iterator[Cell]:
    """The cell with neutral features dropped: as few as possible first, as many as there are last."""
    neutral = [feature for feature in _NEUTRAL if feature in cell.features]
    for count in range(1, len(neutral) + 1):
        for dropped in itertools.combinations(neutral, count):
            yield cell.without(dropped)


def _borrowed(cell: Cell, here: Here, hit: Hit, ranked: Ranked) -> Candidate:
    """A recorded choice for fewer features. Its text is another than the one that was timed, so it has no record."""
    lender = hit.decision.cell
    dropped = ", ".join(feature.value for feature in cell.features if feature not in lender.features)
    reason = f"{cell} is not tuned; the choice for {lender}, without {dropped}: {_source(hit)}; not measured here"
    stale = hit.decision.environment.mismatch(here.environment, ranked.variant.family)
    if stale is not None:
        reason = f"{stale}; {reason}"
    return Candidate(variant=ranked.variant, tier=Tier.BORROWED, reason=reason, to_verify=True)


def _source(hit: Hit) -> str:
    return f"{hit.decision.reason} (from {hit.origin.words})"


def _recorded(cell: Cell, here: Here, hit: Hit, ranked: Ranked) -> Candidate:
    decision = hit.decision
    stale = decision.environment.mismatch(here.environment, ranked.variant.family)
    source = _source(hit)
    if stale is not None:
        tier, reason = Tier.STALE, f"{stale}; timing unconfirmed; was {source}"
    elif hit.is_exact:
        tier, reason = Tier.EXACT, source
    else:
        tier, reason = Tier.NEAREST, f"{cell} is not tuned; the nearest that is, {decision.cell}: {source}"
    return Candidate(
        variant=ranked.variant, tier=tier, reason=reason, ranked=ranked, hit=hit, to_verify=stale is not None
    )


def _vendors(cell: Cell, here: Here, tuned: Sequence[Candidate]) -> tuple[Candidate, ...]:
    """Vendor kernels in the catalog's order, the one that was measured fastest before the others."""
    able = catalog.vendors(cell, here.device)
    if not able:
        return ()
    hit = tuned[0].hit if tuned else None
    best = hit.decision.vendor if hit is not None else None
    variants = [best.variant] if best is not None else []
    variants += [variant for variant in able if variant not in variants]
    if best is None:
        what = f"no tuned kernel for {cell}; not measured here"
        return tuple(Candidate(variant=variant, tier=Tier.VENDOR, reason=what) for variant in variants)
    faster = f"measured at {best.median_us:.1f} us, the fastest vendor kernel in the run that tuned {hit.decision.cell}"  # type: ignore[union-attr]  # best came from it
    others = "not measured here"
    return tuple(
        Candidate(
            variant=variant,
            tier=Tier.VENDOR,
            reason=faster if variant == best.variant else others,
            ranked=best if variant == best.variant else None,
            hit=hit if variant == best.variant else None,
        )
        for variant in variants
    )


def _fallbacks(cell: Cell, here: Here) -> tuple[Candidate, ...]:
    """The default of each family that has one for the device; the portable one is the last resort of a GPU."""
    on_cpu = here.device.kind is DeviceKind.CPU
    candidates = []
    for family in catalog.families(cell.op, here.device, cell.features):
        space = catalog.search_space(cell, here.device, family)
        if space.why_no_default() is not None:
            continue
        last_resort = family is Family.TORCH_TILED and not on_cpu
        candidates.append(
            Candidate(
                variant=space.default(),
                tier=Tier.PORTABLE if last_resort else Tier.DEFAULT,
                reason=f"not measured here: the default of {family.value} for {here.device.arch}",
                to_verify=True,
            )
        )
    return tuple(candidates)
