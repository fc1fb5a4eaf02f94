"""Adagrad."""

import jax
import optax

from optax_sr8bit.factory import optimizer
from optax_sr8bit.rule import Definition, Moment, Rule, state_type
from optax_sr8bit_kernels.names import maximum, reciprocal, sqrt, unfused, where

SUM = Moment("sum_of_squares", signed=False)
AdagradState = state_type(__name__, "AdagradState", SUM)


def scalars(hyper: dict[str, jax.Array], count: jax.Array) -> tuple[jax.Array, ...]:
    """The float32 scalars of a step, as `update` unpacks them."""
    del count
    return hyper["learning_rate"], hyper["eps"]


def update(param, grad, moments, floors, scalars, zero, flags):
    """One step of Adagrad on a tile, in float32; the formula stands in `adagrad`."""
    learning_rate, eps = scalars
    total = unfused(moments[0], zero) + unfused(grad * grad, zero)
    root = sqrt(maximum(total, floors[0]) + eps)
    step = grad * reciprocal(unfused(root, zero))
    step = where(total == 0.0, 0.0, step)  # not for NaN
    return param - unfused(learning_rate * step, zero), (total,)


@optimizer
def adagrad(
    learning_rate: optax.ScalarOrSchedule,
    initial_accumulator_value: float = 0.1,
    eps: jax.typing.ArrayLike = 1e-7,
) -> Definition:
    r"""Adagrad with an 8-bit sum of squares and stochastically rounded parameters.

    .. math::

      s \leftarrow s + g^2, \qquad
      p \leftarrow \text{round}(p - \text{learning\_rate} \, g / \sqrt{\max(s, \text{floor}) + \text{eps}})

    Args:
      learning_rate: a number or a schedule of the count.
      initial_accumulator_value: what the sum begins with.
      eps: added inside the square root; where the sum is 0 there is no step.

    Returns:
      A `Transformation`: `init`, `update`, and the fused `step`.

    Raises:
      ValueError: for arguments out of range.

    Example:
      >>> import jax.numpy as jnp, optax_sr8bit as sr8
      >>> params = {"w": jnp.ones((64, 128), jnp.bfloat16)}
      >>> grads = {"w": jnp.full((64, 128), 0.1, jnp.bfloat16)}
      >>> tx = sr8.adagrad(1e-2)
      >>> params, state = tx.step(grads, tx.init(params), params)
      >>> state.sum_of_squares["w"].dtype
      dtype('uint8')

    References:
      Duchi et al., Adaptive Subgradient Methods for Online Learning and Stochastic Optimization, JMLR 2011
    """
    moments = (SUM._replace(initial=initial_accumulator_value),)
    return Definition(
        Rule("adagrad", moments, AdagradState, scalars, update), {"learning_rate": learning_rate, "eps": eps}
    )
