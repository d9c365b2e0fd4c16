"""From a problem and tensors to a kernel that has run them: walks the ladder until one does."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import torch
from torch import Tensor

from autoflash import paths
from autoflash.device import Device
from autoflash.dispatch.buckets import cell_of
from autoflash.dispatch.ladder import Candidate, Here, VendorPolicy, inference_ladder, training_ladders
from autoflash.dispatch.table import Table, load
from autoflash.errors import NoKernelError
from autoflash.problem import Cell, Form, Pass, Problem
from autoflash.runtime.executable import NO_EXTRAS, Executable, Extras
from autoflash.runtime.probe import environment, probe
from autoflash.trial import Tier, Verification
from autoflash.variant import Family, Variant

_LOG = logging.getLogger("autoflash")
_Result = TypeVar("_Result")

Verifier = Callable[[Executable, Problem], Verification]
Binder = Callable[[Form, Variant, Device], Executable]

# SDPA's math backend holds the whole score matrix; beyond this a generated kernel is the better fallback.
_MOST_MATH_BYTES = 256 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolution:
    """The kernel that serves a problem, and how it came to.

    Attributes:
        problem: What was asked.
        cell: What it was looked up under.
        candidate: The rung that was taken.
        executable: Ready to prepare calls.
        passed_over: Why better rungs were not taken, in words.
        alternatives: The rungs below.
    """

    problem: Problem
    cell: Cell
    candidate: Candidate
    executable: Executable
    passed_over: tuple[str, ...] = ()
    alternatives: tuple[Candidate, ...] = ()

    @property
    def is_vendor(self) -> bool:
        """Whether PyTorch's own kernel serves."""
        return self.candidate.variant.family is Family.VENDOR


class BlamelessError(Exception):
    """Carries, as its cause, what a first call raised where its kernel works: that goes to the caller as it is."""


@dataclass(slots=True)
class _Walk:
    """What happened on the way down one ladder."""

    passed_over: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)


