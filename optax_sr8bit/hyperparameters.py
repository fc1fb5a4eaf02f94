"""Hyperparameters: checked where they are concrete, evaluated where they are schedules, float32 always."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

DECAY_RATES = ("b1", "b2")


def check(hyper: dict[str, Any]) -> None:
    """Checks what is concrete.

    Raises:
      ValueError: for a decay rate outside [0, 1), any other value that is negative or not a number, or a decay rate
        that has been rounded to 16 bits on its way here.
    """
    for name, value in hyper.items():
        if callable(value):
            continue
        if name in DECAY_RATES and getattr(value, "dtype", None) in (jnp.bfloat16, jnp.float16):
            raise ValueError(
                f"{name} arrived rounded to {value.dtype}, as optax.inject_hyperparams does on 16-bit parameters "
                "(0.999 becomes 1.0 in bfloat16); use sr8.inject_hyperparams, which keeps hyperparameters in float32"
            )
        if isinstance(value, Tracer):
            continue
        array = np.asarray(value)
        if array.ndim or not (np.issubdtype(array.dtype, np.number) or jnp.issubdtype(array.dtype, jnp.floating)):
            raise ValueError(f"{name} must be a scalar number or a schedule, got {value!r}")
        number = float(array)
        if name in DECAY_RATES and not 0.0 <= number < 1.0:
            raise ValueError(f"{name} must be in [0, 1), got {number}")
        if not number >= 0.0:
            raise ValueError(f"{name} must not be negative, got {number}")


def evaluate(hyper: dict[str, Any], count: jax.Array) -> dict[str, jax.Array]:
    """All hyperparameters at `count` as float32 scalars; schedules see the count before the step, as in Optax."""
    values = {name: value(count) if callable(value) else value for name, value in hyper.items()}
    return {name: jnp.asarray(value).astype(jnp.float32) for name, value in values.items()}


def bias_correction(decay_rate: jax.Array, steps: jax.Array) -> jax.Array:
    """1 - decay_rate**steps in float32, accurate where the two nearly cancel."""
    return -jnp.expm1(steps * jnp.log1p(decay_rate - 1.0))
