"""Rounding float32 to a 16-bit float, from the definition: neighbours on the format's grid, in exact arithmetic.

A magnitude x has spacing 2**(max(e, emin) - p + 1) for 2**e <= x < 2**(e+1). In units of that spacing the lower
neighbour is floor(x), the fraction is the probability of the upper one. All is exact in float64: float32 values and
powers of two are. Values above the largest finite one have the upper neighbour Inf, counted as 2**(emax + 1).
"""

import dataclasses
from fractions import Fraction

import numpy as np

DRAWS = 65536


@dataclasses.dataclass(frozen=True)
class Format:
    """A binary interchange format of 16 bits.

    Attributes:
      precision: bits of the significand, the hidden one included.
      emin: exponent of the least normal number.
      emax: exponent of the largest finite number.
    """

    precision: int
    emin: int
    emax: int

    @property
    def infinity(self) -> int:
        """The pattern of +Inf."""
        return (self.emax - self.emin + 2) << (self.precision - 1)


BFLOAT16 = Format(precision=8, emin=-126, emax=127)
FLOAT16 = Format(precision=11, emin=-14, emax=15)


def units(x, fmt):
    """|x| in units of its spacing, float64, and the exponent of the spacing, for finite float32 x."""
    magnitude = np.abs(np.asarray(x, np.float32).astype(np.float64))
    exponent = np.maximum(np.frexp(magnitude)[1] - 1, fmt.emin) - fmt.precision + 1
    exponent = np.where(magnitude == 0, fmt.emin - fmt.precision + 1, exponent)
    return np.ldexp(magnitude, -exponent), exponent


def pattern(count, exponent, negative, fmt):
    """The 16-bit pattern of ±count 2**exponent; Inf from 2**(emax + 1) on. Counts are integers up to 2**precision."""
    value = np.ldexp(np.asarray(count, np.float64), exponent)
    fraction, e = np.frexp(value)
    e = np.maximum(e - 1, fmt.emin)
    mantissa = np.ldexp(value, fmt.precision - 1 - e).astype(np.int64)
    # A normal mantissa has its hidden bit set, which adds one to the exponent field.
    bits = ((e - fmt.emin).astype(np.int64) << (fmt.precision - 1)) + mantissa
    bits = np.where(fraction == 0, 0, np.minimum(bits, fmt.infinity))
    return (bits | np.where(negative, 0x8000, 0)).astype(np.uint32)


def value(bits, fmt) -> Fraction:
    """The exact value of a 16-bit pattern, Inf counted as 2**(emax + 1)."""
    bits = int(bits)
    field, mantissa = (bits & 0x7FFF) >> (fmt.precision - 1), bits & ((1 << (fmt.precision - 1)) - 1)
    if field:
        mantissa += 1 << (fmt.precision - 1)
    magnitude = mantissa * Fraction(2) ** (max(field, 1) - 1 + fmt.emin - fmt.precision + 1)
    return -magnitude if bits & 0x8000 else magnitude


def neighbours(x, fmt):
    """For finite x the patterns of both neighbours and how many of 65,536 draws go to the one of larger magnitude.

    A draw r rounds up where the fraction plus r/65536 reaches one. Where x is representable both neighbours are x.
    """
    q, exponent = units(x, fmt)
    floor = np.floor(q)
    ups = np.floor((q - floor) * DRAWS).astype(np.int64)
    negative = np.signbit(np.asarray(x, np.float32))
    lower = pattern(floor, exponent, negative, fmt)
    upper = np.where(q == floor, lower, pattern(floor + 1, exponent, negative, fmt))
    return lower, upper, np.where(lower == upper, 0, ups)


def stochastic(x, r, fmt):
    """The pattern that draw r in [0, 65536) gives for finite x."""
    lower, upper, ups = neighbours(x, fmt)
    return np.where(np.asarray(r, np.int64) + ups >= DRAWS, upper, lower)


def nearest(x, fmt):
    """The pattern of the nearest representable value, ties to even, for finite x."""
    q, exponent = units(x, fmt)
    return pattern(np.rint(q), exponent, np.signbit(np.asarray(x, np.float32)), fmt)
