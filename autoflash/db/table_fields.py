"""Strict reading of a table's fields: each error names the field and what it holds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import cast

from autoflash.errors import TableError
from autoflash.problem import Cell, Feature
from autoflash.trial import Decision, Environment, Ranked, Resources
from autoflash.variant import Family, Variant

_LONGEST_BUCKET = 63


class Fields:
    """One JSON object, with the place where it stands."""

    def __init__(self, where: str, value: object) -> None:
        """Wrap an object.

        Raises:
            TableError: when it is none.
        """
        if not isinstance(value, dict):
            raise TableError(f"{where} must be an object, got {value!r}")
        self.where = where
        self._values: dict[str, object] = value

    def only(self, *names: str) -> None:
        """Refuse missing and unknown fields."""
        missing = sorted(set(names) - set(self._values))
        unknown = sorted(set(self._values) - set(names))
        if missing:
            raise TableError(f"{self.where} lacks the field {missing[0]!r}")
        if unknown:
            raise TableError(f"{self.where} has the unknown field {unknown[0]!r}")

    def at(self, name: str) -> str:
        """Place of a field."""
        return f"{self.where}.{name}"

    def has(self, name: str) -> bool:
        """Whether there is such a field."""
        return name in self._values

    def get(self, name: str) -> object:
        """Any value."""
        if name not in self._values:
            raise TableError(f"{self.where} lacks the field {name!r}")
        return self._values[name]

    def text(self, name: str) -> str:
        """A string."""
        value = self.get(name)
        if not isinstance(value, str):
            raise TableError(f"{self.at(name)} must be a string, got {value!r}")
        return value

    def count(self, name: str, least: int = 0) -> int:
        """An integer."""
        value = self.get(name)
        if type(value) is not int or value < least:
            raise TableError(f"{self.at(name)} must be an integer of at least {least}, got {value!r}")
        return value

    def number(self, name: str, *, positive: bool) -> float:
        """A finite number that is not negative."""
        value = self.get(name)
        if type(value) not in (int, float):
            raise TableError(f"{self.at(name)} must be a number, got {value!r}")
        number = float(cast("float", value))
        if not math.isfinite(number) or number < 0.0 or (positive and number == 0.0):
            raise TableError(
                f"{self.at(name)} must be finite and {'positive' if positive else 'not negative'}, got {value!r}"
            )
        return number

    def sequence(self, name: str) -> Sequence[object]:
        """A list."""
        value = self.get(name)
        if not isinstance(value, list):
            raise TableError(f"{self.at(name)} must be a list, got {value!r}")
        return value


def decision_of(where: str, value: object) -> Decision:
    """Read one decision.

    Raises:
        TableError: naming the field that is wrong.
    """
    fields = Fields(where, value)
    fields.only("cell", "choices", "decided_at", "environment", "reason", "vendor")
    choices = tuple(
        _ranked_of(f"{fields.at('choices')}[{index}]", entry) for index, entry in enumerate(fields.sequence("choices"))
    )
    vendor = fields.get("vendor")
    if not choices and vendor is None:
        raise TableError(f"{where} has neither choices nor a vendor kernel")
    if any(ranked.variant.family is Family.VENDOR for ranked in choices):
        raise TableError(f"{fields.at('choices')} holds a vendor kernel; its place is the field 'vendor'")
    return Decision(
        cell=_cell_of(fields.at("cell"), fields.get("cell")),
        environment=_environment_of(fields.at("environment"), fields.get("environment")),
        choices=choices,
        vendor=None if vendor is None else _ranked_of(fields.at("vendor"), vendor),
        reason=fields.text("reason"),
        decided_at=_time_of(fields, "decided_at"),
    )


def _cell_of(where: str, value: object) -> Cell:
    fields = Fields(where, value)
    try:
        cell = Cell.from_dict(cast("dict[str, str | int | bool]", value))
    except (ValueError, KeyError, TypeError) as error:
        raise TableError(f"{where}: {error}") from error
    for name in ("head_dim", "head_dim_v", "group"):
        fields.count(name, least=1)
    # Plain cells name neither features nor a window.
    if fields.has("features") and not cell.features:
        raise TableError(f"{fields.at('features')} must name a feature, or be absent")
    for name in ("q_bucket", "k_bucket", *(("window_bucket",) if cell.features else ())):
        if fields.count(name) > _LONGEST_BUCKET:
            raise TableError(f"{fields.at(name)} must be at most {_LONGEST_BUCKET}, got {fields.get(name)!r}")
    if cell.window_bucket > max(1, cell.k_bucket):
        raise TableError(
            f"{fields.at('window_bucket')} must be at most k_bucket {cell.k_bucket}, got {cell.window_bucket}"
        )
    if cell.window_bucket and Feature.WINDOW not in cell.features:
        raise TableError(f"{fields.at('window_bucket')} must be 0 without a window, got {cell.window_bucket}")
    return cell


def _environment_of(where: str, value: object) -> Environment:
    fields = Fields(where, value)
    fields.only(
        "device_kind",
        "device_name",
        "arch",
        "multiprocessors",
        "shared_bytes",
        "triton",
        "torch",
        "driver",
        "cuda",
    )
    return Environment(
        device_kind=fields.text("device_kind"),
        device_name=fields.text("device_name"),
        arch=fields.text("arch"),
        multiprocessors=fields.count("multiprocessors"),
        shared_bytes=fields.count("shared_bytes"),
        triton=fields.text("triton"),
        torch=fields.text("torch"),
        driver=fields.text("driver"),
        cuda=fields.text("cuda"),
    )


def _ranked_of(where: str, value: object) -> Ranked:
    fields = Fields(where, value)
    fields.only("median_us", "resources", "source_digest", "variant", "verification")
    verification = Fields(fields.at("verification"), fields.get("verification"))
    verification.only("level", "worst_ratio")
    if verification.text("level") != "full":
        raise TableError(f"{verification.at('level')} must be 'full', got {verification.text('level')!r}")
    return Ranked(
        variant=_variant_of(fields.at("variant"), fields.get("variant")),
        source_digest=fields.text("source_digest"),
        median_us=fields.number("median_us", positive=True),
        worst_ratio=verification.number("worst_ratio", positive=False),
        resources=_resources_of(fields.at("resources"), fields.get("resources")),
    )


def _variant_of(where: str, value: object) -> Variant:
    Fields(where, value).only("family", "structure", "config")
    try:
        return Variant.from_dict(cast("Mapping[str, object]", value))
    except (ValueError, KeyError, TypeError) as error:
        raise TableError(f"{where}: {error}") from error


def _resources_of(where: str, value: object) -> Resources | None:
    if value is None:
        return None
    fields = Fields(where, value)
    fields.only("shared_bytes", "registers", "spill_bytes")
    return Resources(
        shared_bytes=fields.count("shared_bytes"),
        registers=fields.count("registers"),
        spill_bytes=fields.count("spill_bytes"),
    )


def _time_of(fields: Fields, name: str) -> str:
    """A UTC time in ISO 8601, or empty."""
    text = fields.text(name)
    try:
        is_utc = not text or datetime.fromisoformat(text).utcoffset() == timedelta(0)
    except ValueError:
        is_utc = False
    if not is_utc:
        raise TableError(f"{fields.at(name)} must be a UTC time such as 2026-01-31T12:00:00+00:00, got {text!r}")
    return text
