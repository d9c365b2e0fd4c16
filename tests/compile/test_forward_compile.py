"""The forward compiles for GPUs that this machine does not have, and takes what the prototypes took."""

from __future__ import annotations

import itertools
import os

import pytest

from autoflash.codegen.render import render
from autoflash.device import CROSS_TARGETS
from autoflash.problem import DType, Form, Mask, MaskTensor
from autoflash.runtime.compile import compile_variant
from autoflash.runtime.launch import compile_kernel
from autoflash.runtime.load import load
from autoflash.runtime.probe import triton_version
from autoflash.runtime.triton_forward import forward_plan
from autoflash.trial import Status
from tests.codegen.structures import MASK_MOD, SCORE_MOD
from tests.factories import make_device, make_problem, make_variant

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("compiles kernels", allow_module_level=True)

UNDER = {"pv_order": "under_next_softmax", "row_sum": "per_thread"}
CONFIG = {"BLOCK_M": 64, "BLOCK_N": 64, "num_warps": 4, "num_stages": 2}
SMALL = {**CONFIG, "BLOCK_M": 32, "BLOCK_N": 32}
"""Compiles three times as fast. Hopper's products need more rows; Triton 3.6 fails at so small a bias for AMD."""
EVEN = {"seqlen_q": 1024}
RAGGED = {"seqlen_q": 1000}


def assert_compiles(arch: str, structure: dict[str, str], config: dict[str, int], sizes: dict[str, object]) -> None:
    outcome = compile_variant(make_problem(**sizes), make_variant(**structure, **config), make_device(arch))

    assert outcome.status is Status.CORRECT, outcome.detail
    assert outcome.resources is not None
    assert 0 < outcome.resources.shared_bytes <= CROSS_TARGETS[arch].shared_bytes
    assert outcome.resources.registers > 16


@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120", "gfx942"])
def test_default_structure_compiles_everywhere(arch: str) -> None:
    assert_compiles(arch, {}, CONFIG, {"head_dim": 64, "mask": Mask.CAUSAL, **EVEN})


@pytest.mark.parametrize("arch", ["sm_90", "sm_100", "sm_120"])
def test_descriptors_compile_where_there_is_a_copy_engine(arch: str) -> None:
    assert_compiles(arch, {"loads": "tma"}, CONFIG, {"head_dim": 80, "mask": Mask.CAUSAL, **RAGGED})


@pytest.mark.parametrize("pv_order", ["after_softmax", "under_next_softmax"])
@pytest.mark.parametrize(("arch", "loads"), [("sm_80", "pointer"), ("sm_90", "tma"), ("gfx942", "pointer")])
def test_vectors_in_two_tiles_take_no_more_than_padded_ones(arch: str, loads: str, pv_order: str) -> None:
    problem, device = make_problem(head_dim=80, mask=Mask.CAUSAL, **RAGGED), make_device(arch)
    padded = make_variant(loads=loads, pv_order=pv_order, **CONFIG)
    split = make_variant(loads=loads, pv_order=pv_order, head_dim_tiles="split", **CONFIG)

    before, after = (compile_variant(problem, variant, device).resources for variant in (padded, split))

    assert before is not None
    assert after is not None
    assert after.shared_bytes <= 0.75 * before.shared_bytes
    if triton_version() == "3.6":
        # Register allocation changes with each release.
        assert after.registers <= before.registers
        assert after.spill_bytes <= before.spill_bytes


@pytest.mark.parametrize(
    ("arch", "loads", "pv_order"),
    [
        ("sm_80", "pointer", "after_softmax"),
        ("sm_90", "pointer", "after_softmax"),
        ("sm_90", "tma", "under_next_softmax"),
    ],
)
def test_queries_and_keys_of_192_take_less_memory_in_two_tiles_beside_values_of_128(
    arch: str, loads: str, pv_order: str
) -> None:
    problem, device = make_problem(head_dim=192, head_dim_v=128, mask=Mask.CAUSAL, **RAGGED), make_device(arch)
    padded = make_variant(loads=loads, pv_order=pv_order, **CONFIG)
    split = make_variant(loads=loads, pv_order=pv_order, head_dim_tiles="split_qk", **CONFIG)

    before, after = (compile_variant(problem, variant, device).resources for variant in (padded, split))

    assert before is not None
    assert after is not None
    assert after.shared_bytes < before.shared_bytes
    if triton_version() == "3.6":
        assert after.spill_bytes <= before.spill_bytes


