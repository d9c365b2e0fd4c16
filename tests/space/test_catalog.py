from __future__ import annotations

import dataclasses
import itertools

import pytest

from autoflash.device import CROSS_TARGETS, Device, DeviceKind
from autoflash.problem import Cell, DType, Feature, Mask, Parallelism, Pass
from autoflash.space import catalog, constraint, cost
from autoflash.variant import Choices, Family, Variant
from tests.factories import make_cell, make_variant

CPU = Device(kind=DeviceKind.CPU, name="cpu", arch="x86_64", multiprocessors=2, shared_bytes=0, warp_size=1)
_H200 = CROSS_TARGETS["sm_90"]
_FEATURES = (
    (Feature.VARLEN,),
    (Feature.SOFTCAP,),
    (Feature.FLOAT_MASK,),
    (Feature.BOOL_MASK,),
    (Feature.WINDOW,),
    (Feature.DROPOUT,),
    (Feature.BLOCK_MASK,),
    (Feature.SOFTCAP, Feature.FLOAT_MASK, Feature.WINDOW, Feature.DROPOUT),
)
_HEAD_DIMS = (8, 16, 40, 64, 72, 80, 96, 112, 128, 160, 192, 256)


@pytest.mark.parametrize(
    ("target", "rows", "warps"), [("sm_90", 64, 8), ("sm_80", 32, 8), ("sm_86", 16, 4), ("gfx942", 16, 4)]
)
def test_a_backward_of_wide_heads_has_the_largest_default_that_fits(target: str, rows: int, warps: int) -> None:
    cell = make_cell(op=Pass.BACKWARD, dtype=DType.BF16, head_dim=256)

    default = catalog.search_space(cell, CROSS_TARGETS[target], Family.TRITON).default()

    assert (default.config["BLOCK_M"], default.config["num_warps"]) == (rows, warps)
    assert cost.most_shared_bytes(default, cell, CROSS_TARGETS[target]) <= CROSS_TARGETS[target].shared_bytes


@pytest.mark.parametrize(("op", "dtype"), list(itertools.product(Pass, DType)))
@pytest.mark.parametrize("target", sorted(CROSS_TARGETS))
def test_the_default_is_in_the_space_and_fits_every_class_of_shared_memory(target: str, op: Pass, dtype: DType) -> None:
    spaces = [
        catalog.search_space(make_cell(op=op, dtype=dtype, head_dim=dim), CROSS_TARGETS[target], Family.TRITON)
        for dim in _HEAD_DIMS
    ]

    assert [space.why_not(space.default()) for space in spaces] == [None] * len(spaces)
    assert all(
        cost.shared_bytes(space.default(), space.cell) <= 64 * 1024
        or (op is Pass.BACKWARD and space.cell.head_dim > 128 and space.why_no_default() is None)
        for space in spaces
    )
    assert not any(catalog.has_precondition(space.default()) for space in spaces)


