"""A clock that goes on only when a timed call says so: what a busy machine does to real ones is no part of a test."""

from __future__ import annotations

from collections.abc import Callable, Mapping


class Clock:
    """Stands for the ``time`` module of what is tested."""

    def __init__(self) -> None:
        self._now = 0.0

    def perf_counter(self) -> float:
        """Seconds."""
        return self._now

    def call(self, seconds: float, held_up: Mapping[int, float] | None = None) -> Callable[[], None]:
        """Something that takes so long.

        Args:
            seconds: Of each call.
            held_up: Seconds more of single calls, by their number; the first is 0.
        """
        count = 0

        def call() -> None:
            nonlocal count
            self._now += seconds + (held_up or {}).get(count, 0.0)
            count += 1

        return call
