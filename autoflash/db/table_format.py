"""Decisions as text: one JSON table with a checksum, or JSON lines with a digest each.

Equal decisions give equal bytes, whatever database they come from: no ids, no clock, one order. Reading checks every
field and runs no code. The module lies beside the database, for dispatch reads tables too; it needs neither SQL nor
torch.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from importlib import metadata
from typing import TypeAlias, cast

from autoflash import keys
from autoflash.db.table_fields import Fields, decision_of
from autoflash.errors import TableError
from autoflash.keys import Json
from autoflash.problem import Cell, Parallelism, features_text
from autoflash.trial import Decision, Environment, Ranked

FORMAT = "autoflash-table"
SCHEMA = 1

_Content: TypeAlias = dict[str, Json]
_PARALLELISM = list(Parallelism)


def table_text(decisions: Iterable[Decision]) -> str:
    """A table of decisions, which :func:`read_table` reads back.

    The layout is for reviewers: a line for each cell, environment and ranked variant.

    Raises:
        ValueError: for two decisions of one cell and environment, or a number that JSON does not have.
    """
    contents = [_content(decision) for decision in _sorted(decisions)]
    version = _version()
    lines = [
        "{",
        f' "format": {keys.canonical_json(FORMAT)},',
        f' "schema": {SCHEMA},',
        f' "autoflash": {keys.canonical_json(version)},',
        f' "checksum": {keys.canonical_json(_checksum(version, contents))},',
        ' "decisions": [',
        *_separated(["\n".join(_reviewable(content)) for content in contents]),
        " ]",
        "}",
    ]
    return "\n".join(lines) + "\n"


def lines_text(decisions: Iterable[Decision]) -> str:
    """One decision a line, for files that are kept in a repository and merged line by line.

    Raises:
        ValueError: as :func:`table_text`.
    """
    lines = []
    for decision in _sorted(decisions):
        content = _content(decision)
        lines.append(keys.canonical_json({**content, "digest": keys.key("decision", content)}))
    return "".join(f"{line}\n" for line in lines)


def read_table(text: str) -> list[Decision]:
    """Read either form. Decisions of foreign devices are returned too: each carries its environment.

    Raises:
        TableError: for damaged text, an unknown schema, a wrong checksum or digest, or a field that is not what it
            should be, which the message names.
    """
    first = text.lstrip().partition("\n")[0]
    if not first:
        raise TableError("the table is empty")
    try:
        whole = _parsed(text if first.strip() == "{" or "\n" not in text.strip() else first, "the table")
    except TableError as error:
        raise TableError(f"not a tuning table: {error}") from error
    if isinstance(whole, dict) and "digest" in whole:
        decisions = [_read_line(line, number) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    else:
        decisions = _read_whole(_parsed(text, "the table"))
    _refuse_doubles(decisions, TableError)
    return decisions


def _read_whole(document: object) -> list[Decision]:
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise TableError("not a tuning table: it does not say that its format is autoflash-table")
    fields = Fields("the table", document)
    schema = document.get("schema")
    if schema != SCHEMA or isinstance(schema, bool):
        raise TableError(
            f"the table has schema {schema!r}, this autoflash reads {SCHEMA}; use the version that wrote it or upgrade"
        )
    fields.only("format", "schema", "autoflash", "checksum", "decisions")
    rows = fields.sequence("decisions")
    expected = _checksum(fields.text("autoflash"), cast("Sequence[Json]", rows))
    if fields.text("checksum") != expected:
        raise TableError(
            f"the checksum of the table is {document['checksum']!r}, its content gives {expected!r}: "
            "it was damaged or edited; export it again"
        )
    return [decision_of(f"decisions[{index}]", row) for index, row in enumerate(rows)]


def _read_line(line: str, number: int) -> Decision:
    where = f"line {number}"
    row = _parsed(line, where)
    if not isinstance(row, dict):
        raise TableError(f"{where} is not a JSON object")
    content = {name: value for name, value in row.items() if name != "digest"}
    if row.get("digest") != keys.key("decision", content):
        raise TableError(f"{where}: its digest is not that of its content: it was damaged or edited; export it again")
    return decision_of(where, content)


def _parsed(text: str, where: str) -> object:
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise TableError(f"{where} is not JSON: {error}") from error


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a number")


def _sorted(decisions: Iterable[Decision]) -> list[Decision]:
    found = sorted(decisions, key=lambda decision: (_rank_of(decision.environment), _order_of(decision.cell)))
    _refuse_doubles(found, ValueError)
    return found


def _refuse_doubles(decisions: Sequence[Decision], error: type[ValueError]) -> None:
    seen: set[tuple[str, str]] = set()
    for decision in decisions:
        identity = decision.cell.key, decision.environment.key
        if identity in seen:
            raise error(f"there are two decisions for {decision.cell} on {decision.environment.device_name}")
        seen.add(identity)


def _rank_of(environment: Environment) -> tuple[str | int, ...]:
    return tuple(environment.identity().values())


def _order_of(cell: Cell) -> tuple[str | int, ...]:
    return (
        cell.op.value,
        cell.dtype.value,
        cell.tf32,
        cell.head_dim,
        cell.head_dim_v,
        cell.mask.value,
        features_text(cell.features),
        cell.window_bucket,
        cell.deterministic,
        cell.group,
        cell.q_bucket,
        cell.k_bucket,
        _PARALLELISM.index(cell.parallelism),
    )


def _content(decision: Decision) -> _Content:
    """What a decision says, without what only one database knows."""
    return {
        "cell": decision.cell.to_dict(),
        "choices": [_ranked_content(ranked) for ranked in decision.choices],
        "decided_at": decision.decided_at,
        "environment": dataclasses.asdict(decision.environment),
        "reason": decision.reason,
        "vendor": None if decision.vendor is None else _ranked_content(decision.vendor),
    }


def _ranked_content(ranked: Ranked) -> _Content:
    return {
        "median_us": float(ranked.median_us),
        "resources": None if ranked.resources is None else dataclasses.asdict(ranked.resources),
        "source_digest": ranked.source_digest,
        "variant": ranked.variant.to_dict(),
        # Only what passed the whole grid may enter a decision.
        "verification": {"level": "full", "worst_ratio": float(ranked.worst_ratio)},
    }


def _reviewable(content: Mapping[str, Json]) -> list[str]:
    """One decision over several lines."""
    choices = cast("list[Json]", content["choices"])
    return [
        "  {",
        *[
            f'   "{name}": {keys.canonical_json(content[name])},'
            for name in ("cell", "environment", "reason", "decided_at", "vendor")
        ],
        '   "choices": [',
        *_separated([f"    {keys.canonical_json(choice)}" for choice in choices]),
        "   ]",
        "  }",
    ]


def _separated(items: Sequence[str]) -> list[str]:
    return [f"{item}," for item in items[:-1]] + list(items[-1:])


def _checksum(version: str, rows: Sequence[Json]) -> str:
    try:
        return keys.key("table", {"autoflash": version, "decisions": rows, "table_schema": SCHEMA})
    except ValueError as error:
        raise TableError(f"the table holds a number that JSON does not have: {error}") from error


def _version() -> str:
    try:
        return metadata.version("autoflash")
    except metadata.PackageNotFoundError:
        # Run from a source tree that is not installed.
        return "unknown"
