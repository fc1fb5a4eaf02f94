"""The names of `names`, as Triton understands them. Imported late: Triton is optional.

A place is (row, column, row of every eighth, column // 8 of every eighth, the same two of every fourth): what eight or
four elements share is computed once for them. Codes are uint8, one each, or uint32, four bytes each.
"""

import triton
import triton.language as tl

# Triton's interpreter, which runs kernels on NumPy, knows no inline assembly and no constants.
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
static_range = range if INTERPRETED.value else tl.static_range
LARGEST = tl.constexpr(3.4028234663852886e38)  # of float32


@triton.jit
def u32(x):
    """A uint32 constant."""
    return tl.full((), x, tl.uint32)


@triton.jit
def bits(x):
    """The bit pattern of a float32, as uint32."""
    return x.to(tl.uint32, bitcast=True)


@triton.jit
def f32(x):
    """The float32 with the bit pattern x, a uint32."""
    return x.to(tl.float32, bitcast=True)


@triton.jit
def f16(x):
    """The float32 value of the float16 with the bit pattern x, a uint32."""
    return x.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def signed_bits(x):
    """The bit pattern of a float32, as int32."""
    return x.to(tl.int32, bitcast=True)


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
def word(code):
    """Bytes as uint32, one each."""
    if code.dtype == tl.uint32:
        return _interleave(code & 0xFF, (code >> 8) & 0xFF, (code >> 16) & 0xFF, code >> 24)
    else:
        return code.to(tl.uint32)


@triton.jit
def _interleave(a, b, c, d):
    """a[0], b[0], c[0], d[0], a[1] ... along the last of two axes; no data moves between threads."""
    x = tl.join(tl.join(a, c), tl.join(b, d))
    return tl.reshape(x, [x.shape[0], x.shape[1] * 4])


@triton.jit
def byte_float(code, shift: tl.constexpr):
    """f32((code << shift) + bits(1)) of bytes."""
    if INTERPRETED or code.dtype == tl.uint8:
        return f32((word(code) << shift) + 0x3F800000)
    else:
        return _byte_float(code, 0xFFFFFFFF, shift)


@triton.jit
def unsigned_offset(code, scale, shift: tl.constexpr):
    """(byte_float(code) - 1) scale; a multiply-add, rounded once all the same."""
    x = byte_float(code, shift)
    if INTERPRETED:
        return (x - 1.0) * scale
    else:
        return x * scale - scale


@triton.jit
def signed_offset(code, scale, shift: tl.constexpr):
    """The `unsigned_offset` of the low seven bits of a byte, with the sign in its highest."""
    if INTERPRETED or code.dtype == tl.uint8:
        code = word(code)
        x = f32(((code & 127) << shift) + 0x3F800000)
        scale = f32(bits(scale) | ((code & 128) << 24))
    else:
        x = _byte_float(code, 0x7F7F7F7F, shift)
        a, b, c, d = tl.inline_asm_elementwise(
            """{
            .reg .b32 a, b, c;
            shl.b32 a, $4, 24;
            shl.b32 b, $4, 16;
            shl.b32 c, $4, 8;
            lop3.b32 $0, a, 0x80000000, $5, 0xEA;
            lop3.b32 $1, b, 0x80000000, $5, 0xEA;
            lop3.b32 $2, c, 0x80000000, $5, 0xEA;
            lop3.b32 $3, $4, 0x80000000, $5, 0xEA;
            }""",
            "=r,=r,=r,=r,r,r",
            [code, scale],
            (tl.float32, tl.float32, tl.float32, tl.float32),
            is_pure=True,
            pack=1,
        )
        scale = _interleave(a, b, c, d)
    if INTERPRETED:
        return (x - 1.0) * scale
    else:
        return x * scale - scale


@triton.jit
def _byte_float(code, mask: tl.constexpr, shift: tl.constexpr):
    """`byte_float` of four bytes in a word, of which the mask selects bits."""
    a, b, c, d = tl.inline_asm_elementwise(
        f"""{{
        .reg .b32 m, a, b, c, d;
        and.b32 m, $4, {mask};
        prmt.b32 a, m, 0, 0x4044;
        prmt.b32 b, m, 0, 0x4144;
        prmt.b32 c, m, 0, 0x4244;
        prmt.b32 d, m, 0, 0x4344;
        mad.lo.u32 $0, a, {1 << (shift - 16)}, 0x3F800000;
        mad.lo.u32 $1, b, {1 << (shift - 16)}, 0x3F800000;
        mad.lo.u32 $2, c, {1 << (shift - 16)}, 0x3F800000;
        mad.lo.u32 $3, d, {1 << (shift - 16)}, 0x3F800000;
        }}""",
        "=r,=r,=r,=r,r",
        [code],
        (tl.float32, tl.float32, tl.float32, tl.float32),
        is_pure=True,
        pack=1,
    )
    return _interleave(a, b, c, d)


