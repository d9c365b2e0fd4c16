from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from autoflash.cli.application import main
from autoflash.trial import Level
from autoflash.variant import Family
from tests.cli.conftest import Filled
from tests.factories import make_verification

SMALL = ["--seqlen", "64", "--heads", "2", "--quick"]


def test_defaults_and_vendor_kernels_are_verified(run_json: Callable[..., Any]) -> None:
    checked = run_json("verify", *SMALL)

    assert {one["variant"]["family"] for one in checked} == {Family.TORCH_TILED.value, Family.VENDOR.value}
    assert all(one["passed"] for one in checked if one["passed"] is not None)
    assert all(0 <= one["worst_ratio"] <= 1 for one in checked if one["passed"])


def test_one_variant_is_verified_on_demand(run_json: Callable[..., Any]) -> None:
    (checked,) = run_json("verify", *SMALL, "--set", "loop_order=key_outer", "--set", "block_n=64")

    assert checked["variant"]["structure"] == {"loop_order": "key_outer"}
    assert checked["level"] == "screen"
    assert checked["passed"]


def test_recorded_kernels_of_this_device_are_verified(
    filled: Filled, run_json: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    levels: list[Level] = []

    def passes(executable: object, problem: object, level: Level, **_: object) -> object:
        levels.append(level)
        return make_verification(level=level)

    monkeypatch.setattr("autoflash.cli.verify.verify", passes)

    (checked,) = run_json("verify", "--all")

    assert checked["variant"] == filled.winner.to_dict()
    assert levels == [Level.FULL]


def test_a_wrong_kernel_is_an_error(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = make_verification(passed=False, detail="last key dropped")
    monkeypatch.setattr("autoflash.cli.verify.verify", lambda *_, **__: wrong)

    assert main(["verify", "--device", "cpu", *SMALL]) == 1

    text = capsys.readouterr().out
    assert "WRONG" in text
    assert "last key dropped" in text


def test_a_kernel_that_raises_is_wrong_and_the_others_are_still_asked(
    monkeypatch: pytest.MonkeyPatch, run_json: Callable[..., Any]
) -> None:
    def raises(*_: object, **__: object) -> object:
        raise RuntimeError("an illegal memory access")

    monkeypatch.setattr("autoflash.cli.verify.verify", raises)

    checked = run_json("verify", *SMALL, code=1)

    assert len(checked) > 1
    assert {one["detail"] for one in checked} == {"RuntimeError: an illegal memory access"}
