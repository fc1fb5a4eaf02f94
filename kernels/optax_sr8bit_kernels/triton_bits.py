"""Bit patterns in Triton: bytes and 16-bit floats, packed in words as long as can be, and the codes of offset floats.

Codes are uint8, one each, or uint32, four bytes each.
"""

import triton
import triton.language as tl

# Triton's interpreter, which runs kernels on NumPy, knows no inline assembly and no constants.
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


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
def widen(x):
    """A float as float32; a uint32 is two bfloat16s."""
    if x.dtype == tl.uint32:
        x = tl.join(f32(x << 16), f32(x & 0xFFFF0000))
        return tl.reshape(x, [x.shape[0], x.shape[1] * 2])
    else:
        return x.to(tl.float32)


@triton.jit
def pattern_of(x, size: tl.constexpr):
    """The bit patterns, uint32, of values of 8 or 16 bits; in words of 32 bits there are several."""
    if x.dtype == tl.uint32:
        if size == 8:
            return word(x)
        else:
            x = tl.join(x & 0xFFFF, x >> 16)
            return tl.reshape(x, [x.shape[0], x.shape[1] * 2])
    elif x.dtype == tl.bfloat16:
        return x.to(tl.uint16, bitcast=True).to(tl.uint32)
    else:
        return x.to(tl.uint32)


@triton.jit
def nibbles(x):
    """Codes of 4 bits in pairs as bytes: those in bytes one each, those in words of 32 bits four in a word."""
    if x.dtype == tl.uint8:
        x = tl.join(x & 15, x >> 4)
        return tl.reshape(x, [x.shape[0], x.shape[1] * 2])
    else:
        even = x & 0x0F0F0F0F
        odd = (x >> 4) & 0x0F0F0F0F
        # The two low bytes of both, then the two high ones, each even one before its odd neighbour.
        if INTERPRETED:
            low = (even & 0xFF) | ((odd & 0xFF) << 8) | ((even & 0xFF00) << 8) | ((odd & 0xFF00) << 16)
            high = ((even >> 16) & 0xFF) | ((odd >> 8) & 0xFF00) | ((even >> 8) & 0xFF0000) | (odd & 0xFF000000)
        else:
            low, high = tl.inline_asm_elementwise(
                """prmt.b32 $0, $2, $3, 0x5140;
                prmt.b32 $1, $2, $3, 0x7362;""",
                "=&r,=r,r,r",
                [even, odd],
                (tl.uint32, tl.uint32),
                is_pure=True,
                pack=1,
            )
        x = tl.join(low, high)
        return tl.reshape(x, [x.shape[0], x.shape[1] * 2])


@triton.jit
def pairs(code):
    """Bytes that hold codes of 4 bits, in pairs in bytes, the first of a pair in the low half."""
    low, high = tl.split(tl.reshape(code, [code.shape[0], code.shape[1] // 2, 2]))
    return low | (high << 4)
