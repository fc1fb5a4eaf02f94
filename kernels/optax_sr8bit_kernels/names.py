"""The names a tile function may use, as XLA understands them.

A *tile function* is a plain function over arrays that uses only arithmetic, comparisons, bit operations and the names
below. Called as it stands it runs on JAX arrays; `retarget` swaps these names for another back end's and keeps the
code. All floats are float32, all bit patterns uint32.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

Array = jax.Array

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


def mulhi(x: Array, y: np.uint32) -> Array:
    """The high 32 bits of the 64-bit product of a uint32 and a uint32 constant.

    Not `lax.mulhi`, which does not lower on arrays that lie on several devices (JAX 0.10 to 0.12), nor four products of
    halves, which take half as long again.
    """
    with jax.enable_x64(True):
        product = lax.convert_element_type(x, jnp.uint64) * lax.convert_element_type(y, jnp.uint64)
        return lax.convert_element_type(product >> lax.full_like(product, 32), jnp.uint32)


def lookup(table: Array, index: Array) -> Array:
    """table[index] for an int32 index within [0, 256)."""
    return table.at[index].get(mode="promise_in_bounds")


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
