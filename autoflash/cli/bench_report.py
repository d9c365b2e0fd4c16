"""What `autoflash bench` found over its grid: tables and summaries for people, the same for machines."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from autoflash.cli.bench_grid import GENERATED, Row, Timed
from autoflash.cli.output import Column, number
from autoflash.cli.peers import Peers
from autoflash.cli.records import first_line
from autoflash.keys import Json
from autoflash.problem import Problem, features_text

_REASON_WIDTH = 240


def problem_json(problem: Problem) -> dict[str, Json]:
    """A problem with as many keys as queries, as the rows of results files begin."""
    return {
        "pass": problem.op.value,
        "dtype": problem.dtype.value,
        "mask": problem.mask.value,
        "features": features_text(problem.features),
        "head_dim": problem.head_dim,
        "batch": problem.batch,
        "heads": problem.heads,
        "kv_heads": problem.kv_heads,
        "seqlen": problem.seqlen_q,
    }


def row_json(row: Row) -> dict[str, Json]:
    """A row for machines."""
    return {
        **problem_json(row.problem),
        "pass": row.kind,
        "tier": row.tier.value,
        "ratio": row.ratio,
        "ratios": {name: row.ratio_to(name) for name in row.vendors},
        "dispatched_ratio": row.dispatched_ratio,
        "generated": timed_json(row.generated),
        "dispatched": timed_json(row.dispatched),
        "vendors": {name: timed_json(timed) for name, timed in row.vendors.items()},
        **_card_json(row),
    }


def _card_json(row: Row) -> dict[str, Json]:
    """What the card was like when the row was timed; null and an empty text where the driver does not say."""
    measured = next((timed.measurement for timed in (row.generated, *row.vendors.values()) if timed.measurement), None)
    return {
        "sm_clock_mhz": (measured.sm_clock_mhz or None) if measured else None,
        "throttled": measured.throttled if measured else "",
    }


def timed_json(timed: Timed) -> dict[str, Json]:
    """One kernel of a row for machines."""
    measured = timed.measurement
    return {
        "variant": timed.variant.to_dict(),
        "tflops": timed.tflops,
        "median_us": None if measured is None else measured.median_us,
        "p20_us": None if measured is None else measured.p20_us,
        "p80_us": None if measured is None else measured.p80_us,
        "reason": timed.reason,
    }


def row_columns(beside: Peers) -> list[Column]:
    """Of the long table, one row for each problem; peers that somebody named have a ratio each."""
    ratios = [f"/ {name}" for name in beside.names] if beside.are_named else []
    names = ("pass", "mask", "D", "S", GENERATED, *beside.names, *ratios, "/ best" if beside.are_named else "ratio")
    return [Column(title=name, numeric=index >= 2) for index, name in enumerate(names)] + [Column(title="kernel")]


def row_cells(row: Row, beside: Peers) -> list[str]:
    """The cells of a row of the long table."""
    problem = row.problem
    speeds = [row.generated, *(row.vendors.get(name) for name in beside.names)]
    ratios = [*([row.ratio_to(name) for name in beside.names] if beside.are_named else []), row.ratio]
    return [
        row.kind,
        _mask(problem),
        str(problem.head_dim),
        str(problem.seqlen_q),
        *(_speed(one) for one in speeds),
        *(number(ratio, 2) for ratio in ratios),
        f"{row.generated.variant} ({row.tier.value})",
    ]


def pivot(rows: Sequence[Row], names: Sequence[str]) -> tuple[list[Column], list[list[str]]]:
    """The short table of the README: lengths across, one row for each pass, mask and head dimension."""
    seqlens = sorted({row.problem.seqlen_q for row in rows})
    columns = [Column(title="pass"), Column(title="mask"), Column(title="D", numeric=True)]
    columns += [Column(title=f"S={seqlen}", numeric=True) for seqlen in seqlens]
    lines: dict[tuple[str, str, int], dict[int, str]] = {}
    for row in rows:
        problem = row.problem
        speeds = [_speed(one) for one in (row.generated, *(row.vendors.get(name) for name in names))]
        line = lines.setdefault((row.kind, _mask(problem), problem.head_dim), {})
        line[problem.seqlen_q] = " / ".join(speeds)
    return columns, [
        [op, mask, str(head_dim), *(line.get(seqlen, "-") for seqlen in seqlens)]
        for (op, mask, head_dim), line in lines.items()
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """How fast kernels are in units of others, over the rows of a pass in which both ran.

    Attributes:
        kind: The pass, or ``step``.
        what: Which kernels and which others, in words.
        rows: How many.
        geometric_mean, lowest: Of the ratios; above 1 they are faster.
    """

    kind: str
    what: str
    rows: int
    geometric_mean: float
    lowest: float

    def __str__(self) -> str:
        means = f"geometric mean {self.geometric_mean:.3f}, lowest {self.lowest:.2f}"
        return f"{self.kind}: {self.what}, {self.rows} rows: {means}"

    def to_json(self) -> dict[str, Json]:
        """For machines."""
        ratios: dict[str, Json] = {"geometric_mean": self.geometric_mean, "lowest": self.lowest}
        return {"pass": self.kind, "what": self.what, "rows": self.rows, **ratios}


def summary(rows: Sequence[Row], names: Sequence[str]) -> list[Summary]:
    """How fast what ran is in units of each peer, and of the fastest one of each row: geometric mean and lowest."""
    found = []
    for kind in dict.fromkeys(row.kind for row in rows):
        of_pass = [row for row in rows if row.kind == kind]
        ratios = {f"generated to {name}": [row.ratio_to(name) for row in of_pass] for name in names}
        ratios["generated to the fastest of them"] = [row.ratio for row in of_pass]
        ratios["attention() to the fastest of them"] = [row.dispatched_ratio for row in of_pass]
        for what, some in ratios.items():
            known = [ratio for ratio in some if ratio is not None]
            if known:
                mean = statistics.geometric_mean(known)
                found.append(Summary(kind=kind, what=what, rows=len(known), geometric_mean=mean, lowest=min(known)))
    return found


def without_times(rows: Sequence[Row], names: Sequence[str]) -> list[str]:
    """Why kernels of some rows have no time, each reason once for each pass."""
    reasons: Counter[tuple[str, str, str]] = Counter()
    for row in rows:
        for name, timed in ((GENERATED, row.generated), *((name, row.vendors.get(name)) for name in names)):
            if timed is not None and timed.reason:
                reasons[row.kind, name, first_line(timed.reason, _REASON_WIDTH)] += 1
    return [f"{kind}: no time of {name} in {count} rows: {reason}" for (kind, name, reason), count in reasons.items()]


def _mask(problem: Problem) -> str:
    """The mask with the features, such as ``causal+softcap``."""
    return "+".join([problem.mask.value, *(feature.value for feature in problem.features)])


def _speed(timed: Timed | None) -> str:
    if timed is None or timed.tflops is None:
        return "-"
    return f"{timed.tflops:.0f}" if timed.tflops >= 10 else f"{timed.tflops:.3f}"
