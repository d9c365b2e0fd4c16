"""The roofline: how fast a device could do so many operations on so many bytes (Williams et al., CACM 52(4), 2009)."""

from __future__ import annotations

from dataclasses import dataclass

from autoflash.evaluate.peaks import Peak


@dataclass(frozen=True, slots=True, kw_only=True)
class Roofline:
    """Work and the limits of the device that does it.

    Attributes:
        flops: Floating point operations.
        bytes_moved: Between main memory and the chip.
        peak: Of the device.
    """

    flops: float
    bytes_moved: int
    peak: Peak

    @property
    def intensity(self) -> float | None:
        """Operations per byte; None where nothing is moved."""
        return self.flops / self.bytes_moved if self.bytes_moved else None

    @property
    def compute_us(self) -> float | None:
        """Microseconds that the operations take at peak rate; None where it is unknown."""
        return None if self.peak.tflops is None else self.flops / self.peak.tflops * 1e-6

    @property
    def memory_us(self) -> float | None:
        """Microseconds that the bytes take at peak bandwidth; None where it is unknown."""
        return None if self.peak.bandwidth_gb_s is None else self.bytes_moved / self.peak.bandwidth_gb_s * 1e-3

    @property
    def bound_us(self) -> float | None:
        """The longer of the two: no call takes less. None where either is unknown."""
        if self.compute_us is None or self.memory_us is None:
            return None
        return max(self.compute_us, self.memory_us)

    @property
    def limit(self) -> str | None:
        """``compute`` or ``memory``, whichever bounds; None where either is unknown."""
        if self.compute_us is None or self.memory_us is None:
            return None
        return "compute" if self.compute_us >= self.memory_us else "memory"

    @property
    def attainable_tflops(self) -> float | None:
        """The highest rate that the bound allows, in TFLOP/s; None where it is unknown or takes no time."""
        return self.flops / self.bound_us * 1e-6 if self.bound_us else None