class Resolver:
    """Everything that dispatch remembers in a process: the table, quarantined kernels, local verifications.

    Args:
        verifier: Compares an executable with the reference on the specialisation of a problem.
        loader: Reads the table, once, when first needed.
        binder: Makes executables; None is ``runtime.bind``.
        here: Describes a torch device; None asks the driver.
    """

    def __init__(
        self,
        verifier: Verifier,
        *,
        loader: Callable[[], Table] = load,
        binder: Binder | None = None,
        here: Callable[[torch.device], Here] | None = None,
    ) -> None:
        self.lock = threading.RLock()
        self._verifier = verifier
        self._loader = loader
        self._binder = binder or _bind
        self._describe = here or _describe
        self._table: Table | None = None
        self._here: dict[torch.device, Here] = {}
        self._quarantine: dict[tuple[Cell, Variant], str] = {}
        self._verified: dict[tuple[Cell, Variant], Verification] = {}
        self._warned: set[str] = set()

    def here(self, device: torch.device) -> Here:
        """What a torch device is; asked of the driver once."""
        with self.lock:
            if device not in self._here:
                self._here[device] = self._describe(device)
            return self._here[device]

    @property
    def table(self) -> Table:
        """The decisions in force in this process."""
        with self.lock:
            if self._table is None:
                _heed_log_level()
                self._table = self._loader()
            return self._table

    def cell(self, problem: Problem, device: torch.device) -> Cell:
        """The cell that a problem is looked up under."""
        return cell_of(problem, self.here(device).device)

    def inference(self, problem: Problem, device: torch.device, policy: VendorPolicy) -> tuple[Candidate, ...]:
        """The ladder of a forward pass without gradients."""
        return inference_ladder(self.cell(problem, device), self.here(device), self.table, policy)

    def training(
        self,
        problem: Problem,
        backward: Problem,
        device: torch.device,
        policy: VendorPolicy,
        *,
        vendor_forwards: int = 1,
    ) -> tuple[tuple[Candidate, ...], tuple[Candidate, ...]]:
        """The ladders of a forward pass and of its backward; see :func:`training_ladders`."""
        cells = self.cell(problem, device), self.cell(backward, device)
        return training_ladders(*cells, self.here(device), self.table, policy, vendor_forwards=vendor_forwards)

    def first_call(
        self,
        problem: Problem,
        candidates: Sequence[Candidate],
        tensors: Sequence[Tensor],
        run: Callable[[Executable], _Result],
        *,
        extras: Extras = NO_EXTRAS,
        capturing: bool = False,
    ) -> tuple[Resolution, _Result]:
        """Run the best kernel that can, and say which it was.

        A kernel that cannot be built, fails its verification, or fails to launch is quarantined for this process,
        with a warning, and the next one serves the call.

        Args:
            problem: What to compute.
            candidates: Best first.
            tensors: q, k, v, and dout for a backward pass.
            run: Prepares and makes the call with an executable.
            extras: The tensors beside q, k and v.
            capturing: A CUDA graph is being captured: nothing may be compiled, loaded or verified.

        Raises:
            NoKernelError: if no candidate can run.
        """
        cell, walk = self.cell(problem, tensors[0].device), _Walk()
        for position, recorded in enumerate(candidates):
            executable = self._ready(problem, cell, recorded, tensors, walk, candidates)
            if executable is None:
                continue
            candidate = _with_digest(recorded, executable)
            if not self._may_run(problem, cell, candidate, executable, tensors, extras, walk, capturing=capturing):
                continue
            try:
                result = run(executable)
            except BlamelessError as error:
                raise error.__cause__ or error from None
            except Exception as error:
                if _is_out_of_memory(error):
                    raise
                # Whatever a kernel of a record, a compiler or a driver throws: the call is served by the next one.
                self._reject(cell, candidate.variant, f"{type(error).__name__}: {error}", walk)
                continue
            resolution = Resolution(
                problem=problem,
                cell=cell,
                candidate=candidate,
                executable=executable,
                passed_over=tuple(walk.passed_over),
                alternatives=tuple(candidates[position + 1 :]),
            )
            self._warn_of(walk, cell, candidate)
            if candidate.hit is None:
                self._tell_of_other_devices(cell, self.here(tensors[0].device), candidate)
            return resolution, result
        raise NoKernelError(_nothing_left(cell, walk, capturing))

    def peek(self, problem: Problem, candidates: Sequence[Candidate], tensors: Sequence[Tensor]) -> Resolution:
        """The kernel that a first call would try first, without compiling or running it.

        Raises:
            NoKernelError: if no candidate can run.
        """
        cell, walk = self.cell(problem, tensors[0].device), _Walk()
        for position, candidate in enumerate(candidates):
            executable = self._ready(problem, cell, candidate, tensors, walk, candidates)
            if executable is not None:
                return Resolution(
                    problem=problem,
                    cell=cell,
                    candidate=_with_digest(candidate, executable),
                    executable=executable,
                    passed_over=tuple(walk.passed_over),
                    alternatives=tuple(candidates[position + 1 :]),
                )
        raise NoKernelError(_nothing_left(cell, walk, capturing=False))

    def verification(self, cell: Cell, variant: Variant) -> Verification | None:
        """What this process found when it verified a kernel; None where it did not have to."""
        return self._verified.get((_form(cell), variant))

    def quarantined(self) -> dict[tuple[Cell, Variant], str]:
        """Kernels that failed in this process, with the reason."""
        return dict(self._quarantine)

    def _ready(
        self,
        problem: Problem,
        cell: Cell,
        candidate: Candidate,
        tensors: Sequence[Tensor],
        walk: _Walk,
        candidates: Sequence[Candidate],
    ) -> Executable | None:
        """The executable of a candidate that can run the tensors; None, with the reason noted, for any other."""
        variant = candidate.variant
        known = self._quarantine.get((cell, variant))
        if known is not None:
            walk.passed_over.append(f"{variant}: {known}")
            return None
        try:
            executable = self._binder(Form.of(problem), variant, self.here(tensors[0].device).device)
            reason = executable.why_not(problem, *tensors)
        except Exception as error:
            # A variant of a record may be of any age: what its templates or its compiler throw is its own failure.
            self._reject(cell, variant, f"{type(error).__name__}: {error}", walk)
            return None
        if reason is None and _wastes_memory(candidate, problem) and any(map(_is_generated, candidates)):
            reason = "it would hold the whole score matrix"
        if reason is not None:
            walk.passed_over.append(f"{variant}: {reason}")
            return None
        return executable

    def _may_run(
        self,
        problem: Problem,
        cell: Cell,
        candidate: Candidate,
        executable: Executable,
        tensors: Sequence[Tensor],
        extras: Extras,
        walk: _Walk,
        *,
        capturing: bool,
    ) -> bool:
        """Whether a candidate is verified, now if it has to be, and loaded where nothing may be loaded."""
        verified = not candidate.to_verify or (_form(cell), candidate.variant) in self._verified
        if capturing and not (verified and executable.is_loaded(problem, *tensors, extras=extras)):
            state = "not loaded" if verified else "not verified"
            walk.passed_over.append(f"{candidate.variant}: {state} yet, and a CUDA graph is being captured")
            return False
        if verified:
            return True
        try:
            verification = self._verifier(executable, problem)
        except Exception as error:
            if _is_out_of_memory(error):
                raise
            # As in first_call: a kernel that nobody ran here yet may fail in any way.
            self._reject(cell, candidate.variant, f"{type(error).__name__}: {error}", walk)
            return False
        if not verification.passed:
            kind = "wrong results: " if verification.checks else ""
            self._reject(cell, candidate.variant, f"{kind}{verification.detail}", walk)
            return False
        self._verified[_form(cell), candidate.variant] = verification
        return True

    def _reject(self, cell: Cell, variant: Variant, reason: str, walk: _Walk) -> None:
        reason = reason.strip().splitlines()[0][:300]
        self._quarantine[cell, variant] = reason
        walk.passed_over.append(f"{variant}: {reason}")
        walk.failures.append(f"{variant}: {reason}")

    def _warn_of(self, walk: _Walk, cell: Cell, taken: Candidate) -> None:
        """One warning for all that failed on the way, and none for the same failures again."""
        fresh = [failure for failure in walk.failures if failure not in self._warned]
        self._warned.update(fresh)
        if fresh:
            more = f" (and {len(fresh) - 1} more)" if len(fresh) > 1 else ""
            _LOG.warning(
                "autoflash: a kernel for %s failed and is not used again in this process; %s%s. Using %s (%s). "
                "`autoflash doctor` says what this machine can do.",
                cell,
                fresh[0],
                more,
                taken.variant,
                taken.tier.value,
            )

    def _tell_of_other_devices(self, cell: Cell, here: Here, taken: Candidate) -> None:
        """One line where only another device's records are there: a renamed or sliced card would go unseen."""
        fresh = [reason for reason in self.table.ignored(cell, here.environment) if reason not in self._warned]
        self._warned.update(fresh)
        for reason in fresh:
            _LOG.info("autoflash: records of %s; using %s (%s)", reason, taken.variant, taken.tier.value)


