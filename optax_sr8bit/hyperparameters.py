"""Hyperparameters: checked where they are concrete, evaluated where they are schedules, float32 always."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from optax_sr8bit.rule import Definition
from optax_sr8bit_kernels.names import unfused


def check(definition: Definition) -> None:
    """Checks what is concrete.

    Raises:
      ValueError: for a decay rate outside [0, 1) or rounded to 16 bits on its way here, any other value that is
        negative or not a finite number, and a schedule where none can be.
    """
    for name, value in definition.hyperparameters.items():
        if callable(value):
            if name not in definition.schedules:
                may = ", ".join(definition.schedules)
                raise ValueError(f"{name} cannot be a schedule, only {may}; or use sr8.inject_hyperparams")
            continue
        if name in definition.rates and getattr(value, "dtype", None) in (jnp.bfloat16, jnp.float16):
            raise ValueError(
                f"{name} arrived rounded to {value.dtype}, as optax.inject_hyperparams does on 16-bit parameters "
                "(0.999 becomes 1.0 in bfloat16); use sr8.inject_hyperparams, which keeps hyperparameters in float32"
            )
        if isinstance(value, Tracer):
            continue
        number(name, value, below=1.0 if name in definition.rates else float("inf"))


def number(name: str, value: Any, below: float = float("inf")) -> float:
    """A concrete number, as float32 has it, where 1 - 1e-9 is 1.

    Raises:
      ValueError: for what is none, and for one outside [0, below).
    """
    if isinstance(value, Tracer):
        raise ValueError(f"{name} must be concrete, not traced")
    array = np.asarray(value)
    real = jnp.issubdtype(array.dtype, jnp.floating) or jnp.issubdtype(array.dtype, jnp.integer)
    if array.ndim or not real:
        raise ValueError(f"{name} must be a real number, got {value!r}")
    result = float(np.float32(array))
    if not 0.0 <= result < below:
        raise ValueError(f"{name} must be {'in [0, 1)' if below == 1 else 'finite and not negative'}, got {result}")
    return result


def evaluate(hyper: dict[str, Any], count: jax.Array) -> dict[str, jax.Array]:
    """All hyperparameters at `count` as float32 scalars; schedules see the count before the step, as in Optax."""
    values: dict[str, Any] = {name: value(count) if callable(value) else value for name, value in hyper.items()}
    for name, value in values.items():
        if value is None or jnp.ndim(value) or jnp.issubdtype(jnp.result_type(value), jnp.complexfloating):
            raise ValueError(f"{name} must be a real scalar at every step, got {value!r}")
    return {name: jnp.asarray(value).astype(jnp.float32) for name, value in values.items()}


def bias_correction(decay_rate: jax.Array, steps: jax.Array) -> jax.Array:
    """1 - decay_rate**steps, to a few roundings even where the two nearly cancel, and to the same bits everywhere.

    With c(n) = 1 - b**n, c(m + n) = c(m) + c(n) (1 - c(m)): sums of positive terms, by the bits of the exponent. An
    exponential would be more direct, but a compiler that knows its argument evaluates it otherwise than the run does.

    Args:
      decay_rate: float32, any shape.
      steps: uint32 of that shape, at least 1.

    Returns:
      float32.
    """
    zero = (steps >> 31) & (steps >> 30)  # the steps are 2**31 + 1 at most, which no compiler knows
    total, power = jnp.zeros_like(decay_rate), 1.0 - decay_rate
    for i in range(32):
        more = total + unfused(power * (1.0 - total), zero)
        total = jnp.where((steps >> i) & 1 == 1, more, total)
        power = unfused(power * (2.0 - power), zero)
    return total
