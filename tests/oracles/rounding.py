"""Rounding float32 to a shorter float, from the definition: neighbours on the format's grid, in exact arithmetic.

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
    """A binary floating-point format.

    Attributes:
      precision: bits of the significand, the hidden one included.
      emin: exponent of the least normal number.
      emax: exponent of the largest finite number.
      width: of its patterns.
      largest: the pattern of the largest number, where there is no infinity above it.
    """

    precision: int
    emin: int
    emax: int
    width: int = 16
    largest: int | None = None

    @property
    def infinity(self) -> int:
        """The pattern of +Inf."""
        return (self.emax - self.emin + 2) << (self.precision - 1)

    @property
    def sign(self) -> int:
        """The bit of the sign."""
        return 1 << (self.width - 1)


BFLOAT16 = Format(precision=8, emin=-126, emax=127)
FLOAT16 = Format(precision=11, emin=-14, emax=15)
BFLOAT24 = Format(precision=16, emin=-126, emax=127, width=24)
E4M3 = Format(precision=4, emin=-6, emax=8, width=8, largest=0x7E)
E5M2 = Format(precision=3, emin=-14, emax=15, width=8)


def units(x, fmt):
    """|x| in units of its spacing, float64, and the exponent of the spacing, for finite float32 x."""
    magnitude = np.abs(np.asarray(x, np.float32).astype(np.float64))
    exponent = np.maximum(np.frexp(magnitude)[1] - 1, fmt.emin) - fmt.precision + 1
    exponent = np.where(magnitude == 0, fmt.emin - fmt.precision + 1, exponent)
    return np.ldexp(magnitude, -exponent), exponent


def pattern(count, exponent, negative, fmt):
    """The pattern of ±count 2**exponent; Inf from 2**(emax + 1) on, or the largest number from there on.

    Counts are integers up to 2**precision.
    """
    value = np.ldexp(np.asarray(count, np.float64), exponent)
    fraction, e = np.frexp(value)
    e = np.maximum(e - 1, fmt.emin)
    mantissa = np.ldexp(value, fmt.precision - 1 - e).astype(np.int64)
    # A normal mantissa has its hidden bit set, which adds one to the exponent field.
    bits = ((e - fmt.emin).astype(np.int64) << (fmt.precision - 1)) + mantissa
    bits = np.where(fraction == 0, 0, np.minimum(bits, fmt.largest or fmt.infinity))
    return (bits | np.where(negative, fmt.sign, 0)).astype(np.uint32)


def value(bits, fmt) -> Fraction:
    """The exact value of a pattern, Inf counted as 2**(emax + 1)."""
    bits = int(bits)
    field, mantissa = (bits & (fmt.sign - 1)) >> (fmt.precision - 1), bits & ((1 << (fmt.precision - 1)) - 1)
    if field:
        mantissa += 1 << (fmt.precision - 1)
    magnitude = mantissa * Fraction(2) ** (max(field, 1) - 1 + fmt.emin - fmt.precision + 1)
    return -magnitude if bits & fmt.sign else magnitude


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


def nearest_away(x, fmt):
    """The pattern of the nearest representable value, ties away from zero, for finite x."""
    q, exponent = units(x, fmt)
    return pattern(np.floor(q + 0.5), exponent, np.signbit(np.asarray(x, np.float32)), fmt)


def ups_of_short(x, fmt):
    """For finite x and a format of 8 bits how many of 65,536 draws go to the neighbour of larger magnitude.

    The fraction, rounded to 1/65,536. Of a subnormal result it is first rounded to what a float32 in [1, 2) has room
    for, ties to even. Also returns the fraction.
    """
    q, exponent = units(x, fmt)
    fraction = q - np.floor(q)
    room = 2.0 ** (24 - fmt.precision)
    subnormal = np.abs(np.asarray(x, np.float64)) < 2.0**fmt.emin
    kept = np.where(subnormal, np.rint(fraction * room) / room, fraction)
    return np.floor(kept * DRAWS + 0.5).astype(np.int64), fraction


def floats(patterns, fmt):
    """The values of patterns, none of which is NaN, as float64; Inf counted as 2**(emax + 1)."""
    bits = np.asarray(patterns, np.int64)
    magnitude = bits & (fmt.sign - 1)
    field, mantissa = magnitude >> (fmt.precision - 1), magnitude & ((1 << (fmt.precision - 1)) - 1)
    mantissa = mantissa + np.where(field > 0, 1 << (fmt.precision - 1), 0)
    exponent = np.maximum(field, 1) - 1 + fmt.emin - fmt.precision + 1
    return np.ldexp(np.where(bits & fmt.sign, -1.0, 1.0) * mantissa, exponent.astype(np.int32))
