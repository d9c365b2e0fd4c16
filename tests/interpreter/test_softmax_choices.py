"""A maximum that may be stale and exponentials by polynomial, through the correctness gate in Triton's interpreter."""

from __future__ import annotations

import dataclasses
import importlib.util
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from autoflash.codegen.environment import environment
from autoflash.codegen.render import RenderedSource, render, source_digest
from autoflash.errors import NoKernelError
from autoflash.evaluate.verify import verify
from autoflash.problem import DType, Form, Mask, Problem
from autoflash.runtime import compiled
from autoflash.runtime.triton_forward import TritonForward
from autoflash.trial import Level
from autoflash.variant import Choices, Family, Variant
from tests import gradients
from tests.factories import make_problem, make_variant
from tests.interpreter import test_backward_features, test_forward, test_forward_features
from tests.interpreter.test_forward_features import CPU, FEATURES, dense

# Triton 3.6's interpreter takes arrays of one element for numbers.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0 to a scalar:DeprecationWarning"),
]

CONDITIONAL = {"rescale": "conditional"}
POLYNOMIAL = {"exp2": "polynomial"}
CHOICES = {
    "conditional": {**CONDITIONAL, "mask_loops": "branch", "row_sum": "per_thread"},
    "polynomial": {**POLYNOMIAL, "pv_order": "under_next_softmax"},
    "both": {**CONDITIONAL, **POLYNOMIAL, "loads": "tma"},
}
SIXTEEN_BITS = [DType.FP16, DType.BF16]


def make_kernel(name: str, **more: int | str) -> Variant:
    return make_variant(**{"BLOCK_M": 16, "BLOCK_N": 16, **CHOICES[name], **more})


@pytest.mark.parametrize("mask", list(Mask))
@pytest.mark.parametrize("dtype", SIXTEEN_BITS)
@pytest.mark.parametrize("name", CHOICES)
def test_choices_pass_the_gate_in_its_irregular_shapes(name: str, dtype: DType, mask: Mask) -> None:
    problem = make_problem(dtype=dtype, head_dim=16, heads=2, kv_heads=1, seqlen_q=48, seqlen_k=80, mask=mask)

    verification = verify(TritonForward(Form.of(problem), make_kernel(name), CPU), problem, Level.SCREEN)

    assert verification.passed, verification.detail


@test_forward_features.IGNORE_NAN
@pytest.mark.parametrize("features", FEATURES)
@pytest.mark.parametrize(("name", "dtype"), [("conditional", DType.FP16), ("both", DType.BF16)])
def test_features_match_the_specification(name: str, dtype: DType, features: str) -> None:
    mask = Mask.CAUSAL if name == "both" else Mask.FULL

    test_forward_features.assert_passes_the_gate(make_kernel(name), dense(dtype=dtype, mask=mask, **FEATURES[features]))


def test_packed_sequences_match_the_specification() -> None:
    lengths = test_forward_features.LENGTHS
    problem = test_forward_features.packed(lengths, (2, 3), dtype=DType.FP16, mask=Mask.CAUSAL, sinks=True)

    test_forward_features.assert_passes_the_gate(make_kernel("both", loads="pointer"), problem, lengths=lengths)


@pytest.mark.parametrize("name", ["conditional", "both"])
def test_heads_in_two_tiles_are_rescaled_in_both(name: str) -> None:
    problem = make_problem(dtype=DType.FP16, head_dim=40, heads=1, seqlen_q=18, seqlen_k=50, mask=Mask.CAUSAL)

    test_forward.assert_attention(make_kernel(name, head_dim_tiles="split"), problem, scale=2.0)


def scores_of(rule: Callable[[Tensor], Tensor], dtype: DType) -> tuple[Problem, test_forward.Inputs]:
    """A problem of 96 keys in which the score of key j is, in units of log2, the rule's of j, times 1 to 1.5 by row."""
    problem = make_problem(dtype=dtype, head_dim=16, heads=1, seqlen_q=17, seqlen_k=96)
    inputs = test_forward.make_inputs(problem)
    q, k = torch.zeros_like(inputs.q), torch.zeros_like(inputs.k)
    q[..., 0] = 1.0 + torch.arange(17) / 32
    k[..., 0] = rule(torch.arange(96.0)).to(k.dtype)
    return problem, test_forward.Inputs(q=q, k=k, v=inputs.v)


