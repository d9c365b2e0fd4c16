"""A thread block: roles that take turns at random, barriers with phases, a copy engine that finishes in any order."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, field


class EmulationError(AssertionError):
    """What would hang, or be undefined, on a device."""


@dataclass(eq=False)
class Barrier:
    """An mbarrier: a phase is complete when all have arrived and all announced bytes have.

    Attributes:
        arrivals: That each phase waits for.
        on_complete: Called at the end of each phase.
    """

    arrivals: int = 0
    on_complete: Callable[[], object] | None = None
    phase: int = 0
    pending: int = 0
    missing_bytes: int = 0

    def init(self, arrivals: int) -> None:
        """Begin the first phase."""
        self.arrivals = self.pending = arrivals

    def arrive(self, count: int = 1) -> None:
        """Count arrivals of the current phase."""
        self.pending -= count
        if self.pending < 0:
            raise EmulationError("more arrivals than a phase waits for")
        self._finish()

    def expect(self, size: int) -> None:
        """Arrive, and announce bytes."""
        self.missing_bytes += size
        self.arrive()

    def receive(self, size: int) -> None:
        """Bytes have come."""
        self.missing_bytes -= size
        self._finish()

    def has_completed(self, parity: int) -> bool:
        """Whether the phase of this parity is over: the one before the first counts as such."""
        return (self.phase & 1) != parity

    def _finish(self) -> None:
        if self.pending == 0 and self.missing_bytes == 0:
            self.phase += 1
            self.pending = self.arrivals
            if self.on_complete is not None:
                self.on_complete()


@dataclass(eq=False)
class _Role:
    thread: threading.Thread | None = None
    is_ready: Callable[[], bool] = field(default=lambda: True)
    is_done: bool = False


class Machine:
    """Runs the roles of one thread block, one at a time; who goes on at a barrier is drawn."""

    def __init__(self, seed: int) -> None:
        """Nothing runs yet."""
        self._random = random.Random(seed)
        self._turn = threading.Condition()
        self._roles: list[_Role] = []
        self._current: _Role | None = None
        self._copies: list[Callable[[], object]] = []
        self._error: BaseException | None = None

    def run(self, roles: list[Callable[[], object]]) -> None:
        """Run all roles to their ends.

        Raises:
            EmulationError: where none can go on.
        """
        self._roles = [_Role() for _ in roles]
        for role, body in zip(self._roles, roles, strict=True):
            role.thread = threading.Thread(target=self._body, args=(role, body), daemon=True)
            role.thread.start()
        with self._turn:
            self._pass_on()
        for role in self._roles:
            assert role.thread is not None
            role.thread.join()
        if self._error is not None:
            raise self._error
        while self._copies:
            self._copies.pop()()

    def copy(self, copy: Callable[[], object]) -> None:
        """Have the copy engine do something, at any time."""
        self._copies.append(copy)

    def wait(self, is_ready: Callable[[], bool] = lambda: True) -> None:
        """Let others run, and go on once something holds."""
        role = next(role for role in self._roles if role.thread is threading.current_thread())
        with self._turn:
            role.is_ready = is_ready
            self._pass_on()
            self._await_turn(role)

    def _body(self, role: _Role, body: Callable[[], object]) -> None:
        try:
            with self._turn:
                self._await_turn(role)
            body()
        except BaseException as error:  # it is raised again by run
            self._error = self._error or error
        with self._turn:
            role.is_done = True
            self._pass_on()

    def _await_turn(self, role: _Role) -> None:
        while self._current is not role and self._error is None:
            self._turn.wait()
        if self._error is not None:
            raise self._error
        role.is_ready = lambda: True

    def _pass_on(self) -> None:
        while self._error is None:
            able = [role for role in self._roles if not role.is_done and role.is_ready()]
            choice = self._random.randrange(len(able) + len(self._copies)) if able or self._copies else None
            if choice is None:
                if not all(role.is_done for role in self._roles):
                    self._error = EmulationError("no role can go on: they wait for each other")
                break
            if choice < len(able):
                self._current = able[choice]
                break
            self._copies.pop(choice - len(able))()
        self._turn.notify_all()
