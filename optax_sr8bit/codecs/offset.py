"""`offset`: an 8-bit float with an offset, linear near zero and logarithmic above.

With 1 added, the scaled magnitude y + 1 lies in [1, 2**8) (mu, sign-3-4) or [1, 2**16) (nu, 4-4), and the exponent and
the four leading mantissa bits of that float32 are the code: one fused multiply-add, a bit cast, an addition, a shift.
The code is linear in the bits and the value is linear between neighbouring codes, so 19 uniform bits added below the
code round it without bias.
"""

import dataclasses

from optax_sr8bit.codecs.base import DitheredCodec, MomentCode, no_floor
from optax_sr8bit_kernels.names import (
    absolute,
    dithered,
    ratio,
    signed_byte,
    signed_offset,
    unsigned_byte,
    unsigned_offset,
)

MU_TOP = 247.0  # with the offset 1, the value of code 127: 2**7 (1 + 15/16)
NU_TOP = 63487.0  # of code 255: 2**15 (1 + 15/16)


def encode_mu(x, absmax, word):
    """sign | min((bits(|x| 247/absmax + 1) - bits(1) + r) >> 19, 127), r the 19 high bits of word."""
    y = absolute(x) * ratio(MU_TOP, absmax) + 1.0
    return signed_byte(dithered(y, word, 19), x)


def decode_mu(code, scale):
    """±(f32((c << 19) + bits(1)) - 1) scale, the sign in bit 7."""
    return signed_offset(code, scale, 19)


def encode_nu(x, absmax, word):
    """min((bits(x 63487/absmax + 1) - bits(1) + r) >> 19, 255), r the 19 high bits of word."""
    y = x * ratio(NU_TOP, absmax) + 1.0
    return unsigned_byte(dithered(y, word, 19))


def decode_nu(code, scale):
    """(f32((c << 19) + bits(1)) - 1) scale."""
    return unsigned_offset(code, scale, 19)


def floor_nu(scale):
    """Half of the least value but zero, for a second moment that decodes to zero beside a first one that does not."""
    return scale * 0.03125


@dataclasses.dataclass(frozen=True)
class Offset(DitheredCodec):
    """The default: 8-bit offset floats, sign-3-4 for mu and 4-4 for nu, both dithered.

    Attributes:
      scales: "float32" (default) or "power_of_two", one byte a block.
      dither: "weyl" (default), "philox" or "nearest".
    """

    name = "offset"
    number = 1
    bits = 8
    signed = MomentCode(encode_mu, decode_mu, MU_TOP, no_floor, zero=0, tiny=2.0**-100)
    unsigned = MomentCode(encode_nu, decode_nu, NU_TOP, floor_nu, zero=0, tiny=2.0**-100)
