from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from autoflash.device import CROSS_TARGETS, Device, DeviceKind
from autoflash.errors import InvalidProblemError
from autoflash.problem import DType, Feature, Mask, MaskTensor, Pass
from autoflash.search.presets import Asked, Axes, Preset, cells, default_preset, effort

_H200 = CROSS_TARGETS["sm_90"]
_CPU = Device(kind=DeviceKind.CPU, name="cpu", arch="x86_64", multiprocessors=2, shared_bytes=0, warp_size=1)


def test_the_language_model_preset_is_the_published_grid() -> None:
    found = cells(Preset.LLM, _H200)

    assert len(found) == 2 * 2 * 3 * 2 * 6
    assert {cell.head_dim for cell in found} == {64, 128, 256}
    assert {cell.q_bucket for cell in found} == {9, 10, 11, 12, 13, 14}
    assert {cell.dtype for cell in found} == {DType.BF16, DType.FP16}


@pytest.mark.parametrize(("preset", "device"), list(itertools.product(Preset, (_H200, _CPU))))
def test_every_preset_has_cells_and_none_twice(preset: Preset, device: Device) -> None:
    found = cells(preset, device)

    assert found
    assert len(set(found)) == len(found)


def test_lengths_follow_each_other_and_the_full_mask_comes_first() -> None:
    found = cells(Preset.LLM, _H200)

    assert [cell.q_bucket for cell in found[:6]] == [9, 10, 11, 12, 13, 14]
    assert [cell.mask for cell in found[:12]] == [Mask.FULL] * 6 + [Mask.CAUSAL] * 6


def test_chosen_axes_replace_the_presets() -> None:
    chosen = Axes(passes=(Pass.FORWARD,), head_dims=(96,), dtypes=(DType.FP32,), masks=(Mask.CAUSAL,), seqlens=(333,))

    found = cells(Preset.LLM, _H200, chosen)

    assert [(cell.op, cell.head_dim, cell.dtype, cell.q_bucket) for cell in found] == [
        (Pass.FORWARD, 96, DType.FP32, 9)
    ]


def test_lengths_of_one_bucket_are_one_cell() -> None:
    found = cells(Preset.QUICK, _CPU, Axes(passes=(Pass.FORWARD,), masks=(Mask.FULL,), seqlens=(1000, 1024)))

    assert len(found) == 1


def test_a_new_machine_gets_something_to_see() -> None:
    assert default_preset(_CPU) is Preset.QUICK
    assert default_preset(_H200) is Preset.LLM
    assert len(cells(Preset.QUICK, _CPU)) <= 8
    assert effort(Preset.QUICK, _CPU).budget_s == 120.0
    assert effort(Preset.LLM, _H200).budget_s is not None


@pytest.mark.parametrize("device", [_H200, _CPU])
def test_the_features_preset_has_what_models_ask_for(device: Device) -> None:
    found = {(cell.op, cell.features, cell.mask, cell.group > 1) for cell in cells(Preset.FEATURES, device)}

    for op in Pass:
        assert (op, (), Mask.CAUSAL, True) in found
        assert (op, (Feature.WINDOW,), Mask.CAUSAL, True) in found
        assert (op, (Feature.SOFTCAP, Feature.WINDOW), Mask.CAUSAL, True) in found
        assert (op, (Feature.VARLEN,), Mask.CAUSAL, True) in found
        for feature in (Feature.DROPOUT, Feature.BOOL_MASK, Feature.FLOAT_MASK):
            assert (op, (feature,), Mask.FULL, False) in found
    assert (Pass.FORWARD, (Feature.BIAS,), Mask.FULL, False) in found
    assert (Pass.BACKWARD, (Feature.BIAS, Feature.BIAS_GRADIENT), Mask.FULL, False) in found


@pytest.mark.parametrize("preset", [Preset.QUICK, Preset.LLM, Preset.VISION])
def test_other_presets_are_plain(preset: Preset) -> None:
    assert {(cell.features, cell.group) for cell in cells(preset, _H200)} == {((), 1)}


def test_all_holds_the_features_too() -> None:
    assert set(cells(Preset.FEATURES, _H200)) <= set(cells(Preset.ALL, _H200))


def test_what_is_asked_for_is_asked_of_every_shape() -> None:
    asked = Asked(window=(127, 0), softcap=30.0, packed=True)

    found = cells(Preset.QUICK, _H200, Axes(asked=(asked,), groups=(2, 4)))

    assert {(cell.features, cell.window_bucket) for cell in found} == {
        ((Feature.VARLEN, Feature.SOFTCAP, Feature.WINDOW), 7)
    }
    assert {cell.group for cell in found} == {2, 4}
    assert len(found) == 2 * len(cells(Preset.QUICK, _H200))


def test_cells_are_those_under_which_calls_are_looked_up() -> None:
    """Nothing to the right is a causal mask, and a window as wide as the sequence is none."""
    one = Axes(passes=(Pass.FORWARD,), head_dims=(64,), seqlens=(1024,), masks=(Mask.FULL,))

    (narrow,) = cells(Preset.QUICK, _H200, replace(one, asked=(Asked(window=(127, 0)),)))
    (wide,) = cells(Preset.QUICK, _H200, replace(one, asked=(Asked(window=(4095, 0)),)))

    assert (narrow.mask, narrow.features, narrow.window_bucket) == (Mask.CAUSAL, (Feature.WINDOW,), 7)
    assert (wide.mask, wide.features, wide.window_bucket) == (Mask.CAUSAL, (), 0)


def test_what_does_not_go_together_is_refused() -> None:
    with pytest.raises(InvalidProblemError, match="packed sequences have no mask tensor"):
        cells(Preset.QUICK, _H200, Axes(asked=(Asked(packed=True, mask_tensor=MaskTensor.BOOL),)))


def test_more_heads_in_a_group_than_fit_the_usual_width_are_one_group() -> None:
    (cell,) = cells(
        Preset.QUICK, _H200, Axes(passes=(Pass.FORWARD,), head_dims=(128,), groups=(71,), masks=(Mask.FULL,))
    )

    assert cell.group == 71
