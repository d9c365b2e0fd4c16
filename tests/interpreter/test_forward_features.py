"""Numerics of the forward templates with features, in Triton's interpreter.

Tiles and sequences are small, so that few elements make many tiles, of every kind that a feature knows.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from autoflash.errors import InvalidProblemError
from autoflash.evaluate.grid import Case
from autoflash.evaluate.inputs import Lengths, Memory
from autoflash.evaluate.masks import MaskForm, Pattern
from autoflash.evaluate.terms import BiasForm
from autoflash.evaluate.verify import run_case
from autoflash.problem import Alignment, DType, Form, Mask, MaskTensor, Problem
from autoflash.runtime.executable import NO_EXTRAS, Extras
from autoflash.runtime.probe import probe
from autoflash.runtime.triton_forward import TritonForward
from autoflash.variant import Variant
from tests.factories import make_problem, make_variant

# Triton 3.6's interpreter takes arrays of one element for numbers.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0 to a scalar:DeprecationWarning")

# numpy warns of scores that are NaN on purpose.
IGNORE_NAN = pytest.mark.filterwarnings("ignore:All-NaN slice encountered:RuntimeWarning")

CPU = probe("cpu")
STRUCTURES: dict[str, dict[str, str]] = {
    "plain": {},
    "branch": {"mask_loops": "branch", "row_sum": "per_thread", "tile_order": "heads_first"},
    "under": {"pv_order": "under_next_softmax"},
    "everything": {
        "loads": "tma",
        "pv_order": "under_next_softmax",
        "row_sum": "per_thread",
        "mask_loops": "branch",
        "tile_order": "heads_first",
    },
}
DTYPES = {"plain": DType.FP32, "branch": DType.FP16, "under": DType.BF16, "everything": DType.FP16}

SOFTCAP = {"softcap": 3.0}
WINDOW = {"window_left": 9, "window_right": 5}
DROPOUT = {"dropout_p": 0.3}
BOOL = {"mask_tensor": MaskTensor.BOOL}
FLOAT = {"mask_tensor": MaskTensor.FLOAT}
SINKS = {"sinks": True}
BIAS = {"bias": True}
ALIBI = {"alibi": True}
FEATURES: dict[str, dict[str, object]] = {
    "softcap": SOFTCAP,
    "float_mask": FLOAT,
    "bool_mask": BOOL,
    "window": WINDOW,
    "sinks": SINKS,
    "alibi": ALIBI,
    "alibi+bias": {**ALIBI, **BIAS},
    "bias": BIAS,
    "bias+bool_mask": {**BIAS, **BOOL},
    "dropout": DROPOUT,
    "softcap+float_mask+window+dropout": {**SOFTCAP, **FLOAT, **WINDOW, **DROPOUT},
    "softcap+terms+float_mask+window+sinks+dropout": {
        **SOFTCAP,
        **ALIBI,
        **BIAS,
        **FLOAT,
        **WINDOW,
        **SINKS,
        **DROPOUT,
    },
    "softcap+bool_mask+window+dropout": {**SOFTCAP, **BOOL, **WINDOW, **DROPOUT},
}

# Of xformers, and those that are left.
BIASES = ["bhmn", "hmn", "bmn", "mn", "bn", "hm", "n", "b", ""]
MEMORIES = [Memory.DENSE, Memory.STRIDED, Memory.TRANSPOSED]

# Empty ones, some shorter and some longer than a tile, of one query, of one key.
LENGTHS: Lengths = ((5, 5), (0, 7), (33, 20), (0, 0), (1, 18), (9, 1), (3, 0))
TAIL = (2, 3)


def make_kernel(structure: str, **choices: int | str) -> Variant:
    return make_variant(**{"BLOCK_M": 16, "BLOCK_N": 16, **STRUCTURES[structure], **choices})


def dense(*, seqlen_q: int = 19, seqlen_k: int = 50, heads: int = 2, **fields: object) -> Problem:
    plain = make_problem(head_dim=16, heads=heads, kv_heads=1, seqlen_q=seqlen_q, seqlen_k=seqlen_k)
    return plain.replace(**fields)


def packed(lengths: Lengths, tail: tuple[int, int] = (0, 0), **fields: object) -> Problem:
    rows_q, rows_k = (sum(length[side] for length in lengths) + tail[side] for side in (0, 1))
    return dense(**fields).replace(batch=len(lengths), packed_q=rows_q, packed_k=rows_k)


def executable(problem: Problem, variant: Variant) -> TritonForward:
    return TritonForward(Form.of(problem), variant, CPU)


def assert_passes_the_gate(variant: Variant, problem: Problem, **options: object) -> None:
    options = {"mask": MaskForm(), **options} if problem.mask_tensor is not MaskTensor.NONE else options
    options = {"bias": BiasForm(), **options} if problem.bias else options
    options = {"own_slopes": problem.is_varlen, **options} if problem.alibi else options
    options = {"rng": (-(2**62) + 5, 2**33 + 17), **options} if problem.dropout_p else options
    case = Case(problem=problem, **options)  # type: ignore[arg-type]  # fields of a case

    run = run_case(executable(problem, variant), case, "cpu")

    assert not isinstance(run, str), run
    assert run.finding.ratio <= 1.0, f"{run.finding.words} ({case})"


def forward(
    variant: Variant, problem: Problem, q: Tensor, k: Tensor, v: Tensor, extras: Extras = NO_EXTRAS, scale: float = 1.0
) -> tuple[Tensor, Tensor]:
    return executable(problem, variant).prepare_forward(problem, q, k, v, scale, extras)(q, k, v, extras=extras)


@pytest.mark.parametrize("features", FEATURES)
@pytest.mark.parametrize("structure", STRUCTURES)
def test_features_match_the_specification(structure: str, features: str) -> None:
    # The structures that visit masked tiles in another way have another mask.
    mask = Mask.CAUSAL if structure in ("plain", "everything") else Mask.FULL

    assert_passes_the_gate(make_kernel(structure), dense(dtype=DTYPES[structure], mask=mask, **FEATURES[features]))


@pytest.mark.parametrize(
    "features",
    [{}, SINKS, ALIBI, {**SOFTCAP, **ALIBI, **WINDOW, **SINKS, **DROPOUT}],
    ids=["alone", "with_sinks", "with_alibi", "with_all"],
)
@pytest.mark.parametrize("structure", ["plain", "branch", "under"])
def test_packed_sequences_match_the_specification(structure: str, features: dict[str, object]) -> None:
    mask = Mask.FULL if structure == "branch" else Mask.CAUSAL
    alignment = Alignment.TOP_LEFT if structure == "under" else Alignment.BOTTOM_RIGHT
    problem = packed(LENGTHS, TAIL, dtype=DTYPES[structure], mask=mask, alignment=alignment, **features)

    assert_passes_the_gate(make_kernel(structure), problem, lengths=LENGTHS)


@pytest.mark.parametrize("features", [{}, SINKS], ids=["plain", "sinks"])
@pytest.mark.parametrize("lengths", [(), ((0, 0), (0, 0)), ((0, 4),), ((5, 0),)], ids=str)
def test_packed_tensors_of_nothing_but_unused_rows(lengths: Lengths, features: dict[str, object]) -> None:
    problem = packed(lengths, (20, 18), dtype=DType.FP32, **features)

    assert_passes_the_gate(make_kernel("under"), problem, lengths=lengths)


@pytest.mark.parametrize(
    ("problem", "lengths"),
    [(dense(seqlen_k=0, **SINKS), ()), (packed(((5, 0), (2, 0)), (3, 0), **SINKS), ((5, 0), (2, 0)))],
    ids=["dense", "packed"],
)
def test_without_any_key_the_sink_is_what_there_is(problem: Problem, lengths: Lengths) -> None:
    assert problem.is_empty
    assert_passes_the_gate(make_kernel("plain"), problem, lengths=lengths)


def test_more_sequences_than_rows_of_a_tile() -> None:
    lengths = tuple((n * 2 % 3, n * 5 % 4) for n in range(20))

    assert_passes_the_gate(make_kernel("plain", tile_order="heads_first"), packed(lengths, (1, 2)), lengths=lengths)


def test_representative_lengths_of_packed_sequences_decide_nothing() -> None:
    lengths = ((20, 9), (3, 20))
    problem = packed(lengths, dtype=DType.FP32, heads=1, mask=Mask.CAUSAL)

    for seqlen in (1, 64, 4096):
        stand_ins = problem.replace(seqlen_q=seqlen, seqlen_k=seqlen)
        assert_passes_the_gate(make_kernel("plain"), stand_ins, lengths=lengths)


@pytest.mark.parametrize(("structure", "kind"), [("everything", BOOL), ("plain", FLOAT)], ids=["bool", "float"])
@pytest.mark.parametrize("pattern", Pattern, ids=[pattern.name.lower() for pattern in Pattern])
def test_masks_of_every_kind(pattern: Pattern, structure: str, kind: dict[str, MaskTensor]) -> None:
    problem = dense(dtype=DType.BF16, seqlen_k=35, batch=2, **kind)

    assert_passes_the_gate(make_kernel(structure), problem, mask=MaskForm(pattern=pattern))


@pytest.mark.parametrize("alignment", Alignment)
@pytest.mark.parametrize("sizes", [(19, 50), (50, 19)], ids=str)
@pytest.mark.parametrize("structure", ["plain", "everything"])
def test_slopes_of_each_batch_entry(structure: str, sizes: tuple[int, int], alignment: Alignment) -> None:
    lengths = {"seqlen_q": sizes[0], "seqlen_k": sizes[1]}
    problem = dense(dtype=DTYPES[structure], batch=2, alignment=alignment, **lengths, **ALIBI)

    assert_passes_the_gate(make_kernel(structure), problem, own_slopes=True)


@pytest.mark.parametrize("own", BIASES)
@pytest.mark.parametrize("structure", ["plain", "everything"])
def test_biases_of_every_shape(structure: str, own: str) -> None:
    turn = BIASES.index(own)
    form = BiasForm(own=own, dtype=list(DType)[turn % 3], memory=MEMORIES[turn % 3], has_holes=turn % 2 == 1)

    kernel = make_kernel(structure, batch_order=("innermost", "outermost")[turn % 2])
    assert_passes_the_gate(kernel, dense(dtype=DType.BF16, seqlen_k=35, batch=2, **BIAS), bias=form)


@pytest.mark.parametrize("memory", [Memory.STRIDED, Memory.TRANSPOSED, Memory.PACKED])
@pytest.mark.parametrize("dtype", [DType.FP16, DType.BF16, DType.FP32])
def test_float_masks_of_every_type_lie_as_they_like(dtype: DType, memory: Memory) -> None:
    problem = dense(dtype=DType.FP16, seqlen_k=32, **FLOAT)

    assert_passes_the_gate(make_kernel("plain"), problem, mask=MaskForm(memory=memory, dtype=dtype), memory=memory)


@pytest.mark.parametrize("features", ["softcap", "float_mask", "softcap+bool_mask+window+dropout"])
def test_any_scale(features: str) -> None:
    for structure, scale in (("plain", -0.5), ("everything", 0.0)):
        problem = dense(dtype=DType.FP32, mask=Mask.CAUSAL, **FEATURES[features])
        assert_passes_the_gate(make_kernel(structure), problem, scale=scale)


@pytest.mark.parametrize("window", [(0, 0), (3, None), (None, 0), (20, 4), (15, 16), (2**31, 2**40)], ids=str)
@pytest.mark.parametrize("structure", ["branch", "under"])
def test_windows_of_every_width(structure: str, window: tuple[int | None, int | None]) -> None:
    bounds = {"window_left": window[0], "window_right": window[1]}
    for seqlen_q, seqlen_k, alignment in ((19, 40, Alignment.TOP_LEFT), (40, 19, Alignment.BOTTOM_RIGHT)):
        problem = dense(seqlen_q=seqlen_q, seqlen_k=seqlen_k, dtype=DType.FP32, heads=1, alignment=alignment, **bounds)
        assert_passes_the_gate(make_kernel(structure), problem)


@pytest.mark.parametrize(("block_m", "block_n"), [(32, 16), (16, 32)])
@pytest.mark.parametrize("structure", STRUCTURES)
def test_windows_over_tiles_that_are_not_square(structure: str, block_m: int, block_n: int) -> None:
    problem = dense(seqlen_q=64, seqlen_k=96, dtype=DType.FP16, heads=1, window_left=40, window_right=7)

    assert_passes_the_gate(make_kernel(structure, BLOCK_M=block_m, BLOCK_N=block_n), problem)


@pytest.mark.parametrize("width", [1, 2, 4, 15, 16, 17])
def test_window_counts_positions_to_the_left_of_the_query(width: int) -> None:
    problem = dense(seqlen_q=16, seqlen_k=16, dtype=DType.FP32, heads=1, mask=Mask.CAUSAL, window_left=width)
    q = torch.zeros(1, 1, 16, 16)

    for structure in ("plain", "under"):
        out, _ = forward(make_kernel(structure), problem, q, torch.randn(1, 1, 16, 16), torch.eye(16)[None, None])

        expected = torch.ones(16, 16).tril().triu(-width)
        assert torch.equal(out[0, 0] > 0, expected > 0)


def test_window_over_all_keys_is_a_causal_mask_bitwise() -> None:
    problem = dense(seqlen_q=40, seqlen_k=40, dtype=DType.FP32, heads=1, mask=Mask.CAUSAL)
    q, k, v = (torch.randn(1, 1, 40, 16) for _ in "qkv")

    for structure in STRUCTURES:
        causal = forward(make_kernel(structure), problem, q, k, v)
        windowed = forward(make_kernel(structure), problem.replace(window_left=39, window_right=0), q, k, v)

        assert all(torch.equal(one, other) for one, other in zip(causal, windowed, strict=True))


@IGNORE_NAN
@pytest.mark.parametrize("structure", STRUCTURES)
def test_keys_and_values_outside_the_window_are_not_touched(structure: str) -> None:
    problem = dense(seqlen_q=96, seqlen_k=96, dtype=DType.BF16, heads=1, mask=Mask.CAUSAL, window_left=15)
    q, k, v = (torch.randn(1, 1, 96, 16, dtype=torch.bfloat16) for _ in "qkv")
    spoiled_k, spoiled_v = k.clone(), v.clone()
    spoiled_k[:, :, :32], spoiled_v[:, :, :32] = math.nan, math.nan

    for variant in (make_kernel(structure), make_kernel(structure, BLOCK_M=32, BLOCK_N=32)):
        clean, _ = forward(variant, problem, q, k, v)
        out, _ = forward(variant, problem, q, spoiled_k, spoiled_v)

        assert torch.equal(out[:, :, 64:], clean[:, :, 64:])


@IGNORE_NAN
@pytest.mark.parametrize("structure", STRUCTURES)
def test_rows_that_see_nothing_touch_no_value(structure: str) -> None:
    # Queries from 21 on stand behind all that their window reaches.
    problem = dense(
        seqlen_q=64, seqlen_k=16, dtype=DType.FP16, heads=1, alignment=Alignment.TOP_LEFT, window_left=5, window_right=0
    )
    q, k, v = (torch.full((1, 1, rows, 16), math.nan, dtype=torch.float16) for rows in (64, 16, 16))

    out, lse = forward(make_kernel(structure), problem, q, k, v)

    assert (out[:, :, 32:] == 0).all()
    assert (lse[:, :, 32:] == -math.inf).all()


@pytest.mark.parametrize("structure", STRUCTURES)
def test_very_negative_scores_behind_a_first_tile_that_is_hidden(structure: str) -> None:
    # 0 must not become the maximum of rows whose first tiles hold no key that they see.
    window = dense(seqlen_q=35, seqlen_k=64, dtype=DType.BF16, window_left=9, mask=Mask.CAUSAL)
    masked = dense(seqlen_q=20, seqlen_k=50, dtype=DType.BF16, mask=Mask.CAUSAL, **BOOL)

    assert_passes_the_gate(make_kernel(structure), window, low=True)
    for pattern in (Pattern.FIRST_KEYS, Pattern.LAST_KEYS):
        assert_passes_the_gate(make_kernel(structure), masked, low=True, mask=MaskForm(pattern=pattern))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_of_the_least_number_see_all_their_keys_alike(dtype: torch.dtype) -> None:
    problem = dense(seqlen_q=3, seqlen_k=20, dtype=DType.FP32, heads=1, **FLOAT)
    q, k, v = torch.randn(1, 1, 3, 16), torch.randn(1, 1, 20, 16), torch.randn(1, 1, 20, 16)
    mask = torch.zeros(1, 1, 3, 20, dtype=dtype)
    mask[:, :, 1], mask[:, :, 2, 4:] = torch.finfo(dtype).min, torch.finfo(dtype).min

    out, lse = forward(make_kernel("plain"), problem, q, k, v, Extras(mask=mask), 0.0)

    torch.testing.assert_close(out[0, 0, 1], v.mean(2)[0, 0])
    torch.testing.assert_close(out[0, 0, 2], v[0, 0, :4].mean(0))
    assert lse.isfinite().all()


def test_dropout_depends_on_seed_and_offset_and_on_nothing_of_the_tiles() -> None:
    problem = dense(seqlen_q=32, seqlen_k=64, dtype=DType.FP32, heads=1, **DROPOUT)
    q, k, v = torch.zeros(1, 1, 32, 16), torch.zeros(1, 1, 64, 16), torch.randn(1, 1, 64, 16)

    def out(seed: int, offset: int, **blocks: int) -> Tensor:
        return forward(make_kernel("plain", **blocks), problem, q, k, v, Extras(rng=torch.tensor([seed, offset])))[0]

    torch.testing.assert_close(out(1, 2, BLOCK_M=32, BLOCK_N=64), out(1, 2))
    torch.testing.assert_close(out(1, 2 + 2**32), out(1, 2))
    assert not torch.allclose(out(1, 3), out(1, 2))
    assert not torch.allclose(out(1 + 2**32, 2), out(1, 2))


def test_dropout_leaves_the_sum_of_exponentials_alone() -> None:
    problem = dense(dtype=DType.FP32)
    q, k, v = torch.randn(1, 2, 19, 16), torch.randn(1, 1, 50, 16), torch.randn(1, 1, 50, 16)

    dropped = forward(make_kernel("plain"), problem.replace(**DROPOUT), q, k, v, Extras(rng=torch.tensor([1, 2])))

    assert torch.equal(dropped[1], forward(make_kernel("plain"), problem, q, k, v)[1])


@pytest.mark.parametrize(
    ("problem", "name"),
    [(dense(**BOOL), "mask"), (dense(**DROPOUT), "rng"), (packed(((3, 3),)), "cu_seqlens_q")],
    ids=["mask", "rng", "lengths"],
)
def test_missing_tensor_is_named(problem: Problem, name: str) -> None:
    shape_q = (problem.tensor_batch, 2, problem.rows_q, 16)
    q, k = torch.zeros(shape_q, dtype=torch.bfloat16), torch.zeros(1, 1, problem.rows_k, 16, dtype=torch.bfloat16)

    with pytest.raises(InvalidProblemError, match=f"asks for {name}"):
        executable(problem, make_kernel("plain")).prepare_forward(problem, q, k, k, 1.0)


def test_given_outputs_and_masks_of_other_strides_are_taken() -> None:
    problem = dense(dtype=DType.FP32, **BOOL)
    q, k, v = torch.randn(1, 2, 19, 16), torch.randn(1, 1, 50, 16), torch.randn(1, 1, 50, 16)
    mask = (torch.rand(1, 2, 19, 50) > 0.3).contiguous()
    extras = Extras(mask=mask)
    call = executable(problem, make_kernel("plain")).prepare_forward(problem, q, k, v, 1.0, extras)
    expected, expected_lse = call(q, k, v, extras=extras)
    buffer, rows = torch.full((1, 2, 19, 18), 7.0), torch.full((1, 2, 19, 2), 7.0)

    out, lse = call(q, k, v, buffer[..., 1:17], rows[..., 0], extras)

    assert out.data_ptr() == buffer[..., 1:17].data_ptr()
    assert torch.equal(out, expected)
    assert torch.equal(lse, expected_lse)
    assert (rows[..., 1] == 7.0).all()
    transposed = Extras(mask=mask.mT.contiguous().mT)
    assert torch.equal(forward(make_kernel("plain"), problem, q, k, v, transposed)[0], expected)
