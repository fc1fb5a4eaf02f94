"""Lion."""

from typing import Any

import jax
import optax

from optax_sr8bit.factory import optimizer
from optax_sr8bit.rule import Definition, Moment, Rule, state_type
from optax_sr8bit_kernels.names import unfused, where

MU = Moment("mu", signed=True)
LionState = state_type(__name__, "LionState", MU, optax=optax.ScaleByLionState)


def scalars(hyper: dict[str, jax.Array], count: jax.Array) -> tuple[jax.Array, ...]:
    """The float32 scalars of a step, as `update` unpacks them."""
    del count
    return tuple(hyper[name] for name in ("learning_rate", "b1", "b2", "weight_decay"))


def update(param, grad, moments, floors, scalars, zero, flags):
    """One step of Lion on a tile, in float32; the formula stands in `lion`."""
    learning_rate, b1, b2, weight_decay = scalars
    mu = moments[0]
    blend = unfused(b1 * mu, zero) + unfused((1.0 - b1) * grad, zero)
    # Not a product with |blend|: zeros stay zero and NaN stays NaN.
    step = where(blend > 0.0, 1.0, where(blend < 0.0, -1.0, blend))
    if flags[0]:
        step = step + unfused(weight_decay * param, zero)
    mu = unfused(b2 * mu, zero) + unfused((1.0 - b2) * grad, zero)
    return param - unfused(learning_rate * step, zero), (mu,)


@optimizer
def lion(
    learning_rate: optax.ScalarOrSchedule,
    b1: jax.typing.ArrayLike = 0.9,
    b2: jax.typing.ArrayLike = 0.99,
    mu_dtype: None = None,
    weight_decay: optax.ScalarOrSchedule = 1e-3,
    mask: Any = None,
) -> Definition:
    r"""Lion with an 8-bit momentum and stochastically rounded parameters.

    .. math::

      u &= \text{sign}(b_1 m + (1 - b_1) g) \\
      p &\leftarrow \text{round}(p - \text{learning\_rate} \, (u + \text{weight\_decay} \, p)) \\
      m &\leftarrow b_2 m + (1 - b_2) g

    All in float32 and rounded once; the decay stands outside the sign.

    Args:
      learning_rate: a number or a schedule of the count; 3 to 10 times smaller than AdamW's.
      b1: weight of the momentum in the step, in [0, 1).
      b2: decay rate of the momentum, in [0, 1).
      mu_dtype: must stay None; the momentum is kept as `codec` says.
      weight_decay: a number or a schedule of the count, multiplied with the learning rate.
      mask: which leaves decay: a tree of booleans like the parameters (or a prefix), or a function that returns it.

    Returns:
      A `Transformation`: `init`, `update`, and the fused `step`.

    Raises:
      ValueError: for arguments out of range.

    Example:
      >>> import jax.numpy as jnp, optax_sr8bit as sr8
      >>> params = {"w": jnp.ones((64, 128), jnp.bfloat16)}
      >>> grads = {"w": jnp.full((64, 128), 0.1, jnp.bfloat16)}
      >>> tx = sr8.lion(1e-4, weight_decay=0.1)
      >>> state = tx.init(params)
      >>> params, state = tx.step(grads, state, params)
      >>> state.mu["w"].dtype
      dtype('uint8')

    References:
      Chen et al., Symbolic Discovery of Optimization Algorithms, 2023, https://arxiv.org/abs/2302.06675
    """
    hyper = {"learning_rate": learning_rate, "b1": b1, "b2": b2, "weight_decay": weight_decay}
    rule = Rule("lion", (MU,), LionState, scalars, update, flags=(True,))
    return Definition(rule, hyper, (mask,))
