"""The child's side of :mod:`autoflash.evaluate.worker`: read a request, run it, answer. Nothing else."""

from __future__ import annotations

import ctypes
import importlib
import os
import pickle
import signal
import struct
import sys
import traceback

HEADER = struct.Struct("!Q")
"""Length of the pickle that follows."""

_PR_SET_PDEATHSIG = 1


def main(requests: int, replies: int, parent: int) -> None:
    """Serve until the parent closes its end or dies.

    Args:
        requests: File descriptor that pickled ``(function, arguments)`` come from.
        replies: File descriptor for pickled ``(succeeded, value or reason)``; nothing else ever writes there.
        parent: Its process id.
    """
    _die_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with os.fdopen(requests, "rb") as source, os.fdopen(replies, "wb") as sink:
        while header := source.read(HEADER.size):
            if len(header) < HEADER.size:
                return
            content = _answer(source.read(HEADER.unpack(header)[0]))
            sink.write(HEADER.pack(len(content)) + content)
            sink.flush()


def import_module(name: str) -> None:
    """Import a module that later requests need."""
    importlib.import_module(name)


def _answer(request: bytes) -> bytes:
    try:
        function, arguments = pickle.loads(request)
        return pickle.dumps((True, function(*arguments)))
    except Exception as error:
        # A bug of ours or a result that cannot travel: the parent decides what it means.
        traceback.print_exc()
        return pickle.dumps((False, f"{type(error).__name__}: {error}"))


def _die_with(parent: int) -> None:
    """Ask the kernel for SIGKILL when the parent is gone: end of input is not seen inside a hanging kernel."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(1)
