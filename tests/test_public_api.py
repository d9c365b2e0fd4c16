"""The names that users may rely on."""

from __future__ import annotations

import inspect
from importlib import metadata
from pathlib import Path

import pytest

import autoflash
from autoflash import errors
from autoflash.db.repository import Repository
from autoflash.db.table_format import table_text
from autoflash.ops import CALLS
from tests.factories import make_decision


def test_every_public_name_is_there() -> None:
    for name in autoflash.__all__:
        assert getattr(autoflash, name) is not None


@pytest.mark.parametrize(
    "name",
    ["attention", "block_mask", "explain", "warmup", "tune", "export_table", "import_table", "freeze", "reference"],
)
def test_the_promised_names_are_public(name: str) -> None:
    assert name in autoflash.__all__


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'atention'"):
        autoflash.atention  # noqa: B018


def test_the_version_is_that_of_the_distribution() -> None:
    try:
        expected = metadata.version("autoflash")
    except metadata.PackageNotFoundError:
        pytest.skip("autoflash runs from its source tree and is not installed")
    assert autoflash.__version__ == expected


def test_attention_has_the_promised_signature() -> None:
    parameters = inspect.signature(autoflash.attention).parameters

    assert list(parameters) == [
        "query",
        "key",
        "value",
        "causal",
        "window",
        "mask",
        "bias",
        "alibi_slopes",
        "softcap",
        "sinks",
        "score_mod",
        "mask_mod",
        "score_params",
        "block_mask",
        "dropout_p",
        "scale",
        "layout",
        "return_lse",
        "deterministic",
        "vendor",
    ]
    assert all(parameters[name].kind is inspect.Parameter.KEYWORD_ONLY for name in list(parameters)[3:])


@pytest.mark.parametrize(
    "function", ["attention", "block_mask", "explain", "warmup", "tune", "export_table", "import_table", "freeze"]
)
def test_every_public_function_documents_its_arguments(function: str) -> None:
    documented = getattr(autoflash, function)
    text = inspect.getdoc(documented) or ""

    missing = [name for name in inspect.signature(documented).parameters if f"{name}:" not in text]

    assert missing == []


def test_errors_are_builtin_kinds_too() -> None:
    assert issubclass(errors.InvalidProblemError, ValueError)
    assert issubclass(errors.UnsupportedError, NotImplementedError)
    assert issubclass(errors.NoKernelError, RuntimeError)


def test_a_table_goes_out_of_one_database_and_into_another(tmp_path: Path) -> None:
    first, second = str(tmp_path / "first.sqlite"), str(tmp_path / "second.sqlite")
    with Repository.open(first) as repository:
        repository.save_decision(make_decision())

    text = autoflash.export_table(tmp_path / "table.json", database=first)
    summary = autoflash.import_table(tmp_path / "table.json", database=second)

    assert summary.added == 1
    assert (tmp_path / "table.json").read_text() == text
    assert autoflash.export_table(database=second) == text


def test_importing_a_table_changes_what_is_dispatched(tmp_path: Path) -> None:
    (tmp_path / "table.json").write_text(table_text([make_decision(reason="imported")]))
    known = CALLS.resolver

    autoflash.import_table(tmp_path / "table.json")

    assert CALLS.resolver is not known
    assert "imported" in {decision.reason for decision in CALLS.resolver.table.decisions()}
