"""A database with something in it, for commands to print."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from autoflash.cli.application import main
from autoflash.db.repository import Repository
from autoflash.dispatch.buckets import cell_of
from autoflash.evaluate import fa4
from autoflash.problem import Cell, DType, Mask
from autoflash.runtime.probe import environment, probe
from autoflash.trial import Decision, Environment, Status
from autoflash.variant import Choices, Family, Variant
from tests.evaluate import fake_fa4
from tests.factories import make_environment, make_problem, make_ranked, make_trial, make_variant


@dataclass(frozen=True, slots=True, kw_only=True)
class Filled:
    """What the database holds: one decision and three trials of this machine's CPU, one decision of a GPU."""

    cell: Cell
    winner: Variant
    here: Environment
    mine: Decision
    foreign: Decision


@pytest.fixture
def filled() -> Filled:
    device = probe("cpu")
    here = environment(device)
    cell = cell_of(make_problem(dtype=DType.FP32, heads=8, seqlen_q=1024, mask=Mask.CAUSAL), device)
    winner = make_variant(Family.TORCH_TILED)
    vendor = Variant(family=Family.VENDOR, structure=Choices(backend="math"), config=Choices())
    mine = Decision(
        cell=cell,
        environment=here,
        choices=(make_ranked(variant=winner, median_us=900.0),),
        vendor=make_ranked(variant=vendor, source_digest="", median_us=1800.0),
        reason="fastest of 2",
        decided_at="2026-01-02T03:04:05+00:00",
    )
    foreign = Decision(
        cell=cell,
        environment=make_environment(),
        choices=(make_ranked(),),
        vendor=None,
        reason="fastest of 1",
        decided_at="2026-01-02T03:04:05+00:00",
    )
    with Repository.open() as repository:
        repository.record(make_trial(cell=cell, variant=winner, environment=here, median_us=900.0))
        slower = make_variant(Family.TORCH_TILED, block_m=64)
        repository.record(make_trial(cell=cell, variant=slower, environment=here, median_us=1500.0))
        broken = make_variant(Family.TORCH_TILED, block_m=32)
        repository.record(
            make_trial(cell=cell, variant=broken, environment=here, status=Status.COMPILE, detail="PassManager failed")
        )
        repository.save_decision(mine)
        repository.save_decision(foreign)
    return Filled(cell=cell, winner=winner, here=here, mine=mine, foreign=foreign)


@pytest.fixture
def run_json(capsys: pytest.CaptureFixture[str]) -> Callable[..., object]:
    """Run a command with --json; its document, which must be all of standard output."""

    def run(*arguments: str, code: int = 0) -> object:
        capsys.readouterr()
        assert main([*arguments, "--json", "--device", "cpu"]) == code
        return json.loads(capsys.readouterr().out)

    return run


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Put a stand-in for the package flash-attn-4 here, some of its functions replaced."""

    def put(**replaced: object) -> None:
        monkeypatch.setitem(sys.modules, "flash_attn", fake_fa4.module())
        monkeypatch.setitem(sys.modules, "flash_attn.cute", fake_fa4.module())
        monkeypatch.setitem(sys.modules, fa4.MODULE, fake_fa4.module(**replaced))
        monkeypatch.setattr(fa4, "_capability", lambda tensor: (9, 0))
        monkeypatch.setattr(fa4, "version", lambda: "4.0.0")

    return put
