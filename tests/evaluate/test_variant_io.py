"""What autoflash's own kernels move."""

from __future__ import annotations

import pytest

from autoflash.evaluate.cost import least_bytes
from autoflash.evaluate.io_model import Traffic, flash_attention_1, flash_attention_2, standard
from autoflash.evaluate.tiles import Blocks
from autoflash.evaluate.variant_io import blocks_of, traffic_of
from autoflash.problem import Mask, MaskTensor, Pass
from autoflash.variant import Choices, Family, Variant
from tests import gradients
from tests.factories import make_problem, make_variant

PROBLEM = make_problem(heads=4, kv_heads=2, seqlen_q=256, head_dim=64)
BACKWARD = PROBLEM.replace(op=Pass.BACKWARD)


def read(traffic: Traffic | None, tensor: str) -> int:
    assert traffic is not None
    (stream,) = [stream for stream in traffic.streams if stream.tensor == tensor]
    return stream.read_bytes


@pytest.mark.parametrize(
    ("variant", "blocks"),
    [
        (make_variant(BLOCK_M=128, BLOCK_N=32), Blocks(rows=128, keys=32)),
        (make_variant(Family.GLUON_SM90, consumers=3, BLOCK_N=176), Blocks(rows=192, keys=176)),
        (make_variant(Family.TORCH_TILED, block_m=512, block_n=64), Blocks(rows=512, keys=64)),
        (gradients.make_variant("key_outer", tiles=(16, 64, 0, 0)), Blocks(rows=16, keys=64)),
        (Variant(family=Family.VENDOR, structure=Choices(backend="flash"), config=Choices()), None),
    ],
)
def test_blocks_are_those_of_the_config(variant: Variant, blocks: Blocks | None) -> None:
    assert blocks_of(variant) == blocks


def test_a_query_outer_forward_is_flash_attention_2() -> None:
    assert traffic_of(PROBLEM, make_variant(BLOCK_M=64, BLOCK_N=32)) == flash_attention_2(
        PROBLEM, Blocks(rows=64, keys=32)
    )


def test_a_key_outer_forward_moves_float32_sums_and_reads_them_once_more() -> None:
    found = traffic_of(PROBLEM, make_variant(loop_order="key_outer", BLOCK_M=64, BLOCK_N=32))
    paper = flash_attention_1(PROBLEM, Blocks(rows=64, keys=32))

    sums = 4 * 256 * 64 * 4
    assert read(found, "acc") == (256 // 32 + 1) * sums
    assert read(found, "q") == read(paper, "q")
    assert read(found, "k") == read(paper, "k")


def test_math_is_standard_attention_and_other_vendors_are_unknown() -> None:
    math, flash = (
        Variant(family=Family.VENDOR, structure=Choices(backend=backend), config=Choices())
        for backend in ("math", "flash")
    )

    assert traffic_of(PROBLEM, math) == standard(PROBLEM)
    assert traffic_of(PROBLEM, flash) is None


def test_a_split_backward_reads_keys_once_for_each_block_of_queries_and_once_more() -> None:
    found = traffic_of(BACKWARD, gradients.make_variant("split", tiles=(32, 128, 64, 32)))

    each_head, shared = 4 * 256 * 64 * 2, 2 * 256 * 64 * 2
    assert read(found, "k") == (256 // 64) * each_head + shared
    assert read(found, "q") == (256 // 128) * each_head + each_head
    assert read(found, "dout") == (256 // 128) * each_head + 2 * each_head


def test_a_key_outer_backward_adds_to_dq_once_for_each_block_of_keys() -> None:
    found = traffic_of(BACKWARD, gradients.make_variant("key_outer", tiles=(32, 64, 0, 0)))

    assert read(found, "dq sums") == (256 // 64 + 1) * 4 * 256 * 64 * 4


def test_the_hopper_backward_has_blocks_of_128_keys() -> None:
    variant = make_variant(Family.GLUON_SM90, op=Pass.BACKWARD)

    assert read(traffic_of(BACKWARD, variant), "dq sums") == (256 // 128 + 1) * 4 * 256 * 64 * 4


@pytest.mark.parametrize(("op", "passes"), [(Pass.FORWARD, 5), (Pass.BACKWARD, 3)])
def test_torch_streams_each_tile_through_memory(op: Pass, passes: int) -> None:
    variant = make_variant(Family.TORCH_TILED, op=op, block_m=64, block_n=64)

    assert read(traffic_of(PROBLEM.replace(op=op), variant), "scores") == passes * 4 * 256 * 256 * 4


VARIANTS = [
    make_variant(),
    make_variant(loop_order="key_outer"),
    make_variant(Family.GLUON_SM90),
    make_variant(Family.TORCH_TILED),
    gradients.make_variant("split"),
    gradients.make_variant("fused"),
    gradients.make_variant("key_outer"),
    make_variant(Family.GLUON_SM90, op=Pass.BACKWARD),
    make_variant(Family.TORCH_TILED, op=Pass.BACKWARD),
]


@pytest.mark.parametrize("index", range(len(VARIANTS)))
def test_no_kernel_moves_less_than_there_is(index: int) -> None:
    problem = PROBLEM if index < 4 else BACKWARD

    traffic = traffic_of(problem, VARIANTS[index])

    assert traffic is not None
    assert traffic.total_bytes >= least_bytes(problem)


@pytest.mark.parametrize("index", range(len(VARIANTS)))
def test_a_causal_mask_saves_up_to_half(index: int) -> None:
    problem = (PROBLEM if index < 4 else BACKWARD).replace(seqlen_q=4096, seqlen_k=4096)

    full, causal = (traffic_of(problem.replace(mask=mask), VARIANTS[index]) for mask in Mask)

    assert full is not None
    assert causal is not None
    assert 0.5 < causal.total_bytes / full.total_bytes < 0.6


@pytest.mark.parametrize("family", [Family.TRITON, Family.TORCH_TILED])
@pytest.mark.parametrize("op", list(Pass))
def test_a_mask_is_read(family: Family, op: Pass) -> None:
    problem = PROBLEM.replace(op=op)
    masked = problem.replace(mask_tensor=MaskTensor.BOOL)
    variant = make_variant(family, op=op)

    plain, more = traffic_of(problem, variant), traffic_of(masked, variant)

    assert plain is not None
    assert more is not None
    visits = 2 if (family, op) == (Family.TRITON, Pass.BACKWARD) else 1
    assert more.total_bytes - plain.total_bytes == visits * 4 * 256 * 256
