"""Where things lie, and what happens where they may not lie."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import pytest
import torch

import autoflash
from autoflash import paths


def test_what_the_user_passes_wins_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOFLASH_DB", "from-environment.sqlite")

    assert paths.database_url("given.sqlite") == "given.sqlite"
    assert paths.database_url() == "from-environment.sqlite"


def test_templates_and_tables_are_found_in_a_checkout() -> None:
    assert (paths.templates_dir() / "README.md").is_file()
    assert (paths.tuning_db_dir() / "README.md").is_file()


def test_a_cache_folder_that_can_be_written_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOFLASH_CACHE_DIR", str(tmp_path / "new" / "cache"))

    assert paths.writable_cache_dir() == tmp_path / "new" / "cache"


@pytest.mark.skipif(sys.platform != "linux", reason="/proc takes no folders on Linux")
def test_case_a23_attention_works_without_a_writable_cache_and_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("AUTOFLASH_CACHE_DIR", "/proc/autoflash")
    paths._writable.cache_clear()
    q = torch.randn(1, 2, 37, 16)

    with caplog.at_level(logging.WARNING, logger="autoflash"):
        first = autoflash.attention(q, q, q, vendor="never")
        paths.writable_cache_dir()

    assert torch.allclose(first, autoflash.reference.attention(q, q, q).float(), atol=1e-5)
    said = [record.message for record in caplog.records if "/proc/autoflash" in record.message]
    assert len(said) == 1
    assert "AUTOFLASH_CACHE_DIR" in said[0]
