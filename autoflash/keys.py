"""The one place where identities are made: canonical JSON, a schema number, sha256."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence

KEY_SCHEMA = 1
"""Raised whenever the meaning of a keyed field changes; old keys then simply never match."""

Json = str | int | float | bool | None | Sequence["Json"] | Mapping[str, "Json"]


def canonical_json(content: Json) -> str:
    """Sorted, compact, ASCII JSON: equal content gives equal text on every machine.

    Raises:
        ValueError: for NaN or infinity, which JSON does not have.
    """
    return json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def digest(text: str) -> str:
    """First 16 hex digits of the sha256 of a text."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def key(kind: str, content: Json) -> str:
    """Identity of a noun: 16 hex digits over its kind, the key schema and its canonical JSON."""
    return digest(canonical_json({"kind": kind, "schema": KEY_SCHEMA, "content": content}))
