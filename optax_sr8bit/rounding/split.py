"""`split32` and `split24`: a bfloat16 parameter, and beside it the low bits of the float32 that it is rounded from.

    m = (s << 16) + k - 2 (k & 0x8000)          s, 16 bits: the bfloat16 nearest to m; k: the 16 low bits of m

so `s` alone is a parameter to compute with, and both together are the float32 `m` bit for bit. Ties go away from zero,
since s could not be told from its neighbour if they went to even. Above the largest finite bfloat16 s is Inf while m
may be finite, as with every rounding to nearest. `split24` first rounds m to 24 bits (16 of significand), whose last 8
are k; ties go to even there, since away from zero they would let each step add half a unit in float32's last place.

Whoever writes s and leaves k (pruning, say) changes m by half a spacing at most beside that: below s = ±0 nothing is
subtracted, which would carry into the sign and give NaN.

References:
  FlashOptim, 2026, https://arxiv.org/abs/2602.23349, which keeps a correction in units of the spacing instead.
"""

import dataclasses

import jax.numpy as jnp

from optax_sr8bit.rounding.base import Rounding
from optax_sr8bit_kernels.names import f32, quiet_bits, u32, where


def nearest_of_32(x, r):
    """The bfloat16 nearest to x, ties away from zero; r is not used."""
    return (quiet_bits(x) + 0x8000) >> 16


def rest_of_32(x, stored):
    """The 16 low bits."""
    return quiet_bits(x) & 0xFFFF


def join_32(stored, kept):
    """The float32."""
    return f32((stored << 16) + kept - where((stored & 0x7FFF) == 0, u32(0), (kept & 0x8000) << 1))


def nearest_of_24(x, r):
    """The bfloat16 nearest to x rounded to 24 bits, ties away from zero; r is not used."""
    return ((_carried_24(x) & u32(0xFFFFFF00)) + 0x8000) >> 16


def rest_of_24(x, stored):
    """The 8 low bits of x rounded to 24."""
    return (_carried_24(x) >> 8) & 0xFF


def _carried_24(x):
    """The bits of x, whose 24 high ones are rounded, ties to even."""
    b = quiet_bits(x)
    return b + 0x7F + ((b >> 8) & 1)


def join_24(stored, kept):
    """The float32 of 24 bits."""
    return f32((stored << 16) + (kept << 8) - where((stored & 0x7FFF) == 0, u32(0), (kept & 0x80) << 9))


@dataclasses.dataclass(frozen=True)
class Split32(Rounding):
    """A bfloat16 and 16 bits, together a float32: 2 bytes more a parameter."""

    name = "split32"
    random = False
    encoders = {"bfloat16": nearest_of_32}  # noqa: RUF012
    correction = jnp.uint16
    rest = staticmethod(rest_of_32)
    join = staticmethod(join_32)


@dataclasses.dataclass(frozen=True)
class Split24(Rounding):
    """A bfloat16 and 8 bits, together a float32 without its last byte: 1 byte more a parameter."""

    name = "split24"
    random = False
    encoders = {"bfloat16": nearest_of_24}  # noqa: RUF012
    correction = jnp.uint8
    rest = staticmethod(rest_of_24)
    join = staticmethod(join_24)
