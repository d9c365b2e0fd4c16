"""A module whose import takes a while in a worker, and none in the tests' own process."""

from __future__ import annotations

import sys
import time

if "pytest" not in sys.modules:
    time.sleep(3.0)


def answer() -> int:
    """What a request asks for."""
    return 42
