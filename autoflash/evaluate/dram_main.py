"""The counted side of :mod:`autoflash.evaluate.dram`: call one system after the other, each in a range of its own.

A call finds none of its tensors in the L2, and nothing there that is yet to be written back: a buffer of four times
the L2 has just been *read* (to overwrite one would leave its lines to be written during the call, and be counted).
What the call leaves in the L2 to be written back is its own doing too: a second range reads the buffer again, which
drives it out, and its writes are added to those of the call.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from autoflash.device import Device, DeviceKind
from autoflash.evaluate import systems
from autoflash.evaluate.memory import release_cached
from autoflash.evaluate.systems import System
from autoflash.problem import Problem

RANGES_OF_A_CALL = 2
"""The call, then what drives out what it left in the L2."""

_LEAST_L2_BYTES = 32 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """A system to be counted on a problem."""

    problem: Problem
    system: System


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What a counted process is to do, in this order."""

    device: Device
    seed: int
    work: tuple[Work, ...]


def main(request: str, replies: str) -> None:
    """Do what a request asks for; a line of JSON for each piece of work, as soon as it is done.

    Args:
        request: A file with a pickled :class:`Request`.
        replies: The file to write to: ``reason`` is empty where the ranges of the call were closed, and ``stopped``
            is set where an open range failed, after which nothing more is tried.
    """
    asked: Request = pickle.loads(Path(request).read_bytes())
    evict = _eviction(asked.device)
    # Written anew where ncu runs the process again, which a third counter would make it do.
    with Path(replies).open("w", encoding="utf-8") as sink:
        for work in asked.work:
            reason, stopped = _count(work, asked, evict)
            sink.write(json.dumps({"reason": reason, "stopped": stopped}) + "\n")
            sink.flush()
            if stopped:
                return


def _count(work: Work, asked: Request, evict: Callable[[], object]) -> tuple[str, bool]:
    """Why there is no count, empty where there is one; and whether that leaves a range open."""
    # A call may fail in any way that torch, Triton or the driver has: it is a system without a count.
    try:
        executable = systems.executable_of(work.system, work.problem, asked.device)
        call = systems.timed_call(executable, work.problem, asked.device, asked.seed)
        call()
        evict()
    except Exception as error:
        release_cached(asked.device)
        return f"{type(error).__name__}: {error}", False
    try:
        with _counted(asked.device):
            call()
        with _counted(asked.device):
            evict()
    except Exception as error:
        return f"{type(error).__name__}: {error}", True
    return "", False


@contextmanager
def _counted(device: Device) -> Iterator[None]:
    """A range, from an idle device to an idle device."""
    if device.kind is DeviceKind.CPU:
        yield
        return
    torch.cuda.synchronize(device.index)
    torch.cuda.profiler.start()  # type: ignore[no-untyped-call]  # torch 2.13
    yield
    torch.cuda.synchronize(device.index)
    torch.cuda.profiler.stop()  # type: ignore[no-untyped-call]  # torch 2.13


def _eviction(device: Device) -> Callable[[], object]:
    size_bytes = 4 * max(device.l2_bytes, _LEAST_L2_BYTES)
    buffer = torch.zeros(size_bytes // 4, dtype=torch.int32, device=device.torch_device)
    return buffer.max
