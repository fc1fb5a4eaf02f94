"""The names of `names`, as Triton understands them. Imported late: Triton is optional."""

import triton
import triton.language as tl

static_range = tl.static_range


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
    """The square root of a non-negative float32."""
    return tl.sqrt(x)


@triton.jit
def reciprocal(x):
    """1/x of a positive float32."""
    return 1.0 / x


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
def mulhi(x, y):
    """The high 32 bits of the 64-bit product of two uint32."""
    return tl.umulhi(x, y)


@triton.jit
def lookup(table, index):
    """table[index]; the table is a pointer here."""
    return tl.load(table + index)


@triton.jit
def block_max(xs):
    """The largest |x| along the last axis of each float32 tile, kept as an axis of length 1."""
    result = ()
    for i in tl.static_range(len(xs)):  # pyright: ignore[reportGeneralTypeIssues]
        result = result + (tl.max(tl.abs(xs[i]), axis=-1, keep_dims=True),)
    return result
