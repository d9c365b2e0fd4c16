"""What this process is trying, kept from others until it is done."""

from __future__ import annotations

import logging
import threading
from types import TracebackType

from autoflash.db.claim import Claim
from autoflash.errors import DatabaseError
from autoflash.problem import Cell
from autoflash.search.records import Records
from autoflash.variant import Variant

_LOG = logging.getLogger("autoflash")
# A small part of the time after which a claim ends by itself.
_HEARTBEAT_S = 20.0


class Claims:
    """The claims that this process holds.

    A thread renews them: behind other processes, a trial may wait for the device longer than a claim lives.
    """

    def __init__(self, records: Records, *, heartbeat_s: float = _HEARTBEAT_S) -> None:
        self._records = records
        self._heartbeat_s = heartbeat_s
        self._held: set[Claim] = set()
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="claims", daemon=True)

    def __enter__(self) -> Claims:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()

    def take(self, cell: Cell, variant: Variant) -> Claim | None:
        """Claim a trial; None where it is finished, or a live process has claimed it."""
        claim = self._records.claim(cell, variant)
        if claim is not None:
            with self._lock:
                self._held.add(claim)
        return claim

    def release(self, claim: Claim) -> None:
        """Give a claim back."""
        with self._lock:
            self._held.discard(claim)
        claim.release()

    def _renew(self) -> None:
        while not self._ended.wait(self._heartbeat_s):
            with self._lock:
                held = list(self._held)
            try:
                for claim in held:
                    claim.heartbeat()
            except DatabaseError as error:
                # The next beat may come through; if none does, the trial in flight cannot be recorded either.
                _LOG.warning("autoflash: claims are not renewed: %s", error)
