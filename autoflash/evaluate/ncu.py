"""NVIDIA's Nsight Compute (``ncu``): the command that counts the bytes of main memory, and what it prints.

What is counted is a *range*: all that a process does on the GPU between a start and a stop of CUDA's profiler, from any
of its threads, in the order in which ranges are opened. Kernels run in it as they do without ncu, one after the other
with what the one before left in the caches; a count of each kernel by itself (ncu's default) would serialise them, put
a cold cache before each, and cost some milliseconds for each of the thousands of kernels of tiled attention in torch.
The two counters are read in one pass, so that the process runs once and nothing is replayed.
"""

from __future__ import annotations

import csv
import math
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from autoflash.errors import CounterError

_READ, _WRITTEN = "dram__bytes_read.sum", "dram__bytes_write.sum"
_UNIT_BYTES = {"byte": 1.0, "kbyte": 1e3, "mbyte": 1e6, "gbyte": 1e9, "tbyte": 1e12}
_NO_PERMISSION = "ERR_NVGPUCTRPERM"
_COMPLAINTS = ("==ERROR==", "==WARNING==")

# Neither the caches nor the clocks are ncu's to set: the counted process sees to its caches itself.
_OPTIONS = (
    *("--config-file", "off"),
    *("--target-processes", "all"),
    *("--replay-mode", "app-range"),
    *("--cache-control", "none"),
    *("--clock-control", "none"),
    *("--metrics", f"{_READ},{_WRITTEN}"),
    *("--page", "raw"),
    *("--print-units", "base"),
    "--csv",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DramBytes:
    """What was moved between the chip and its main memory."""

    read_bytes: int
    written_bytes: int

    @property
    def total_bytes(self) -> int:
        """Bytes moved."""
        return self.read_bytes + self.written_bytes


def find() -> str:
    """Where ncu is.

    Raises:
        CounterError: if it is not on the PATH.
    """
    found = shutil.which("ncu")
    if found is None:
        raise CounterError("ncu is not on the PATH: NVIDIA's Nsight Compute, of the CUDA toolkit, counts bytes of DRAM")
    return found


def command(program: str, log: Path, counted: Sequence[str]) -> list[str]:
    """The command line that counts what another one does.

    Args:
        program: ncu.
        log: The file for what ncu says, the counts among it.
        counted: The other command line.
    """
    # Numbers are to be printed as they are read here.
    return ["env", "LC_ALL=C.UTF-8", program, *_OPTIONS, "--log-file", str(log), *counted]


def check(text: str) -> None:
    """Stop where no other attempt would do better.

    Raises:
        CounterError: if the user may not read counters.
    """
    if _NO_PERMISSION in text:
        raise CounterError(
            f"this user may not read the GPU's performance counters ({_NO_PERMISSION}): run it as root, or load the "
            "driver with NVreg_RestrictProfilingToAdminUsers=0 (https://developer.nvidia.com/ERR_NVGPUCTRPERM)"
        )


def parse(text: str) -> list[DramBytes]:
    """The counts of each range, in the order of the ranges; none where ncu saw no range.

    Args:
        text: What ncu printed: its raw page as CSV, a row of units below the head, and lines of its own that begin
            with ``==``.

    Raises:
        CounterError: if a count is missing, or no number of bytes.
    """
    rows = list(csv.reader(line for line in text.splitlines() if not line.startswith("==")))
    heads = [index for index, row in enumerate(rows) if row[:1] == ["ID"]]
    if not heads:
        return []
    head, units, *found = rows[heads[0] :]
    by_range = {int(row[0]): row for row in found if row and row[0].isdecimal()}
    counts = []
    for number in sorted(by_range):
        row = by_range[number]
        if len(row) != len(head) or len(units) != len(head):
            raise CounterError(f"ncu printed {len(row)} cells below a head of {len(head)}: {','.join(row)}")
        read, written = (_bytes(name, number, head, units, row) for name in (_READ, _WRITTEN))
        counts.append(DramBytes(read_bytes=read, written_bytes=written))
    return counts


def complaint(text: str) -> str:
    """The first error that ncu printed, else its first warning; empty where there is neither."""
    for mark in _COMPLAINTS:
        for line in text.splitlines():
            if line.startswith(mark):
                return line.removeprefix(mark).strip()
    return ""


def _bytes(name: str, number: int, head: list[str], units: list[str], row: list[str]) -> int:
    if name not in head:
        raise CounterError(f"ncu printed no column {name}: this GPU may not have that counter")
    column = head.index(name)
    factor = _UNIT_BYTES.get(units[column].lower())
    try:
        # Thousands may be set apart.
        value = float(row[column].replace(",", ""))
    except ValueError:
        value = math.nan
    if factor is None or not math.isfinite(value):
        raise CounterError(f"ncu counted {row[column]!r} of unit {units[column]!r} for {name} in range {number}")
    return round(factor * value)
