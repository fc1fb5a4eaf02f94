"""`dynamic`: the dynamic maps of bitsandbytes with the nearest code, to read, write and follow its checkpoints.

Seven decades, the e-th with 2**e (signed) or 2**(e+1) (unsigned) equal intervals, whose midpoints are the values;
beside them 0 and 1. The signed map is not symmetric: 1 is in it and -1 is not, so absmax itself is stored exactly only
when positive, and `step(-g)` does not mirror `step(g)`. Unlike `offset` it has no dither and no floor: slow averages
stall, and a second moment that decodes to zero beside a first one that does not gives a huge update.

No table is read. Let the *place* of a value be p = |code - 127| (signed) or code + 1 (unsigned), plus how far it lies
into the interval that rounds to it. Decade e starts at y = 10**(e-7) and at p = n, a power of two as well, and in it

    p = n (8/9 + y 10**(6-e) / 0.9)        y = 10**(e-7) (9 p/n - 8)        n = 2**e (signed) or 2**(e+1) (unsigned)

So the leading bit of p is the decade, p is the least of the seven lines, and a line serves another decade once y is
multiplied by a power of ten and p by one of two.

References:
  Dettmers et al., 8-bit Optimizers via Block-wise Quantization, ICLR 2022; `create_dynamic_map` in
  bitsandbytes/functional.py. Adding 2**23 to round a float32 into the low bits: Hecker, Let's Get to the (Floating)
  Point, Game Developer, 1996.
"""

import dataclasses

from optax_sr8bit.codecs.base import BlockCodec, MomentCode, no_floor
from optax_sr8bit_kernels.names import absolute, bits, f32, floored, maximum, minimum, ratio, u32, where, word

INTEGER = 0x4B000000  # bits(2**23): a byte in the low bits of this is the float 2**23 + byte


def encode_mu(x, absmax, dither):
    """The code whose value is nearest to x/absmax; code 127 is zero.

    Only 1.0 is nearer to its neighbour than half an interval: code 255 begins at p = 127.75. Nothing negative does.
    """
    p = _place(x, absmax, 1.0, 0.925, 1.0)
    below = x < 0.0
    steps = floored(where(below, minimum(p, 127.5), maximum(p, p * 2.0 - 127.5)))
    return where(below, 127 - steps, 127 + steps)


def encode_nu(x, absmax, dither):
    """The code whose value is nearest to x/absmax, for x >= 0; code 0 is zero, code 255 begins at p = 255.75."""
    p = _place(x, absmax, 2.0, 1.8645161, 2.0645161)
    return floored(maximum(p, p * 2.0 - 255.5)) - 1


def _place(x, absmax, n, lift, slope):
    """The place p of |x|/absmax, so that floor(p) is that of the nearest value, but for 1.0.

    Decades 4 to 6 are computed as 1 to 3, with y a thousandth and p an eighth. Between 0 and the first value there is
    no decade: the first line is tilted to lift + slope y (y in millionths), which has the first tie where the others
    have theirs, 1/5 after the start of the decade, and lies above them. An interval is five times as long as the one
    before it in the decade below, so the tie lies there, and up to it p stays just below the power of two.

    Args:
      x: not above absmax in magnitude; its sign is ignored.
      absmax: of the block.
      n: intervals of decade 0.
      lift: of the first line.
      slope: of the first line.
    """
    large = absolute(x) >= absmax * 0.0009765625  # 2**-10: from 0.974e-3 to 1.011e-3 either way finds the nearest
    scale = ratio(1e3, absmax)
    y = absolute(x * where(large, scale, scale * 1e3))
    p = minimum(lift + y * slope, n * (16 / 9) + y * (n * 2 / 9))
    p = minimum(p, n * (32 / 9) + y * (n * 4 / 90))
    p = minimum(p, n * (64 / 9) + y * (n * 8 / 900))
    p = p * where(large, 8.0, 1.0)
    return minimum(p, f32(bits(p - 0.2) | 0x7FFFFF))


def decode_mu(code, scale):
    """±y scale, for the midpoint p + 1/2 of p = |code - 127|."""
    steps = f32(word(code) | INTEGER) - 8388735.0  # 2**23 + 127
    return f32(bits(_value(absolute(steps) * 2.0 + 1.0, scale)) | (bits(steps) & u32(0x80000000)))


def decode_nu(code, scale):
    """y scale, for the midpoint p + 1/2 of p = code + 1."""
    return _value(f32(word(code) | INTEGER) - 8388606.5, scale)  # 2**23 - 1.5


def _value(q, scale):
    """The value, times scale, for the midpoint q of a place where decade e starts at 2**(e+1).

    Two bits of q's exponent give the even decade, and without them q is one of decade 0 or 1: the greatest of their two
    lines, which are exact in float32, and of 0. The one value of decade 7 becomes 1.
    """
    b = bits(q)
    r = f32(b & 0x7CFFFFFF)
    tenths = maximum(maximum(r * 4.5 - 8.0, r * 22.5 - 80.0), 0.0)
    power = where((b & 0x1000000) != 0, scale * 0.1, scale * 0.001) * where((b & 0x2000000) != 0, 1.0, 1e-4)
    return minimum(tenths * power, scale)


@dataclasses.dataclass(frozen=True)
class Dynamic(BlockCodec):
    """bitsandbytes' dynamic maps, signed for mu and unsigned for nu, rounded to nearest.

    Attributes:
      scales: "float32" (default, as bitsandbytes keeps them) or "power_of_two", one byte a block.
    """

    name = "dynamic"
    number = 3
    bits = 8
    signed = MomentCode(encode_mu, decode_mu, 1.0, no_floor, zero=127, tiny=2.0**-100)
    unsigned = MomentCode(encode_nu, decode_nu, 1.0, no_floor, zero=0, tiny=2.0**-100)
