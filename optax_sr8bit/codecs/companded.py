"""`companded`: FlashOptim's codes, linear in a companded value, with the nearest code.

mu is companded by a softsign and kept in 127 steps a side, nu by a square root and kept in 255 steps. With u = x/absmax

    mu  c = round(254 u / (1 + |u|)), kept as c + 128      u = c / (254 - |c|)
    nu  c = round(255 sqrt(u))                             u = (c / 255)**2

As published there is no dither: slow averages stall. Unlike the published one it has a floor, a quarter of the least
value but zero, up to which a second moment is rounded to zero; and scales are of blocks as large as for other codecs.

References:
  FlashOptim: Optimizers for Memory Efficient Training, arXiv 2602.23349.
"""

import dataclasses

from optax_sr8bit.codecs.base import BlockCodec, MomentCode, no_floor
from optax_sr8bit_kernels.names import absolute, byte_number, nearest_byte, ratio, reciprocal, saturated, sqrt

NU_TOP = 65025.0  # 255**2


def encode_mu(x, absmax, dither):
    """round(254 u / (1 + |u|)) + 128, u = x/absmax; 256 u, since 1/absmax may be subnormal.

    u / (1 + |u|) + 1/2 lies in [0, 1], so that clamping it costs nothing.
    """
    u = x * ratio(256.0, absmax)
    return nearest_byte(saturated(u * reciprocal(absolute(u) + 256.0) + 0.5), 254.0, 1.0)


def decode_mu(code, scale):
    """c / (254 - |c|) scale, c = code - 128."""
    c = byte_number(code, 128.0)
    return c * reciprocal(254.0 - absolute(c)) * scale


def encode_nu(x, absmax, dither):
    """round(255 sqrt(x)/sqrt(absmax)), for x >= 0."""
    return nearest_byte(saturated(sqrt(x) * reciprocal(sqrt(absmax))), 255.0, 0.0)


def decode_nu(code, scale):
    """c**2 scale."""
    c = byte_number(code, 0.0)
    return c * c * scale


def floor_nu(scale):
    """What the least code but zero begins at."""
    return scale * 0.25


@dataclasses.dataclass(frozen=True)
class Companded(BlockCodec):
    """FlashOptim's companded codes, softsign for mu and square root for nu, rounded to nearest.

    Attributes:
      scales: "float32" (default) or "power_of_two", one byte a block.
    """

    name = "companded"
    number = 4
    bits = 8
    signed = MomentCode(encode_mu, decode_mu, 1.0, no_floor, zero=128, tiny=2.0**-100)
    unsigned = MomentCode(encode_nu, decode_nu, NU_TOP, floor_nu, zero=0, tiny=2.0**-100)
