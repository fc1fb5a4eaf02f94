"""Where noise gets its names: the seed's two words, and a leaf's two words from its path."""

import functools
import hashlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from optax_sr8bit.bits import philox4x32


def check_seed(seed: Any) -> None:
    """Checks a seed without touching a device: factories are called before `jax.distributed.initialize`.

    Raises:
      ValueError: for what `seed_words` does not take.
    """
    if not _is_int(seed) and not _is_typed_key(seed) and not _is_raw_key(seed):
        raise ValueError(f"seed must be an int or one JAX PRNG key, got {seed!r}")


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
    check_seed(seed)
    if _is_int(seed):
        number = int(seed)
        return jnp.asarray(_hash(number.to_bytes(max(8, number.bit_length() // 8 + 1), "little", signed=True)))
    words = jnp.asarray(jax.random.key_data(seed) if _is_typed_key(seed) else seed)
    counter = jnp.zeros((4,), jnp.uint32).at[: words.size].set(words.reshape(-1))
    zero = jnp.zeros((), jnp.uint32)
    return jnp.stack(philox4x32(counter[0], counter[1], counter[2], counter[3], zero, zero)[:2])


def _is_int(seed: Any) -> bool:
    if isinstance(seed, bool | np.bool_ | Tracer):
        return False
    scalar = isinstance(seed, jax.Array | np.ndarray) and seed.ndim == 0 and jnp.issubdtype(seed.dtype, jnp.integer)
    return scalar or isinstance(seed, int | np.integer)


def _is_typed_key(seed: Any) -> bool:
    return isinstance(seed, jax.Array) and jnp.issubdtype(seed.dtype, jax.dtypes.prng_key) and seed.ndim == 0


def _is_raw_key(seed: Any) -> bool:
    return isinstance(seed, jax.Array | np.ndarray) and seed.dtype == np.uint32 and seed.shape in ((2,), (4,))


def path_name(path: tuple[Any, ...]) -> str:
    """The name of a leaf: the keys of its path joined by '/'."""
    return "/".join(str(next((getattr(k, a) for a in ("key", "name", "idx") if hasattr(k, a)), k)) for k in path)


def noise_name(name: str) -> str:
    """The name that addresses a leaf's noise: without a final `value`.

    `nnx.state`, boxed Linen parameters and Orbax add that last key, and it must not change a model's noise.
    """
    return "" if name == "value" else name.removesuffix("/value")


@functools.cache
def leaf_words(name: str) -> tuple[int, int]:
    """The low and the high word of the 64-bit blake2s of the name of a leaf's noise."""
    low, high = _hash(noise_name(name).encode())
    return int(low), int(high)


def _hash(data: bytes) -> np.ndarray:
    return np.frombuffer(hashlib.blake2s(data, digest_size=8).digest(), "<u4").astype(np.uint32)
