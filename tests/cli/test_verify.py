from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from autoflash.cli.application import INTERRUPTED, main
from autoflash.cli.verify_kernels import Selection, covering, kernels, structures
from autoflash.cli.verify_table import Row
from autoflash.device import Device
from autoflash.dispatch.buckets import cell_of
from autoflash.evaluate.worker import Failure, Worker
from autoflash.problem import DType, Form, Mask, Pass, Problem
from autoflash.runtime.bind import bind
from autoflash.runtime.executable import Executable
from autoflash.space import catalog
from autoflash.trial import Level, Status
from autoflash.variant import Choices, Family, Variant
from tests.cli.conftest import Filled
from tests.evaluate.candidates import Fails, Kernel
from tests.factories import make_device, make_problem, make_verification

Verified = dict[tuple[Pass, Family, DType], set[Choices]]

SMALL = ["--seqlen", "64", "--heads", "2", "--quick"]


@pytest.fixture(scope="module")
def everything() -> Verified:
    """Structures of causal attention that --all goes through on Hopper."""
    selection = Selection(
        family=None, features=("causal",), dtypes=(DType.BF16, DType.FP16), passes=(Pass.FORWARD, Pass.BACKWARD)
    )
    found: Verified = {}
    for problem, variant in kernels(make_device("sm_90"), selection):
        found.setdefault((problem.op, variant.family, problem.dtype), set()).add(variant.structure)
    return found


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

    (checked,) = run_json("verify", "--recorded")

    assert checked["variant"] == filled.winner.to_dict()
    assert levels == [Level.FULL]


def test_a_kernel_that_cannot_do_the_problem_is_no_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "--device", "cpu", *SMALL, "--head-dim", "16", "--head-dim-v", "32"]) == 0

    text = capsys.readouterr().out
    assert "cannot" in text
    assert "WRONG" not in text


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


def test_all_structures_and_features_are_measured_beside_torch_s_backends(run_json: Callable[..., Any]) -> None:
    restricted = ["--feature", "window", "--feature", "together_varlen", "--dtype", "fp32", "--head-dim", "32"]

    rows = run_json("verify", "--all", *restricted)

    assert [(row["form"], row["variant"]["structure"]["loop_order"]) for row in rows] == [
        (form, loop_order)
        for form in (
            "forward/full+window",
            "backward/full+window",
            "forward/causal+varlen+softcap+alibi+window+sinks+dropout",
            "backward/causal+varlen+softcap+alibi+window+sinks+dropout+alibi_gradient",
        )
        for loop_order in ("query_outer", "key_outer")
    ]
    assert {(row["dtype"], row["head_dim"]) for row in rows} == {("fp32", 32)}
    for row in rows:
        assert len(row["cases"]) == 2
        assert all(case["gate"] <= 1.0 for case in row["cases"])
    outputs = [[errors["output"] for errors in row["cases"][0]["errors"]] for row in rows]
    forwards, backwards = [["out"], ["out"]], [["dq", "dk", "dv"], ["dq", "dk", "dv"]]
    with_terms = [[*names, "dsinks", "dalibi_slopes"] for names in backwards]
    assert outputs == [*forwards, *backwards, *forwards, *with_terms]
    window, together = rows[0]["cases"][0]["errors"][0], rows[4]["cases"][0]["errors"][0]
    assert set(window["torch"]) == {"flash", "math", "plain"}
    assert window["ratio"] == window["kernel"] / min(window["torch"]["flash"], window["torch"]["math"])
    assert set(together["torch"]) == {"plain"}


def test_all_may_be_restricted_to_a_pass_a_family_and_the_defaults(
    run_json: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    few = [
        "--all",
        "--quick",
        "--pass",
        "forward",
        "--family",
        "torch_tiled",
        "--dtype",
        "bf16",
        "--feature",
        "softcap",
    ]

    (row,) = run_json("verify", *few)
    assert main(["verify", "--device", "cpu", *few]) == 0

    assert (row["form"], len(row["cases"])) == ("forward/full+softcap", 1)
    assert "113x203" in row["cases"][0]["case"]
    text = capsys.readouterr().out
    assert "forward/full+softcap/bf16/d64" in text
    assert "ratio" in text


@pytest.mark.parametrize("options", [["--softcap", "3"], ["--heads", "4"], ["--set", "block_m=64"], ["--recorded"]])
def test_options_that_all_does_not_look_at_are_refused(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "--device", "cpu", "--all", *options]) == 2

    assert options[0] in capsys.readouterr().err


