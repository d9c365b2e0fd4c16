"""What a call allocates from torch for itself, beside its outputs, and gives back when it is done.

The formula of each family stands beside its allocations; :func:`autoflash.runtime.bind.workspace` asks the right one.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Buffer:
    """Memory of a call.

    Attributes:
        name: What lies in it.
        size_bytes: How large it is while the call needs the most.
    """

    name: str
    size_bytes: int


Workspace = tuple[Buffer, ...]
"""All of it; empty for a kernel that needs none."""


def total_bytes(workspace: Workspace) -> int:
    """The most that the call holds at once."""
    return sum(buffer.size_bytes for buffer in workspace)
