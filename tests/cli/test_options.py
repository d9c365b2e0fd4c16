from __future__ import annotations

import logging

import click
import pytest
from click.testing import CliRunner

from autoflash import paths
from autoflash.cli.features import Window
from autoflash.cli.options import Common, Duration, ProblemOptions, Retold, common_options, problem_options
from autoflash.device import CROSS_TARGETS, Device, DeviceKind
from autoflash.problem import Alignment, DType, Feature, Mask, Pass, Problem

CPU = Device(kind=DeviceKind.CPU, name="Test CPU", arch="x86_64", multiprocessors=2, shared_bytes=0)


def _problem(*arguments: str, device: Device = CROSS_TARGETS["sm_90"]) -> Problem:
    made: list[Problem] = []

    @click.command()
    @problem_options
    def command(wanted: ProblemOptions) -> None:
        made.append(wanted.problem(device))

    command.main(list(arguments), standalone_mode=False)
    return made[0]


@pytest.mark.parametrize(
    ("text", "seconds"), [("90", 90), ("90s", 90), ("10m", 600), ("1h30m", 5400), ("1h30m5s", 5405), ("2h", 7200)]
)
def test_durations_are_read(text: str, seconds: float) -> None:
    assert Duration().convert(text, None, None) == seconds


@pytest.mark.parametrize("text", ["", "0", "ten", "10x", "-5m", "m"])
def test_durations_that_mean_nothing_are_refused(text: str) -> None:
    with pytest.raises(click.BadParameter, match="length of time"):
        Duration().convert(text, None, None)


def test_a_problem_follows_its_device_where_nothing_is_said() -> None:
    assert _problem().dtype is DType.BF16
    assert _problem(device=CPU).dtype is DType.FP32


def test_a_problem_is_read_from_options() -> None:
    arguments = (
        "--pass backward --dtype fp16 --head-dim 80 --batch 3 --heads 8 --kv-heads 2 --seqlen 100 --seqlen-k 300"
    )

    problem = _problem(*arguments.split(), "--top-left")

    assert problem == Problem(
        op=Pass.BACKWARD,
        dtype=DType.FP16,
        head_dim=80,
        head_dim_v=80,
        batch=3,
        heads=8,
        kv_heads=2,
        seqlen_q=100,
        seqlen_k=300,
        mask=Mask.CAUSAL,
        alignment=Alignment.TOP_LEFT,
    )


def test_a_problem_with_features_is_read_from_options() -> None:
    arguments = "--head-dim 192 --head-dim-v 128 --batch 3 --seqlen 100 --causal --window 63,0 --softcap 20 --varlen"

    problem = _problem(*arguments.split())

    assert (problem.head_dim, problem.head_dim_v) == (192, 128)
    assert problem.features == (Feature.VARLEN, Feature.SOFTCAP, Feature.WINDOW)
    assert (problem.mask, problem.window_left, problem.window_right) == (Mask.CAUSAL, 63, None)
    assert problem.softcap == 20.0
    assert (problem.batch, problem.rows_q, problem.rows_k) == (3, 300, 300)


def test_common_options_arrive_as_one_value() -> None:
    taken: list[Common] = []
    table = str(next(paths.tuning_db_dir().glob("**/forward.jsonl")))

    @click.command()
    @common_options
    def command(common: Common) -> None:
        taken.append(common)

    command.main(
        ["--db", "x.sqlite", "--table", table, "--device", "cpu", "--json", "--seed", "7"], standalone_mode=False
    )

    assert taken == [Common(db="x.sqlite", table=table, device="cpu", json=True, seed=7)]


def test_verbosity_sets_the_level_of_the_log() -> None:
    @click.command()
    @common_options
    def command(common: Common) -> None:
        pass

    command.main(["-vv"], standalone_mode=False)

    assert logging.getLogger("autoflash").level == logging.DEBUG


def test_an_unknown_log_level_is_a_usage_error(monkeypatch: pytest.MonkeyPatch) -> None:
    @click.command()
    @common_options
    def command(common: Common) -> None:
        pass

    monkeypatch.setenv("AUTOFLASH_LOG", "loud")

    outcome = CliRunner().invoke(command, [])

    assert outcome.exit_code == 2
    assert "AUTOFLASH_LOG must be one of DEBUG" in outcome.output


def test_a_command_retells_its_options() -> None:
    @click.command(cls=Retold)
    @click.option("--quick", is_flag=True)
    @click.option("--causal/--full", default=None)
    @click.option("--window", type=Window())
    @click.option("--seqlen", type=int, multiple=True)
    @click.option("--out")
    def command(**values: object) -> None:
        click.echo(" ".join(Retold.words(click.get_current_context(), leave_out=("out",))))

    given = ["--seqlen=1", "--full", "--out", "folder", "--window", "15,0", "--seqlen", "2"]

    assert CliRunner().invoke(command, given).output.strip() == "--seqlen 1 --seqlen 2 --full --window 15,0"
    assert CliRunner().invoke(command, []).output.strip() == ""
