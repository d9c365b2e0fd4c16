"""How far kernels are from float64, beside torch's own attention on the same inputs."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from autoflash.device import Device
from autoflash.evaluate.expected import expanded, expected
from autoflash.evaluate.grid import Case, screen_cases
from autoflash.evaluate.inputs import MARGIN, Inputs
from autoflash.evaluate.semantics import Block, Semantics
from autoflash.evaluate.verify import run_case, running_on
from autoflash.evaluate.yardstick import plain, plain_gradients, plain_term_gradients
from autoflash.problem import Feature, Pass, Problem
from autoflash.runtime.executable import Executable
from autoflash.runtime.vendor import BACKENDS

PLAIN = "plain"
"""Ordinary torch math in the same dtype: what there is where no backend can do the problem."""

# What no backend of torch's does, or not on numbers that are given to it.
_FOREIGN = {Feature.SOFTCAP, Feature.SCORE_MOD, Feature.ALIBI, Feature.BIAS, Feature.SINKS, Feature.DROPOUT}


@dataclass(frozen=True, slots=True, kw_only=True)
class Errors:
    """Largest absolute errors of one output against float64.

    Attributes:
        output: ``out``, ``dq``, ``dk``, ``dv`` or that of a term, such as ``dsinks``.
        kernel: Of the kernel.
        torch: Of those of torch's backends that can do the problem, by name, and of plain torch math.
    """

    output: str
    kernel: float
    torch: dict[str, float]

    @property
    def best(self) -> str:
        """The backend with the least error; plain torch math where there is none."""
        backends = [name for name in self.torch if name != PLAIN]
        return min(backends, key=self.torch.__getitem__, default=PLAIN)

    @property
    def ratio(self) -> float:
        """The kernel's error in units of the best backend's, where that one is not exact."""
        return self.kernel / self.torch[self.best] if self.torch[self.best] else 0.0 if not self.kernel else math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class Accuracy:
    """What came of a kernel on one case.

    Attributes:
        case: Which.
        errors: By output; none where torch's kernels were not asked.
        gate: The worst comparison of the correctness gate, in units of what it allows.
        words: The same in words.
    """

    case: Case
    errors: tuple[Errors, ...]
    gate: float
    words: str


def accuracy(executable: Executable, case: Case, device: Device, is_bare: bool = False) -> Accuracy | str:
    """Measure the errors of a kernel on one case; or the reason why it refuses the case.

    Args:
        executable: The kernel.
        case: One of :func:`accuracy_cases`.
        device: Where.
        is_bare: For tools that watch allocations: tensors have no margins around them, and none of torch's backends
            runs, so that there is the gate alone.
    """
    place = device.torch_device
    with running_on(place, case.problem.tf32):
        run = run_case(executable, case, place, 0 if is_bare else MARGIN)
        if isinstance(run, str):
            return run
        by_torch = {} if is_bare else torch_errors(case.values, place)
    return Accuracy(
        case=case,
        errors=tuple(
            Errors(
                output=name,
                kernel=_largest(run.results[name], limit.exact),
                torch={backend: errors[name] for backend, errors in by_torch.items()},
            )
            for name, limit in (() if is_bare else run.expected.limits)
        ),
        gate=run.finding.ratio,
        words=run.finding.words,
    )


def accuracy_cases(problem: Problem) -> tuple[Case, ...]:
    """A regular and an irregular case of a problem's form, both such that torch's backends may do them."""
    return tuple(
        replace(case, with_dlse=False, mask=None if case.mask is None else replace(case.mask, dtype=None))
        for case in screen_cases(problem)
        if not case.flat
    )


@functools.lru_cache(maxsize=256)
def torch_errors(case: Case, device: str) -> dict[str, dict[str, float]]:
    """Largest errors by backend and output; computed once for all the kernels that are compared on a case.

    A backend is left out where it cannot do the problem (softcap, a score_mod, terms, or a dropout of given numbers),
    raises, or gives elements that are not finite. Causal masks that are aligned to the bottom right and windows are
    given to it as a mask; key heads are repeated; packed sequences are computed one by one.
    """
    problem = case.problem
    wanted = expected(case, device, True)
    inputs = wanted.inputs
    semantics = Semantics.of_problem(problem, case.score_scale, expanded(inputs.extras, inputs.q, inputs.k))
    exact = {name: limit.exact for name, limit in wanted.limits}
    errors: dict[str, dict[str, float]] = {}
    usable = _FOREIGN.isdisjoint(problem.features) and not case.with_dlse
    for name, backend in BACKENDS.items() if usable else ():
        results = _by_backend(backend, inputs, semantics, problem.op)
        found = {} if results is None else {key: _largest(results[key], exact[key]) for key in exact}
        if found and all(map(math.isfinite, found.values())):
            errors[name] = found
    q, k, v = inputs.q, inputs.k, inputs.v
    if problem.op is Pass.FORWARD:
        errors[PLAIN] = {"out": _largest(plain(q, k, v, semantics)[0], exact["out"])}
    else:
        given = (q, k, v, inputs.dout, inputs.dlse if case.with_dlse else None, semantics)
        grads = dict(zip(("dq", "dk", "dv"), plain_gradients(*given), strict=True))
        if not set(exact) <= set(grads):
            grads |= {f"d{name}": term for name, term in plain_term_gradients(*given).present.items()}
        errors[PLAIN] = {name: _largest(grads[name], wanted) for name, wanted in exact.items()}
    return errors


def _by_backend(backend: SDPBackend, inputs: Inputs, semantics: Semantics, op: Pass) -> dict[str, Tensor] | None:
    """Outputs of one of torch's backends; None where it refuses."""
    leaves = [tensor.detach().requires_grad_(op is Pass.BACKWARD) for tensor in (inputs.q, inputs.k, inputs.v)]
    q, k, v = leaves
    out = q.new_zeros((*q.shape[:3], v.shape[3]))
    try:
        # Torch warns of each reason why a backend refuses, and then raises.
        with warnings.catch_warnings(), sdpa_kernel(backend), torch.set_grad_enabled(op is Pass.BACKWARD):
            warnings.simplefilter("ignore")
            for block in _sequences(semantics.blocks(q, k)):
                out[:, :, block.rows] = _attend(q, k, v, semantics, block)
            if op is Pass.FORWARD:
                return {"out": out}
            return dict(zip(("dq", "dk", "dv"), torch.autograd.grad(out, leaves, inputs.dout), strict=True))
    except RuntimeError:
        return None


