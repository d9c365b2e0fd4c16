"""What a trial may claim, and where a result holds."""

from __future__ import annotations

import dataclasses
import math

import pytest

from autoflash import keys
from autoflash.device import CROSS_TARGETS
from autoflash.trial import Level, Status
from autoflash.variant import Family
from tests.factories import make_environment, make_measurement, make_trial, make_verification


@pytest.mark.parametrize("median_us", [math.nan, math.inf, -math.inf, 0.0, -1.0])
def test_case_a37_a_time_that_is_none_cannot_be_recorded(median_us: float) -> None:
    measurement = dataclasses.replace(make_measurement(), median_us=median_us)

    with pytest.raises(ValueError, match="positive and finite"):
        dataclasses.replace(make_trial(), measurement=measurement)


def test_only_what_is_correct_has_a_time() -> None:
    with pytest.raises(ValueError, match="lacks a measurement"):
        dataclasses.replace(make_trial(), measurement=None)
    with pytest.raises(ValueError, match="has a measurement"):
        dataclasses.replace(make_trial(), status=Status.CORRECTNESS)


def test_a_verification_that_failed_is_no_level() -> None:
    passed = dataclasses.replace(make_verification(), level=Level.FULL, passed=True)
    failed = dataclasses.replace(passed, passed=False)

    assert dataclasses.replace(make_trial(), verification=passed).level is Level.FULL
    assert dataclasses.replace(make_trial(), verification=failed).level is Level.NONE


@pytest.mark.parametrize("field", ["device_name", "arch", "multiprocessors", "shared_bytes"])
def test_a_result_of_another_device_does_not_hold_here(field: str) -> None:
    there = make_environment()
    here = dataclasses.replace(there, **{field: 7 if isinstance(getattr(there, field), int) else "other"})

    assert field in (there.mismatch(here, Family.TORCH_TILED) or "")


def test_tritons_release_counts_for_what_triton_compiles() -> None:
    there, here = make_environment(triton="3.6"), make_environment(triton="3.9")

    assert "triton is '3.9' here" in (there.mismatch(here, Family.GLUON_SM90) or "")
    assert there.mismatch(here, Family.TORCH_TILED) is None


def test_versions_that_are_only_noted_change_no_key() -> None:
    there, here = make_environment(torch="2.11.0"), make_environment(torch="2.13.0", driver="1")

    assert there.key == here.key
    assert there.mismatch(here, Family.TRITON) is None


def test_an_environment_describes_its_device() -> None:
    device = make_environment().device

    assert (device.name, device.arch, device.multiprocessors) == ("NVIDIA H200", "sm_90", 132)
    assert device.has_tma


def test_keys_tell_kinds_apart_and_know_no_nan() -> None:
    assert keys.key("cell", {"a": 1}) != keys.key("variant", {"a": 1})
    assert keys.canonical_json({"b": 1, "a": [True, None]}) == '{"a":[true,null],"b":1}'
    with pytest.raises(ValueError, match="JSON"):
        keys.canonical_json(math.nan)


def test_descriptors_are_executed_from_hopper_on() -> None:
    assert [arch for arch, device in CROSS_TARGETS.items() if device.has_tma] == ["sm_90", "sm_100", "sm_120"]
