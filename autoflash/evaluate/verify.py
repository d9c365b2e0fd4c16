"""The correctness gate: no kernel is timed for the record, or dispatched as tuned, without passing it.

A kernel's error against float64 is allowed to be a little larger than the one that ordinary torch math in the same
dtype makes on the same inputs, so that one rule serves every dtype and shape. DESIGN decision 5 states the rule.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from autoflash.device import Device
from autoflash.evaluate.expected import Expected, Limit, expanded, expected
from autoflash.evaluate.grid import Case, crowded_case, determinism_case, full_cases, screen_cases
from autoflash.evaluate.inputs import MARGIN, Guarded, Memory
from autoflash.problem import Pass, Problem
from autoflash.runtime.executable import SINGLE, SINGLE_TERMS, Executable, Extras, TermGradients
from autoflash.trial import Level, Verification
from autoflash.variant import Family

WORST_RATIO = 1e9
"""Stands for an error without measure (NaN, a damaged input): records cannot hold infinity."""

_LAUNCHES = 10


@dataclass(frozen=True, slots=True, order=True)
class Finding:
    """One comparison: the error in units of what is allowed, and in words."""

    ratio: float
    words: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What a kernel made of one case.

    Attributes:
        expected: What it should have made.
        results: Its outputs, by name.
        finding: The worst comparison.
    """

    expected: Expected
    results: dict[str, Tensor]
    finding: Finding


def verify(executable: Executable, problem: Problem, level: Level, *, device: Device | None = None) -> Verification:
    """Put a kernel through the gate.

    Every output is filled with NaN first; tensors lie in larger buffers whose margins, like the inputs, must be bitwise
    unchanged afterwards. Inputs make single keys decide single rows, at the borders of every block size. On a GPU the
    whole grid ends with repeated launches of many short tiles, which may show a race. Cases that the kernel refuses
    by :meth:`~autoflash.runtime.executable.Executable.why_not` are left out, and one that refuses all of them has
    not passed, with 0 checks; a log-sum-exp that it does not have is not compared. What it raises is not caught.

    Args:
        executable: The kernel.
        problem: What it will be used for. Its sizes are brought down where that selects the same specialisation.
        level: SCREEN is the problem's own specialisation and one irregular shape; FULL is the whole grid.
        device: Where to run; None is the executable's own device or, if it does not say, torch's current GPU or the
            CPU.
    """
    place = _torch_device(executable, device)
    with running_on(place, problem.tf32):
        findings = _verify_cases(
            executable, screen_cases(problem) if level is Level.SCREEN else full_cases(problem), place
        )
        if isinstance(findings, str):
            return Verification(level=level, passed=False, worst_ratio=WORST_RATIO, detail=findings, checks=0)
        if level is Level.FULL and place != "cpu" and max(findings).ratio <= 1.0:
            findings += _verify_crowded(executable, crowded_case(problem, _multiprocessors(place)), place)
        if problem.deterministic and max(findings).ratio <= 1.0:
            findings.append(_verify_determinism(executable, determinism_case(problem, _multiprocessors(place)), place))
    worst = max(findings)
    return Verification(
        level=level, passed=worst.ratio <= 1.0, worst_ratio=worst.ratio, detail=worst.words, checks=len(findings)
    )


def compare(name: str, actual: Tensor, limit: Limit) -> Finding:
    """Apply the rules for outputs and gradients: the larger of the maximum and the mean error, each by its limit."""
    if actual.shape != limit.exact.shape:
        return Finding(WORST_RATIO, f"{name} has shape {list(actual.shape)} for {list(limit.exact.shape)}")
    if actual.numel() == 0:
        return Finding(0.0, f"{name} is empty")
    error = (actual.double() - limit.exact).abs()
    largest, mean, wrong_zeros = torch.stack(
        [
            error.max(),
            error.mean(),
            (error * limit.zero).max() if limit.zero is not None else error.new_zeros(()),
        ]
    ).tolist()
    if not math.isfinite(mean):
        return Finding(WORST_RATIO, f"{name} has elements that are not finite, or were not written")
    if wrong_zeros > 0.0:
        return Finding(WORST_RATIO, f"{name} is not 0 in a row that sees no key, or belongs to no sequence")
    return max(
        _finding(largest, limit.max_error, f"largest error of {name}"),
        _finding(mean, limit.mean_error, f"mean error of {name}"),
    )


