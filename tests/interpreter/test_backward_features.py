"""Numerics of the backward templates with features, in Triton's interpreter: every feature in every loop order.

Tiles are small, so that few elements make many tiles.
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from autoflash.evaluate.verify import verify
from autoflash.problem import Alignment, DType, Form, Mask, MaskTensor, Problem
from autoflash.runtime.executable import Extras
from autoflash.runtime.probe import probe
from autoflash.runtime.triton_backward import TritonBackward
from autoflash.trial import Level
from autoflash.variant import Variant
from tests.gradients import (
    Gradients,
    Lengths,
    assert_gradients,
    backward_problem,
    dropout_rng,
    make_inputs,
    make_variant,
    packed_extras,
    packed_problem,
    run,
)

pytestmark = [
    # Triton 3.6's interpreter takes arrays of one element for numbers.
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0 to a scalar:DeprecationWarning"),
    # What overflows is hidden afterwards, or belongs to rows that are not stored.
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]

LOOP_ORDERS = ["split", "fused", "key_outer"]
CPU = probe("cpu")

# Empty ones, some shorter and some longer than a tile, one query or one key; rows behind the last.
LENGTHS: Lengths = ((3, 5), (0, 7), (18, 9), (0, 0), (1, 1), (4, 0))
TAIL = (2, 3)

COMBINATIONS = [
    "window",
    "softcap",
    "bool_mask",
    "float_mask",
    "dropout",
    "varlen",
    "softcap float_mask window dropout",
    "softcap bool_mask window dropout",
    "varlen softcap window dropout",
]


def _numbers(features: list[str]) -> dict[str, object]:
    numbers: dict[str, object] = {"window_left": 9, "window_right": 5} if "window" in features else {}
    numbers |= {"softcap": 2.0} if "softcap" in features else {}
    return numbers | ({"dropout_p": 0.3} if "dropout" in features else {})


def _mask(features: list[str], shape: tuple[int, int, int, int], dtype: torch.dtype) -> Tensor | None:
    """A third is hidden at random; so are rows 4 and 5, and in the last head the keys of a tile."""
    if not {"bool_mask", "float_mask"} & set(features):
        return None
    seen = torch.rand(1, *shape[1:]) > 0.3
    seen[:, :, 4:6] = False
    seen[:, -1, :, :16] = False
    mask = seen if "bool_mask" in features else torch.randn(seen.shape).to(dtype).masked_fill(~seen, -math.inf)
    return mask.expand(shape)


def featured(combination: str, mask: Mask, **sizes: object) -> tuple[Problem, Extras]:
    features = combination.split()
    rng = dropout_rng() if "dropout" in features else None
    sizes = {"heads": 2, "kv_heads": 1, "head_dim": 24, "head_dim_v": 16, "mask": mask, "dtype": DType.FP32} | sizes
    if "varlen" in features:
        problem = packed_problem(LENGTHS, tail=TAIL, **sizes).replace(**_numbers(features))
        return problem, packed_extras(LENGTHS, rng=rng)
    problem = backward_problem(seqlen_q=20, seqlen_k=35, **sizes).replace(**_numbers(features))
    kinds = {"bool_mask": MaskTensor.BOOL, "float_mask": MaskTensor.FLOAT}
    kind = next((kinds[feature] for feature in features if feature in kinds), MaskTensor.NONE)
    tensor = _mask(features, (1, problem.heads, 20, 35), torch.bfloat16)
    return problem.replace(mask_tensor=kind), Extras(mask=tensor, rng=rng)


def _variant(loop_order: str, mask: Mask) -> Variant:
    """Of two masks, the variants together have every choice of the structure."""
    if mask is Mask.FULL:
        return make_variant(loop_order, tiles=(32, 16, 16, 32))
    order = "per_kind" if loop_order == "fused" else "per_head"
    return make_variant(
        loop_order, tiles=(16, 32, 32, 16), mask_loops="everywhere", dot_order="scores_first", tile_order=order
    )


@pytest.mark.parametrize("combination", COMBINATIONS)
@pytest.mark.parametrize("loop_order", LOOP_ORDERS)
def test_features_match_the_specification(loop_order: str, combination: str) -> None:
    mask = list(Mask)[(LOOP_ORDERS.index(loop_order) + COMBINATIONS.index(combination)) % 2]
    problem, extras = featured(combination, mask)
    inputs = make_inputs(problem, extras=extras)
    assert_gradients(run(_variant(loop_order, mask), problem, inputs, CPU), problem, inputs)


@pytest.mark.parametrize(("combination", "loop_order"), list(zip(COMBINATIONS[:5], itertools.cycle(LOOP_ORDERS))))
def test_features_are_read_beside_descriptors(combination: str, loop_order: str) -> None:
    problem, extras = featured(combination, Mask.CAUSAL)
    inputs = make_inputs(problem, extras=extras)
    variant = make_variant(loop_order, "tma", tiles=(32, 16, 16, 32))
    assert_gradients(run(variant, problem, inputs, CPU), problem, inputs)


@pytest.mark.parametrize(
    ("combination", "loop_order", "dtype"),
    [
        ("softcap bool_mask window", "fused", DType.BF16),
        ("float_mask dropout", "key_outer", DType.FP16),
        ("varlen", "split", DType.FP32),
    ],
)
def test_features_pass_the_gate(combination: str, loop_order: str, dtype: DType) -> None:
    problem, _ = featured(combination, Mask.CAUSAL, dtype=dtype, head_dim=16)
    executable = TritonBackward(Form.of(problem), make_variant(loop_order, tiles=(32, 32, 32, 32)), CPU)
    verification = verify(executable, problem, Level.SCREEN, device=CPU)
    assert verification.passed, verification.detail


@pytest.mark.parametrize(
    ("window", "lengths", "mask", "alignment"),
    [
        ((0, 0), (37, 37), Mask.FULL, Alignment.BOTTOM_RIGHT),
        ((0, 0), (50, 20), Mask.CAUSAL, Alignment.BOTTOM_RIGHT),
        ((None, 3), (20, 50), Mask.FULL, Alignment.BOTTOM_RIGHT),
        ((None, 3), (50, 20), Mask.FULL, Alignment.TOP_LEFT),
        ((7, None), (50, 20), Mask.FULL, Alignment.BOTTOM_RIGHT),
        ((7, None), (37, 37), Mask.CAUSAL, Alignment.BOTTOM_RIGHT),
        ((3, 20), (20, 50), Mask.FULL, Alignment.TOP_LEFT),
        ((400, 400), (37, 37), Mask.FULL, Alignment.BOTTOM_RIGHT),
    ],
)
def test_any_window_matches_the_specification(
    window: tuple[int | None, int | None], lengths: tuple[int, int], mask: Mask, alignment: Alignment
) -> None:
    problem = backward_problem(
        dtype=DType.FP32,
        head_dim=16,
        heads=1,
        seqlen_q=lengths[0],
        seqlen_k=lengths[1],
        mask=mask,
        alignment=alignment,
    ).replace(window_left=window[0], window_right=window[1])
    inputs = make_inputs(problem)
    got = run(make_variant("fused", tiles=(16, 16, 32, 16)), problem, inputs, CPU)
    assert_gradients(got, problem, inputs)


@pytest.mark.parametrize("loop_order", LOOP_ORDERS)
def test_tiles_outside_the_window_are_not_computed(loop_order: str) -> None:
    problem = backward_problem(dtype=DType.FP32, head_dim=16, heads=1, seqlen_q=64, seqlen_k=64)
    problem = problem.replace(window_left=4, window_right=2)
    inputs = make_inputs(problem)
    variant = make_variant(loop_order, tiles=(16, 16, 16, 16))
    dq, dk, dv = run(variant, problem, inputs, CPU)

    def spoiled(tensor: Tensor, rows: slice) -> Tensor:
        other = tensor.clone()
        other[:, :, rows] = math.nan
        return other

    # Whatever is computed of a tile with NaN is NaN, hidden or not. No row and key of these see each other.
    for far, near in ((slice(0, 16), slice(32, 64)), (slice(48, 64), slice(0, 32))):
        keys = inputs.replace(k=spoiled(inputs.k, far), v=spoiled(inputs.v, far))
        queries = inputs.replace(q=spoiled(inputs.q, far), dout=spoiled(inputs.dout, far))
        assert torch.equal(run(variant, problem, keys, CPU)[0][:, :, near], dq[:, :, near])
        _, dk_far, dv_far = run(variant, problem, queries, CPU)
        assert torch.equal(dk_far[:, :, near], dk[:, :, near])
        assert torch.equal(dv_far[:, :, near], dv[:, :, near])


@pytest.mark.parametrize("features", ["", "softcap", "float_mask"])
def test_a_negative_scale_matches_the_specification(features: str) -> None:
    problem, extras = featured(features, Mask.CAUSAL)
    inputs = make_inputs(problem, scale=-0.3, extras=extras)
    got = run(make_variant("split", tiles=(32, 16, 16, 32)), problem, inputs, CPU, scale=-0.3)
    assert_gradients(got, problem, inputs, scale=-0.3)


@pytest.mark.parametrize(
    ("loop_order", "combination"), [("split", "softcap float_mask window dropout"), ("fused", "varlen")]
)
def test_what_is_deterministic_gives_the_same_bits_again(loop_order: str, combination: str) -> None:
    problem, extras = featured(combination, Mask.CAUSAL)
    inputs = make_inputs(problem, extras=extras)
    problem = problem.replace(deterministic=True)
    variant = make_variant(loop_order, tiles=(16, 16, 16, 16))
    assert _same(run(variant, problem, inputs, CPU), run(variant, problem, inputs, CPU))


def test_dropped_pairs_are_the_same_for_all_tiles_and_loop_orders() -> None:
    problem, extras = featured("dropout", Mask.FULL, dtype=DType.FP32)
    inputs = make_inputs(problem, extras=extras)
    for loop_order, tiles in zip(LOOP_ORDERS, ((16, 64, 64, 16), (64, 16, 16, 64), (32, 64, 0, 0)), strict=True):
        assert_gradients(run(make_variant(loop_order, tiles=tiles), problem, inputs, CPU), problem, inputs)


@pytest.mark.parametrize("kind", [torch.bool, torch.float16, torch.float32])
def test_a_mask_of_any_strides_is_read_as_it_lies(kind: torch.dtype) -> None:
    shape = (2, 2, 19, 35)
    seen = torch.rand(shape) > 0.3
    full = seen if kind is torch.bool else torch.randn(shape, dtype=kind).masked_fill(~seen, -math.inf)
    problem = backward_problem(dtype=DType.FP32, head_dim=16, batch=2, heads=2, seqlen_q=19, seqlen_k=35)
    problem = problem.replace(mask_tensor=MaskTensor.BOOL if kind is torch.bool else MaskTensor.FLOAT)
    layouts = {
        torch.bool: [full.transpose(2, 3).contiguous().transpose(2, 3), full[:1, :1].expand(shape)],
        torch.float16: [full.repeat_interleave(2, dim=3)[..., ::2], full[:, :, :1].expand(shape)],
        torch.float32: [full[:, :, :, 3:4].expand(shape), full[:1, :1, :1, 3:4].expand(shape)],
    }
    for mask in layouts[kind]:
        inputs = make_inputs(problem, extras=Extras(mask=mask))
        got = run(make_variant("fused", tiles=(32, 32, 32, 32)), problem, inputs, CPU)
        assert_gradients(got, problem, inputs)


@pytest.mark.parametrize("loop_order", LOOP_ORDERS)
def test_rows_of_hugely_negative_masks_count_as_rows_without_keys(loop_order: str) -> None:
    problem = backward_problem(dtype=DType.FP32, head_dim=16, heads=1, seqlen_q=20, seqlen_k=20)
    problem = problem.replace(mask_tensor=MaskTensor.FLOAT)
    mask = torch.zeros(1, 1, 20, 20)
    mask[:, :, 3], mask[:, :, 4] = torch.finfo(torch.float32).min, -1e9
    mask[:, :, 5:, 12:] = torch.finfo(torch.float32).min
    inputs = make_inputs(problem, extras=Extras(mask=mask))
    dq, dk, dv = run(make_variant(loop_order), problem, inputs, CPU)
    assert (dq[:, :, 3:5] == 0).all()
    blind = inputs.replace(extras=Extras(mask=mask.masked_fill(mask < -1e6, -math.inf)))
    assert_gradients((dq, dk, dv), problem, blind)


@pytest.mark.parametrize("loop_order", LOOP_ORDERS)
def test_rows_behind_the_last_sequence_get_zeros_whatever_was_there(loop_order: str) -> None:
    problem, extras = featured("varlen", Mask.CAUSAL)
    inputs = make_inputs(problem, extras=extras)
    given = {f"d{name}": torch.full_like(getattr(inputs, name), math.nan) for name in ("q", "k", "v")}
    run(make_variant(loop_order), problem, inputs, CPU, **given)
    assert (given["dq"][:, :, -TAIL[0] :] == 0).all()
    assert (given["dk"][:, :, -TAIL[1] :] == 0).all()
    assert (given["dv"][:, :, -TAIL[1] :] == 0).all()
    assert_gradients((given["dq"], given["dk"], given["dv"]), problem, inputs)


@pytest.mark.parametrize(
    ("lengths", "loop_order"),
    [
        ((), "split"),
        (((0, 0),), "fused"),
        (((0, 30), (20, 0)), "key_outer"),
        (((16, 16), (32, 16), (16, 32)), "fused"),
        # More sequences than rows of a tile.
        (tuple((n * 7 % 5, n * 5 % 4) for n in range(20)), "split"),
    ],
)
def test_any_lengths_match_the_specification(lengths: Lengths, loop_order: str) -> None:
    problem = packed_problem(lengths, tail=(2, 5), dtype=DType.FP32, head_dim=16, heads=1, mask=Mask.CAUSAL)
    inputs = make_inputs(problem, extras=packed_extras(lengths))
    got = run(make_variant(loop_order, tiles=(16, 16, 16, 16)), problem, inputs, CPU)
    assert_gradients(got, problem, inputs)


@pytest.mark.parametrize(
    ("head_dims", "loop_order"),
    [((576, 512), "split"), ((576, 512), "key_outer"), ((320, 16), "fused"), ((16, 300), "split")],
)
def test_head_dims_beyond_256_match_the_specification(head_dims: tuple[int, int], loop_order: str) -> None:
    problem = backward_problem(
        dtype=DType.FP16, head_dim=head_dims[0], head_dim_v=head_dims[1], heads=1, seqlen_q=17, seqlen_k=20
    )
    inputs = make_inputs(problem)
    got = run(make_variant(loop_order, tiles=(16, 16, 16, 16)), problem, inputs, CPU)
    assert_gradients(got, problem, inputs)


@pytest.mark.parametrize("loop_order", LOOP_ORDERS)
def test_case_a02_the_strides_of_an_upstream_gradient_are_its_own(loop_order: str) -> None:
    problem = backward_problem(dtype=DType.FP16, head_dim=16, heads=2, seqlen_q=20, seqlen_k=20)
    inputs = make_inputs(problem)
    for dout in (
        torch.ones((), dtype=torch.float16).expand(inputs.dout.shape),
        inputs.dout.transpose(1, 2).contiguous().transpose(1, 2),
        inputs.dout.repeat_interleave(2, dim=3)[..., ::2],
    ):
        variant = make_variant(loop_order)
        got = run(variant, problem, inputs.replace(dout=dout), CPU)
        assert _same(got, run(variant, problem, inputs.replace(dout=dout.contiguous()), CPU))


@pytest.mark.parametrize(("dtype", "loop_order"), list(zip(DType, LOOP_ORDERS, strict=True)))
def test_case_a03_rows_that_a_bool_mask_hides_leave_the_others_alone(dtype: DType, loop_order: str) -> None:
    problem = backward_problem(dtype=dtype, head_dim=16, heads=2, seqlen_q=6, seqlen_k=10)
    problem = problem.replace(mask_tensor=MaskTensor.BOOL)
    seen = torch.rand(1, 2, 6, 10) > 0.3
    seen[:, :, 4:] = False
    seen[:, 1] = False
    inputs = make_inputs(problem, extras=Extras(mask=seen), with_dlse=False)
    inputs = inputs.replace(dout=inputs.dout.index_fill(2, torch.tensor([4, 5]), 0.0))
    variant = make_variant(loop_order, tiles=(16, 16, 16, 16))
    dq, dk, dv = run(variant, problem, inputs, CPU)
    assert_gradients((dq, dk, dv), problem, inputs)
    assert (dq[:, :, 4:] == 0).all()
    assert all((gradient[:, 1] == 0).all() for gradient in (dq, dk, dv))
    short = problem.replace(seqlen_q=4)
    rows = {name: getattr(inputs, name)[:, :, :4] for name in ("q", "out", "lse", "dout")}
    shortened = inputs.replace(**rows, extras=Extras(mask=seen[:, :, :4]))
    assert _same((dq[:, :, :4], dk, dv), run(variant, short, shortened, CPU))


@pytest.mark.parametrize("loop_order", LOOP_ORDERS)
def test_case_a07_a_causal_mask_with_a_bias_at_a_length_that_fills_no_tile(loop_order: str) -> None:
    problem = backward_problem(dtype=DType.BF16, head_dim=64, heads=1, seqlen_q=65, seqlen_k=65, mask=Mask.CAUSAL)
    problem = problem.replace(mask_tensor=MaskTensor.FLOAT)
    places = torch.arange(65)
    bias = (places[:, None] - places[None]).to(torch.bfloat16)[None, None]
    inputs = make_inputs(problem, extras=Extras(mask=bias), with_dlse=False)
    mean = torch.full((), 0.01 / inputs.out.numel(), dtype=torch.bfloat16)
    inputs = inputs.replace(dout=mean.expand(inputs.out.shape))
    assert_gradients(run(make_variant(loop_order), problem, inputs, CPU), problem, inputs)


@pytest.mark.parametrize(
    ("loop_order", "dtype", "mask", "window"),
    [
        ("split", DType.FP32, Mask.FULL, {}),
        ("fused", DType.BF16, Mask.FULL, {}),
        ("key_outer", DType.FP32, Mask.CAUSAL, {"window_left": 11}),
        ("split", DType.BF16, Mask.CAUSAL, {"window_left": 11}),
    ],
)
def test_case_a08_a_softcap_is_differentiated_where_scores_exceed_it(
    loop_order: str, dtype: DType, mask: Mask, window: dict[str, int]
) -> None:
    problem = backward_problem(dtype=dtype, head_dim=64, heads=1, seqlen_q=33, seqlen_k=33, mask=mask)
    problem = problem.replace(softcap=30.0, **window)
    inputs = make_inputs(problem, strength=60.0)
    scores = (inputs.q.double() @ inputs.k.double().mT).abs() * problem.head_dim**-0.5
    assert scores.max() > 170
    assert_gradients(run(make_variant(loop_order), problem, inputs, CPU), problem, inputs)


@pytest.mark.parametrize(
    ("heads", "head_dims"),
    [
        ((8, 2), (64, 128)),
        ((6, 3), (192, 128)),
        ((12, 4), (64, 128)),
        ((5, 1), (192, 128)),
        ((8, 8), (64, 64)),
    ],
)
def test_case_a09_grouped_heads_and_unequal_head_dims(heads: tuple[int, int], head_dims: tuple[int, int]) -> None:
    problem = backward_problem(
        dtype=DType.FP32,
        heads=heads[0],
        kv_heads=heads[1],
        head_dim=head_dims[0],
        head_dim_v=head_dims[1],
        seqlen_q=18,
        seqlen_k=18,
    )
    inputs = make_inputs(problem)
    given = {f"d{name}": torch.full_like(getattr(inputs, name), math.nan) for name in ("q", "k", "v")}
    loop_order = LOOP_ORDERS[heads[0] % 3]
    assert_gradients(run(make_variant(loop_order), problem, inputs, CPU, **given), problem, inputs)


@pytest.mark.parametrize("loop_order", ["fused", "key_outer"])
def test_case_a50_workspaces_of_packed_sequences_hold_nothing_that_was_there_before(
    loop_order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = ((5, 5), (15, 15), (17, 17), (1, 1), (20, 20))
    problem = packed_problem(lengths, tail=(3, 3), dtype=DType.FP32, heads=2, kv_heads=1, head_dim=16)
    inputs = make_inputs(problem, extras=packed_extras(lengths))
    empty = torch.empty

    def poisoned(*arguments: object, **options: object) -> Tensor:
        made: Tensor = empty(*arguments, **options)  # type: ignore[call-overload]  # torch's are too many to repeat
        return made.fill_(math.nan) if made.is_floating_point() else made

    variant = make_variant(loop_order, tiles=(16, 16, 32, 32))
    clean = run(variant, problem, inputs, CPU)
    monkeypatch.setattr(torch, "empty", poisoned)
    for _ in range(2):
        assert _same(run(variant, problem, inputs, CPU), clean)
    monkeypatch.undo()
    assert_gradients(clean, problem, inputs)


def _same(one: Gradients, other: Gradients) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
