"""`offset_wide`: more exponent and less mantissa than `offset`, for blocks that span very different scales.

mu is a sign-4-3 offset float; nu a 5-3 float without an offset, which spans 2**32 and never decodes to zero.
"""

import dataclasses

from optax_sr8bit.codecs.base import DitheredCodec, MomentCode, no_floor
from optax_sr8bit_kernels.names import (
    absolute,
    byte_float,
    dithered,
    ratio,
    signed_byte,
    signed_offset,
    unsigned_byte,
)

MU_TOP = 61439.0  # with the offset 1, the value of code 127: 2**15 (1 + 7/8)
NU_TOP = 4026531840.0  # the value of code 255: 2**31 (1 + 7/8)


def encode_mu(x, absmax, word):
    """sign | min((bits(|x| 61439/absmax + 1) - bits(1) + r) >> 20, 127), r the 20 high bits of word."""
    y = absolute(x) * ratio(MU_TOP, absmax) + 1.0
    return signed_byte(dithered(y, word, 20), x)


def decode_mu(code, scale):
    """±(f32((c << 20) + bits(1)) - 1) scale, the sign in bit 7."""
    return signed_offset(code, scale, 20)


def encode_nu(x, absmax, word):
    """clamp((bits(x/s) - bits(1) + r) >> 20, 0, 255), r the 20 high bits of word, s = absmax / (1.875 2**31)."""
    return unsigned_byte(dithered(x * ratio(NU_TOP, absmax), word, 20))


def decode_nu(code, scale):
    """f32((c << 20) + bits(1)) scale: never zero once a scale is."""
    return byte_float(code, 20) * scale


@dataclasses.dataclass(frozen=True)
class OffsetWide(DitheredCodec):
    """Offset floats of wider range: for embeddings, output heads, and b2 <= 0.95.

    Attributes:
      scales: "float32" (default) or "power_of_two", one byte a block.
      dither: "weyl" (default), "philox" or "nearest".
    """

    name = "offset_wide"
    number = 2
    bits = 8
    signed = MomentCode(encode_mu, decode_mu, MU_TOP, no_floor, zero=0, tiny=2.0**-90)
    unsigned = MomentCode(encode_nu, decode_nu, NU_TOP, no_floor, zero=0, tiny=2.0**-90)
