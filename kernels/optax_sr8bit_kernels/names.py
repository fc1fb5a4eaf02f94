"""The names a tile function may use, as XLA understands them.

A *tile function* is a plain function over arrays that uses only arithmetic, comparisons, bit operations and the names
below. Called as it stands it runs on JAX arrays; `retarget` swaps these names for another back end's and keeps the
code. All floats are float32, all bit patterns uint32. A *place* is what a back end knows of each element's global
coordinates: here (row, column), uint32; only the functions below that take one look further into it.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

Array = jax.Array

ONE = np.uint32(0x3F800000)  # the bits of 1.0

static_range = range


def u32(x: int) -> np.uint32:
    """A uint32 constant; Python integers above 2**31 overflow JAX's weak int32."""
    return np.uint32(x)


def bits(x: Array) -> Array:
    """The bit pattern of a float32, as uint32."""
    return lax.bitcast_convert_type(x, jnp.uint32)


def f32(x: Array) -> Array:
    """The float32 with the bit pattern x, a uint32."""
    return lax.bitcast_convert_type(x, jnp.float32)


def f16(x: Array) -> Array:
    """The float32 value of the float16 with the bit pattern x, a uint32."""
    half = lax.bitcast_convert_type(lax.convert_element_type(x, jnp.uint16), jnp.float16)
    return lax.convert_element_type(half, jnp.float32)


def as_int(x: Array) -> Array:
    """A float32 or uint32 truncated to int32."""
    return lax.convert_element_type(x, jnp.int32)


def as_uint(x: Array) -> Array:
    """An int32 as uint32."""
    return lax.convert_element_type(x, jnp.uint32)


def signed_bits(x: Array) -> Array:
    """The bit pattern of a float32, as int32."""
    return lax.bitcast_convert_type(x, jnp.int32)


def absolute(x: Array) -> Array:
    """|x| of a float32."""
    return lax.abs(x)


def unfused(x: Array, zero: Array) -> Array:
    """x itself, a float32 that is not to be contracted with the addition that it goes into.

    XLA turns a product and an addition into a fused multiply-add wherever it happens to find both in one loop, so that
    the bits would depend on the program around. A back end that compiles one fixed kernel may contract all the same.

    Args:
      x: a product.
      zero: a uint32 that is always 0, which the compiler cannot know; a scalar, since an array would be kept in memory.
    """
    return f32(bits(x) ^ zero)


def sqrt(x: Array) -> Array:
    """The square root of a non-negative float32; a back end may use an approximate instruction."""
    return lax.sqrt(x)


def reciprocal(x: Array) -> Array:
    """1/x of a positive float32; a back end may use an approximate instruction."""
    return 1.0 / x


def maximum(x, y) -> Array:
    """The larger of two floats or integers; NaN where either is NaN."""
    return jnp.maximum(x, y)


def minimum(x, y) -> Array:
    """The smaller of two floats or integers; NaN where either is NaN."""
    return jnp.minimum(x, y)


def where(condition, x, y) -> Array:
    """x where the condition holds, else y."""
    return jnp.where(condition, x, y)


def wide_product(x: Array, y: np.uint32) -> tuple[Array, Array]:
    """The high and the low 32 bits of the product of a uint32 and a uint32 constant.

    Not `lax.mulhi`, which does not lower on arrays that lie on several devices (JAX 0.10 to 0.12), nor four products of
    halves, which take half as long again.
    """
    with jax.enable_x64(True):
        product = lax.convert_element_type(x, jnp.uint64) * lax.convert_element_type(y, jnp.uint64)
        return lax.convert_element_type(product >> lax.full_like(product, 32), jnp.uint32), x * y


def quiet_bits(x: Array) -> Array:
    """The bit pattern of a float32 that comes out of arithmetic; of NaN always 0x7FC00000.

    Any other NaN plus random bits may carry into its sign and become -0.0.
    """
    b = bits(x)
    return jnp.where((b & 0x7FFFFFFF) > 0x7F800000, np.uint32(0x7FC00000), b)


def ratio(top: float, x: Array) -> Array:
    """top / x for a constant and a float32 in [2**-100, 2**128); a back end may be off by 3 units in the last place."""
    return top / x


def word(code: Array) -> Array:
    """A byte, which a back end may hold in eight bits, as uint32."""
    return code


def byte_float(code: Array, shift: int) -> Array:
    """f32((code << shift) + bits(1)) of a byte."""
    return f32((code << shift) + ONE)


def unsigned_offset(code: Array, scale: Array, shift: int) -> Array:
    """(byte_float(code) - 1) scale: an offset float without a sign.

    Rounded once: the float32 has the bits of a byte at most, so that 1 is subtracted without rounding.
    """
    return (byte_float(code, shift) - 1.0) * scale


def signed_offset(code: Array, scale: Array, shift: int) -> Array:
    """The `unsigned_offset` of the low seven bits of a byte, with the sign in its highest."""
    return (byte_float(code & 127, shift) - 1.0) * f32(bits(scale) | ((code & 128) << 24))


def dithered(y: Array, word: Array, shift: int) -> Array:
    """(bits(y) - bits(1) + r) >> shift as int32, r the `shift` high bits of a uniform uint32.

    The code of a float with few mantissa bits is linear in the bits of y, and the value is linear between neighbouring
    codes, so that uniform bits added below the code round it without bias.
    """
    return (signed_bits(y) - ONE.astype(np.int32) + as_int(word >> (32 - shift))) >> shift


