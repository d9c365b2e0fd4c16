"""Wall clock shared among the cells of a run."""

from __future__ import annotations

import time
from collections.abc import Callable

# The rest of a cell's share is for the full verification and the final comparison.
_SEARCH_SHARE = 0.7


class Budget:
    """Gives each cell an equal part of what is left when it begins, so that time saved by one goes to the others."""

    def __init__(self, seconds: float | None, cells: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._end = None if seconds is None else clock() + seconds
        self._cells_left = cells
        self._search_end: float | None = None

    def begin_cell(self) -> bool:
        """Begin the next cell; False where no time is left for it."""
        if self._end is not None:
            now = self._clock()
            if now >= self._end:
                return False
            self._search_end = now + _SEARCH_SHARE * (self._end - now) / max(1, self._cells_left)
        self._cells_left -= 1
        return True

    @property
    def may_search(self) -> bool:
        """Whether the cell may begin another trial."""
        return self._search_end is None or self._clock() < self._search_end
