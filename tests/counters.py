"""An ``ncu`` that needs no GPU: it runs the process as the real one does, and invents the counts."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path

HEAD = (
    '"ID","Process ID","Process Name","Host Name","Kernel Name","Context","Stream","Block Size","Grid Size","Device",'
    '"CC","dram__bytes_read.sum","dram__bytes_write.sum"\n'
    '"","","","","","","","","","","","byte","byte"\n'
)
"""The raw page of Nsight Compute 2025 as CSV, with a row of units below the names."""


def line(number: int, read: str, written: str) -> str:
    """A range of the raw page."""
    place = '"4242","python3.12","127.0.0.1","range","1","n/a","(0, 0, 0)","(0, 0, 0)","0","9.0"'
    return f'"{number}",{place},"{read}","{written}"\n'


PAGE = (
    "==PROF== Connected to process 4242 (/usr/bin/python3.12)\n"
    '==PROF== Profiling "range" - 0: Application replay pass 1\n'
    '==PROF== Profiling "range" - 1: Application replay pass 1\n'
    "==PROF== Disconnected from process 4242\n"
    + HEAD
    + line(0, "33,554,432", "16777216")
    + line(1, "268435456", "1,024")
)
"""What ncu prints of two ranges."""

_SOURCE = '''\
#!{python}
"""Ranges of 1000 i + 1000 bytes read and i bytes written, two for each call that the process was done with."""
import json, subprocess, sys
from pathlib import Path

arguments = sys.argv[1:]
log = Path(arguments[arguments.index("--log-file") + 1])
counted = arguments[arguments.index({python!r}) :]
Path({seen!r}).write_text(json.dumps(arguments))
{before}
code = subprocess.run(counted).returncode
replies = [json.loads(line) for line in Path(counted[-1]).read_text().splitlines()]
ranges = 2 * sum(not reply["reason"] for reply in replies)
rows = [{line!r} % (i, 1000 * i + 1000, i) for i in range(ranges)]
log.write_text("==PROF== Connected to process 1\\n" + {head!r} * bool(rows) + "".join(rows))
sys.exit(code)
'''


def install(folder: Path, *, before: str = "") -> Path:
    """Write the program into a folder that is to be on the PATH.

    Args:
        folder: Made where it is not there.
        before: Lines of Python to run in the place of, or before, the process that is counted; ``log`` is the file
            that ncu prints to.

    Returns:
        The file that will hold the arguments of the last run, as JSON.
    """
    folder.mkdir(exist_ok=True)
    seen, program = folder / "arguments.json", folder / "ncu"
    row = line(0, "%d", "%d").replace('"0"', '"%d"', 1)
    program.write_text(
        _SOURCE.format(python=sys.executable, seen=str(seen), before=textwrap.dedent(before), line=row, head=HEAD)
    )
    program.chmod(0o755)
    return seen
