"""``autoflash doctor``: what this machine can do, and why not more."""

from __future__ import annotations

import importlib.util
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import click

from autoflash import __version__, paths
from autoflash.cli.options import Common, common_options
from autoflash.cli.output import print_json
from autoflash.codegen.render import render
from autoflash.db.repository import Repository
from autoflash.device import Device, DeviceKind
from autoflash.dispatch import table
from autoflash.dispatch.table import other_device
from autoflash.errors import AutoflashError, RenderError, UnsupportedError
from autoflash.problem import Feature, Form, Pass
from autoflash.runtime.probe import environment, probe
from autoflash.space import catalog
from autoflash.trial import Decision, Environment
from autoflash.variant import Family

TESTED_TRITON = ((3, 6), (3, 9))
TESTED_TORCH = ((2, 10), (2, 13))
"""Lowest and highest release that the test suite has run with."""

MARKS = {"ok": ("ok", "green"), "note": ("note", "cyan"), "warning": ("warn", "yellow"), "failure": ("FAIL", "red")}


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        subject: What.
        state: ``ok``, ``note``, ``warning`` or ``failure``.
        text: What was found, and what to do about it.
    """

    subject: str
    state: str
    text: str


@click.command("doctor")
@common_options
def command(common: Common) -> None:
    """Say what this machine can do, and why not more.

    Exit code 1 if something is broken: a database that cannot be read, a cache that cannot be written.
    """
    findings = [_python()]
    try:
        device = probe(common.device)
    except UnsupportedError as error:
        findings.append(Finding(subject="device", state="failure", text=str(error)))
        device = probe("cpu")
    here = environment(device)
    findings += [_device(device), *_versions(here), *_compilers(device)]
    findings += [_cache(), *_database(common), *_families(device, here), *_records(common, here)]
    if common.json:
        print_json([{"subject": one.subject, "state": one.state, "text": one.text} for one in findings])
    else:
        for one in findings:
            mark, color = MARKS[one.state]
            click.echo(f"{click.style(f'{mark:4}', fg=color)}  {one.subject:<20} {one.text}")
    if any(one.state == "failure" for one in findings):
        raise click.exceptions.Exit(1)


def _python() -> Finding:
    text = f"autoflash {__version__}, Python {sys.version.split()[0]}"
    return Finding(subject="autoflash", state="ok", text=text)


def _device(device: Device) -> Finding:
    if device.kind is DeviceKind.CPU:
        text = f"{device.name} ({device.arch}, {device.multiprocessors} threads); torch sees no GPU"
        return Finding(subject="device", state="note", text=text)
    text = (
        f"{device.name} ({device.arch}, {device.multiprocessors} multiprocessors, "
        f"{device.shared_bytes // 1024} KiB shared memory, {device.memory_bytes / 2**30:.0f} GiB)"
    )
    return Finding(subject="device", state="ok", text=text)


def _versions(here: Environment) -> Iterator[Finding]:
    yield _release("torch", here.torch, TESTED_TORCH)
    if here.triton:
        yield _release("triton", here.triton, TESTED_TRITON)
    else:
        text = "not installed: kernels cannot be compiled; `pip install triton` (Linux, x86-64)"
        yield Finding(subject="triton", state="warning", text=text)


def _release(name: str, found: str, tested: tuple[tuple[int, int], tuple[int, int]]) -> Finding:
    numbers = tuple(int(part) for part in found.split("+")[0].split(".")[:2] if part.isdigit())
    low, high = (".".join(map(str, bound)) for bound in tested)
    if numbers > tested[1]:
        text = f"{found} is newer than the newest tested ({high}): what is verified may be used, the rest may fail"
        return Finding(subject=name, state="warning", text=text)
    if numbers < tested[0]:
        return Finding(subject=name, state="warning", text=f"{found} is older than the oldest supported ({low})")
    return Finding(subject=name, state="ok", text=f"{found} (tested: {low} to {high})")


def _compilers(device: Device) -> Iterator[Finding]:
    needed = device.kind is not DeviceKind.CPU
    compiler = next((path for name in ("cc", "gcc", "clang") if (path := shutil.which(name))), None)
    if compiler:
        yield Finding(subject="C compiler", state="ok", text=compiler)
    else:
        text = "none on the path: Triton builds its launcher with one; install gcc, or ship a warm cache"
        yield Finding(subject="C compiler", state="warning" if needed else "note", text=text)
    assembler = _ptxas()
    if assembler:
        yield Finding(subject="ptxas", state="ok", text=str(assembler))
    elif device.kind is DeviceKind.CUDA:
        yield Finding(subject="ptxas", state="warning", text="not found in Triton nor on the path")


def _ptxas() -> Path | None:
    """The assembler that Triton brings along, or one on the path. Triton itself is not imported."""
    spec = importlib.util.find_spec("triton")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        bundled = Path(folder) / "backends" / "nvidia" / "bin" / "ptxas"
        if bundled.exists():
            return bundled
    found = shutil.which("ptxas")
    return Path(found) if found else None


def _cache() -> Finding:
    folder = paths.cache_dir()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        text = f"{folder} cannot be written ({error.strerror}); set AUTOFLASH_CACHE_DIR to a folder of yours"
        return Finding(subject="cache", state="failure", text=text)
    return Finding(subject="cache", state="ok", text=str(folder))


def _database(common: Common) -> Iterator[Finding]:
    file = paths.table_file(common.table)
    if file is not None:
        try:
            count = len(table.load_decisions(file.read_text(encoding="utf-8")))
        except (OSError, UnicodeDecodeError, AutoflashError) as error:
            yield Finding(subject="table", state="failure", text=f"{file}: {error}")
        else:
            text = f"{file}: {count} decisions; it replaces the database"
            yield Finding(subject="table", state="ok", text=text)
    url = paths.database_url(common.db)
    if not Repository.exists(common.db):
        yield Finding(subject="database", state="note", text=f"{url} does not exist yet; `autoflash tune` makes it")
        return
    try:
        with Repository.open(common.db, read_only=True) as repository:
            trials, decisions = repository.trials(), repository.decisions()
            bad = repository.quarantined()
    except AutoflashError as error:
        yield Finding(subject="database", state="failure", text=str(error))
        return
    text = f"{repository.location}: {len(trials)} trials, {len(decisions)} decisions"
    yield Finding(subject="database", state="ok", text=text)
    if bad:
        reasons = "; ".join(f"trial {trial}: {reason}" for trial, reason in list(bad.items())[:5])
        text = f"{len(bad)} bad records are set aside ({reasons})"
        yield Finding(subject="quarantine", state="warning", text=text)


def _families(device: Device, here: Environment) -> Iterator[Finding]:
    for family in Family:
        if family is Family.VENDOR:
            continue
        subject = f"{family.value} kernels"
        passes = [op.value for op in Pass if family in catalog.families(op, device)]
        if family is not Family.TORCH_TILED and not here.triton:
            yield Finding(subject=subject, state="warning", text="need Triton, which is not installed")
        elif passes:
            yield Finding(subject=subject, state="ok", text=" and ".join(passes) + _reach(family, device))
        else:
            gpu = "a GPU" if family is Family.TRITON else f"a GPU of {family.value.rpartition('_')[2]}"
            text = f"need {gpu}; here they can be rendered and cross-compiled, not run"
            yield Finding(subject=subject, state="note", text=text)


def _reach(family: Family, device: Device) -> str:
    """In words, what a family leaves to others; nothing where it does every feature."""
    able = [
        {feature for feature in Feature if family in catalog.families(op, device, (feature,))}
        for op in (Pass.FORWARD, Pass.BACKWARD)
    ]
    if all(len(features) == len(Feature) for features in able):
        return ""
    forward = ", ".join(feature.value for feature in Feature if feature in able[0])
    return ", of plain attention" + (f"; forward also with {forward}" if forward else "")


def _records(common: Common, here: Environment) -> Iterator[Finding]:
    """How many of the visible decisions hold here, and why the others do not."""
    decisions = table.load(common.db, common.table).decisions()
    foreign = Counter(
        decision.environment.device_name
        for decision in decisions
        if other_device(decision.environment, here) is not None
    )
    ours = [decision for decision in decisions if other_device(decision.environment, here) is None]
    stale = [reason for decision in ours if (reason := _stale(decision, here)) is not None]
    if not ours:
        text = "no decision for this device: calls use vendor kernels or defaults; run `autoflash tune`"
        yield Finding(subject="tuned", state="note", text=text)
    else:
        yield Finding(subject="tuned", state="ok", text=f"{len(ours) - len(stale)} decisions hold on this device")
    if stale:
        text = f"{len(stale)} decisions are verified again before use; tune again to re-time them ({stale[0]})"
        yield Finding(subject="stale", state="warning", text=text)
    if foreign:
        text = ", ".join(f"{count} for {name}" for name, count in sorted(foreign.items()))
        yield Finding(subject="other devices", state="note", text=f"{text}: not used here")


def _stale(decision: Decision, here: Environment) -> str | None:
    """Why the first choice of a decision is not trusted as it stands; None where it is."""
    if not decision.choices:
        return None
    first = decision.choices[0]
    reason = decision.environment.mismatch(here, first.variant.family)
    if reason is not None or first.variant.family is Family.VENDOR:
        return reason
    try:
        digest = render(Form.of(decision.cell), first.variant.family, first.variant.structure).digest
    except RenderError as error:
        return str(error)
    return None if digest == first.source_digest else f"the text of {first.variant} has changed"
