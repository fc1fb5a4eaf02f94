"""Adam whose momentum is kept in BF16, rounded to nearest or stochastically."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax


class RoundedMomentum(NamedTuple):
    """State: that of the inner transformation, and the key of the random bits."""

    inner: Any
    key: jax.Array


def round_momentum(inner: optax.GradientTransformation, *, stochastic: bool, seed: int) -> optax.GradientTransformation:
    """Rounds `mu` of the inner transformation's state to BF16 after each step; `nu` and all arithmetic stay FP32."""

    def floats(tree: Any) -> Any:
        return jax.tree.map(lambda leaf: leaf.astype(jnp.float32), tree)

    def init(params: Any) -> RoundedMomentum:
        return RoundedMomentum(inner.init(floats(params)), jax.random.key_data(jax.random.key(seed)))

    def update(updates: Any, state: RoundedMomentum, params: Any = None) -> tuple[Any, RoundedMomentum]:
        updates, new = inner.update(floats(updates), state.inner, params)
        leaves, structure = jax.tree.flatten(new.mu)
        key, *keys = jax.random.split(jax.random.wrap_key_data(state.key), len(leaves) + 1)
        rounded = [_bfloat16(leaf, key if stochastic else None) for leaf, key in zip(leaves, keys, strict=True)]
        inner_state = new._replace(mu=jax.tree.unflatten(structure, rounded))
        return updates, RoundedMomentum(inner_state, jax.random.key_data(key))

    return optax.GradientTransformation(init, update)


def _bfloat16(x: jax.Array, key: jax.Array | None) -> jax.Array:
    """A finite float32 with a BF16 value: on bits, since compilers may drop a pair of casts."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    if key is None:
        added = jnp.uint32(0x7FFF) + ((bits >> 16) & 1)
    else:
        added = jax.random.bits(key, x.shape, jnp.uint32) >> 16
    return jax.lax.bitcast_convert_type((bits + added) & jnp.uint32(0xFFFF0000), jnp.float32)
