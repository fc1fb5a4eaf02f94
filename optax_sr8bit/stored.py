"""How one array of an inner state is kept between steps: as codes, as bfloat16, or as it is."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from optax_sr8bit import bits, rounding, seeds, tile
from optax_sr8bit.codecs import Codec
from optax_sr8bit.plan import scale_shape
from optax_sr8bit.rounding.sixteen_bits import stochastic_bfloat16
from optax_sr8bit.rule import Moment
from optax_sr8bit_kernels.names import block_max, maximum, unfused
from optax_sr8bit_kernels.xla import (
    coordinates,
    from_stored,
    into_blocks,
    load,
    out_of_blocks,
    placed_like,
    store,
    to_stored,
    unsigned,
)

BFLOAT16 = 256  # in a state's `format`; codecs have numbers below 256


@dataclasses.dataclass(frozen=True)
class Storage:
    """All that is static in how an array is kept, beside its name.

    Attributes:
      shape: of the array.
      codec: of the array; `float32` where it is not quantised.
      block: elements a scale, or None without scales.
      signed: False for what is never negative.
      bfloat16: whether it is kept in bfloat16, stochastically rounded.
      exact: whether it is kept as it is, finite or not.
    """

    shape: tuple[int, ...]
    codec: Codec
    block: int | None
    signed: bool
    bfloat16: bool = False
    exact: bool = False

    @property
    def format(self) -> int:
        """What a state's `format` says of it."""
        return BFLOAT16 if self.bfloat16 else self.codec.format

    @property
    def code_shape(self) -> tuple[int, ...]:
        """Of what is kept."""
        return self.shape if self.block is None else self.codec.code_shape(self.shape)

    @property
    def code_dtype(self) -> Any:
        """Of what is kept."""
        return jnp.dtype(jnp.bfloat16 if self.bfloat16 else self.codec.code_dtype)

    @property
    def scale_shape(self) -> tuple[int, ...]:
        """Of its scales: one a block; one unused a row where there are none, since Orbax saves no empty arrays."""
        return scale_shape(self.shape, self.block)

    @property
    def scale_dtype(self) -> Any:
        """Of its scales."""
        return jnp.dtype(jnp.float32 if self.block is None else self.codec.scale_dtype)

    def parts(self, nearest: bool = False) -> tile.Parts:
        """The tile functions, of a moment without a rule."""
        parts = tile.recoding((Moment("", self.signed),), self.codec)
        return parts if nearest else dataclasses.replace(parts, dithers=(self.codec.dither_word(self.signed),))


def words_of(seed: jax.Array, count: jax.Array, name: str) -> tuple[jax.Array, ...]:
    """The words that address the random bits of an array with that name in a step."""
    return seed[0], seed[1], count.astype(jnp.uint32), *map(jnp.uint32, seeds.leaf_words(name))


@functools.partial(jax.jit, static_argnames="how")
def decode(code: jax.Array, scale: jax.Array, count: jax.Array, *, how: Storage) -> jax.Array:
    """The array in float32.

    What is never negative decodes to the floor of its code at least: a denominator must not be zero beside a numerator
    that is not. The count of steps, never negative, is what keeps products from being fused with what follows.
    """
    if how.block is None:
        return load(code)
    n, parts = how.shape[-1], how.parts()
    (value,), (floor,) = map(list, tile.decode(*from_stored(parts, (code,), (scale,), n, how.block), parts))
    value = unfused(value if how.signed else maximum(value, floor), count.astype(jnp.uint32) >> 31)
    return out_of_blocks(value, n)


@functools.partial(jax.jit, static_argnames="how")
def encode(value: jax.Array, words: Any, *, how: Storage) -> tuple[jax.Array, jax.Array]:
    """What is kept of a float32 array, and its scales.

    Args:
      value: the array; finite, where it has blocks.
      words: the address of its random bits, or None to round to nearest.
      how: the `Storage`.
    """
    if how.block is None:
        return _unscaled(value, words, how), jnp.zeros(how.scale_shape, how.scale_dtype)
    place = (jnp.zeros(how.shape, jnp.uint32),) if words is None else coordinates(how.shape)
    value, *place = (into_blocks(x, how.block) for x in (value, *place))
    parts = how.parts(nearest=words is None)
    encoded: Any = tile.encode((value,), block_max((value,)), tuple(place), words or (), parts)
    codes, scales = encoded
    (code,), (scale,) = to_stored(parts, codes, scales, how.shape[-1])
    return code, scale


def _unscaled(value: jax.Array, words: Any, how: Storage) -> jax.Array:
    if not how.bfloat16:
        return value
    if words is None:
        return store(rounding.nearest_bfloat16(value, None), jnp.bfloat16)
    return store(stochastic_bfloat16(value, bits.parameter_bits(words, coordinates(how.shape))), jnp.bfloat16)


def placed(code: jax.Array, old: jax.Array, how: Storage, words: Any) -> jax.Array:
    """A new code or scale, which XLA shards like the old one of its shape."""
    if how.block is None or (code.shape == how.code_shape and how.shape[-1] % (8 * how.block) == 0):
        return code  # where eight devices cannot cut a block, XLA propagates shardings by itself
    return placed_like(code, old, words[2] >> 31)


def following(x: jax.Array, leaf: jax.Array) -> jax.Array:
    """A first float32 value, which XLA shards like the parameter of its shape, and does not take for a constant.

    It would compute the scales of constants while it compiles, which takes minutes.
    """
    zero = jax.lax.optimization_barrier(jnp.uint32(0))
    nothing = unsigned(load(leaf)) & zero
    return jax.lax.optimization_barrier(jax.lax.bitcast_convert_type(unsigned(x) | nothing, x.dtype))