def floored(x: Array) -> Array:
    """floor(x) of a float32 in [0, 512), as uint32; a back end may round an integer down to the one before it.

    Not by the bits of a large float that is added, as on other back ends: XLA miscompiles that on GPUs (JAX 0.11.2),
    once it is fused with the conversion to uint8.
    """
    return as_uint(as_int(x))


def unsigned_byte(code: Array) -> Array:
    """An int32 clamped to a byte, as uint32."""
    return as_uint(jnp.clip(code, 0, 255))


def signed_byte(magnitude: Array, x: Array) -> Array:
    """A non-negative int32 clamped to seven bits, below the sign bit of the float32 x: a sign-magnitude byte."""
    return as_uint(jnp.minimum(magnitude, 127)) | ((bits(x) >> 24) & 128)


def halves(draw: Callable, words: tuple[Array, ...], place: tuple[Array, ...]) -> Array:
    """16 bits for each element, of which eight neighbours in a row share one call of `draw`.

    Args:
      draw: tile function (words, row, column // 8) -> four uint32 words.
      words: handed to `draw`.
      place: of the elements.

    Returns:
      uint32 in [0, 65536): of column j = column % 8 the word is j // 2, the half the low one for even j.
    """
    row, col = place
    w0, w1, w2, w3 = draw(words, row, col >> 3)
    word = _select(w0, w1, w2, w3, (col >> 1) & 3)
    return (word >> ((col & 1) << 4)) & 0xFFFF


def quarters(draw: Callable, words: tuple[Array, ...], place: tuple[Array, ...]) -> Array:
    """A uint32 word for each element, of which four neighbours in a row share one call of `draw`; see `halves`."""
    row, col = place
    w0, w1, w2, w3 = draw(words, row, col >> 2)
    return _select(w0, w1, w2, w3, col & 3)


def _select(w0: Array, w1: Array, w2: Array, w3: Array, index: Array) -> Array:
    return jnp.where(index < 2, jnp.where(index == 0, w0, w1), jnp.where(index == 2, w2, w3))


def finite(xs: tuple[Array, ...]) -> tuple[Array, ...]:
    """All tiles become 0 at an element where any of them is not finite."""
    largest = np.float32(np.finfo(np.float32).max)
    whole = lax.abs(xs[0]) <= largest
    for x in xs[1:]:
        whole = whole & (lax.abs(x) <= largest)
    return tuple(jnp.where(whole, x, np.float32(0)) for x in xs)


def block_max(xs: tuple[Array, ...]) -> tuple[Array, ...]:
    """The largest |x| along the last axis of each float32 tile, kept as an axis of length 1.

    One reduction for all of them: XLA's CPU back end fuses a reduction of several operands with what computes them
    and writes no float32 temporaries, while it materialises the operand of a single one. So a lone tile is searched for
    the largest x and the largest -x.
    """
    lone = len(xs) == 1
    operands = [x for tile in xs for x in (tile, -tile)] if lone else [lax.abs(x) for x in xs]
    zeros = [np.float32(0)] * len(operands)
    axis = operands[0].ndim - 1
    reduced = lax.reduce(operands, zeros, lambda a, b: list(map(lax.max, a, b)), (axis,))
    if lone:
        reduced = [lax.max(*reduced)]
    return tuple(lax.expand_dims(x, (axis,)) for x in reduced)


def saturated(x: Array) -> Array:
    """A finite float32 clamped to [0, 1]."""
    return jnp.clip(x, 0.0, 1.0)


def byte_number(code: Array, base: float) -> Array:
    """A byte minus a constant, as float32."""
    return lax.convert_element_type(code, jnp.float32) - np.float32(base)


def nearest_byte(x: Array, slope: float, base: float) -> Array:
    """The integer nearest to x slope + base, which lies in [-0.5, 255.5); near a tie a back end may take either."""
    return as_uint(as_int(x * np.float32(slope) + np.float32(base + 0.5)))


def e4m3(x: Array) -> Array:
    """The float32 value of the float8_e4m3fn with the bit pattern x, a uint32.

    By float16, whose exponent has one bit more and is biased by 8 more: a seventh of the time of JAX's conversion.
    """
    value = f16(((x & 0x7F) << 7) | ((x & 0x80) << 8)) * np.float32(256)
    return jnp.where((x & 0x7F) == 0x7F, np.float32(np.nan), value)


def e5m2(x: Array) -> Array:
    """The float32 value of the float8_e5m2 with the bit pattern x, a uint32: the upper half of a float16."""
    return f16(x << 8)


def e4m3_code(code: Array) -> Array:
    """The `e4m3` of a byte that is not NaN, held as codes are."""
    return e4m3(code)


def signed_nibble(magnitude: Array, x: Array) -> Array:
    """A non-negative int32 below 8, below the sign bit of the float32 x: a sign-magnitude half byte."""
    return as_uint(magnitude) | ((bits(x) >> 28) & 8)


def nibble_offset(code: Array, scale: Array, shift: int) -> Array:
    """The `unsigned_offset` of the low three bits of a byte, with the sign in the fourth."""
    return (byte_float(code & 7, shift) - 1.0) * f32(bits(scale) | ((code & 8) << 28))