def test_features_alone_name_no_problem(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "--device", "cpu", "--feature", "window"]) == 2

    assert "--all" in capsys.readouterr().err


def test_a_kernel_that_the_gate_rejects_is_an_error_of_all(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("autoflash.cli.verify_all.bind", lambda *_: Kernel("last key dropped"))
    few = ["--all", "--quick", "--pass", "forward", "--dtype", "fp32", "--feature", "full"]

    assert main(["verify", "--device", "cpu", *few]) == 1

    assert "WRONG" in capsys.readouterr().out


def test_a_kernel_that_raises_does_not_end_all(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("autoflash.cli.verify_all.bind", lambda *_: Fails())
    few = ["--all", "--quick", "--pass", "forward", "--dtype", "fp32", "--feature", "full", "--feature", "causal"]

    assert main(["verify", "--device", "cpu", *few]) == 1

    text = capsys.readouterr().out
    assert text.count("RuntimeError: an illegal memory access") == 2
    assert text.count("WRONG") == 2


def interrupting(after: int) -> Callable[..., Executable]:
    """A bind that gives so many executables before Ctrl-C is pressed."""
    left = iter(range(after))

    def bound(form: Form, variant: Variant, device: Device) -> Executable:
        if next(left, None) is None:
            raise KeyboardInterrupt
        return bind(form, variant, device)

    return bound


QUICK = ["--all", "--quick", "--pass", "forward", "--dtype", "fp32"]


def test_processes_find_what_one_finds_and_the_table_is_written(run_json: Callable[..., Any], tmp_path: Path) -> None:
    few = [*QUICK, "--feature", "full", "--feature", "causal"]
    file = tmp_path / "errors.md"

    rows = run_json("verify", *few, "--jobs", "2", "--out", str(file))

    assert rows == run_json("verify", *few)
    head, _, table = file.read_text().partition("\n\n| ")
    assert f"{len(rows)} kernels, 0 wrong" in head
    assert table.count("torch_tiled") == len(rows)


def test_a_kernel_that_takes_its_process_with_it_is_a_row_of_all(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def killed(self: Worker, function: object, timeout_s: float, *arguments: object) -> Failure:
        return Failure(status=Status.RUNTIME, detail="the worker was killed by SIGSEGV")

    monkeypatch.setattr(Worker, "call", killed)

    assert main(["verify", "--device", "cpu", *QUICK, "--feature", "full", "--jobs", "1"]) == 1

    assert "killed by SIGSEGV" in capsys.readouterr().out


def test_after_a_kernel_that_raised_the_next_begins_in_another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def raising(self: Worker, _: object, __: float, problem: Problem, variant: Variant, *___: object) -> Row:
        asked.append("kernel")
        return Row(problem=problem, variant=variant, reason="an illegal memory access", has_raised=True)

    monkeypatch.setattr(Worker, "call", raising)
    monkeypatch.setattr(Worker, "restart", lambda self: asked.append("new process"))

    main(["verify", "--device", "cpu", *QUICK, "--feature", "full", "--feature", "causal", "--jobs", "1"])

    assert asked[:4] == ["kernel", "new process"] * 2


def test_an_interrupted_run_shows_and_writes_what_it_has(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr("autoflash.cli.verify_all.bind", interrupting(after=1))
    file = tmp_path / "errors.md"

    code = main(["verify", "--device", "cpu", *QUICK, "--feature", "full", "--feature", "causal", "--out", str(file)])

    assert code == INTERRUPTED
    text = file.read_text()
    assert "1 kernels of 2 (it was stopped before the others), 0 wrong" in text
    assert text.count("| forward/full/fp32/d64") == 1
    shown = capsys.readouterr()
    assert "forward/full/fp32/d64" in shown.out
    assert "1 of 2 kernels were not verified" in shown.err


@pytest.mark.parametrize("jobs", [[], ["--jobs", "1"]])
def test_a_budget_begins_no_more_kernels_and_its_table_says_so(
    jobs: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    over = iter([False, True, True])
    monkeypatch.setattr("autoflash.cli.verify_all._is_over", lambda _: next(over))
    file = tmp_path / "errors.md"
    few = [*QUICK, "--feature", "full", "--feature", "causal", "--feature", "softcap"]

    code = main(["verify", "--device", "cpu", *few, "--budget", "1m", "--out", str(file), *jobs])

    assert code == 1
    assert "1 kernels of 3" in file.read_text()
    assert "2 of 3 kernels were not verified" in capsys.readouterr().err


def test_one_of_the_two_problems_and_the_gate_alone_may_be_asked(
    run_json: Callable[..., Any], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "errors.md"
    few = ["--all", "--pass", "forward", "--dtype", "fp32", "--feature", "full", "--case", "regular", "--bare"]

    rows = run_json("verify", *few, "--out", str(file))

    assert [[case["case"].split()[0] for case in row["cases"]] for row in rows] == [["384x384"], ["384x384"]]
    assert all(case["errors"] == [] and 0.0 < case["gate"] <= 1.0 for row in rows for case in row["cases"])
    head, _, table = file.read_text().partition("\n\n| ")
    command = "autoflash verify --all --feature full --dtype fp32 --pass forward --case regular --bare"
    assert f"`{command}`" in head
    assert "math" not in table.splitlines()[0]


@pytest.mark.parametrize(
    "option", [["--jobs", "2"], ["--out", "errors.md"], ["--budget", "5m"], ["--case", "regular"], ["--bare"]]
)
def test_options_of_all_alone_are_refused_without_it(option: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "--device", "cpu", *option]) == 2

    assert "--all" in capsys.readouterr().err


def test_every_structure_of_the_triton_family_has_one_variant() -> None:
    device = make_device("sm_90")
    cell = cell_of(make_problem(dtype=DType.BF16, seqlen_q=512), device)
    space = catalog.search_space(cell, device, Family.TRITON)

    variants = structures(space)

    assert {variant.structure for variant in variants} == {variant.structure for variant in space.variants()}
    assert len({variant.structure for variant in variants}) == len(variants)
    assert all(space.why_not(variant) is None for variant in variants)
    assert space.default() in variants


def test_with_features_every_choice_of_a_structure_is_verified_in_a_few() -> None:
    device = make_device("sm_90")
    cell = cell_of(make_problem(dtype=DType.BF16, seqlen_q=512).replace(softcap=5.0), device)
    space = catalog.search_space(cell, device, Family.TRITON)

    variants = covering(space)

    every = {choice for variant in space.variants() for choice in variant.structure.items()}
    assert {choice for variant in variants for choice in variant.structure.items()} == every
    assert variants[0].structure == space.default().structure
    assert len(variants) == 3
    assert covering(space, variants) == []


@pytest.mark.parametrize("op", Pass)
@pytest.mark.parametrize("head_dim", [40, 80, 96, 128, 192, 256])
def test_the_structures_of_all_are_those_of_any_head_dimension(op: Pass, head_dim: int, everything: Verified) -> None:
    device = make_device("sm_90")
    problem = make_problem(op=op, dtype=DType.BF16, head_dim=head_dim, mask=Mask.CAUSAL, seqlen_q=384)

    for family in catalog.families(op, device):
        space = catalog.search_space(cell_of(problem, device), device, family)
        assert {variant.structure for variant in structures(space)} <= everything[op, family, DType.BF16]


def test_in_fp16_every_choice_is_verified_at_the_head_dimensions_that_have_it(everything: Verified) -> None:
    names = [(op, family) for op, family, dtype in everything if dtype is DType.FP16]

    assert len(names) == 6
    for op, family in names:
        few, every = everything[op, family, DType.FP16], everything[op, family, DType.BF16]
        assert {one for each in few for one in each.items()} == {one for each in every for one in each.items()}
        assert len(few) < len(every) or family is Family.TORCH_TILED


def test_no_form_is_verified_twice_by_two_names() -> None:
    device = make_device("sm_90")
    names = ("alibi", "alibi_gradient", "bias", "bias_gradient", "score_mod", "params_gradient")
    selection = Selection(family=Family.TRITON, features=names, dtypes=(DType.BF16,), passes=tuple(Pass))

    chosen = list(kernels(device, selection))

    assert len({(Form.of(problem), variant) for problem, variant in chosen}) == len(chosen)
    assert len({Form.of(problem) for problem, _ in chosen}) == 3 + 6


@pytest.mark.parametrize("op", Pass)
def test_two_tiles_on_one_side_are_verified_at_head_dimensions_that_have_them(op: Pass) -> None:
    selection = Selection(family=Family.TRITON, features=("full",), dtypes=(DType.FP32,), passes=(op,))

    found = {
        (problem.head_dim, problem.head_dim_v): variant.structure["head_dim_tiles"]
        for problem, variant in kernels(make_device("sm_90"), selection)
        if "head_dim_tiles" in variant.structure
    }

    assert found == {(80, 80): "split", (192, 128): "split_qk", (128, 80): "split_v"}