def _heed_log_level() -> None:
    """Let ``AUTOFLASH_LOG`` show more than warnings, unless the program has set up the logger itself."""
    level = logging.getLevelName(paths.log_level())
    if _LOG.level != logging.NOTSET or not isinstance(level, int):
        return
    _LOG.setLevel(level)
    if level < logging.WARNING and not _LOG.hasHandlers():
        _LOG.addHandler(logging.StreamHandler())


def _bind(form: Form, variant: Variant, device: Device) -> Executable:
    # Rendering loads Jinja, which importing autoflash must not.
    from autoflash.runtime.bind import bind

    return bind(form, variant, device)


def _describe(device: torch.device) -> Here:
    described = probe(device)
    return Here(device=described, environment=environment(described))


def _is_out_of_memory(error: Exception) -> bool:
    """Whether memory was short: no kernel is to blame. On the CPU, torch has no type for it."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "can't allocate memory" in str(error)


def _form(cell: Cell) -> Cell:
    """A cell without its sizes: one local verification serves all of them."""
    return replace(cell, q_bucket=0, k_bucket=0, window_bucket=0)


def _with_digest(candidate: Candidate, executable: Executable) -> Candidate:
    """A record whose kernel text is not what the templates give today is stale."""
    ranked = candidate.ranked
    if ranked is None or candidate.tier is Tier.STALE or candidate.variant.family is Family.VENDOR:
        return candidate
    if ranked.source_digest == executable.source_digest:
        return candidate
    changed = f"the kernel's text is {executable.source_digest} now, the record is for {ranked.source_digest}"
    return replace(
        candidate, tier=Tier.STALE, reason=f"{changed}; timing unconfirmed; was {candidate.reason}", to_verify=True
    )


def _is_generated(candidate: Candidate) -> bool:
    return candidate.variant.family is not Family.VENDOR


def _wastes_memory(candidate: Candidate, problem: Problem) -> bool:
    """Whether a kernel that nobody measured would hold a large score matrix."""
    is_math = candidate.variant.structure.get("backend") == "math" and candidate.ranked is None
    return is_math and problem.batch * problem.heads * problem.seqlen_q * problem.seqlen_k * 4 > _MOST_MATH_BYTES


def _nothing_left(cell: Cell, walk: _Walk, capturing: bool) -> str:
    features = ", ".join(feature.value for feature in cell.features)
    nobody = (
        f"no kernel that is allowed has {features}: vendor kernels have none" if features else "no kernel is allowed"
    )
    tried = "; ".join(walk.passed_over) or nobody
    if capturing:
        return (
            f"no kernel for {cell} is loaded, and nothing can be compiled while a CUDA graph is captured: call "
            f"autoflash.warmup(...) with the same arguments before the capture ({tried})"
        )
    op = "backward" if cell.op is Pass.BACKWARD else "forward"
    return f"no kernel can do this {op} pass ({cell}): {tried}"