def compare_lse(actual: Tensor, exact: Tensor, slack: Tensor | float = 0.0) -> Finding:
    """Apply the rule for the log-sum-exp: 1e-4 + 32 eps32 |exact|, and -inf exactly where no key is visible."""
    if actual.shape != exact.shape or actual.dtype != torch.float32:
        return Finding(WORST_RATIO, f"lse is {actual.dtype} {list(actual.shape)} for float32 {list(exact.shape)}")
    if actual.numel() == 0:
        return Finding(0.0, "lse is empty")
    blind = exact == -math.inf
    if not torch.equal(actual == -math.inf, blind):
        return Finding(WORST_RATIO, "lse is not -inf exactly where no key is visible")
    error = (actual.double() - exact).masked_fill(blind, 0.0).abs()
    allowed = 1e-4 + slack + 32 * torch.finfo(torch.float32).eps * exact.masked_fill(blind, 0.0).abs()
    ratio = (error / allowed).max().item()
    if not math.isfinite(ratio):
        return Finding(WORST_RATIO, "lse has elements that are not finite, or were not written")
    return Finding(min(ratio, WORST_RATIO), f"error of lse is {ratio:.3g} of what is allowed")


def _finding(error: float, allowed: float, words: str) -> Finding:
    if error == 0.0:
        return Finding(0.0, f"{words} is 0")
    ratio = min(error / allowed, WORST_RATIO) if allowed > 0.0 else WORST_RATIO
    return Finding(ratio, f"{words} is {error:.3g}, allowed {allowed:.3g}")


def _verify_cases(executable: Executable, cases: Sequence[Case], device: str) -> list[Finding] | str:
    """The worst finding of each case up to the first that fails; the reason for the first where all are refused."""
    findings: list[Finding] = []
    refusal = ""
    for case in cases:
        compared = _verify_case(executable, case, device)
        if isinstance(compared, str):
            refusal = refusal or compared
            continue
        findings.append(compared)
        if compared.ratio > 1.0:
            break
    return findings or f"every case is refused, the first because {refusal}"


def run_case(executable: Executable, case: Case, device: str, margin: int = MARGIN) -> Run | str:
    """Run a kernel on one case and apply the rules; or the reason why the executable refuses it.

    Args:
        executable: The kernel.
        case: What to compute.
        device: Where, as torch names it.
        margin: Elements around each tensor that are watched; 0 leaves that to tools that watch allocations.
    """
    wanted = expected(case.values, device, _has_lse(executable))
    inputs = _place_inputs(executable, case, wanted, margin)
    tensors = [inputs[name].tensor for name in ("q", "k", "v", *(["dout"] if "dout" in inputs else []))]
    refusal = executable.why_not(case.problem, *tensors)
    if refusal is not None:
        return refusal
    outputs = _place_outputs(executable, case, wanted, margin)
    results = _launch(executable, case, inputs, outputs)
    findings = [
        Finding(WORST_RATIO, f"{name} was written to, and is an input")
        for name, guarded in inputs.items()
        if not guarded.is_unchanged()
    ]
    for name, guarded in outputs.items():
        if results[name] is not guarded.tensor:
            findings.append(Finding(WORST_RATIO, f"{name} was given and not returned"))
        if not guarded.is_unchanged_outside():
            findings.append(Finding(WORST_RATIO, f"memory around {name} was written to"))
    findings += [compare(name, results[name], limit) for name, limit in wanted.limits]
    if "lse" in results and _has_lse(executable):
        findings.append(compare_lse(results["lse"], wanted.lse, wanted.lse_slack))
    return Run(expected=wanted, results=results, finding=max(findings))


def _verify_case(executable: Executable, case: Case, device: str) -> Finding | str:
    """The worst finding of one case, or the reason why the executable refuses it."""
    run = run_case(executable, case, device)
    return run if isinstance(run, str) else Finding(run.finding.ratio, f"{run.finding.words} ({case})")


def _verify_crowded(executable: Executable, case: Case, device: str) -> list[Finding]:
    """The findings of many launches; none where the kernel refuses the case. That can show a race, never exclude it."""
    launches = (_verify_case(executable, case, device) for _ in range(_LAUNCHES))
    return [finding for finding in launches if isinstance(finding, Finding)]


def _verify_determinism(executable: Executable, case: Case, device: str) -> Finding:
    """Launch often, with more tiles than multiprocessors: that can refute determinism, never prove it."""
    inputs = _place_inputs(executable, case, expected(case.values, device, _has_lse(executable)))
    first = {name: tensor.clone() for name, tensor in _launch(executable, case, inputs, {}).items()}
    for _ in range(_LAUNCHES - 1):
        for name, tensor in _launch(executable, case, inputs, {}).items():
            if not torch.equal(tensor, first[name]):
                return Finding(WORST_RATIO, f"{name} differs between launches ({case})")
    return Finding(0.0, f"{_LAUNCHES} launches gave the same bits ({case})")


