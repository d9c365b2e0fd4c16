"""The systems for attention side by side: standard attention, Rabe-Staats, FlashAttention's orders, SDPA."""

from __future__ import annotations

import contextlib
import functools
import math
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import wait
from dataclasses import dataclass

import torch

from autoflash.device import Device, DeviceKind
from autoflash.evaluate.accuracy import Accuracy, accuracy, accuracy_cases
from autoflash.evaluate.benchmark import Call, interleaved, make_call
from autoflash.evaluate.compile_pool import CompilePool
from autoflash.evaluate.cost import lse_bytes
from autoflash.evaluate.grid import Case
from autoflash.evaluate.io_model import Traffic
from autoflash.evaluate.memory import peak_bytes, release_cached
from autoflash.evaluate.standard import STANDARD, StandardAttention, kept_bytes
from autoflash.evaluate.timed_inputs import timed_inputs
from autoflash.evaluate.variant_io import traffic_of
from autoflash.problem import Cell, Form, Pass, Problem
from autoflash.runtime.bind import bind
from autoflash.runtime.executable import Executable, TermGradients
from autoflash.space import catalog
from autoflash.space.catalog import SearchSpace
from autoflash.trial import Measurement
from autoflash.variant import Choice, Family, Variant

_FLASH_ORDERS = {
    Pass.FORWARD: (("FlashAttention-1", "key_outer"), ("FlashAttention-2", "query_outer")),
    Pass.BACKWARD: (("FlashAttention-1", "key_outer"), ("FlashAttention-2", "split")),
}
_TORCH_ORDERS = (("Rabe-Staats", "query_outer"), ("Rabe-Staats, key outer", "key_outer"))


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """One way to compute attention that the literature names.

    Attributes:
        name: As the literature has it, or torch's name of a backend.
        variant: What stands for it.
    """

    name: str
    variant: Variant

    @property
    def is_standard(self) -> bool:
        """Whether it is standard attention in plain torch."""
        return self.variant == STANDARD


def systems(cell: Cell, device: Device, recorded: tuple[Variant, ...] = ()) -> tuple[System, ...]:
    """Those that may run on a device.

    A loop order is stood for by the first recorded variant that has it; else by its most promising variant in Triton,
    or in plain torch by the default with that order, with larger tiles on long sequences.

    Args:
        cell: What is to be computed.
        device: Where.
        recorded: The choices for the cell, best first.
    """
    found = [System(name="standard attention", variant=STANDARD)]
    for family in reversed(catalog.families(cell.op, device, cell.features)):
        space = catalog.search_space(cell, device, family)
        own = [variant for variant in recorded if variant.family is family]
        if family is Family.GLUON_SM90:
            found.append(System(name="FlashAttention-3", variant=own[0] if own else space.default()))
            continue
        for name, order in _TORCH_ORDERS if family is Family.TORCH_TILED else _FLASH_ORDERS[cell.op]:
            variant = _of_order(space, order, own)
            if variant is not None:
                found.append(System(name=name, variant=variant))
    found += [
        System(name=f"SDPA {variant.structure['backend']}", variant=variant)
        for variant in catalog.vendors(cell, device)
    ]
    return tuple(found)


def executable_of(system: System, problem: Problem, device: Device) -> Executable:
    """What runs a system.

    Raises:
        RenderError, ImportError: as :func:`autoflash.runtime.bind.bind`.
    """
    return StandardAttention() if system.is_standard else bind(Form.of(problem), system.variant, device)


def timed_call(executable: Executable, problem: Problem, device: Device, seed: int) -> Call:
    """A call as it is timed: what remains is the launch, as in :func:`make_call`.

    Generated kernels are given their outputs; torch's own allocate some in every call.
    """
    if executable.variant.family is Family.VENDOR:
        return allocating_call(executable, problem, device, seed)
    return make_call(executable, problem, device, seed=seed)


def allocating_call(executable: Executable, problem: Problem, device: Device, seed: int) -> Callable[[], object]:
    """A call that allocates everything, outputs included, so that systems can be compared by their memory."""
    q, k, v, out, lse, dout, extras = timed_inputs(problem, device, seed)
    scale = 1.0 / math.sqrt(problem.head_dim)
    if problem.op is Pass.FORWARD:
        forward = executable.prepare_forward(problem, q, k, v, scale, extras)
        return lambda: forward(q, k, v, extras=extras)
    backward = executable.prepare_backward(problem, q, k, v, out, dout, scale, extras)
    terms = TermGradients.asked_by(problem, extras)
    return lambda: backward(q, k, v, out, lse, dout, extras=extras, terms=terms)