SOFTMAX = {
    "conditional": {"rescale": "conditional"},
    "polynomial": {"exp2": "polynomial"},
    "both": {"rescale": "conditional", "exp2": "polynomial"},
}
ONE_CHOICE_ELSEWHERE = list(itertools.product(["sm_100", "gfx942"], ["conditional", "polynomial"]))
"""Of what compiles with both choices, each compiles alone."""


@pytest.mark.parametrize(
    ("arch", "choice"),
    [
        *itertools.product(["sm_80", "sm_90"], SOFTMAX),
        *itertools.product(["sm_100", "gfx942"], ["both"]),
        *(pytest.param(*pair, marks=pytest.mark.slow) for pair in ONE_CHOICE_ELSEWHERE),
    ],
)
def test_choices_in_the_softmax_compile_everywhere_without_more_spills(arch: str, choice: str) -> None:
    problem, device = make_problem(head_dim=128, mask=Mask.CAUSAL, **RAGGED), make_device(arch)
    plain = make_variant(loads="tma" if device.has_tma else "pointer", row_sum="per_thread", **CONFIG)
    chosen = make_variant(structure=plain.structure.replace(**SOFTMAX[choice]), config=plain.config)

    after = compile_variant(problem, chosen, device)

    assert after.status is Status.CORRECT, after.detail
    assert after.resources is not None
    if triton_version() == "3.6":
        before = compile_variant(problem, plain, device)
        assert before.resources is not None
        assert after.resources.spill_bytes <= before.resources.spill_bytes


