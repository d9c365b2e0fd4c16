"""How much memory a call's tensors hold, on any device and to the byte."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode


class LiveBytes(TorchDispatchMode):
    """Knows the most memory that the tensors made under it have held at once; a view holds none of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._held: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]  # torch's own
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and func._schema.returns[0].alias_info is None:
            storage = result.untyped_storage()
            self._held = {key: held for key, held in self._held.items() if not held[0].expired()}
            self._held[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
            self.peak = max(self.peak, sum(size for _, size in self._held.values()))
        return result


def peak_bytes(call: Callable[[], object]) -> int:
    """The most memory that a call's tensors held at once."""
    with LiveBytes() as live:
        call()
    return live.peak
