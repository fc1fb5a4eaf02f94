"""`kahan`: a bfloat16 parameter, and in a second bfloat16 what the last rounding lost.

The optimizer takes the parameter to be the sum of both, steps it in float32, stores the bfloat16 nearest to the result,
and beside it the bfloat16 nearest to the difference: 16 bits of significand instead of 8, or more. A difference
below 2**-126 may be lost, since XLA flushes subnormal float32s in arithmetic on CPUs; -0 and 0 sum up to 0.

References:
  Zamirai et al., Revisiting BFloat16 Training, 2020, https://arxiv.org/abs/2010.06192 (algorithm of Kahan summation).
"""

import dataclasses

import jax.numpy as jnp

from optax_sr8bit.rounding.base import Rounding
from optax_sr8bit.rounding.sixteen_bits import nearest_bfloat16
from optax_sr8bit_kernels.names import absolute, f32, where


def rest(x, stored):
    """The bfloat16 nearest to x less what is stored; 0 where that is not finite, so that it spoils no later value."""
    lost = x - f32(stored << 16)
    return nearest_bfloat16(where(absolute(lost) < 3e38, lost, 0.0), stored)


def join(stored, kept):
    """The sum of both."""
    return f32(stored << 16) + f32(kept << 16)


@dataclasses.dataclass(frozen=True)
class Kahan(Rounding):
    """To the nearest bfloat16, with the rounding error in a second one: 2 bytes more a parameter."""

    name = "kahan"
    random = False
    encoders = {"bfloat16": nearest_bfloat16}  # noqa: RUF012
    correction = jnp.bfloat16
    rest = staticmethod(rest)
    join = staticmethod(join)
