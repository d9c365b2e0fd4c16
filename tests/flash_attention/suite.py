"""Fetch FlashAttention's test file, draw a stratified sample of its cases, and run them.

    pip install einops
    python -m tests.flash_attention.suite --cases 2000 --seed 0 --jobs 8 --list cases.txt

Strata are the test functions, each with its values of dtype, causal, local, dropout, softcap and ALiBi. Cases of what
is not built (KV caches, paged keys) are left out, and those that would skip themselves (softcap beside dropout).
Outcomes are added to the list as they come; a run that was interrupted goes on from its list. On a machine without a
GPU, ``--device cpu`` runs the smallest ones.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import itertools
import multiprocessing
import os
import random
import sys
import time
import traceback
import types
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from typing import Any

import pytest
import torch

from autoflash import paths
from tests.flash_attention import adapter

COMMIT = "0251105a2fb19d2957484b7f023cd8c115286ced"
SHA256 = "71984b919237657da4c8dea7a14728104c848a6122dc551302dbd8470745e878"
URL = f"https://raw.githubusercontent.com/Dao-AILab/flash-attention/{COMMIT}/tests/test_flash_attn.py"
PLACE = "AUTOFLASH_FLASH_ATTENTION_TESTS"
"""Names a copy of the file where there is no network."""

_LEFT_OUT = (
    "test_flash_attn_kvcache",
    "test_flash_attn_splitkv",
    "test_flash_attn_varlen_paged_kv_num_splits",
    "test_flash_attn_generator_arg_must_be_none",
)
_STRATA = ("dtype", "causal", "local", "dropout_p", "softcap", "alibi", "deterministic")
_MOST_CPU_WORK = 6 * 128 * 217 * 64


@dataclass(frozen=True, kw_only=True)
class Case:
    """One parametrisation of one of the test functions."""

    function: str
    arguments: tuple[tuple[str, Any], ...]

    def __str__(self) -> str:
        words = (f"{name}={str(value).removeprefix('torch.')}" for name, value in sorted(self.arguments))
        return f"{self.function} {' '.join(words)}"

    @property
    def stratum(self) -> tuple[str, ...]:
        """What a sample is spread over."""
        given = dict(self.arguments)
        return (self.function, *(str(given.get(name)) for name in _STRATA))

    @property
    def work(self) -> int:
        """Roughly what it costs."""
        given = dict(self.arguments)
        length = given.get("seqlen", 0)
        return 6 * given.get("seqlen_q", length) * given.get("seqlen_k", length) * given.get("d", 64)


def fetch() -> str:
    """The text of the test file, from a named copy, the cache, or the network.

    Raises:
        ValueError: for another text than the one that the sample is drawn from.
    """
    named = os.environ.get(PLACE)
    place = Path(named) if named else paths.writable_cache_dir() / f"flash-attention-{COMMIT}.py"
    if not place.exists():
        place.parent.mkdir(parents=True, exist_ok=True)
        with urllib.request.urlopen(URL) as reply:
            place.write_bytes(reply.read())
    content = place.read_bytes()
    if hashlib.sha256(content).hexdigest() != SHA256:
        raise ValueError(f"{place} is not FlashAttention's tests/test_flash_attn.py of commit {COMMIT}")
    return content.decode()


def load(text: str, device: str) -> types.ModuleType:
    """The test module, with the shells for its imports."""
    adapter.install()
    module = types.ModuleType("flash_attention_tests")
    if device == "cpu":
        text = text.replace('device = "cuda"', 'device = "cpu"')
        torch.cuda.get_device_capability = lambda *_: (9, 0)  # type: ignore[assignment]
        torch.cuda.synchronize = lambda *_: None  # type: ignore[assignment]
    exec(compile(text, "test_flash_attn.py", "exec"), module.__dict__)
    module.normalize_flash_attn_S = adapter.normalised  # type: ignore[attr-defined]
    return module


def cases(module: types.ModuleType) -> Iterator[Case]:
    """Every case that may be drawn."""
    for name, function in vars(module).items():
        if not name.startswith("test_") or name in _LEFT_OUT:
            continue
        axes = []
        for mark in function.pytestmark:
            if mark.name != "parametrize":
                continue
            names = [word.strip() for word in mark.args[0].split(",")]
            axes.append(
                [tuple(zip(names, values if len(names) > 1 else (values,), strict=True)) for values in mark.args[1]]
            )
        for chosen in itertools.product(*axes):
            arguments = tuple(itertools.chain.from_iterable(chosen))
            given = dict(arguments)
            skips_itself = given.get("softcap") and given.get("dropout_p")
            if given.get("paged_kv_block_size") is None and not skips_itself:
                yield Case(function=name, arguments=arguments)


def sample(every: list[Case], count: int, seed: int) -> list[Case]:
    """So many cases, drawn in turn from all strata."""
    generator = random.Random(seed)
    strata: dict[tuple[str, ...], list[Case]] = {}
    for case in every:
        strata.setdefault(case.stratum, []).append(case)
    for members in strata.values():
        generator.shuffle(members)
    turns = itertools.chain.from_iterable(itertools.zip_longest(*(strata[key] for key in sorted(strata))))
    return [case for case in turns if case is not None][:count]


def run(module: types.ModuleType, case: Case) -> str | None:
    """Why a case failed; None where it passed, ``skipped`` where FlashAttention's test skips itself."""
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            getattr(module, case.function)(**dict(case.arguments))
    except pytest.skip.Exception:
        return "skipped"
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        return f"{type(error).__name__} at line {where.lineno}: {str(error).splitlines()[0] if str(error) else ''}"
    return None


