"""The names of `names`, as Triton understands them. Imported late: Triton is optional.

A place is (row of each block, column, column // 8 of every eighth element, column // 4 of every fourth): what eight or
four elements share is computed once for them.
"""

import triton
import triton.language as tl

from optax_sr8bit_kernels.triton_bits import (
    INTERPRETED,
    bits,
    byte_float as byte_float,
    dithered as dithered,
    f16 as f16,
    f32,
    floored as floored,
    signed_bits,
    signed_byte as signed_byte,
    signed_offset as signed_offset,
    unsigned_byte as unsigned_byte,
    unsigned_offset as unsigned_offset,
    word as word,
)
from optax_sr8bit_kernels.triton_codes import (
    byte_number as byte_number,
    e4m3 as e4m3,
    e4m3_code as e4m3_code,
    e5m2 as e5m2,
    nearest_byte as nearest_byte,
    nibble_offset as nibble_offset,
    saturated as saturated,
    signed_nibble as signed_nibble,
)

static_range = range if INTERPRETED.value else tl.static_range
LARGEST = tl.constexpr(3.4028234663852886e38)  # of float32


@triton.jit
def u32(x):
    """A uint32 constant."""
    return tl.full((), x, tl.uint32)


@triton.jit
def as_int(x):
    """A float32 or uint32 truncated to int32."""
    return x.to(tl.int32)


@triton.jit
def as_uint(x):
    """An int32 as uint32."""
    return x.to(tl.uint32)


@triton.jit
def absolute(x):
    """|x| of a float32."""
    return tl.abs(x)


@triton.jit
def unfused(x, zero):
    """x itself: the kernel is compiled once and for all, and multiply-adds make it fast."""
    return x


@triton.jit
def sqrt(x):
    """The square root of a non-negative float32, approximate; subnormals count as 0."""
    if INTERPRETED:
        return tl.sqrt(x)
    else:
        return tl.inline_asm_elementwise("sqrt.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)


@triton.jit
def reciprocal(x):
    """1/x of a positive float32, approximate; subnormals count as 0."""
    if INTERPRETED:
        return 1.0 / x
    else:
        return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)


@triton.jit
def maximum(x, y):
    """The larger of two floats or integers; NaN where either is NaN."""
    return tl.maximum(x, y, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def minimum(x, y):
    """The smaller of two floats or integers; NaN where either is NaN."""
    return tl.minimum(x, y, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def where(condition, x, y):
    """x where the condition holds, else y."""
    return tl.where(condition, x, y)


@triton.jit
def wide_product(x, y):
    """The high and the low 32 bits of the product of two uint32: one instruction for both."""
    product = x.to(tl.uint64) * y.to(tl.uint64)
    return (product >> 32).to(tl.uint32), product.to(tl.uint32)


@triton.jit
def quiet_bits(x):
    """The bit pattern of a float32 that comes out of arithmetic; of NaN always 0x7FC00000.

    The one NaN that comes out of an NVIDIA GPU's arithmetic is 0x7FFFFFFF.
    """
    if INTERPRETED:
        return tl.where(x != x, 0x7FC00000, bits(x))
    else:
        return tl.minimum(x.to(tl.int32, bitcast=True), 0x7FC00000).to(tl.uint32, bitcast=True)


@triton.jit
def ratio(top, x):
    """top / x for a constant and a float32 in [2**-100, 2**128); the approximate reciprocal ends at 2**126."""
    return reciprocal(x * 0.25) * (top * 0.25)


@triton.jit
def halves(draw, words, place):
    """16 bits for each element, of which eight neighbours in a row share one call of `draw`."""
    w0, w1, w2, w3 = draw(words, place[0], place[2])
    low = tl.join(tl.join(w0 & 0xFFFF, w2 & 0xFFFF), tl.join(w1 & 0xFFFF, w3 & 0xFFFF))
    high = tl.join(tl.join(w0 >> 16, w2 >> 16), tl.join(w1 >> 16, w3 >> 16))
    r = tl.join(low, high)
    return tl.reshape(r, [r.shape[0], r.shape[1] * 8])


@triton.jit
def quarters(draw, words, place):
    """A uint32 word for each element, of which four neighbours in a row share one call of `draw`."""
    w0, w1, w2, w3 = draw(words, place[0], place[3])
    r = tl.join(tl.join(w0, w2), tl.join(w1, w3))
    return tl.reshape(r, [r.shape[0], r.shape[1] * 4])


@triton.jit
def finite(xs):
    """All tiles become 0 at an element where any of them is not finite."""
    whole = tl.abs(xs[0]) <= LARGEST
    for i in static_range(1, len(xs)):
        whole = whole & (tl.abs(xs[i]) <= LARGEST)
    cleaned = ()
    for i in static_range(len(xs)):
        cleaned = cleaned + (tl.where(whole, xs[i], 0.0),)
    return cleaned


@triton.jit
def block_max(xs):
    """The largest |x| along the last axis of each float32 tile, kept as an axis of length 1; NaN where one is NaN."""
    result = ()
    for i in static_range(len(xs)):
        result = result + (_max(tl.abs(xs[i]), 1),)
    return result


@triton.jit
def _max(x, axis: tl.constexpr):
    if INTERPRETED:  # it runs other reductions than the built-in ones element by element
        return f32(tl.max(signed_bits(x), axis, keep_dims=True).to(tl.uint32))
    else:
        return tl.reduce(x, axis, maximum, keep_dims=True)


@triton.jit
def all_finite(absmax):
    """Whether all of a tile is finite, as a scalar, from its `block_max`."""
    worst = absmax[0]
    for i in static_range(1, len(absmax)):
        worst = maximum(worst, absmax[i])
    worst = _max(worst, 0)
    return tl.max(tl.where(worst <= LARGEST, 0, 1)) == 0
