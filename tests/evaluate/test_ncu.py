"""What ncu is asked, and how its answer is read."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from autoflash.errors import CounterError
from autoflash.evaluate import ncu
from autoflash.evaluate.ncu import DramBytes
from tests.counters import HEAD, PAGE, line


def test_the_raw_page_gives_bytes_of_each_range() -> None:
    first, second = ncu.parse(PAGE)

    assert first == DramBytes(read_bytes=33554432, written_bytes=16777216)
    assert second == DramBytes(read_bytes=268435456, written_bytes=1024)
    assert first.total_bytes == 33554432 + 16777216


def test_ranges_come_in_the_order_of_their_numbers() -> None:
    text = HEAD + line(10, "10", "0") + line(9, "9", "0")

    assert [one.read_bytes for one in ncu.parse(text)] == [9, 10]


def test_units_are_heeded() -> None:
    text = HEAD.replace('"byte","byte"', '"Mbyte","Kbyte"') + line(0, "2.5", "1.25")

    assert ncu.parse(text) == [DramBytes(read_bytes=2_500_000, written_bytes=1250)]


def test_columns_are_found_by_name() -> None:
    names = '"ID","dram__bytes_write.sum","Kernel Name","dram__bytes_read.sum"\n"","byte","","byte"\n'

    assert ncu.parse(f'{names}"0","1","f(int, int)","2"\n') == [DramBytes(read_bytes=2, written_bytes=1)]


@pytest.mark.parametrize("text", ["", "==WARNING== No ranges were profiled.\n", HEAD])
def test_without_a_range_there_is_nothing(text: str) -> None:
    assert ncu.parse(text) == []


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (HEAD + line(0, "n/a", "1"), "'n/a'"),
        (HEAD + line(0, "1", "nan"), "'nan'"),
        (HEAD.replace('"byte"', '"sector"') + line(0, "1", "1"), "sector"),
        (HEAD.replace("dram__bytes_read", "dram__sectors_read") + line(0, "1", "1"), "no column dram__bytes_read.sum"),
        (HEAD + '"0","1","2"\n', "3 cells below a head of 13"),
    ],
)
def test_what_is_no_count_is_an_error(text: str, words: str) -> None:
    with pytest.raises(CounterError, match=words):
        ncu.parse(text)


def test_a_lack_of_permission_says_what_to_do() -> None:
    said = "==ERROR== ERR_NVGPUCTRPERM - The user does not have permission to access NVIDIA GPU Performance Counters\n"

    with pytest.raises(CounterError, match=r"root.*NVreg_RestrictProfilingToAdminUsers=0"):
        ncu.check(said)
    ncu.check(PAGE)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("==PROF== Connected\n==WARNING== Late.\n==ERROR== Unknown option.\n", "Unknown option."),
        ("==WARNING== No ranges were profiled.\n", "No ranges were profiled."),
        (PAGE, ""),
    ],
)
def test_errors_come_before_warnings(text: str, expected: str) -> None:
    assert ncu.complaint(text) == expected


def test_ranges_are_counted_in_one_run_with_the_caches_left_alone() -> None:
    command = ncu.command("/opt/ncu", Path("log"), ["python", "-c", "pass"])

    assert command[:3] == ["env", "LC_ALL=C.UTF-8", "/opt/ncu"]
    assert command[-5:] == ["--log-file", "log", "python", "-c", "pass"]
    given = dict(itertools.pairwise(command))
    assert given["--replay-mode"] == "app-range"
    assert given["--cache-control"] == given["--clock-control"] == "none"
    assert given["--metrics"] == "dram__bytes_read.sum,dram__bytes_write.sum"
    # ncu refuses it for ranges.
    assert "--profile-from-start" not in command


def test_an_absent_ncu_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))

    with pytest.raises(CounterError, match="ncu is not on the PATH"):
        ncu.find()