@pytest.mark.parametrize(("op", "mask"), list(itertools.product(Pass, Mask)))
def test_every_variant_satisfies_its_constraints_in_one_spelling(op: Pass, mask: Mask) -> None:
    space = catalog.search_space(make_cell(op=op, mask=mask, head_dim=128), _H200, Family.TRITON)

    variants = space.variants()

    sample = variants[:: max(1, len(variants) // 200)]
    assert len(set(variants)) == len(variants) > 100
    assert [space.why_not(variant) for variant in sample] == [None] * len(sample)
    assert [space.normalise(variant) for variant in sample] == sample


def test_variants_come_in_the_same_order_each_time() -> None:
    cell = make_cell(head_dim=128)

    one = catalog.search_space(cell, _H200, Family.TRITON).variants()
    catalog._search_space.cache_clear()
    other = catalog.search_space(cell, _H200, Family.TRITON).variants()

    assert one == other


def test_descriptors_are_offered_only_where_a_copy_engine_executes_them() -> None:
    cell = make_cell()

    loads = {
        target: {v.structure["loads"] for v in catalog.search_space(cell, device, Family.TRITON).variants()}
        for target, device in CROSS_TARGETS.items()
    }

    assert loads["sm_90"] == loads["sm_100"] == {"pointer", "tma"}
    assert loads["sm_80"] == loads["sm_89"] == loads["gfx942"] == {"pointer"}


def test_descriptors_need_rows_of_whole_16_bytes() -> None:
    space = catalog.search_space(make_cell(head_dim=20), _H200, Family.TRITON)
    variant = space.variant({"loads": "tma"})

    assert "16 bytes" in (space.why_not(variant) or "")


def test_a_deterministic_backward_has_no_atomic_additions() -> None:
    cell = make_cell(op=Pass.BACKWARD, deterministic=True)
    space = catalog.search_space(cell, _H200, Family.TRITON)

    orders = {variant.structure["loop_order"] for variant in space.variants()}

    assert orders == {"split", "fused"}
    assert "not deterministic" in (space.why_not(space.variant({"loop_order": "key_outer"})) or "")


def test_backward_knobs_that_do_not_apply_are_absent() -> None:
    space = catalog.search_space(make_cell(op=Pass.BACKWARD), _H200, Family.TRITON)

    names = {order: set(space.variant({"loop_order": order}).config) for order in ("key_outer", "split", "fused")}

    one = {"BLOCK_M", "BLOCK_N", "num_warps", "num_stages"}
    assert names["key_outer"] == one
    assert names["fused"] == one | {"BLOCK_M2", "BLOCK_N2", "num_stages2"}
    assert names["split"] == names["fused"] | {"num_warps2"}


def test_a_forward_with_keys_outside_has_no_other_structure() -> None:
    space = catalog.search_space(make_cell(mask=Mask.CAUSAL), _H200, Family.TRITON)

    structures = {v.structure for v in space.variants() if v.structure["loop_order"] == "key_outer"}

    assert structures == {space.default().structure.replace(loop_order="key_outer")}


@pytest.mark.parametrize("mask", list(Mask))
def test_mask_knobs_exist_only_under_a_mask(mask: Mask) -> None:
    space = catalog.search_space(make_cell(mask=mask), _H200, Family.TRITON)

    found = {(v.structure["mask_loops"], v.structure["tile_order"]) for v in space.variants()}

    assert len(found) == (4 if mask is Mask.CAUSAL else 1)


def test_values_outside_the_space_are_named() -> None:
    space = catalog.search_space(make_cell(), _H200, Family.TRITON)
    variant = dataclasses.replace(space.default(), config=space.default().config.replace(BLOCK_M=96))

    assert "BLOCK_M=96" in (space.why_not(variant) or "")


def test_a_short_sequence_gets_no_block_longer_than_itself() -> None:
    space = catalog.search_space(make_cell(q_bucket=6, k_bucket=5, parallelism=Parallelism.LOW), _H200, Family.TRITON)

    variants = space.variants()

    assert max(v.config.number("BLOCK_M") for v in variants) == 64
    assert max(v.config.number("BLOCK_N") for v in variants) == 32


@pytest.mark.parametrize("op", list(Pass))
def test_even_an_empty_sequence_has_a_variant(op: Pass) -> None:
    cell = make_cell(op=op, q_bucket=0, k_bucket=0)

    assert catalog.search_space(cell, _H200, Family.TRITON).variants()
    assert catalog.search_space(cell, CPU, Family.TORCH_TILED).variants()


def test_the_portable_family_searches_blocks_up_to_the_sequence() -> None:
    space = catalog.search_space(make_cell(q_bucket=10, k_bucket=8), CPU, Family.TORCH_TILED)

    variants = space.variants()

    assert {v.config["block_m"] for v in variants} == {64, 128, 256, 512, 1024}
    assert {v.config["block_n"] for v in variants} == {64, 128, 256}
    assert {v.config["heads_per_step"] for v in variants} == {0, 1, 4}
    assert {v.structure["loop_order"] for v in variants} == {"query_outer", "key_outer"}
    assert space.default() in variants


def test_a_cpu_has_the_portable_family_alone() -> None:
    assert catalog.families(Pass.FORWARD, CPU) == (Family.TORCH_TILED,)
    assert Family.TRITON in catalog.families(Pass.FORWARD, _H200)


def test_vendors_have_no_search_space() -> None:
    with pytest.raises(ValueError, match="vendor"):
        catalog.search_space(make_cell(), _H200, Family.VENDOR)


def test_vendors_are_those_that_the_dtype_and_device_have() -> None:
    def backends(dtype: DType, device: Device) -> set[object]:
        return {variant.structure["backend"] for variant in catalog.vendors(make_cell(dtype=dtype), device)}

    assert backends(DType.BF16, _H200) == {"cudnn", "flash", "efficient", "math"}
    assert backends(DType.FP32, _H200) == {"efficient", "math"}
    assert backends(DType.FP32, CPU) == {"flash", "math"}


def test_a_variant_of_another_family_is_refused() -> None:
    space = catalog.search_space(make_cell(), _H200, Family.TRITON)

    reason = space.why_not(Variant(family=Family.VENDOR, structure=Choices(backend="math"), config=Choices()))

    assert reason == "vendor is not triton"


_LONG_HEADS = ((257, 257), (320, 320), (512, 512), (576, 512), (64, 512), (192, 128))


@pytest.mark.parametrize(("op", "dtype"), list(itertools.product(Pass, DType)))
@pytest.mark.parametrize("target", sorted(CROSS_TARGETS))
def test_long_heads_have_a_default_that_fits_or_the_reason_why_not(target: str, op: Pass, dtype: DType) -> None:
    device = CROSS_TARGETS[target]
    for head_dim, head_dim_v in _LONG_HEADS:
        cell = make_cell(op=op, dtype=dtype, head_dim=head_dim, head_dim_v=head_dim_v)
        space = catalog.search_space(cell, device, Family.TRITON)
        default, reason = space.default(), space.why_no_default()

        if reason is None:
            assert space.why_not(default) is None
            assert cost.most_shared_bytes(default, cell, device) <= device.shared_bytes
        else:
            assert "shared memory" in reason or "float32 without TF32" in reason


@pytest.mark.parametrize(
    ("target", "op", "dtype", "head_dims", "has_default"),
    [
        ("sm_86", Pass.FORWARD, DType.BF16, (576, 512), True),
        ("sm_86", Pass.BACKWARD, DType.BF16, (512, 512), True),
        ("sm_86", Pass.BACKWARD, DType.BF16, (576, 512), False),
        ("sm_86", Pass.FORWARD, DType.FP32, (512, 512), True),
        ("sm_86", Pass.FORWARD, DType.FP32, (576, 512), False),
        ("sm_90", Pass.BACKWARD, DType.BF16, (576, 512), True),
        ("gfx942", Pass.BACKWARD, DType.BF16, (576, 512), True),
    ],
)
def test_shared_memory_decides_how_long_heads_may_be(
    target: str, op: Pass, dtype: DType, head_dims: tuple[int, int], has_default: bool
) -> None:
    cell = make_cell(op=op, dtype=dtype, head_dim=head_dims[0], head_dim_v=head_dims[1])
    space = catalog.search_space(cell, CROSS_TARGETS[target], Family.TRITON)

    assert (space.why_no_default() is None) is has_default


@pytest.mark.parametrize("features", _FEATURES, ids=str)
@pytest.mark.parametrize("op", list(Pass))
@pytest.mark.parametrize("target", ["sm_86", "sm_90", "gfx942"])
def test_features_have_a_default_wherever_plain_attention_has(
    target: str, op: Pass, features: tuple[Feature, ...]
) -> None:
    device = CROSS_TARGETS[target]
    spaces = [
        catalog.search_space(make_cell(op=op, dtype=dtype, head_dim=dim, features=features), device, Family.TRITON)
        for dim, dtype in itertools.product((16, 64, 128, 256), DType)
    ]

    assert [space.why_no_default() for space in spaces] == [None] * len(spaces)
    assert [space.why_not(space.default()) for space in spaces] == [None] * len(spaces)


def test_a_mask_tensor_takes_shared_memory_beside_the_operands() -> None:
    variant = catalog.search_space(make_cell(head_dim=256), _H200, Family.TRITON).variant({"BLOCK_M": 64})
    plain, masked, biased = (
        cost.shared_bytes(variant, make_cell(head_dim=256, features=features))
        for features in ((), (Feature.BOOL_MASK,), (Feature.FLOAT_MASK,))
    )

    tile = 64 * variant.config.number("BLOCK_N")
    assert (masked - plain, biased - plain) == (tile, 4 * tile)


def test_features_leave_out_the_families_that_do_plain_attention_alone() -> None:
    asked = (Feature.ALIBI, Feature.WINDOW)
    cell = make_cell(head_dim=128, features=asked)
    hopper = catalog.search_space(cell, _H200, Family.GLUON_SM90)

    assert catalog.families(Pass.FORWARD, _H200, asked) == (Family.TRITON, Family.TORCH_TILED)
    assert catalog.families(Pass.FORWARD, CPU, asked) == (Family.TORCH_TILED,)
    assert catalog.vendors(cell, _H200) == catalog.vendors(cell, CPU) == ()
    assert hopper.variants() == []
    assert hopper.why_no_default() == "the forward of gluon_sm90 has no alibi"


@pytest.mark.parametrize("asked", [(Feature.WINDOW,), (Feature.SOFTCAP,), (Feature.SOFTCAP, Feature.WINDOW)])
def test_the_forward_of_the_hopper_family_has_features_that_its_backward_leaves_to_triton(
    asked: tuple[Feature, ...],
) -> None:
    cell = make_cell(op=Pass.BACKWARD, head_dim=128, features=asked)

    assert catalog.families(Pass.FORWARD, _H200, asked)[0] is Family.GLUON_SM90
    assert catalog.families(Pass.BACKWARD, _H200, asked)[0] is Family.TRITON
    assert "backward of gluon_sm90 has no" in (
        catalog.search_space(cell, _H200, Family.GLUON_SM90).why_no_default() or ""
    )


@pytest.mark.parametrize(("index", "is_able"), [("h, q_idx - kv_idx", True), ("q_idx, kv_idx", False)])
def test_triton_gives_deterministic_gradients_of_parameters_where_it_can_walk_along_what_shares_them(
    index: str, is_able: bool
) -> None:
    cell = make_cell(
        op=Pass.BACKWARD,
        head_dim=64,
        features=(Feature.SCORE_MOD, Feature.PARAMS_GRADIENT),
        score_mod=f"score_mod(t: float 2) = score + t[{index}]",
    )
    at_any_rate = catalog.search_space(cell, _H200, Family.TRITON)
    space = catalog.search_space(dataclasses.replace(cell, deterministic=True), _H200, Family.TRITON)

    assert at_any_rate.why_no_default() is None
    reason = space.why_no_default()
    assert reason is None if is_able else reason == "atomic additions to the gradient of t are not deterministic"


@pytest.mark.parametrize("features", _FEATURES, ids=str)
def test_features_have_no_forward_with_keys_outside(features: tuple[Feature, ...]) -> None:
    space = catalog.search_space(make_cell(head_dim=128, features=features), _H200, Family.TRITON)

    assert {variant.structure["loop_order"] for variant in space.variants()} == {"query_outer"}
    assert "keys outside" in (space.why_not(space.variant({"loop_order": "key_outer"})) or "")


@pytest.mark.parametrize("op", list(Pass))
def test_packed_sequences_are_loaded_by_pointer_and_the_others_by_either(op: Pass) -> None:
    loads = {
        features: {
            variant.structure["loads"]
            for variant in catalog.search_space(
                make_cell(op=op, dtype=DType.FP32, head_dim=128, features=features), _H200, Family.TRITON
            ).variants()
        }
        for features in ((Feature.VARLEN,), (Feature.WINDOW,), (Feature.FLOAT_MASK,))
    }

    assert loads[Feature.VARLEN,] == {"pointer"}
    assert loads[Feature.WINDOW,] == loads[Feature.FLOAT_MASK,] == {"pointer", "tma"}


@pytest.mark.parametrize("op", list(Pass))
def test_kernels_that_walk_over_lists_mask_as_their_blocks_stand_and_take_tiles_that_divide_them(op: Pass) -> None:
    asked = (Feature.BLOCK_MASK,)
    cell = make_cell(op=op, dtype=DType.FP32, head_dim=128, mask=Mask.CAUSAL, features=asked)
    variants = catalog.search_space(cell, _H200, Family.TRITON).variants()

    assert {variant.structure["loads"] for variant in variants} == {"pointer", "tma"}
    for variant in variants:
        tiles = [number for name, number in variant.config.items() if name.startswith("BLOCK_")]
        assert all(isinstance(tile, int) and 128 % tile == 0 for tile in tiles)
        if op is Pass.FORWARD:
            assert (variant.structure["pv_order"], variant.structure["mask_loops"]) == ("after_softmax", "branch")


def test_a_forward_in_two_tiles_does_not_work_ahead() -> None:
    variants = catalog.search_space(make_cell(head_dim=80), _H200, Family.TRITON).variants()

    orders: dict[str, set[object]] = {"padded": set(), "split": set()}
    for variant in variants:
        orders[str(variant.structure.get("head_dim_tiles", "padded"))].add(variant.structure["pv_order"])

    assert orders == {"padded": {"after_softmax", "under_next_softmax"}, "split": {"after_softmax"}}


def test_what_does_not_walk_over_lists_says_so() -> None:
    cell = make_cell(head_dim=128, features=(Feature.BLOCK_MASK,))

    ahead = make_variant(pv_order="under_next_softmax")
    wide = make_variant(BLOCK_N=256)

    assert "works ahead" in (constraint.why_unable(ahead, cell) or "")
    assert "BLOCK_N=256 does not divide" in (constraint.why_unable(wide, cell) or "")
    assert constraint.why_unable(make_variant(), cell) is None


@pytest.mark.parametrize(
    ("feature", "gradient"),
    [
        (Feature.BIAS, Feature.BIAS_GRADIENT),
        (Feature.ALIBI, Feature.ALIBI_GRADIENT),
        (Feature.SCORE_MOD, Feature.PARAMS_GRADIENT),
    ],
)
def test_gradients_of_terms_beside_a_block_mask_are_left_to_torch(feature: Feature, gradient: Feature) -> None:
    assert catalog.families(Pass.BACKWARD, _H200, (feature, Feature.BLOCK_MASK, gradient)) == (Family.TORCH_TILED,)
    assert catalog.families(Pass.BACKWARD, _H200, (feature, Feature.BLOCK_MASK))[0] is Family.TRITON


def test_kernels_of_terms_may_load_ahead_where_there_are_some() -> None:
    asked = (Feature.BIAS, Feature.BIAS_GRADIENT)
    with_terms, without = (
        catalog.search_space(make_cell(op=Pass.BACKWARD, head_dim=64, features=features), _H200, Family.TRITON)
        for features in (asked, (Feature.BIAS,))
    )

    assert {variant.config.get("num_stages_term") for variant in with_terms.variants()} == {None, 2}
    assert {variant.config.get("num_stages_term") for variant in without.variants()} == {None}
    assert "num_stages_term" not in with_terms.default().config


def test_a_window_has_the_choices_of_a_causal_mask() -> None:
    def choices(features: tuple[Feature, ...], op: Pass) -> set[object]:
        cell = make_cell(op=op, dtype=DType.FP32, head_dim=128, features=features)
        variants = catalog.search_space(cell, CROSS_TARGETS["sm_80"], Family.TRITON).variants()
        return {variant.structure["mask_loops"] for variant in variants}

    assert choices((Feature.WINDOW,), Pass.FORWARD) == {"split", "branch"}
    assert choices((Feature.WINDOW,), Pass.BACKWARD) == {"branch", "everywhere"}
    assert choices((Feature.BOOL_MASK,), Pass.FORWARD) == {"split"}


@pytest.mark.parametrize("family", [Family.TRITON, Family.TORCH_TILED])
def test_a_narrow_window_ranks_small_blocks_higher_than_a_wide_one_does(family: Family) -> None:
    device = _H200 if family is Family.TRITON else CPU

    def best(window_bucket: int) -> int:
        cell = make_cell(q_bucket=12, features=(Feature.WINDOW,), window_bucket=window_bucket)
        scores = catalog.search_space(cell, device, family).scores()
        config = max(scores, key=lambda variant: scores[variant]).config
        return sum(config.number(name) for name in config if name.lower().startswith("block"))

    assert best(6) < best(12)


def test_cells_of_other_features_do_not_share_a_space() -> None:
    one, other = (
        catalog.search_space(make_cell(features=features), _H200, Family.TRITON).scores()
        for features in ((), (Feature.VARLEN,))
    )

    assert set(one) != set(other)


def _softmax_choices(cell: Cell, device: Device) -> set[str]:
    knobs = catalog.search_space(cell, device, Family.TRITON).knobs
    return {knob.name for knob in knobs if knob.name in ("rescale", "exp2")}


def test_the_softmax_has_choices_for_16_bits_and_short_heads_on_nvidia_gpus() -> None:
    both = {"rescale", "exp2"}

    assert _softmax_choices(make_cell(), _H200) == _softmax_choices(make_cell(), CROSS_TARGETS["sm_80"]) == both
    assert _softmax_choices(make_cell(op=Pass.BACKWARD), _H200) == {"exp2"}
    assert _softmax_choices(make_cell(), CROSS_TARGETS["gfx942"]) == set()
    assert _softmax_choices(make_cell(dtype=DType.FP32), _H200) == set()
    assert _softmax_choices(make_cell(head_dim=256), _H200) == set()


@pytest.mark.parametrize("op", list(Pass))
def test_choices_in_the_softmax_come_after_the_same_variant_without_them(op: Pass) -> None:
    cell = make_cell(op=op, head_dim=128, mask=Mask.CAUSAL)
    scores = catalog.search_space(cell, _H200, Family.TRITON).scores()

    chosen = [variant for variant in scores if {"rescale", "exp2"} & set(variant.structure)]
    without = [
        dataclasses.replace(
            variant,
            structure=Choices({k: v for k, v in variant.structure.items() if k not in ("rescale", "exp2")}),
        )
        for variant in chosen
    ]

    assert len(scores) < (3 if op is Pass.FORWARD else 1.3) * len(set(scores) - set(chosen))
    assert all(scores[plain] > scores[variant] for plain, variant in zip(without, chosen, strict=True))


def test_only_a_softmax_that_its_own_product_follows_may_keep_its_maximum() -> None:
    space = catalog.search_space(make_cell(), _H200, Family.TRITON)

    conditional = [v.structure for v in space.variants() if "rescale" in v.structure]

    assert {one["pv_order"] for one in conditional} == {"after_softmax"}
    assert {one["loop_order"] for one in conditional} == {"query_outer"}
