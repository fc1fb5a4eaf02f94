"""Codes of the other codecs in Triton: linear ones, 8-bit floats, codes of 4 bits. Codes as in `triton_bits`."""

import triton
import triton.language as tl

from optax_sr8bit_kernels.triton_bits import INTERPRETED, _byte_float, _interleave, bits, f16, f32, word


@triton.jit
def saturated(x):
    """A finite float32 clamped to [0, 1]; the instruction that computed x does so."""
    if INTERPRETED:
        return tl.minimum(tl.maximum(x, 0.0), 1.0)
    else:
        return tl.inline_asm_elementwise("cvt.sat.f32.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)


@triton.jit
def byte_number(code, base: tl.constexpr):
    """A byte minus a constant, as float32: in the low bits of 2**23, which is subtracted as well."""
    if INTERPRETED or code.dtype == tl.uint8:
        return f32(word(code) | 0x4B000000) - (8388608.0 + base)
    else:
        a, b, c, d = tl.inline_asm_elementwise(
            """{
            prmt.b32 $0, $4, 0x4B000000, 0x7440;
            prmt.b32 $1, $4, 0x4B000000, 0x7441;
            prmt.b32 $2, $4, 0x4B000000, 0x7442;
            prmt.b32 $3, $4, 0x4B000000, 0x7443;
            }""",
            "=f,=f,=f,=f,r",
            [code],
            (tl.float32, tl.float32, tl.float32, tl.float32),
            is_pure=True,
            pack=1,
        )
        return _interleave(a, b, c, d) - (8388608.0 + base)


@triton.jit
def nearest_byte(x, slope: tl.constexpr, base: tl.constexpr):
    """The integer nearest to x slope + base, as uint8: 2**23 leaves it in the low bits, of which four are packed."""
    if INTERPRETED:
        return (x * slope + (base + 0.5)).to(tl.int32).to(tl.uint8)
    else:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 t;
            prmt.b32 t, $3, $4, 0x0040;
            prmt.b32 $0, $1, $2, 0x0040;
            prmt.b32 $0, $0, t, 0x5410;
            }""",
            "=r,f,f,f,f",
            [x * slope + (8388608.0 + base)],
            tl.uint8,
            is_pure=True,
            pack=4,
        )


@tl.core.builtin
def _converts_e4m3(_semantic=None):
    """Whether the target has instructions for float8_e4m3fn (sm_89 and later)."""
    return tl.constexpr("fp8e4nv" in _semantic.builder.options.supported_fp8_dtypes)


@triton.jit
def e4m3(x):
    """The float32 value of the float8_e4m3fn with the bit pattern x, a uint32."""
    if INTERPRETED:
        return tl.where((x & 0x7F) == 0x7F, float("nan"), _e4m3_by_half(x))
    elif _converts_e4m3():
        return tl.inline_asm_elementwise(
            """{
            .reg .b16 h, l;
            .reg .b32 t;
            cvt.u16.u32 h, $1;
            cvt.rn.f16x2.e4m3x2 t, h;
            mov.b32 {l, h}, t;
            cvt.f32.f16 $0, l;
            }""",
            "=f,r",
            [x],
            tl.float32,
            is_pure=True,
            pack=1,
        )
    else:
        return tl.where((x & 0x7F) == 0x7F, float("nan"), _e4m3_by_half(x))


@triton.jit
def _e4m3_by_half(x):
    return f16(((x & 0x7F) << 7) | ((x & 0x80) << 8)) * 256.0


@triton.jit
def e5m2(x):
    """The float32 value of the float8_e5m2 with the bit pattern x, a uint32: the upper half of a float16."""
    return f16(x << 8)


@triton.jit
def e4m3_code(code):
    """The `e4m3` of a byte that is not NaN; four in a word by instructions where the target has them."""
    if INTERPRETED or code.dtype == tl.uint8:
        return _e4m3_by_half(word(code))
    elif _converts_e4m3():
        a, b, c, d = tl.inline_asm_elementwise(
            """{
            .reg .b16 lo, hi, h0, h1, h2, h3;
            .reg .b32 even, odd;
            mov.b32 {lo, hi}, $4;
            cvt.rn.f16x2.e4m3x2 even, lo;
            cvt.rn.f16x2.e4m3x2 odd, hi;
            mov.b32 {h0, h1}, even;
            mov.b32 {h2, h3}, odd;
            cvt.f32.f16 $0, h0;
            cvt.f32.f16 $1, h1;
            cvt.f32.f16 $2, h2;
            cvt.f32.f16 $3, h3;
            }""",
            "=f,=f,=f,=f,r",
            [code],
            (tl.float32, tl.float32, tl.float32, tl.float32),
            is_pure=True,
            pack=1,
        )
        return _interleave(a, b, c, d)
    else:
        # In the upper halves of two float16, whose exponent has one bit more and is biased by 8 more.
        a, b, c, d = tl.inline_asm_elementwise(
            """{
            .reg .b16 h0, h1, h2, h3;
            .reg .b32 lo, hi, t;
            prmt.b32 lo, $4, 0, 0x1404;
            prmt.b32 hi, $4, 0, 0x3424;
            shr.u32 t, lo, 1;
            and.b32 t, t, 0x3F803F80;
            lop3.b32 lo, lo, 0x80008000, t, 0xEA;
            shr.u32 t, hi, 1;
            and.b32 t, t, 0x3F803F80;
            lop3.b32 hi, hi, 0x80008000, t, 0xEA;
            mov.b32 {h0, h1}, lo;
            mov.b32 {h2, h3}, hi;
            cvt.f32.f16 $0, h0;
            cvt.f32.f16 $1, h1;
            cvt.f32.f16 $2, h2;
            cvt.f32.f16 $3, h3;
            }""",
            "=f,=f,=f,=f,r",
            [code],
            (tl.float32, tl.float32, tl.float32, tl.float32),
            is_pure=True,
            pack=1,
        )
        return _interleave(a, b, c, d) * 256.0


@triton.jit
def signed_nibble(magnitude, x):
    """A non-negative int32 below 8, below the sign bit of x, as uint8; packed as in `signed_byte`."""
    if INTERPRETED:
        return (magnitude.to(tl.uint32) | ((bits(x) >> 28) & 8)).to(tl.uint8)
    else:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 t, lo, hi;
            cvt.pack.sat.s8.s32.b32 t, $4, $3, 0;
            cvt.pack.sat.s8.s32.b32 t, $2, $1, t;
            prmt.b32 lo, $5, $6, 0xFB;
            prmt.b32 hi, $7, $8, 0xFB;
            prmt.b32 lo, lo, hi, 0x5410;
            lop3.b32 $0, t, lo, 0x08080808, 0xF8;
            }""",
            "=r,r,r,r,r,r,r,r,r",
            [magnitude, x],
            tl.uint8,
            is_pure=True,
            pack=4,
        )


@triton.jit
def nibble_offset(code, scale, shift: tl.constexpr):
    """The `unsigned_offset` of the low three bits of a byte, with the sign in the fourth."""
    if INTERPRETED or code.dtype == tl.uint8:
        code = word(code)
        x = f32(((code & 7) << shift) + 0x3F800000)
        scale = f32(bits(scale) | ((code & 8) << 28))
    else:
        x = _byte_float(code, 0x07070707, shift)
        a, b, c, d = tl.inline_asm_elementwise(
            """{
            .reg .b32 a, b, c, d;
            shl.b32 a, $4, 28;
            shl.b32 b, $4, 20;
            shl.b32 c, $4, 12;
            shl.b32 d, $4, 4;
            lop3.b32 $0, a, 0x80000000, $5, 0xEA;
            lop3.b32 $1, b, 0x80000000, $5, 0xEA;
            lop3.b32 $2, c, 0x80000000, $5, 0xEA;
            lop3.b32 $3, d, 0x80000000, $5, 0xEA;
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
