"""Device functions that printed expressions call, as text: what Triton lacks, or does otherwise than torch."""

from __future__ import annotations

from collections.abc import Collection

from autoflash.expression import limits

_TANH = '''@triton.jit
def hyperbolic_tangent(x):
    """Hyperbolic tangent to float32's precision, of float32."""
    # Near 0 the difference of 1 and a number close to 1 has few bits left: there, a polynomial in x * x.
    square = x * x
    small = -5.70498872745e-3
    small = small * square + 2.06390887954e-2
    small = small * square - 5.37397155531e-2
    small = small * square + 1.33314422036e-1
    small = small * square - 3.33332819422e-1
    # 2 log2(e): exp2 of it all may be inf or 0, and the quotient is right for both.
    large = 1.0 - 2.0 / (1.0 + tl.exp2(x * 2.8853900817779268))
    return tl.where(square < 0.390625, x + x * square * small, large)'''

_FLOOR = '''@triton.jit
def whole_below(x):
    """The largest integer not above x, int32: the nearest that float32 holds of what is beyond, 0 for NaN."""
    # 2**31 - 128, the last float32 before 2**31.
    bounded = tl.minimum(tl.maximum(tl.floor(x), -2147483648.0), 2147483520.0)
    return tl.where(x == x, bounded, 0.0).to(tl.int32)'''

_FLOOR_DIVIDE = '''@triton.jit
def floor_divide(x, y):
    """x // y as in Python, of int32; 0 where y is 0. Triton rounds towards 0."""
    # The least integer has no opposite, and a processor may refuse to divide it by -1.
    is_regular = (y != 0) & (y != -1)
    divisor = tl.where(is_regular, y, 1)
    quotient = x // divisor
    rest = x - quotient * divisor
    quotient -= ((rest != 0) & ((rest < 0) != (divisor < 0))).to(tl.int32)
    return tl.where(is_regular, quotient, x * y)'''


def _look_up(rank: int) -> str:
    axes = range(rank)
    fields = [f"    {kind}_{axis}: tl.tensor" for kind in ("size", "stride") for axis in axes]
    indices = ", ".join(f"index_{axis}" for axis in axes)
    inside = [f"(index_{axis} >= 0) & (index_{axis} < table.size_{axis})" for axis in axes]
    places = [f"index_{axis}.to(tl.int64) * table.stride_{axis}" for axis in axes]
    return "\n".join(
        [
            f"class Table{rank}(NamedTuple):",
            f'    """A tensor of rank {rank}."""',
            "",
            "    base: tl.tensor",
            *fields,
            "",
            "",
            "@triton.jit",
            f"def look_up_{rank}(table, {indices}):",
            '    """Elements at int32 indices, which broadcast; 0 where one lies outside."""',
            f"    inside = {inside[0]}",
            *(f"    inside = inside & {condition}" for condition in inside[1:]),
            f"    pointers = table.base + {places[0]}",
            *(f"    pointers = pointers + {place}" for place in places[1:]),
            "    return tl.load(pointers, mask=inside, other=0)",
        ]
    )


_DEFINITIONS = {
    **{f"look_up_{rank}": _look_up(rank) for rank in range(1, limits.RANK + 1)},
    "floor_divide": _FLOOR_DIVIDE,
    "hyperbolic_tangent": _TANH,
    "whole_below": _FLOOR,
}


def definitions(names: Collection[str]) -> list[str]:
    """Text of the functions of these names, always in the same order.

    Raises:
        KeyError: for a name that no function has.
    """
    unknown = set(names) - set(_DEFINITIONS)
    if unknown:
        raise KeyError(f"no device function {sorted(unknown)}")
    return [text for name, text in _DEFINITIONS.items() if name in names]
