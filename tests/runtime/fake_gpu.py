"""A GPU that only writes down what it is asked to do, behind Triton's driver and torch's CUDA functions."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

STREAM = 77
FUNCTION = 4242


@dataclass
class FakeGpu:
    """What was loaded, encoded and launched.

    Attributes:
        signatures: Of the launchers made, in order.
        encoded: Arguments of each encoding of a tensor map.
        launches: Arguments of each launch.
        entered: Devices that were made current.
        current: The current device.
    """

    signatures: list[list[str]] = field(default_factory=list)
    encoded: list[tuple[Any, ...]] = field(default_factory=list)
    launches: list[tuple[Any, ...]] = field(default_factory=list)
    entered: list[int] = field(default_factory=list)
    current: int = 0
    max_threads: int = 1024

    def launcher(self, source: Any, metadata: Any) -> Any:
        assert metadata.tensordesc_meta is None
        assert not source.constants
        self.signatures.append(list(source.signature.values()))
        return lambda *arguments: self.launches.append(arguments)

    def load_binary(self, name: str, kernel: bytes, shared: int, device: int) -> tuple[int, int, int, int, int]:
        assert kernel.startswith(b"\x7fELF")
        return 1, FUNCTION, 100, 3, self.max_threads

    def encode(self, *arguments: Any) -> str:
        self.encoded.append(arguments)
        return f"map{len(self.encoded)}"

    @contextlib.contextmanager
    def make_current(self, index: int) -> Iterator[None]:
        before, self.current = self.current, index
        self.entered.append(index)
        yield
        self.current = before