@pytest.mark.skipif(triton_version() != "3.6", reason="what the compiler folds changes with each release")
@pytest.mark.parametrize(
    ("structure", "config", "sizes"),
    [
        ({"row_sum": "per_thread"}, (64, 128, 4, 1), {"head_dim": 128}),
        (
            {**UNDER, "tile_order": "heads_first"},
            (128, 64, 4, 2),
            {"head_dim": 128, "mask": Mask.CAUSAL},
        ),
        ({"mask_loops": "branch"}, (64, 128, 4, 2), {"head_dim": 64, "mask": Mask.CAUSAL}),
    ],
    ids=["d128_full", "d128_causal", "d64_causal"],
)
def test_a_quarter_of_the_exponentials_is_left_to_no_special_function_unit(
    structure: dict[str, str], config: tuple[int, int, int, int], sizes: dict[str, object]
) -> None:
    problem = make_problem(**EVEN, **sizes)
    numbers = dict(zip(("BLOCK_M", "BLOCK_N", "num_warps", "num_stages"), config, strict=True))
    plain = make_variant(loads="tma", **structure, **numbers)
    mixed = make_variant(loads="tma", **structure, **numbers, exp2="polynomial")

    before, after = (
        str(
            compile_kernel(
                load(render(Form.of(problem), variant.family, variant.structure)),
                forward_plan(problem, variant),
                make_device(),
            ).asm["ptx"]
        )
        for variant in (plain, mixed)
    )

    polynomials = after.count("max.NaN.f32")
    tiles = numbers["BLOCK_M"] * numbers["BLOCK_N"] // 128
    assert polynomials > 0
    assert polynomials % (tiles // 4) == 0
    assert after.count("ex2.approx") == before.count("ex2.approx") - polynomials
    outcome = compile_variant(problem, mixed, make_device())
    assert outcome.resources is not None
    assert outcome.resources.spill_bytes == 0


@pytest.mark.slow
@pytest.mark.parametrize("arch", CROSS_TARGETS)
@pytest.mark.parametrize(
    ("structure", "config", "sizes"),
    [
        ({**UNDER, "mask_loops": "branch"}, CONFIG, {"mask": Mask.CAUSAL, **RAGGED}),
        ({**UNDER, "tile_order": "heads_first"}, CONFIG, {"head_dim": 128, **RAGGED}),
        ({}, CONFIG, {"head_dim": 80, **RAGGED}),
        ({"head_dim_tiles": "split"}, CONFIG, {"head_dim": 96, **RAGGED}),
        ({"head_dim_tiles": "split_v"}, CONFIG, {"head_dim": 128, "head_dim_v": 80, **RAGGED}),
        ({}, {**CONFIG, "BLOCK_M": 32, "BLOCK_N": 32}, {"dtype": DType.FP32, **EVEN}),
        ({}, CONFIG, {"dtype": DType.FP32, "tf32": True, **EVEN}),
        ({"loop_order": "key_outer"}, CONFIG, {"mask": Mask.CAUSAL, **RAGGED}),
        ({}, {**CONFIG, "BLOCK_N": 32}, {"head_dim": 256, "dtype": DType.FP16, **EVEN}),
    ],
    ids=["branch", "under", "d80", "d96_split", "d128_80_split_v", "fp32", "tf32", "key_outer", "d256"],
)
def test_spread_compiles_everywhere(
    arch: str, structure: dict[str, str], config: dict[str, int], sizes: dict[str, object]
) -> None:
    assert_compiles(arch, structure, config, sizes)


# What the hand-written prototypes took that were the fastest on an H200.
@pytest.mark.skipif(triton_version() != "3.6", reason="the prototypes were compiled by Triton 3.6")
@pytest.mark.parametrize(
    ("structure", "config", "sizes", "shared_bytes", "registers", "products"),
    [
        ({"row_sum": "per_thread"}, (64, 128, 4, 1), {"head_dim": 128}, 50176, 158, 16),
        (
            {**UNDER, "tile_order": "heads_first"},
            (128, 64, 4, 2),
            {"head_dim": 128, "mask": Mask.CAUSAL},
            114720,
            255,
            72,
        ),
        ({"mask_loops": "branch"}, (64, 128, 4, 2), {"head_dim": 64, "mask": Mask.CAUSAL}, 73760, 154, 12),
    ],
    ids=["d128_full", "d128_causal", "d64_causal"],
)
def test_hopper_winners_cost_no_more_than_their_prototypes(
    structure: dict[str, str],
    config: tuple[int, int, int, int],
    sizes: dict[str, object],
    shared_bytes: int,
    registers: int,
    products: int,
) -> None:
    problem = make_problem(**EVEN, **sizes)
    numbers = dict(zip(("BLOCK_M", "BLOCK_N", "num_warps", "num_stages"), config, strict=True))
    variant = make_variant(loads="tma", **structure, **numbers)

    outcome = compile_variant(problem, variant, make_device())
    compiled = compile_kernel(
        load(render(Form.of(problem), variant.family, variant.structure)), forward_plan(problem, variant), make_device()
    )

    assert outcome.resources is not None
    assert outcome.resources.shared_bytes <= shared_bytes
    assert outcome.resources.spill_bytes == 0
    assert outcome.resources.registers <= registers
    assert compiled.asm["ptx"].count("wgmma.mma_async") == products
    assert "mma.sync" not in compiled.asm["ptx"]


TERMS: dict[str, dict[str, object]] = {
    "sinks": {"sinks": True},
    "alibi bias": {"alibi": True, "bias": True},
    "varlen alibi": {"alibi": True, "packed_q": 1000, "packed_k": 900},
    "bias": {"bias": True},
    "bias bool_mask sinks": {"bias": True, "mask_tensor": MaskTensor.BOOL, "sinks": True},
    "varlen sinks": {"sinks": True, "packed_q": 1000, "packed_k": 900},
    "score_mod mask_mod": {"score_mod": SCORE_MOD, "mask_mod": MASK_MOD},
}


@pytest.mark.parametrize("terms", TERMS)
@pytest.mark.parametrize(
    ("arch", "structure"),
    [("sm_80", UNDER), ("sm_90", {"mask_loops": "branch"}), ("sm_120", {}), ("gfx942", {"row_sum": "per_thread"})],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_terms_of_scores_compile_everywhere(arch: str, structure: dict[str, str], terms: str) -> None:
    problem = make_problem(mask=Mask.CAUSAL, heads=8, kv_heads=4, **RAGGED).replace(**TERMS[terms])

    config = SMALL if arch in ("sm_80", "sm_120") else CONFIG

    outcome = compile_variant(problem, make_variant(**structure, **config), make_device(arch))

    assert outcome.status is Status.CORRECT, outcome.detail