def compile_ahead(asked: Iterable[tuple[Problem, Sequence[System]]], device: Device) -> None:
    """Compile what the systems launch, in parallel; what cannot be compiled will be seen where it is launched."""
    with CompilePool() as pool:
        futures, waits = [], []
        for problem, which in asked:
            for variant in (system.variant for system in which if system.variant.family.uses_triton):
                futures.append(pool.submit(problem, variant, device))
                waits.append(pool.prepare(accuracy_cases(problem)[:1], variant, device))
        wait(futures)
        for compiled in waits:
            compiled()


def peak_and_seconds(call: Callable[[], object], device: Device) -> tuple[int, float]:
    """The most that a call holds at once, in bytes, and about how long it takes, in seconds."""
    (held,), start = peak_bytes([call], device), time.perf_counter()
    call()
    if device.kind is not DeviceKind.CPU:
        torch.cuda.synchronize(device.index)
    return held, time.perf_counter() - start


def times(makers: Sequence[Callable[[], Call]], device: Device, *, run: str) -> list[Measurement | str]:
    """Time calls in turns; one after the other where they do not fit into the device's memory together.

    A call that does not fit even alone, as a timed one keeps more beside than one call does, has a reason for a time.

    Args:
        makers: Each makes a call.
        device: Where they run.
        run: Names the comparison.
    """
    # The calls are gone, and their memory with them, once the error that holds them is.
    with contextlib.suppress(torch.OutOfMemoryError):
        return list(interleaved([make() for make in makers], device, run=run))
    release_cached(device)
    return [_time_alone(make, device, run) for make in makers]


def _time_alone(make: Callable[[], Call], device: Device, run: str) -> Measurement | str:
    try:
        return interleaved([make()], device, run=run)[0]
    except torch.OutOfMemoryError as error:
        reason = f"not timed: {type(error).__name__}"
    release_cached(device)
    return reason


def kept_for_backward(system: System, problem: Problem) -> int | None:
    """Bytes that a backward finds kept by its forward beside inputs and output; None where a vendor does not say."""
    if problem.op is Pass.FORWARD:
        return 0
    if system.is_standard:
        return kept_bytes(problem)
    return None if system.variant.family is Family.VENDOR else lse_bytes(problem)


def error_of(system: System, problem: Problem, device: Device) -> Accuracy | str:
    """Errors against float64 on the problem's own form, at lengths that a reference can be computed for.

    Problems that have such a case in common share its errors.

    Returns:
        The errors, or the reason why the system refuses.
    """
    return _error(system, accuracy_cases(problem)[0], device)


@functools.lru_cache(maxsize=256)
def _error(system: System, case: Case, device: Device) -> Accuracy | str:
    return accuracy(executable_of(system, case.problem, device), case, device)


def model_of(system: System, problem: Problem) -> Traffic | None:
    """What the IO model says that the system moves; None where its algorithm is not known."""
    return traffic_of(problem, system.variant)


def _of_order(space: SearchSpace, order: str, recorded: list[Variant]) -> Variant | None:
    for variant in recorded:
        if variant.structure["loop_order"] == order:
            return variant
    if space.family is Family.TORCH_TILED:
        return space.variant({**_large_tiles(space), "loop_order": order})
    scores = {variant: score for variant, score in space.scores().items() if variant.structure["loop_order"] == order}
    return max(scores, key=scores.__getitem__) if scores else None


def _large_tiles(space: SearchSpace) -> dict[str, Choice]:
    """The default's tiles in plain torch, larger where there would be thousands: each is a dozen launches."""
    choices: dict[str, Choice] = {}
    for name, bucket, most in (("block_m", space.cell.q_bucket, 32), ("block_n", space.cell.k_bucket, 16)):
        largest = max(value for knob in space.knobs if knob.name == name for value in knob.values)
        choices[name] = max(space.default().config.number(name), min(2**bucket // most, largest))
    return choices