def _place_inputs(executable: Executable, case: Case, wanted: Expected, margin: int = MARGIN) -> dict[str, Guarded]:
    """The tensors of a call in guarded memory, by name. Log-sum-exps are contiguous everywhere."""
    values, memory = wanted.inputs, case.memory
    key_memory = Memory.SHARED_HEAD if case.shared else memory
    placed = {
        "q": Guarded(values.q, memory, margin),
        "k": Guarded(values.k, key_memory, margin),
        "v": Guarded(values.v, key_memory, margin),
    }
    extras = dict(zip(SINGLE, values.extras.flat, strict=False))
    extras |= {f"param_{place}": tensor for place, tensor in enumerate(values.extras.params)}
    for name, tensor in extras.items():
        if tensor is not None:
            form = {"mask": case.mask, "bias": case.bias}.get(name)
            placed[name] = Guarded(tensor, Memory.DENSE if form is None else form.memory, margin)
    if case.problem.op is Pass.BACKWARD:
        placed["out"] = Guarded(wanted.out.to(values.q.dtype), memory, margin)
        placed["lse"] = Guarded(wanted.lse.float(), Memory.DENSE, margin)
        placed["dout"] = Guarded(values.dout, Memory.SHARED_ELEMENT if case.shared else memory, margin)
        if case.with_dlse and _has_lse(executable):
            placed["dlse"] = Guarded(values.dlse, Memory.DENSE, margin)
    return placed


def _place_outputs(executable: Executable, case: Case, wanted: Expected, margin: int) -> dict[str, Guarded]:
    """Outputs for the kernel to write into, full of NaN; a vendor's kernel allocates its own."""
    if executable.variant.family is Family.VENDOR:
        return {}
    values, memory = wanted.inputs, case.memory
    if case.problem.op is Pass.BACKWARD:
        models = {"dq": values.q, "dk": values.k, "dv": values.v}
        placed = {name: Guarded.unwritten(model, memory, margin) for name, model in models.items()}
        terms = TermGradients.asked_by(case.problem, values.extras).present
        return placed | {f"d{name}": Guarded.unwritten(term, Memory.DENSE, margin) for name, term in terms.items()}
    return {
        "out": Guarded.unwritten(values.dout, memory, margin),
        "lse": Guarded.unwritten(values.dlse, Memory.DENSE, margin),
    }


def _launch(
    executable: Executable, case: Case, inputs: dict[str, Guarded], outputs: dict[str, Guarded]
) -> dict[str, Tensor]:
    given = {name: guarded.tensor for name, guarded in inputs.items()}
    written = {name: guarded.tensor for name, guarded in outputs.items()}
    q, k, v = given["q"], given["k"], given["v"]
    params = tuple(given[f"param_{place}"] for place in range(sum(name.startswith("param_") for name in given)))
    extras = expanded(Extras(**{name: given.get(name) for name in SINGLE}, params=params), q, k)
    if case.problem.op is Pass.FORWARD:
        forward = executable.prepare_forward(case.problem, q, k, v, case.score_scale, extras)
        results = forward(q, k, v, out=written.get("out"), lse=written.get("lse"), extras=extras)
        return dict(zip(("out", "lse"), results, strict=True))
    out, dout = given["out"], given["dout"]
    terms = TermGradients.asked_by(case.problem, extras)
    terms = TermGradients(
        **{name: written.get(f"d{name}", getattr(terms, name)) for name in SINGLE_TERMS},
        params=tuple(written.get(f"dparam_{place}", term) for place, term in enumerate(terms.params)),
    )
    backward = executable.prepare_backward(case.problem, q, k, v, out, dout, case.score_scale, extras)
    grads = backward(
        q,
        k,
        v,
        out,
        given["lse"],
        dout,
        dlse=given.get("dlse"),
        dq=written.get("dq"),
        dk=written.get("dk"),
        dv=written.get("dv"),
        extras=extras,
        terms=terms,
    )
    of_terms = {f"d{name}": term for name, term in terms.present.items()}
    return dict(zip(("dq", "dk", "dv"), grads, strict=True)) | of_terms


@contextmanager
def running_on(device: str, tf32: bool) -> Iterator[None]:
    """Make the device current, and let torch's own float32 products be what the problem says."""
    if device == "cpu":
        yield
        return
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32" if tf32 else "ieee"
    try:
        with torch.cuda.device(device):
            yield
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


def _has_lse(executable: Executable) -> bool:
    """Vendor kernels may have no log-sum-exp to give, and say so."""
    return bool(getattr(executable, "has_lse", True))


def _torch_device(executable: Executable, device: Device | None) -> str:
    chosen = device if device is not None else getattr(executable, "device", None)
    if isinstance(chosen, Device):
        return chosen.torch_device
    return f"cuda:{torch.cuda.current_device()}" if torch.cuda.is_available() else "cpu"


def _multiprocessors(device: str) -> int:
    if device == "cpu":
        return torch.get_num_threads()
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
