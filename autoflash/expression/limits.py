"""How large an expression may be, and what its numbers may be: nothing that people write comes near."""

from __future__ import annotations

CHARACTERS = 4096
"""Of its text."""
NODES = 256
"""Of its syntax tree, which is about one for each name, number and operator."""
DEPTH = 64
"""Of its syntax tree."""
PARAMETERS = 16
RANK = 4
"""Of a parameter."""
NAME = 32
"""Characters of a parameter's name."""
EXPONENT = 16
"""Of a whole power, either sign."""

INT_MIN, INT_MAX = -(2**31), 2**31 - 1
FLOAT_MAX = float.fromhex("0x1.fffffep+127")
"""Largest number of float32, in which kernels compute."""


def wrapped(value: int) -> int:
    """An integer as 32 bits hold it."""
    return (value - INT_MIN) % 2**32 + INT_MIN