class Worker:
    """A process that runs cases on a device."""

    module: types.ModuleType

    @classmethod
    def start(cls, device: str, started: Synchronized[int]) -> None:
        """Load the tests, once a process; processes take the GPUs that there are in turn."""
        if device == "cuda":
            with started:
                number, started.value = started.value, started.value + 1
            torch.cuda.set_device(number % torch.cuda.device_count())
        cls.module = load(fetch(), device)

    @classmethod
    def run(cls, case: Case) -> str | None:
        """Why a case failed."""
        return run(cls.module, case)


def outcomes(chosen: list[Case], device: str, jobs: int) -> Iterator[tuple[Case, str | None]]:
    """Run cases in several processes, in the order in which they end; what finds no memory beside others goes alone."""
    context = multiprocessing.get_context("spawn")
    crowded = []
    with ProcessPoolExecutor(jobs, context, Worker.start, (device, context.Value("i", 0))) as pool:
        running = {pool.submit(Worker.run, case): case for case in chosen}
        for future in as_completed(running):
            outcome = future.result()
            if jobs > 1 and outcome is not None and outcome.startswith("OutOfMemoryError"):
                crowded.append(running[future])
            else:
                yield running[future], outcome
    if crowded:
        yield from outcomes(crowded, device, 1)


class Known:
    """The outcomes in a list of cases, if there is one."""

    def __init__(self, place: Path | None, title: str) -> None:
        """Read what is there. What failed is not run again unless its line is taken out.

        Raises:
            ValueError: for the list of another sample.
        """
        self._place = place
        lines = [title] if place is None or not place.exists() else place.read_text().splitlines()
        if lines[0] != title:
            raise ValueError(f"{place} begins with {lines[0]!r}, not {title!r}: name another file, or the same --seed")
        self._title = title
        split = [line.partition(": ") for line in lines[1:]]
        self.outcomes = {case: None if outcome == "passed" else outcome for case, _, outcome in split}
        self.sort()

    def add(self, case: Case, outcome: str | None) -> None:
        """Keep one more."""
        self.outcomes[str(case)] = outcome
        if self._place is not None:
            with self._place.open("a") as file:
                file.write(_line(str(case), outcome))

    def sort(self) -> None:
        """Write the list in the order of the cases."""
        if self._place is not None:
            lines = sorted(_line(case, outcome) for case, outcome in self.outcomes.items())
            self._place.write_text("".join([f"{self._title}\n", *lines]))


def _line(case: str, outcome: str | None) -> str:
    return f"{case}: {outcome or 'passed'}\n"


def main() -> int:
    """Run the sample; 1 where a case fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1, help="processes, spread over the GPUs")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--list", type=Path, help="cases with their outcomes, read and added to")
    parser.add_argument("--quiet", action="store_true", help="print no progress")
    options = parser.parse_args()
    module = load(fetch(), options.device)
    every = [case for case in cases(module) if options.device == "cuda" or case.work <= _MOST_CPU_WORK]
    chosen = sample(every, options.cases, options.seed)
    known = Known(options.list, f"# seed {options.seed}, commit {COMMIT}")
    found = {case: known.outcomes[str(case)] for case in chosen if str(case) in known.outcomes}
    waiting = [case for case in chosen if case not in found]
    began = time.monotonic()
    for done, (case, outcome) in enumerate(outcomes(waiting, options.device, options.jobs), start=1):
        found[case] = outcome
        known.add(case, outcome)
        if outcome not in (None, "skipped"):
            print(f"FAILED {case}: {outcome}", flush=True)
        if not options.quiet and (done % 20 == 0 or done == len(waiting)):
            left = (time.monotonic() - began) / done * (len(waiting) - done)
            print(f"{len(found)} of {len(chosen)} cases, {left:.0f} s left", file=sys.stderr, flush=True)
    known.sort()
    skipped = sum(outcome == "skipped" for outcome in found.values())
    failed = sum(outcome is not None for outcome in found.values()) - skipped
    passed = len(chosen) - skipped - failed
    print(f"{passed} passed, {failed} failed, {skipped} skipped of {len(every)} that may be drawn")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
