"""Bytes of main memory that calls move, as the GPU's own counters have it.

The calls are those of systems for attention, made in a process that runs under ncu. One process counts
as much as it can: its start takes longer than most calls.
"""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from autoflash.device import Device
from autoflash.errors import CounterError
from autoflash.evaluate import ncu
from autoflash.evaluate.dram_main import RANGES_OF_A_CALL, Request, Work
from autoflash.evaluate.memory import release_cached
from autoflash.evaluate.ncu import DramBytes

# Without a reply for so long, the process is killed.
_STALL_S = 90.0
_POLL_S = 0.1
# Processes that end before their work does; each may lose one system.
_MOST_FAILURES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Count:
    """What came of counting one piece of work.

    Attributes:
        moved: None where it was not counted.
        reason: Why not; empty where it was.
    """

    moved: DramBytes | None = None
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Session:
    """What came of one process.

    Attributes:
        reasons: One for each piece of work that was done, in order; empty where it was counted.
        is_complete: Whether it did all of its work, or said why not.
        end: How it ended.
        ranges: What ncu counted; fewer than there should be where ncu was lost with it.
    """

    reasons: tuple[str, ...]
    is_complete: bool
    end: str
    ranges: tuple[DramBytes, ...]

    @property
    def expected(self) -> int:
        """Ranges of what was counted."""
        return RANGES_OF_A_CALL * self.reasons.count("")

    def counts(self) -> list[Count]:
        """Of what was done and came back."""
        if len(self.ranges) < self.expected:
            return []
        ranges = iter(self.ranges)
        return [Count(reason=reason) if reason else _of_call(next(ranges), next(ranges)) for reason in self.reasons]


def count(work: Sequence[Work], device: Device, *, seed: int, stall_s: float = _STALL_S) -> list[Count]:
    """Count the bytes of DRAM of one call of each system, from a cold L2 and with all that it writes.

    The device should be idle.

    Args:
        work: Systems on problems; those on one problem stand together, and share its inputs.
        device: Where.
        seed: Of the inputs.
        stall_s: Seconds without any piece of work done after which a process is killed.

    Returns:
        One for each piece of work, in order.

    Raises:
        CounterError: if ncu is not there, may not read counters, or counts nothing.
    """
    program = ncu.find()
    release_cached(device)
    counts: dict[int, Count] = {}
    left = list(range(len(work)))
    failures = 0
    while left:
        session = _session(program, [work[index] for index in left], device, seed, stall_s)
        counts |= dict(zip(left, session.counts(), strict=False))
        if session.is_complete:
            if len(session.ranges) < session.expected:
                raise CounterError(f"ncu counted {len(session.ranges)} of {session.expected} ranges: {session.end}")
        else:
            failures += 1
            # The one that it was at. Where ncu told nothing, those before it are tried again.
            lost = left if failures > _MOST_FAILURES else [left[len(session.reasons)]]
            counts |= {index: Count(reason=session.end) for index in lost if index not in counts}
            if failures > _MOST_FAILURES and not any(count.moved for count in counts.values()):
                raise CounterError(session.end)
        left = [index for index in left if index not in counts]
    return [counts[index] for index in range(len(work))]


def _of_call(call: DramBytes, eviction: DramBytes) -> Count:
    written = call.written_bytes + eviction.written_bytes
    return Count(moved=DramBytes(read_bytes=call.read_bytes, written_bytes=written))


def _session(program: str, work: Sequence[Work], device: Device, seed: int, stall_s: float) -> _Session:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        request, replies, log, output = (folder / name for name in ("request", "replies", "log", "output"))
        request.write_bytes(pickle.dumps(Request(device=device, seed=seed, work=tuple(work))))
        replies.touch()
        # The child sees the same modules as this process, wherever they were found.
        source = (
            f"import sys; sys.path[:] = {sys.path!r}\n"
            "from autoflash.evaluate.dram_main import main\n"
            "main(*sys.argv[1:])"
        )
        counted = [sys.executable, "-c", source, str(request), str(replies)]
        end = _run(ncu.command(program, log, counted), output, replies, stall_s)
        said = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
        printed = output.read_text(encoding="utf-8", errors="replace")
        lines = [json.loads(line) for line in replies.read_text(encoding="utf-8").splitlines()]
    ncu.check(said + printed)
    return _Session(
        reasons=tuple(line["reason"] for line in lines),
        is_complete=len(lines) == len(work) or any(line["stopped"] for line in lines),
        end=": ".join(filter(None, (end, ncu.complaint(said) or _last_line(printed)))),
        ranges=tuple(ncu.parse(said)),
    )


def _run(command: Sequence[str], output: Path, replies: Path, stall_s: float) -> str:
    """Run it, and kill it where it gets nowhere; how it ended."""
    with output.open("wb") as sink:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=sink, stderr=sink, start_new_session=True)
        try:
            size, deadline = 0, time.monotonic() + stall_s
            while process.poll() is None:
                if replies.stat().st_size != size:
                    size, deadline = replies.stat().st_size, time.monotonic() + stall_s
                if time.monotonic() > deadline:
                    return f"nothing was done within {stall_s:g} s; killed"
                time.sleep(_POLL_S)
        finally:
            _kill(process)
    return f"the process under ncu exited with status {process.returncode}"


def _kill(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _last_line(printed: str) -> str:
    return next((line.strip()[:300] for line in reversed(printed.splitlines()) if line.strip()), "")
