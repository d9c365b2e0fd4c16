"""The recorded sweep of plain Triton kernels on an H200, as one table per problem.

A problem is (pass, part of the backward, head dimension, causal). The knobs are those of the prototypes that were
swept, bad ones included, so that a search has something to avoid.
"""

from __future__ import annotations

import json
import lzma
from collections import defaultdict
from pathlib import Path
from typing import Any

from autoflash.device import CROSS_TARGETS
from autoflash.search.replay import Recording, Row
from autoflash.search.sampler import Feedback
from autoflash.space.cost import Tile, schedule_score
from autoflash.space.knob import Knob, Part
from autoflash.trial import Status
from autoflash.variant import Choices, Family, Variant

_FILE = Path(__file__).parent / "data" / "h200_plain_triton_sweep.jsonl.xz"
_DEVICE = CROSS_TARGETS["sm_90"]
_PARTS = {None: "forward", 1: "keys", 2: "queries", 3: "fused-shared", 4: "sequential", 5: "fused"}
_STRUCTURE = ("SPLIT", "PIPE", "LOADM", "PERSIST", "ORDER", "WS", "OST", "ATOM", "ORD", "ORD2", "IL", "SPLIT2")
_CONFIG = ("BM", "BN", "NS", "warps", "BM2", "BN2", "NS2", "maxnreg")
_STATUS = {"smem": Status.CONSTRAINTS, "wrong": Status.CORRECTNESS, "timeout": Status.TIMEOUT}


def recordings() -> list[Recording]:
    """All problems of the sweep, sorted by name."""
    tables: dict[str, dict[Variant, list[dict[str, Any]]]] = defaultdict(lambda: defaultdict(list))
    for line in lzma.decompress(_FILE.read_bytes()).decode().splitlines():
        row = json.loads(line)
        if "cfg" in row and ("ms" in row or "fail" in row):
            tables[_problem(row["cfg"])][_variant(row["cfg"])].append(row)
    return [_recording(name, table) for name, table in sorted(tables.items())]


def _problem(cfg: dict[str, Any]) -> str:
    part = _PARTS[cfg.get("PART")]
    if part == "keys" and cfg["ATOM"]:
        part = "keys-atomic"
    return f"{part}/d{cfg['D']}/{'causal' if cfg['CAUSAL'] else 'full'}"


def _variant(cfg: dict[str, Any]) -> Variant:
    return Variant(
        family=Family.TRITON,
        structure=Choices({name: int(cfg.get(name, 0)) for name in _STRUCTURE}),
        config=Choices({name: int(cfg.get(name, 0)) for name in _CONFIG}),
    )


def _recording(name: str, table: dict[Variant, list[dict[str, Any]]]) -> Recording:
    variants = list(table)
    knobs = []
    for part, names in ((Part.STRUCTURE, _STRUCTURE), (Part.CONFIG, _CONFIG)):
        for knob in names:
            values = tuple(sorted({{**v.structure, **v.config}[knob] for v in variants}))
            knobs.append(Knob(name=knob, part=part, values=values, default=values[0]))
    return Recording(
        name=name,
        family=Family.TRITON,
        knobs=tuple(knobs),
        rows={variant: _row(rows) for variant, rows in table.items()},
    )


def _row(rows: list[dict[str, Any]]) -> Row:
    timed = sorted(row["ms"] for row in rows if "ms" in row)
    first = rows[0]
    if timed:
        outcome = Feedback(status=Status.CORRECT, median_us=1000.0 * timed[len(timed) // 2])
    else:
        outcome = Feedback(status=_STATUS[first["fail"]])
    return Row(outcome=outcome, score=_score(first["cfg"], None), informed_score=_score(first["cfg"], first))


def _score(cfg: dict[str, Any], facts: dict[str, Any] | None) -> float:
    scores = []
    for tile in _tiles(cfg):
        scores.append(
            schedule_score(
                rows=tile.rows,
                step=tile.step,
                warps=tile.warps,
                stages=tile.stages,
                registers=facts["regs"] if facts else tile.registers(32, 2),
                shared=facts["shared"] if facts else tile.shared_bytes(2),
                spills=facts["spill_st"] if facts else 0,
                device=_DEVICE,
            )
        )
    return sum(scores) / len(scores)


def _tiles(cfg: dict[str, Any]) -> list[Tile]:
    part, waits, width = cfg.get("PART"), cfg.get("PIPE") in (1, 2, 3, 6), cfg["D"]
    launch = {"warps": cfg["warps"], "rows_there_are": 4096, "steps_there_are": 4096, "mask_bytes": 0}
    launch |= {"staged": 2 * width, "at_once": 2 * width}
    one = {"accumulators": 1, "accumulated": width}
    if part is None:
        owner = {**launch, **one, "resident": width, "at_once": width}
        extra = cfg["BM"] * cfg["BN"] * 2 if waits else 0
        return [Tile(rows=cfg["BM"], step=cfg["BN"], stages=cfg["NS"], extra_bytes=extra, **owner)]
    launch |= {"resident": 2 * width, "extra_bytes": 0}
    two = {"accumulators": 2, "accumulated": 2 * width}
    keys = Tile(rows=cfg["BN"], step=cfg["BM"], stages=cfg["NS"], **two, **launch)
    if part == 1:
        return [keys]
    if part == 2:
        return [Tile(rows=cfg["BM"], step=cfg["BN"], stages=cfg["NS"], **one, **launch)]
    if part == 5:
        return [keys, Tile(rows=cfg["BM2"], step=cfg["BN2"], stages=cfg["NS2"], **one, **launch)]
    return [keys, Tile(rows=cfg["BN"], step=cfg["BM"], stages=cfg["NS"], **one, **launch)]
