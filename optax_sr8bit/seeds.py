"""Where noise gets its names: the seed's two words, and a leaf's two words from its path."""

import functools
import hashlib
import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from optax_sr8bit.bits import philox4x32


def seed_words(seed: Any) -> jax.Array:
    """Two well-mixed words from a seed.

    Neighbouring seeds must not give neighbouring words, since a Weyl dither adds them.

    Args:
      seed: an int of any size, or a JAX PRNG key, typed or raw (uint32[2] or uint32[4]), traced or not.

    Returns:
      uint32[2].

    Raises:
      ValueError: for anything else.
    """
    try:
        number = operator.index(seed)
    except TypeError:
        return _key_words(seed)
    size = max(8, number.bit_length() // 8 + 1)
    return jnp.asarray(_hash(number.to_bytes(size, "little", signed=True)))


def _key_words(key: Any) -> jax.Array:
    """Philox of the key's own words: the same for every JAX version."""
    if isinstance(key, jax.Array) and jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        key = jax.random.key_data(key)
    if not isinstance(key, jax.Array | np.ndarray) or key.dtype != jnp.uint32 or key.shape not in ((2,), (4,)):
        raise ValueError(f"seed must be an int or one JAX PRNG key, got {key!r}")
    counter = jnp.zeros((4,), jnp.uint32).at[: key.shape[0]].set(jnp.asarray(key))
    zero = jnp.zeros((), jnp.uint32)
    return jnp.stack(philox4x32(counter[0], counter[1], counter[2], counter[3], zero, zero)[:2])


def path_name(path: tuple[Any, ...]) -> str:
    """The name of a leaf: its keys joined by '/', without a final `value`.

    `nnx.state`, boxed Linen parameters and Orbax add that last key, and it must not change a model's noise.
    """
    keys = [str(next(getattr(k, a) for a in ("key", "name", "idx") if hasattr(k, a))) for k in path]
    if keys and keys[-1] == "value":
        keys.pop()
    return "/".join(keys)


@functools.cache
def leaf_words(name: str) -> tuple[int, int]:
    """The low and the high word of the 64-bit blake2s of a leaf's name."""
    low, high = _hash(name.encode())
    return int(low), int(high)


def _hash(data: bytes) -> np.ndarray:
    return np.frombuffer(hashlib.blake2s(data, digest_size=8).digest(), "<u4").astype(np.uint32)
