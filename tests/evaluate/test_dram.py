"""Counting bytes of DRAM, with an ncu that invents them: which count belongs to which call."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest

from autoflash.errors import CounterError
from autoflash.evaluate import dram, dram_main, systems
from autoflash.evaluate.dram import Count
from autoflash.evaluate.dram_main import Request, Work
from autoflash.evaluate.ncu import DramBytes
from autoflash.evaluate.systems import System
from autoflash.problem import DType, Pass
from autoflash.variant import Family
from tests import counters
from tests.factories import make_cell, make_device, make_problem, make_variant

CPU = make_device("cpu")
PROBLEM = make_problem(dtype=DType.FP32, batch=1, heads=2, kv_heads=2, seqlen_q=32, seqlen_k=32, head_dim=16)
ON_A_CPU = systems.systems(make_cell(dtype=DType.FP32), CPU)
# No GPU is here to compile it for.
BROKEN = System(name="broken", variant=make_variant(Family.GLUON_SM90))


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Put an ncu that does as it is told in front of the PATH; gives the file of its arguments."""

    def install(before: str = "") -> Path:
        monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
        return counters.install(tmp_path / "bin", before=before)

    return install


def _work(*which: System) -> list[Work]:
    return [Work(problem=PROBLEM, system=system) for system in which]


def test_each_call_has_its_own_ranges_and_what_it_leaves_in_the_cache(fake: Callable[..., Path]) -> None:
    seen = fake()
    backward = Work(problem=PROBLEM.replace(op=Pass.BACKWARD), system=ON_A_CPU[0])

    first, broken, last = dram.count([*_work(ON_A_CPU[1], BROKEN), backward], CPU, seed=0)

    # Ranges 0 and 2 are the calls; the writes of 1 and 3, which drive out what they left, are theirs too.
    assert first == Count(moved=DramBytes(read_bytes=1000, written_bytes=0 + 1))
    assert last == Count(moved=DramBytes(read_bytes=3000, written_bytes=2 + 3))
    assert broken.moved is None
    assert broken.reason
    assert "app-range" in json.loads(seen.read_text())


def test_a_system_that_ends_the_process_loses_no_other(fake: Callable[..., Path], tmp_path: Path) -> None:
    # The first process dies at the second of three systems, the next is done with the one that is left.
    fake(
        f"""
        with Path({str(tmp_path / "starts")!r}).open("a") as starts:
            is_first = not starts.tell()
            starts.write("started")
        Path(counted[-1]).write_text(json.dumps({{"reason": "", "stopped": False}}) + "\\n")
        end = "print('Segmentation fault'); sys.exit(139)" if is_first else ""
        counted[1:3] = ["-c", "import sys; " + end]
        """
    )

    first, second, third = dram.count(_work(*ON_A_CPU[:3]), CPU, seed=0)

    assert first == Count(moved=DramBytes(read_bytes=1000, written_bytes=1))
    assert second == Count(reason="the process under ncu exited with status 139: Segmentation fault")
    # The first range of the second process.
    assert third == Count(moved=DramBytes(read_bytes=1000, written_bytes=1))


def test_what_was_counted_and_lost_is_counted_again(fake: Callable[..., Path], tmp_path: Path) -> None:
    fake(
        f"""
        with Path({str(tmp_path / "starts")!r}).open("a") as starts:
            is_first = not starts.tell()
            starts.write("started")
        Path(counted[-1]).write_text(json.dumps({{"reason": "", "stopped": False}}) + "\\n")
        if is_first:
            sys.exit(9)
        counted[1:3] = ["-c", ""]
        """
    )

    first, second = dram.count(_work(*ON_A_CPU[:2]), CPU, seed=0)

    assert first == Count(moved=DramBytes(read_bytes=1000, written_bytes=1))
    assert second == Count(reason="the process under ncu exited with status 9")


def test_a_process_that_gets_nowhere_is_killed(fake: Callable[..., Path]) -> None:
    fake("import time; time.sleep(60)")

    (count,) = dram.count(_work(ON_A_CPU[0]), CPU, seed=0, stall_s=0.2)

    assert count == Count(reason="nothing was done within 0.2 s; killed")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("==ERROR== ERR_NVGPUCTRPERM - The user does not have permission", "ERR_NVGPUCTRPERM.*run it as root"),
        ("==ERROR== Unrecognised option: --page", "status 1: Unrecognised option"),
    ],
)
def test_an_ncu_that_counts_nothing_is_quoted(line: str, words: str, fake: Callable[..., Path]) -> None:
    fake(f"log.write_text({line!r}); sys.exit(1)")

    with pytest.raises(CounterError, match=words):
        dram.count(_work(*ON_A_CPU), CPU, seed=0)


def test_work_that_was_done_and_not_counted_is_an_error(fake: Callable[..., Path]) -> None:
    fake(
        """
        reply = json.dumps({"reason": "", "stopped": False})
        Path(counted[-1]).write_text(reply + "\\n")
        log.write_text("==WARNING== No ranges were profiled.")
        sys.exit(0)
        """
    )

    with pytest.raises(CounterError, match=r"counted 0 of 2 ranges: .*No ranges were profiled"):
        dram.count(_work(ON_A_CPU[0]), CPU, seed=0)


def _replies(tmp_path: Path, *which: System) -> list[dict[str, object]]:
    """What the counted process says, run in this one."""
    request, replies = tmp_path / "request", tmp_path / "replies"
    request.write_bytes(pickle.dumps(Request(device=CPU, seed=0, work=tuple(_work(*which)))))
    dram_main.main(str(request), str(replies))
    return [json.loads(line) for line in replies.read_text().splitlines()]


def test_the_process_calls_every_system_and_says_which_it_could_not(tmp_path: Path) -> None:
    replies = _replies(tmp_path, ON_A_CPU[0], BROKEN, ON_A_CPU[1])

    assert [bool(reply["reason"]) for reply in replies] == [False, True, False]
    assert not any(reply["stopped"] for reply in replies)


def test_the_process_stops_where_a_range_stays_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def make(*arguments: object) -> Callable[[], None]:
        def call() -> None:
            calls.append(1)
            # The first call of a system is outside of its ranges.
            if len(calls) == 2:
                raise RuntimeError("misaligned address")

        return call

    monkeypatch.setattr(systems, "timed_call", make)

    (reply,) = _replies(tmp_path, *ON_A_CPU[:2])

    assert reply == {"reason": "RuntimeError: misaligned address", "stopped": True}
