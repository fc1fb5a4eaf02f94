"""The codes of moments from their definitions, in float64: what each code means, and the nearest one by trying all.

A code without a meaning, which no encoder gives, is NaN.
"""

import dataclasses
from typing import ClassVar

import numpy as np


@dataclasses.dataclass(frozen=True)
class OffsetCode:
    """A dithered offset float: code c is (1 + c % 2**mantissa / 2**mantissa) 2**(c >> mantissa) - offset.

    Attributes:
      mantissa: mantissa bits.
      signed: whether the highest bit is the sign.
      offset: what the encoder adds and the decoder takes away; without it there is no zero.
      top: the value of the largest code, where absmax lands.
      tiny: absmax is clamped from below at this.
      bits: of a code.
    """

    mantissa: int
    signed: bool
    offset: int
    top: int
    tiny: float
    bits: int = 8
    dithered: ClassVar[bool] = True

    @property
    def shift(self) -> int:
        """How many bits of the float32 lie below the code."""
        return 23 - self.mantissa

    @property
    def sign(self) -> int:
        """The bit of the sign."""
        return 2 ** (self.bits - 1)

    @property
    def zero_free(self) -> bool:
        """Whether the least code is not zero."""
        return not self.offset

    def units(self) -> np.ndarray:
        """The value of all codes in units of the scale, float64."""
        code = np.arange(self.sign if self.signed else 2 * self.sign)
        steps = 2**self.mantissa
        magnitude = (1 + (code % steps) / steps) * 2.0 ** (code // steps) - self.offset
        return np.concatenate([magnitude, -magnitude]) if self.signed else magnitude

    def kept(self, y: np.ndarray) -> np.ndarray:
        """What is left of float32 magnitudes in units of the scale once float32 has added the offset; float64."""
        return (y + np.float32(self.offset)).astype(np.float64) - self.offset


@dataclasses.dataclass(frozen=True)
class E4m3Code:
    """float8_e4m3fn, dithered: (1 + m/8) 2**(e - 7), for e = 0 m/8 2**-6, c = 8 e + m; 127 is NaN.

    Attributes:
      signed: whether negative values are used.
    """

    signed: bool
    mantissa: ClassVar[int] = 3
    offset: ClassVar[float] = 2.0**-6  # added where it is subnormal
    top: ClassVar[int] = 448
    tiny: ClassVar[float] = 2.0**-100
    bits: ClassVar[int] = 8
    shift: ClassVar[int] = 20
    sign: ClassVar[int] = 128
    dithered: ClassVar[bool] = True
    zero_free: ClassVar[bool] = False

    def units(self) -> np.ndarray:
        """The value of all codes, float64."""
        code = np.arange(128)
        exponent, fraction = code // 8, code % 8 / 8
        value = np.where(exponent > 0, (1 + fraction) * 2.0 ** (exponent - 7.0), fraction * 2.0**-6)
        value[127] = np.nan
        return np.concatenate([value, -value if self.signed else np.full(128, np.nan)])

    def kept(self, y: np.ndarray) -> np.ndarray:
        """As of `OffsetCode`: fixed point below the least normal value."""
        fixed = (y + np.float32(self.offset)).astype(np.float64) - self.offset
        return np.where(y < self.offset, fixed, y.astype(np.float64))


@dataclasses.dataclass(frozen=True)
class CompandedCode:
    """FlashOptim's codes in units of the scale: c / (254 - |c|) of c = code - 128, or the square of a code.

    They are equally spaced once companded, and the nearest of them is meant so.

    Attributes:
      signed: whether it is the first of these.
    """

    signed: bool
    tiny: ClassVar[float] = 2.0**-100
    bits: ClassVar[int] = 8
    dithered: ClassVar[bool] = False
    zero_free: ClassVar[bool] = False

    @property
    def top(self) -> int:
        """The value of the largest code."""
        return 1 if self.signed else 255**2

    def units(self) -> np.ndarray:
        """The value of all codes, float64."""
        if not self.signed:
            return np.arange(256.0) ** 2
        code = np.arange(256.0) - 128
        return np.where(code > -128, code / (254 - np.abs(code)), np.nan)

    def compand(self, y: np.ndarray) -> np.ndarray:
        """Of a multiple of absmax: its softsign or its square root."""
        return 2 * y / (1 + np.abs(y)) if self.signed else np.sqrt(y)

    def expand(self, z: np.ndarray) -> np.ndarray:
        """The inverse of `compand`."""
        return z / (2 - np.abs(z)) if self.signed else z**2


OFFSET_MU = OffsetCode(mantissa=4, signed=True, offset=1, top=247, tiny=2.0**-100)
OFFSET_NU = OffsetCode(mantissa=4, signed=False, offset=1, top=63487, tiny=2.0**-100)
WIDE_MU = OffsetCode(mantissa=3, signed=True, offset=1, top=61439, tiny=2.0**-90)
WIDE_NU = OffsetCode(mantissa=3, signed=False, offset=0, top=15 * 2**28, tiny=2.0**-90)
FOUR_BIT_MU = OffsetCode(mantissa=1, signed=True, offset=1, top=11, tiny=2.0**-100, bits=4)
FOUR_BIT_NU = OffsetCode(mantissa=1, signed=False, offset=0, top=192, tiny=2.0**-90, bits=4)


def dynamic_map(signed: bool) -> np.ndarray:
    """The 256 ascending values of the dynamic map in float64: Dettmers et al., 8-bit Optimizers, ICLR 2022.

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
    """How much farther from x the value of the given code is than that of the nearest of all codes, by trying them."""
    x, table = np.asarray(x, np.float64)[..., None], np.asarray(table, np.float64)
    distance = x - table
    np.abs(distance, out=distance)
    return np.abs(x[..., 0] - table[code]) - np.nanmin(distance, -1)