@triton.jit
def widen(x):
    """A float as float32; a uint32 is two bfloat16s."""
    if x.dtype == tl.uint32:
        x = tl.join(f32(x << 16), f32(x & 0xFFFF0000))
        return tl.reshape(x, [x.shape[0], x.shape[1] * 2])
    else:
        return x.to(tl.float32)


@triton.jit
def dithered(y, word, shift: tl.constexpr):
    """(bits(y) - bits(1) + r) >> shift as int32, r the `shift` high bits; a funnel shift subtracts bits(1) with it."""
    if INTERPRETED:
        return (signed_bits(y) - 0x3F800000 + (word >> (32 - shift)).to(tl.int32)) >> shift
    else:
        return tl.inline_asm_elementwise(
            f"""{{
            .reg .b32 t;
            shf.l.wrap.b32 t, $2, {-(0x3F800000 >> shift)}, {shift};
            add.u32 t, t, $1;
            shr.s32 $0, t, {shift};
            }}""",
            "=r,r,r",
            [y, word],
            tl.int32,
            is_pure=True,
            pack=1,
        )


@triton.jit
def floored(x):
    """floor(x) of a float32 in [0, 512), as uint32: 2**23 - 1/2 leaves it in the low bits."""
    return bits(x + 8388607.5) & 511


@triton.jit
def unsigned_byte(code):
    """An int32 clamped to a byte, as uint8; packed by saturating conversions, two for four."""
    if INTERPRETED:
        return tl.minimum(tl.maximum(code, 0), 255).to(tl.uint8)
    else:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 t;
            cvt.pack.sat.u8.s32.b32 t, $4, $3, 0;
            cvt.pack.sat.u8.s32.b32 $0, $2, $1, t;
            }""",
            "=r,r,r,r,r",
            [code],
            tl.uint8,
            is_pure=True,
            pack=4,
        )


@triton.jit
def signed_byte(magnitude, x):
    """A non-negative int32 clamped to seven bits, below the sign bit of x, as uint8; packed as in `unsigned_byte`."""
    if INTERPRETED:
        return (tl.minimum(magnitude, 127).to(tl.uint32) | ((bits(x) >> 24) & 128)).to(tl.uint8)
    else:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 t, lo, hi;
            cvt.pack.sat.s8.s32.b32 t, $4, $3, 0;
            cvt.pack.sat.s8.s32.b32 t, $2, $1, t;
            prmt.b32 lo, $5, $6, 0x73;
            prmt.b32 hi, $7, $8, 0x73;
            prmt.b32 lo, lo, hi, 0x5410;
            lop3.b32 $0, t, lo, 0x80808080, 0xF8;
            }""",
            "=r,r,r,r,r,r,r,r,r",
            [magnitude, x],
            tl.uint8,
            is_pure=True,
            pack=4,
        )


@triton.jit
def halves(draw, words, place):
    """16 bits for each element, of which eight neighbours in a row share one call of `draw`."""
    w0, w1, w2, w3 = draw(words, place[2], place[3])
    low = tl.join(tl.join(w0 & 0xFFFF, w2 & 0xFFFF), tl.join(w1 & 0xFFFF, w3 & 0xFFFF))
    high = tl.join(tl.join(w0 >> 16, w2 >> 16), tl.join(w1 >> 16, w3 >> 16))
    r = tl.join(low, high)
    return tl.reshape(r, [r.shape[0], r.shape[1] * 8])


@triton.jit
def quarters(draw, words, place):
    """A uint32 word for each element, of which four neighbours in a row share one call of `draw`."""
    w0, w1, w2, w3 = draw(words, place[4], place[5])
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


@triton.jit
def integer_argument(column, place: tl.constexpr, index):
    """column[index] of int32 arguments of the kernel, of which the first is its `place`-th parameter."""
    if len(column) == 1:
        return column[0]
    elif INTERPRETED:
        return column[index]
    else:
        return tl.inline_asm_elementwise(
            f"""{{
            .reg .b64 a;
            mov.b64 a, step_leaves_param_{place};
            mad.wide.s32 a, $1, 4, a;
            ld.param.b32 $0, [a];
            }}""",
            "=r,r",
            [index],
            tl.int32,
            is_pure=True,
            pack=1,
        )


@triton.jit
def pointer_argument(column, place: tl.constexpr, index):
    """column[index] of pointers among the arguments of the kernel; as `integer_argument`."""
    if len(column) == 1:
        return column[0]
    elif INTERPRETED:
        return column[index]
    else:
        address = tl.inline_asm_elementwise(
            f"""{{
            .reg .b64 a;
            mov.b64 a, step_leaves_param_{place};
            mad.wide.s32 a, $1, 8, a;
            ld.param.b64 $0, [a];
            }}""",
            "=l,r",
            [index],
            tl.int64,
            is_pure=True,
            pack=1,
        )
        return tl.multiple_of(address.to(column[0].dtype), 16)
