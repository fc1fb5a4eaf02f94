"""The 8-bit codes from their definitions, in float64: what each code means, and the nearest code by trying all.

A dithered code c of an offset float with `mantissa` bits means (1 + c % 2**mantissa / 2**mantissa) 2**(c >> mantissa)
- 1, in units of absmax / top; the float of `offset_wide`'s second moment has no - 1. The dynamic map is that of
Dettmers et al., 8-bit Optimizers via Block-wise Quantization, ICLR 2022.
"""

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class OffsetCode:
    """A dithered code, as numbers.

    Attributes:
      mantissa: mantissa bits.
      signed: whether bit 7 is the sign.
      offset: what the encoder adds and the decoder takes away.
      top: the value of the largest code, where absmax lands.
      tiny: absmax is clamped from below at this.
    """

    mantissa: int
    signed: bool
    offset: int
    top: int
    tiny: float

    @property
    def shift(self) -> int:
        """How many bits of the float32 lie below the code."""
        return 23 - self.mantissa

    @property
    def last(self) -> int:
        """The largest code of a positive value."""
        return 127 if self.signed else 255

    def units(self) -> np.ndarray:
        """The value of all 256 codes in units of the scale, float64."""
        code = np.arange(self.last + 1)
        steps = 2**self.mantissa
        magnitude = (1 + (code % steps) / steps) * 2.0 ** (code // steps) - self.offset
        return np.concatenate([magnitude, -magnitude]) if self.signed else magnitude


OFFSET_MU = OffsetCode(mantissa=4, signed=True, offset=1, top=247, tiny=2.0**-100)
OFFSET_NU = OffsetCode(mantissa=4, signed=False, offset=1, top=63487, tiny=2.0**-100)
WIDE_MU = OffsetCode(mantissa=3, signed=True, offset=1, top=61439, tiny=2.0**-90)
WIDE_NU = OffsetCode(mantissa=3, signed=False, offset=0, top=15 * 2**28, tiny=2.0**-90)


def dynamic_map(signed: bool) -> np.ndarray:
    """The 256 ascending values of the dynamic map in float64.

    Decade e of seven holds the midpoints of 2**e (signed) or 2**(e+1) (unsigned) equal parts of [0.1, 1] times
    10**(e-6); 0 and 1 are added, and for a signed map the negatives of all midpoints.
    """
    values = [0.0, 1.0]
    for decade in range(7):
        edges = np.linspace(0.1, 1.0, 2 ** (decade if signed else decade + 1) + 1)
        midpoints = (edges[:-1] + edges[1:]) / 2 * 10.0 ** (decade - 6)
        values += [*midpoints, *(-midpoints if signed else ())]
    return np.sort(values)


def excess(x, code, table):
    """How much farther from x the value of the given code is than that of the nearest of all 256, by trying them."""
    x, table = np.asarray(x, np.float64)[..., None], np.asarray(table, np.float64)
    distance = x - table
    np.abs(distance, out=distance)
    return np.abs(x[..., 0] - table[code]) - distance.min(-1)
