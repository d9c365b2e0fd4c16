from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from autoflash.cli.application import main
from autoflash.evaluate.cost import flops, least_bytes
from autoflash.problem import DType, Mask
from tests.cli.conftest import Filled
from tests.factories import make_problem

HANDBOOK = ["analyze", "--heads", "32", "--seqlen", "8192", "--head-dim", "128"]


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(list(arguments)) == 0
    return capsys.readouterr().out


def test_the_handbooks_score_matrix_is_four_gibibytes(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, *HANDBOOK, "--device", "sm_90")

    lines = [line for line in text.splitlines() if line.startswith("one N x N tensor")]
    assert [line.split()[-2:] for line in lines] == [["4.00", "GiB"]]
    assert "NVIDIA H200 data sheet" in text
    assert "bound by compute" in text
    assert "unknown: give" not in text


def test_every_algorithm_has_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, *HANDBOOK, "--device", "sm_90")

    for name in ("standard attention", "Rabe-Staats", "FlashAttention-1 order", "FlashAttention-2 order, L2"):
        assert f"\n{name} " in text
    assert "\nautoflash gluon_sm90: FlashAttention-2 order " in text
    assert " 128 x 227 " in text


def test_what_is_not_known_of_a_cpu_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, *HANDBOOK, "--device", "cpu")

    assert "unknown: give --peak-tflops and --bandwidth" in text
    assert "unknown: give --on-chip-bytes" in text
    assert "blocks of the kernel, since the on-chip memory is unknown" in text
    assert "not measured here" in text


def test_what_is_given_is_used(run_json: Callable[..., Any]) -> None:
    given = ["--peak-tflops", "2", "--bandwidth", "50", "--on-chip-bytes", "32768"]
    report = run_json("analyze", "--heads", "4", "--seqlen", "512", *given)

    problem = make_problem(dtype=DType.FP32, heads=4, seqlen_q=512)
    assert report["flops"] == flops(problem)
    assert report["least_bytes"] == least_bytes(problem)
    assert report["peak"] == {"tflops": 2.0, "bandwidth_gb_s": 50.0, "source": "as given"}
    assert report["roofline"]["bound_us"] == pytest.approx(flops(problem) / 2e6)
    assert report["roofline"]["limit"] == "compute"
    # 8192 float32 on the chip: ceil(8192 / (4 * 64)) = 32.
    assert {tuple(one["blocks"]) for one in report["published"] if "order" in one["algorithm"]} == {(32, 32)}
    assert report["theta"]["flash_holds"] is True


def test_json_of_a_cpu_holds_nothing_guessed(run_json: Callable[..., Any]) -> None:
    report = run_json("analyze", "--pass", "backward", "--causal")

    assert report["peak"] == {"tflops": None, "bandwidth_gb_s": None, "source": ""}
    assert (report["on_chip_bytes"], report["theta"]["flash_bytes"], report["recorded"]) == (None, None, None)
    assert report["roofline"]["bound_us"] is None
    assert report["kernel"]["variant"]["family"] == "torch_tiled"
    assert [buffer["bytes"] > 0 for buffer in report["memory"]["workspace"]] == [True, True]
    for one in (*report["published"], report["kernel"]["traffic"]):
        assert one["total_bytes"] == sum(s["read_bytes"] + s["written_bytes"] for s in one["streams"])


def test_a_recorded_time_is_compared_with_the_roofline(filled: Filled, run_json: Callable[..., Any]) -> None:
    report = run_json("analyze", "--causal", "--peak-tflops", "1", "--bandwidth", "1000")

    recorded = report["recorded"]
    assert (recorded["median_us"], recorded["vendor_us"], recorded["tier"]) == (900.0, 1800.0, "exact")
    assert recorded["cell"] == filled.cell.to_dict()
    assert report["kernel"]["variant"] == filled.winner.to_dict()
    # At one TFLOP/s, the share is the rate.
    assert recorded["share_of_roofline"] == pytest.approx(recorded["tflops"])


def test_a_recorded_time_is_printed(filled: Filled, capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "analyze", "--causal", "--device", "cpu")

    assert "900.0 us" in text
    assert "1800.0 us in the same run" in text
    assert f"at {filled.cell} (exact)" in text


def test_times_that_are_shipped_are_found_without_the_device(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*HANDBOOK, "--causal", "--device", "sm_90", "--json"]) == 0

    recorded = json.loads(capsys.readouterr().out)["recorded"]
    assert recorded["problem"]["seqlen_q"] == 8192
    assert 0.3 < recorded["share_of_roofline"] < 1.0


@pytest.mark.parametrize(
    "arguments",
    ["--window 63,0 --softcap 30 --causal", "--bool-mask --dropout 0.1", "--varlen --batch 3 --kv-heads 2"],
)
@pytest.mark.parametrize("op", ["forward", "backward"])
def test_features_are_analysed(op: str, arguments: str, run_json: Callable[..., Any]) -> None:
    plain = run_json("analyze", "--pass", op, "--batch", "3", "--on-chip-bytes", "65536")
    report = run_json("analyze", "--pass", op, "--on-chip-bytes", "65536", *arguments.split())

    assert report["kernel"]["traffic"]["total_bytes"] > report["least_bytes"] > 0
    if "window" in arguments:
        assert report["flops"] < plain["flops"] / 10


def test_an_empty_problem_costs_nothing(run_json: Callable[..., Any]) -> None:
    report = run_json("analyze", "--batch", "0", "--on-chip-bytes", "65536")

    assert (report["flops"], report["least_bytes"], report["memory"]["workspace"]) == (0.0, 0, [])
    assert report["roofline"]["intensity"] is None


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--on-chip-bytes", "64"], "64 bytes does not hold one fp32 vector of 64"),
        (["--on-chip-bytes", "0"], "--on-chip-bytes"),
        (["--peak-tflops", "0"], "--peak-tflops"),
        (["--bandwidth", "-3"], "--bandwidth"),
        (["--heads", "8", "--kv-heads", "3"], "8 and 3"),
    ],
)
def test_what_means_nothing_is_a_usage_error(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["analyze", "--device", "cpu", *arguments]) == 2

    assert words in capsys.readouterr().err


def test_a_causal_mask_is_rated_by_what_it_shows(run_json: Callable[..., Any]) -> None:
    full, causal = (run_json("analyze", *flag)["flops"] for flag in ([], ["--causal"]))

    assert causal == full / 2
    assert causal == flops(make_problem(heads=8, seqlen_q=1024, mask=Mask.CAUSAL))


@pytest.mark.parametrize("name", ["sm_91", "mps"])
def test_a_device_that_is_not_known_is_named_with_those_that_are(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["analyze", "--device", name]) == 2

    text = capsys.readouterr().err
    assert f"device {name!r} is not supported" in text
    assert "sm_90" in text
