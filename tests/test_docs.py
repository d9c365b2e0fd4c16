"""The README says what there is, and what it says runs."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import click
import pytest

from autoflash.cli.application import COMMANDS, program

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def _blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


COMMAND_LINES = [
    shlex.split(line, comments=True)[1:]
    for block in _blocks("sh")
    for line in block.splitlines()
    if line.startswith("autoflash ")
]
# The script hands its options on.
COMMAND_LINES += [
    ["bench", *shlex.split(line, comments=True)[1:]]
    for block in _blocks("sh")
    for line in block.splitlines()
    if line.startswith("scripts/benchmark")
]


def _command(name: str) -> click.Command:
    command = program.get_command(click.Context(program), name)
    assert command is not None
    return command


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_has_help_and_is_in_the_readme(name: str) -> None:
    command = _command(name)

    assert command.help
    assert f"`autoflash {name}`" in README


@pytest.mark.parametrize("name", COMMANDS)
def test_each_option_has_help(name: str) -> None:
    options = [parameter for parameter in _command(name).params if isinstance(parameter, click.Option)]

    assert [option.opts for option in options if not option.help] == []


@pytest.mark.parametrize("name", COMMANDS)
def test_each_option_is_in_the_readme(name: str) -> None:
    options = [parameter for parameter in _command(name).params if isinstance(parameter, click.Option)]

    missing = [opt for option in options for opt in option.opts if opt.startswith("--") and opt not in README]
    assert missing in ([], ["--verbose"])


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_takes_the_common_options(name: str) -> None:
    taken = {opt for parameter in _command(name).params for opt in parameter.opts}

    assert {"--db", "--table", "--device", "--json", "--seed", "-v"} <= taken


@pytest.mark.parametrize("line", COMMAND_LINES, ids=" ".join)
def test_command_lines_of_the_readme_parse(line: list[str]) -> None:
    command = _command(line[0])

    command.make_context(line[0], line[1:])


@pytest.mark.parametrize("name", ["DB", "TABLE", "CACHE_DIR", "VENDOR", "LOG"])
def test_each_environment_variable_is_in_the_readme(name: str) -> None:
    assert f"`AUTOFLASH_{name}`" in README
    assert f'"AUTOFLASH_{name}"' in (ROOT / "autoflash" / "paths.py").read_text()


@pytest.mark.parametrize("code", _blocks("python"))
def test_python_of_the_readme_runs_on_a_cpu(code: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}

    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], env=environment, capture_output=True, text=True, timeout=300
    )

    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("path", ["scripts/quickstart", "scripts/test", "scripts/benchmark"])
def test_scripts_of_the_readme_can_be_run_and_say_what_they_do(path: str) -> None:
    script = ROOT / path

    assert os.access(script, os.X_OK)
    assert script.read_text().splitlines()[1].startswith("# ")
    assert subprocess.run(["bash", "-n", script]).returncode == 0


def test_readme_shows_code_then_shell_then_the_table_then_install() -> None:
    order = ["```python", "```sh", "<!-- benchmark table", "## Install"]

    positions = [README.index(part) for part in order]

    assert positions == sorted(positions)
