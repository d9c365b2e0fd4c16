"""What FlashAttention-4 is asked to compute is what the problem says; a stand-in computes it where there is no GPU."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys

import pytest
import torch

from autoflash.errors import NoKernelError
from autoflash.evaluate import fa4
from autoflash.evaluate.fa4 import FlashAttention4
from autoflash.evaluate.timed_inputs import timed_inputs
from autoflash.problem import Alignment, DType, Form, Mask, Pass, Problem
from autoflash.runtime.bind import bind
from autoflash.runtime.probe import probe
from autoflash.variant import Family
from tests.evaluate import fake_fa4
from tests.factories import make_problem, make_variant

CPU = probe("cpu")

FORMS: dict[str, dict[str, object]] = {
    "full": {},
    "causal": {"mask": Mask.CAUSAL},
    "one key head": {"kv_heads": 1, "mask": Mask.CAUSAL},
    "bottom right": {"mask": Mask.CAUSAL, "seqlen_k": 190, "batch": 2},
    "window": {"window_left": 40, "window_right": 20},
    "causal window": {"mask": Mask.CAUSAL, "window_left": 40},
    "packed": {"batch": 2, "packed_q": 256, "packed_k": 256},
    "packed causal window": {
        "batch": 2,
        "packed_q": 256,
        "packed_k": 300,
        "mask": Mask.CAUSAL,
        "window_left": 40,
    },
}
SCALE = 0.25
TOLERANCE = {"atol": 3e-2, "rtol": 3e-2}


def problem_of(op: Pass, **fields: object) -> Problem:
    return make_problem(op=op, heads=4, kv_heads=2, seqlen_q=128, head_dim=32).replace(**fields)


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """The package as if it were here, and tensors as if they were on a Hopper GPU."""
    monkeypatch.setitem(sys.modules, "flash_attn", fake_fa4.module())
    monkeypatch.setitem(sys.modules, "flash_attn.cute", fake_fa4.module())
    monkeypatch.setitem(sys.modules, fa4.MODULE, fake_fa4.module())
    monkeypatch.setattr(fa4, "_capability", lambda tensor: (9, 0))


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize("form", FORMS)
def test_the_forward_is_that_of_a_verified_kernel(form: str) -> None:
    problem = problem_of(Pass.FORWARD, **FORMS[form])
    q, k, v, _, _, _, extras = timed_inputs(problem, CPU, 0)

    found, lse = FlashAttention4().prepare_forward(problem, q, k, v, SCALE, extras)(q, k, v, extras=extras)
    portable = bind(Form.of(problem), make_variant(Family.TORCH_TILED), CPU)
    wanted, _ = portable.prepare_forward(problem, q, k, v, SCALE, extras)(q, k, v, extras=extras)

    assert lse.numel() == 0
    torch.testing.assert_close(found, wanted, **TOLERANCE)


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize("form", FORMS)
def test_the_gradients_are_those_of_a_verified_kernel(form: str) -> None:
    problem = problem_of(Pass.BACKWARD, **FORMS[form])
    # Their scale is that of the output that is given to the verified kernel.
    q, k, v, out, lse, dout, extras = timed_inputs(problem, CPU, 0)
    scale = problem.head_dim**-0.5

    made = FlashAttention4().prepare_backward(problem, q, k, v, out, dout, scale, extras)(q, k, v, out, lse, dout)
    portable = bind(Form.of(problem), make_variant(Family.TORCH_TILED, op=Pass.BACKWARD), CPU)
    true = portable.prepare_backward(problem, q, k, v, out, dout, scale, extras)(q, k, v, out, lse, dout, extras=extras)

    for ours, theirs in zip(made, true, strict=True):
        torch.testing.assert_close(ours, theirs, **TOLERANCE)


@pytest.mark.usefixtures("stand_in")
def test_the_options_of_a_problem_reach_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, object] = {}

    def record(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: object) -> torch.Tensor:
        given.update(options, shapes=[tuple(tensor.shape) for tensor in (q, k, v)])
        return q

    monkeypatch.setitem(sys.modules, fa4.MODULE, fake_fa4.module(flash_attn_func=record))
    problem = problem_of(Pass.FORWARD, softcap=30.0, window_left=7, sinks=True, seqlen_k=190)
    q, k, v, _, _, _, extras = timed_inputs(problem, CPU, 0)

    FlashAttention4().prepare_forward(problem, q, k, v, SCALE, extras)

    assert given.pop("learnable_sink") is extras.sinks
    assert given == {
        "shapes": [(1, 128, 4, 32), (1, 190, 2, 32), (1, 190, 2, 32)],
        "softmax_scale": SCALE,
        "causal": False,
        "window_size": (7, None),
        "softcap": 30.0,
        "deterministic": False,
    }


@pytest.mark.usefixtures("stand_in")
def test_preparing_makes_the_call_that_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def compile_and_run(*tensors: torch.Tensor, **options: object) -> torch.Tensor:
        calls.append(options)
        return tensors[0]

    monkeypatch.setitem(sys.modules, fa4.MODULE, fake_fa4.module(flash_attn_func=compile_and_run))
    problem = problem_of(Pass.FORWARD)
    q, k, v, _, _, _, extras = timed_inputs(problem, CPU, 0)

    FlashAttention4().prepare_forward(problem, q, k, v, SCALE, extras)

    assert len(calls) == 1
    assert not FlashAttention4().is_loaded(problem, q, k, v)


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize(
    ("problem", "words"),
    [
        (problem_of(Pass.FORWARD, dropout_p=0.1), "not asked for dropout"),
        (problem_of(Pass.FORWARD, bias=True), "not asked for bias"),
        (problem_of(Pass.FORWARD, dtype=DType.FP32), "takes bf16 and fp16, not fp32"),
        (problem_of(Pass.FORWARD, head_dim=36), "head dims up to 256 in steps of 8, not 36"),
        (problem_of(Pass.FORWARD, head_dim_v=264), "head dims up to 256 in steps of 8, not 264"),
        (problem_of(Pass.FORWARD, mask=Mask.CAUSAL, seqlen_k=190, alignment=Alignment.TOP_LEFT), "bottom-right"),
        (problem_of(Pass.FORWARD, seqlen_k=0), "no query or no key"),
    ],
)
def test_what_it_cannot_do_is_refused_with_the_reason(problem: Problem, words: str) -> None:
    tensors = [torch.zeros(1, 4, 128, 32) for _ in range(3)]

    assert words in (FlashAttention4().why_not(problem, *tensors) or "")
    with pytest.raises(NoKernelError, match=words):
        FlashAttention4().prepare_forward(problem, *tensors, 1.0)


@pytest.mark.usefixtures("stand_in")
def test_what_it_can_do_is_not_refused() -> None:
    problems = [problem_of(Pass.BACKWARD, softcap=5.0, sinks=True), problem_of(Pass.FORWARD, head_dim=256)]

    assert [FlashAttention4().why_not(problem, torch.zeros(1)) for problem in problems] == [None, None]


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize("capability", [None, (8, 9)])
def test_it_is_compared_on_gpus_that_it_was_written_for(
    capability: tuple[int, int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fa4, "_capability", lambda tensor: capability)

    assert "from sm_90 on" in (FlashAttention4().why_not(problem_of(Pass.FORWARD), torch.zeros(1)) or "")


def test_without_the_package_the_reason_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, fa4.MODULE, None)

    assert "pip install flash-attn-4" in (FlashAttention4().why_not(problem_of(Pass.FORWARD)) or "")


def test_a_package_that_fails_when_imported_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> None:
        raise OSError("libcute.so: undefined symbol")

    monkeypatch.setattr(fa4.importlib, "import_module", fail)

    reason = FlashAttention4().why_not(problem_of(Pass.FORWARD)) or ""
    assert "OSError: libcute.so: undefined symbol" in reason
    assert "flash-attn-4" in reason


@pytest.mark.parametrize(
    ("installed", "words"),
    [
        ({}, ""),
        ({"flash-attn-4": "4.0.0"}, "4.0.0"),
        ({"flash-attn-4": "4.0.0", "nvidia-cutlass-dsl": "4.6.2"}, "4.0.0 (nvidia-cutlass-dsl 4.6.2)"),
    ],
)
def test_its_version_has_that_of_its_compiler(
    installed: dict[str, str], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def find(name: str) -> str:
        if name not in installed:
            raise importlib.metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(importlib.metadata, "version", find)

    assert fa4.version() == words


def test_it_is_imported_by_nothing_but_a_comparison() -> None:
    statement = "import sys, autoflash, autoflash.cli.bench"
    found = "sys.exit(any(name.startswith('flash_attn') for name in sys.modules))"

    assert subprocess.run([sys.executable, "-c", f"{statement}; {found}"], check=False).returncode == 0
