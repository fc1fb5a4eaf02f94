"""LAMB."""

from typing import Any

import jax
import optax

from optax_sr8bit.factory import optimizer
from optax_sr8bit.optimizers.adam import MU, NU, direction, scalars
from optax_sr8bit.rule import Definition, Rule, state_type
from optax_sr8bit.trust import trust_ratio
from optax_sr8bit_kernels.names import unfused

LambState = state_type(__name__, "LambState", MU, NU, optax=optax.ScaleByAdamState)


def measure(param, grad, moments, floors, scalars, zero, flags):
    """The parameter and Adam's step with decay, whose norms make the trust ratio."""
    step, _ = direction(param, grad, moments, floors, scalars, zero, flags)
    return param, step


def adapt(norms: tuple[jax.Array, ...], values: tuple[jax.Array, ...], flags: tuple[bool, ...]) -> tuple[jax.Array]:
    """The trust ratio."""
    del values, flags
    return (trust_ratio(*norms),)


def update(param, grad, moments, floors, scalars, zero, flags):
    """One step of LAMB on a tile, in float32; the formula stands in `lamb`."""
    step, new = direction(param, grad, moments, floors, scalars, zero, flags)
    return param - unfused(scalars[0] * unfused(scalars[len(scalars) - 1] * step, zero), zero), new


@optimizer
def lamb(
    learning_rate: optax.ScalarOrSchedule,
    b1: jax.typing.ArrayLike = 0.9,
    b2: jax.typing.ArrayLike = 0.999,
    eps: jax.typing.ArrayLike = 1e-6,
    eps_root: jax.typing.ArrayLike = 0.0,
    weight_decay: optax.ScalarOrSchedule = 0.0,
    mask: Any = None,
) -> Definition:
    r"""LAMB with 8-bit moments and stochastically rounded parameters.

    .. math::

      u = u_\text{adam} + \text{weight\_decay} \, p, \qquad
      p \leftarrow \text{round}\big(p - \text{learning\_rate} \, \tfrac{\lVert p \rVert}{\lVert u \rVert} u\big)

    with the moments and `u_adam` of `adamw`, and a ratio of 1 where either norm is 0. The norms are of whole leaves,
    which no tile knows: a pass before the step reads all that the step reads and writes nothing. They are sums over
    all devices, in an order that XLA chooses, so that meshes agree to rounding and not bit for bit.

    Args:
      learning_rate: a number or a schedule of the count.
      b1: decay rate of the first moment, in [0, 1).
      b2: decay rate of the second moment, in [0, 1).
      eps: added to the denominator, outside the square root.
      eps_root: added inside the square root.
      weight_decay: a number or a schedule of the count, part of the step whose norm is taken.
      mask: which leaves decay: a tree of booleans like the parameters (or a prefix), or a function that returns it.

    Returns:
      A `Transformation`: `init`, `update`, and the fused `step`.

    Raises:
      ValueError: for arguments out of range.

    Example:
      >>> import jax.numpy as jnp, optax_sr8bit as sr8
      >>> params = {"w": jnp.ones((64, 128), jnp.bfloat16)}
      >>> grads = {"w": jnp.full((64, 128), 0.1, jnp.bfloat16)}
      >>> tx = sr8.lamb(1e-2)
      >>> params, state = tx.step(grads, tx.init(params), params)
      >>> state.mu["w"].dtype
      dtype('uint8')

    References:
      You et al., Large Batch Optimization for Deep Learning, 2019, https://arxiv.org/abs/1904.00962
    """
    hyper = {"learning_rate": learning_rate, "b1": b1, "b2": b2, "eps": eps, "eps_root": eps_root}
    moments = (MU, NU)
    rule = Rule("lamb", moments, LambState, scalars, update, (True, False), measure, adapt)
    return Definition(rule, hyper | {"weight_decay": weight_decay}, (mask,))