HOSTILE: dict[str, Callable[[Tensor], Tensor]] = {
    "grows past the threshold in every tile": lambda j: j * 0.75,
    "grows by just the threshold": lambda j: (j // 16) * 8.0,
    "grows below the threshold in every tile": lambda j: j * 0.25,
    "jumps": lambda j: torch.where(j < 50, -300.0, 300.0),
    "falls": lambda j: -j * 3.0,
    "constant": lambda j: torch.full_like(j, -77.0),
    "one key far above": lambda j: torch.where(j == 40, 500.0, 0.0),
    "far below and then within the threshold": lambda j: -900.0 + j * 0.05,
    "zigzag": lambda j: (j % 32) * 0.5 - 8.0,
}


@pytest.mark.parametrize("dtype", SIXTEEN_BITS)
@pytest.mark.parametrize("rule", HOSTILE)
@pytest.mark.parametrize("name", CHOICES)
def test_hostile_scores_are_exact(name: str, rule: str, dtype: DType) -> None:
    problem, inputs = scores_of(HOSTILE[rule], dtype)

    test_forward.assert_attention(make_kernel(name), problem, inputs, scale=math.log(2.0))


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize("key", range(16))
def test_a_key_that_is_no_number_spoils_its_rows_in_every_column(key: int) -> None:
    problem, inputs = scores_of(lambda j: j, DType.FP16)
    inputs.k[0, 0, key, 0] = math.nan

    out, _ = test_forward.run(make_kernel("both"), problem, inputs, 1.0)

    assert out.isnan().all()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("dtype", SIXTEEN_BITS)
@pytest.mark.parametrize("loop_order", ["split", "fused", "key_outer"])
def test_backward_by_polynomial_matches_the_specification(loop_order: str, dtype: DType) -> None:
    problem = gradients.backward_problem(
        dtype=dtype, head_dim=16, heads=2, kv_heads=1, seqlen_q=35, seqlen_k=40, mask=Mask.CAUSAL
    )
    inputs = gradients.make_inputs(problem)
    variant = polynomial(gradients.make_variant(loop_order, dot_order="scores_first"))

    gradients.assert_gradients(gradients.run(variant, problem, inputs, CPU), problem, inputs)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("combination", test_backward_features.COMBINATIONS)
def test_backward_with_features_matches_the_specification(combination: str) -> None:
    problem, extras = test_backward_features.featured(combination, Mask.CAUSAL, head_dim=16, head_dim_v=16)
    problem = problem.replace(dtype=DType.BF16)
    inputs = gradients.make_inputs(problem, extras=extras)
    variant = polynomial(gradients.make_variant("fused", dot_order="scores_first", tiles=(16, 32, 32, 16)))

    gradients.assert_gradients(gradients.run(variant, problem, inputs, CPU), problem, inputs)


def polynomial(variant: Variant) -> Variant:
    return dataclasses.replace(variant, structure=variant.structure.replace(**POLYNOMIAL))


def test_a_polynomial_is_refused_for_float32() -> None:
    problem = make_problem(dtype=DType.FP32, head_dim=16)
    inputs = test_forward.make_inputs(problem)

    with pytest.raises(NoKernelError, match="fp16 and bf16"):
        test_forward.run(make_kernel("polynomial"), problem, inputs, 1.0)


MUTANTS = {
    "the LSE of the maximum that was not used": (
        "conditional",
        "    return m_kept, tl.where(keeps, m_i, shift), tl.where(m_kept > m_i, alpha, 1.0)",
        "    return m_new, tl.where(keeps, m_i, shift), tl.where(m_kept > m_i, alpha, 1.0)",
    ),
    "P that overflows in fp16": ("conditional", "alpha >= 0.00390625", "alpha >= 9.5367431640625e-07"),
    "a factor for rows that keep their maximum": ("conditional", "tl.where(m_kept > m_i, alpha, 1.0)", "alpha"),
    "no rescaling where only some rows need it": ("conditional", "tl.min(alpha) < 1.0", "tl.max(alpha) < 1.0"),
    "exponents that wrap around": (
        "polynomial",
        "    x = tl.maximum(x, -127.0, propagate_nan=tl.PropagateNan.ALL)\n",
        "",
    ),
    "a polynomial of one degree less": ("polynomial", "power * fraction + 1.0", "power * 0.0 + 1.0"),
}


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_wrong_kernel_is_noticed(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, right, wrong = MUTANTS[mutant]

    def mutated(form: Form, family: Family, structure: Choices) -> RenderedSource:
        source = render(form, family, structure)
        assert right in source.text
        text = source.text.replace(right, wrong)
        digest = source_digest(text)
        return dataclasses.replace(source, text=text, digest=digest, name=f"mutant_{digest}")

    monkeypatch.setattr(compiled, "render", mutated)

    noticed = 0
    for rule in HOSTILE.values():
        problem, inputs = scores_of(rule, DType.FP16)
        try:
            test_forward.assert_attention(make_kernel(name), problem, inputs, scale=math.log(2.0))
        except AssertionError:
            noticed += 1
    assert noticed


KERNELS = '''"""A kernel around the polynomial."""

import triton
import triton.language as tl

{% include "triton/_exp2_mixed.py.j2" %}


@triton.jit
def powers(x_ptr, out_ptr, COUNT: tl.constexpr):
    offs = tl.arange(0, COUNT)
    tl.store(out_ptr + offs, exp2_polynomial(tl.load(x_ptr + offs)))
'''


@pytest.fixture(scope="module")
def powers(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Tensor], Tensor]:
    path = tmp_path_factory.mktemp("kernels") / "polynomial.py"
    path.write_text(environment().from_string(KERNELS).render(problem=None, structure={}), encoding="utf-8")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    def call(x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        module.powers[(1,)](x, out, len(x))
        return out

    return call


def test_the_polynomial_is_exact_to_3_millionths_over_its_whole_range(powers: Callable[[Tensor], Tensor]) -> None:
    x = torch.cat([torch.linspace(-125.5, 100.0, 2**15), torch.linspace(-2.0, 8.0, 2**15)])

    assert ((powers(x).double() / torch.exp2(x.double())) - 1.0).abs().max() < 3.1e-6


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_the_polynomial_knows_the_ends_of_its_range(powers: Callable[[Tensor], Tensor]) -> None:
    whole = torch.arange(-126.0, 128.0)
    low = torch.tensor([-math.inf, -3e38, -1e4, -150.0, -127.0, -126.9, math.nan, 0.0])

    assert torch.equal(powers(torch.cat([whole, whole.new_zeros(2)]))[:254], torch.exp2(whole))
    assert torch.equal(powers(low)[:6], torch.zeros(6))
    assert powers(low)[6].isnan()


def test_the_coefficients_are_those_of_the_best_polynomial() -> None:
    """Lawson's method: least squares of the relative error, weighted by the error before, tend to the minimax one."""
    fraction = np.linspace(-0.5, 0.5, 1001)
    powers_of_fraction = fraction[:, None] ** np.arange(1, 5) / 2.0 ** fraction[:, None]
    target, weights = 1.0 - 2.0**-fraction, np.ones_like(fraction)
    for _ in range(3000):
        root = np.sqrt(weights)
        best = np.linalg.lstsq(powers_of_fraction * root[:, None], target * root, rcond=None)[0]
        error = np.abs(powers_of_fraction @ best - target)
        weights = weights * error / (weights * error).sum()

    written = [0.693124192748247, 0.240240986068199, 0.055906430440783, 0.009582855314588]
    text = render(Form.of(make_problem()), Family.TRITON, make_kernel("both").structure).text
    assert all(str(number) in text for number in written)
    assert error.max() < 2.83e-6
    assert np.abs(powers_of_fraction @ written - target).max() < 1.001 * error.max()
