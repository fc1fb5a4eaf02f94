"""Rounding float32 to a 16-bit parameter, on bits: a compiler may fold a pair of casts away, but no integer arithmetic.

Stochastic rounding of a float32 to bfloat16 keeps the upper half and carries into it with the probability that the
lower half says:

    seeeeeee emmmmmmm | llllllllllllllll      float32
                      + rrrrrrrrrrrrrrrr      16 uniform random bits
    seeeeeee emmmmmmm   (dropped)             bfloat16

so the expectation over the 65,536 draws is the float32 itself, exactly. Representable values, ±0 and ±Inf do not move;
NaN stays NaN; subnormals are rounded like all others; above the largest finite value the upper neighbour is Inf, which
counts as 2**128 (bfloat16) or 65536 (float16).

Tile functions take `x`, float32, and `r`, uint32 in [0, 65536), and return the 16-bit pattern in a uint32.
"""

from optax_sr8bit_kernels.names import as_int, as_uint, bits, f32, minimum, quiet_bits, u32, where


def stochastic_bfloat16(x, r):
    """Rounds float32 to one of its two bfloat16 neighbours, up with the probability of the dropped fraction."""
    return (quiet_bits(x) + r) >> 16


def nearest_bfloat16(x, r):
    """Rounds float32 to the nearest bfloat16, ties to even; r is not used."""
    b = quiet_bits(x)
    return (b + 0x7FFF + ((b >> 16) & 1)) >> 16


def stochastic_float16(x, r):
    """Rounds float32 to one of its two float16 neighbours: 13 dropped bits from 2**-14 up, below in units of 2**-24.

    Below 2**-14 the result is floor(|x| 2**24 + r/65536) 2**-24.
    """
    magnitude = bits(x) & 0x7FFFFFFF
    # |x| 2**40 < 2**26, so the truncation to an integer is exact.
    units = as_uint(as_int(f32(minimum(magnitude, u32(0x38800000))) * 1099511627776.0))
    return _float16(x, magnitude + (r >> 3), (units + r) >> 16)


def nearest_float16(x, r):
    """Rounds float32 to the nearest float16, ties to even; r is not used."""
    magnitude = bits(x) & 0x7FFFFFFF
    # Adding 2**23 leaves an integer, rounded to nearest even, in the low bits.
    units = bits(f32(minimum(magnitude, u32(0x38800000))) * 16777216.0 + 8388608.0) & 0x7FF
    return _float16(x, magnitude + 0xFFF + ((magnitude >> 13) & 1), units)


def _float16(x, carried, units):
    """The float16 pattern of x, given its carried magnitude bits and its rounded count of 2**-24."""
    b = bits(x)
    magnitude = b & 0x7FFFFFFF
    # The exponents differ by 112; what carries beyond the largest finite value is Inf.
    normal = minimum((carried >> 13) - 0x1C000, u32(0x7C00))
    finite = where(magnitude < 0x38800000, units, normal)
    special = where(magnitude > 0x7F800000, u32(0x7E00), u32(0x7C00))
    return where(magnitude < 0x7F800000, finite, special) | ((b >> 16) & 0x8000)
