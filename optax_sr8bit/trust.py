"""The trust ratio of LARS and LAMB."""

from typing import Any

import jax
import jax.numpy as jnp


def trust_ratio(param_norm: jax.Array, step_norm: jax.Array, coefficient: Any = 1.0, eps: Any = 0.0) -> jax.Array:
    """coefficient param_norm / (step_norm + eps), or 1 where either norm is 0; as `optax.scale_by_trust_ratio`."""
    lost = (param_norm == 0) | (step_norm == 0)
    return jnp.where(lost, 1.0, coefficient * param_norm / (jnp.where(lost, 1.0, step_norm) + eps))