def _sequences(blocks: Iterable[Block]) -> Iterable[Block]:
    """Those that have queries and keys; cases are so small that a sequence is one block."""
    return (block for block in blocks if block.keys.stop > block.keys.start)


def _attend(q: Tensor, k: Tensor, v: Tensor, semantics: Semantics, block: Block) -> Tensor:
    group = q.shape[1] // k.shape[1]
    keys, values = (tensor[:, :, block.keys].repeat_interleave(group, dim=1) for tensor in (k, v))
    queries = q[:, :, block.rows]
    shape = (*queries.shape[:3], keys.shape[2])
    if semantics.mask is None and semantics.left is None and semantics.right == 0 and block.diagonal == 0:
        return functional.scaled_dot_product_attention(queries, keys, values, is_causal=True, scale=semantics.scale)
    hidden, mask = semantics.hidden(q.new_empty(shape), block), semantics.mask
    if mask is not None and mask.dtype is not torch.bool:
        mask = mask.to(q.dtype) if hidden is None else mask.to(q.dtype).masked_fill(hidden, -math.inf)
    elif hidden is not None:
        mask = ~hidden.expand(shape)
    out = functional.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=semantics.scale)
    # What a row without keys gives differs from backend to backend; the specification wants 0.
    return out if hidden is None else out.masked_fill(hidden.expand(shape).all(dim=-1, keepdim=True), 0.0)


def _largest(actual: Tensor, exact: Tensor) -> float:
    return float((actual.detach().double() - exact).abs().max()) if exact.numel() else 0.0
