"""Rounding float32 to the 8-bit floats float8_e4m3fn and float8_e5m2, on bits; see `sixteen_bits`.

With y the magnitude in units of the least normal value, the subnormal values are equally spaced below y = 1, as the
first normal ones are above it. So y + 1 has the bits of the result where y is subnormal, 2 y where it is normal, and
the result is the greater of the two. A float32 has 20 or 21 bits more than the result, a draw 16: the probability of
the upper neighbour is the dropped fraction rounded to 1/65,536, off by 1/131,072 at most; where y is subnormal, of
which y + 1 keeps 20 or 21 bits of the fraction, by a sixteenth or a thirty-second more.

float8_e4m3fn has no infinity: finite numbers saturate at ±448, as in NVIDIA's conversion instructions, and infinities
become NaN. In float8_e5m2 the upper neighbour of 57,344 is Inf, which counts as 65,536.

References:
  Micikevicius et al., FP8 Formats for Deep Learning, 2022, https://arxiv.org/abs/2209.05433
"""

from optax_sr8bit_kernels.names import bits, f32, maximum, minimum, u32, where


def stochastic_e4m3(x, r):
    """Rounds float32 to one of its two float8_e4m3fn neighbours, up with the probability of the dropped fraction."""
    y = f32(bits(x) & 0x7FFFFFFF) * 64.0
    return _e4m3(x, (bits(maximum(y + 1.0, y + y)) - 0x3F800000 + (r << 4) + 8) >> 20)


def nearest_e4m3(x, r):
    """Rounds float32 to the nearest float8_e4m3fn, ties to even; r is not used."""
    magnitude = bits(x) & 0x7FFFFFFF
    # Adding 2**23 leaves an integer, rounded to nearest even, in the low bits.
    units = bits(f32(minimum(magnitude, u32(0x3C800000))) * 512.0 + 8388608.0) & 0xFF
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - 0x3C0
    return _e4m3(x, where(magnitude < 0x3C800000, units, normal))


def _e4m3(x, code):
    """The float8_e4m3fn pattern of x, given that of its magnitude, if it were finite."""
    b = bits(x)
    finite = where((b & 0x7FFFFFFF) < 0x7F800000, minimum(code, u32(0x7E)), u32(0x7F))
    return finite | ((b >> 24) & 0x80)


def stochastic_e5m2(x, r):
    """Rounds float32 to one of its two float8_e5m2 neighbours, up with the probability of the dropped fraction."""
    y = f32(bits(x) & 0x7FFFFFFF) * 16384.0
    return _e5m2(x, (bits(maximum(y + 1.0, y + y)) - 0x3F800000 + (r << 5) + 16) >> 21)


def nearest_e5m2(x, r):
    """Rounds float32 to the nearest float8_e5m2, ties to even; r is not used."""
    magnitude = bits(x) & 0x7FFFFFFF
    units = bits(f32(minimum(magnitude, u32(0x38800000))) * 65536.0 + 8388608.0) & 0xFF
    normal = ((magnitude + 0xFFFFF + ((magnitude >> 21) & 1)) >> 21) - 0x1C0
    return _e5m2(x, where(magnitude < 0x38800000, units, normal))


def _e5m2(x, code):
    """The float8_e5m2 pattern of x, given that of its magnitude, if it were finite."""
    b = bits(x)
    magnitude = b & 0x7FFFFFFF
    special = where(magnitude > 0x7F800000, u32(0x7E), u32(0x7C))
    return where(magnitude < 0x7F800000, minimum(code, u32(0x7C)), special) | ((b >> 24) & 0x80)
