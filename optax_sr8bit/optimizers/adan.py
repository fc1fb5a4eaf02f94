"""Adan."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from optax_sr8bit.factory import optimizer
from optax_sr8bit.hyperparameters import bias_correction
from optax_sr8bit.rule import Definition, Moment, Rule, state_type
from optax_sr8bit_kernels.names import maximum, reciprocal, sqrt, unfused

M, V, N, G = (
    Moment("m", signed=True),
    Moment("v", signed=True),
    Moment("n", signed=False),
    Moment("g", signed=True),
)
AdanState = state_type(__name__, "AdanState", M, V, N, G)


def scalars(hyper: dict[str, jax.Array], count: jax.Array) -> tuple[jax.Array, ...]:
    """The float32 scalars of step count + 1, as `update` unpacks them."""
    t = count.astype(jnp.uint32) + 1
    rates = jnp.stack([hyper["b1"], hyper["b2"], hyper["b3"]])
    debias_m, debias_v, debias_n = 1.0 / bias_correction(rates, jnp.stack([t, t, t]))
    names = ("learning_rate", "b1", "b2", "b3", "eps", "eps_root", "weight_decay")
    has_before = jnp.where(count > 0, jnp.float32(1), jnp.float32(0))
    return (*(hyper[name] for name in names), debias_m, (1.0 - hyper["b2"]) * debias_v, debias_n, has_before)


def update(param, grad, moments, floors, scalars, zero, flags):
    """One step of Adan on a tile, in float32; the formula stands in `adan`."""
    learning_rate, b1, b2, b3, eps, eps_root, weight_decay, debias_m, weigh_v, debias_n, has_before = scalars
    m, v, n, before = moments
    change = unfused(has_before * (grad - unfused(before, zero)), zero)
    m = unfused(b1 * m, zero) + unfused((1.0 - b1) * grad, zero)
    v = unfused(b2 * v, zero) + unfused((1.0 - b2) * change, zero)
    ahead = grad + unfused((1.0 - b2) * change, zero)
    n = unfused(b3 * n, zero) + unfused((1.0 - b3) * (ahead * ahead), zero)
    direction = unfused(debias_m * m, zero) + unfused(weigh_v * v, zero)
    step = direction * reciprocal(sqrt(unfused(maximum(n, floors[2]) * debias_n, zero) + eps_root) + eps)
    if flags[0]:  # weight decay
        step = unfused(step, zero) + unfused(weight_decay * param, zero)
    return param - unfused(learning_rate * step, zero), (m, v, n, grad)


@optimizer
def adan(
    learning_rate: optax.ScalarOrSchedule,
    b1: jax.typing.ArrayLike = 0.98,
    b2: jax.typing.ArrayLike = 0.92,
    b3: jax.typing.ArrayLike = 0.99,
    eps: jax.typing.ArrayLike = 1e-8,
    eps_root: jax.typing.ArrayLike = 1e-8,
    weight_decay: optax.ScalarOrSchedule = 0.0,
    mask: Any = None,
) -> Definition:
    r"""Adan with three 8-bit moments, the previous gradient in 8 bits, and stochastically rounded parameters.

    .. math::

      d &= g - g_\text{before} \; (0 \; \text{in the first step}), \qquad m \leftarrow b_1 m + (1 - b_1) g \\
      v &\leftarrow b_2 v + (1 - b_2) d, \qquad n \leftarrow b_3 n + (1 - b_3) (g + (1 - b_2) d)^2 \\
      u &= \frac{m / (1 - b_1^t) + (1 - b_2) v / (1 - b_2^t)}{\sqrt{\max(n, \text{floor}) / (1 - b_3^t)
          + \text{eps\_root}} + \text{eps}} \\
      p &\leftarrow \text{round}(p - \text{learning\_rate} \, (u + \text{weight\_decay} \, p))

    Letters, signs and weights are those of Optax. The difference of gradients has the error of the previous one's code.

    Args:
      learning_rate: a number or a schedule of the count.
      b1: decay rate of the mean gradient, in [0, 1).
      b2: decay rate of the mean difference, in [0, 1).
      b3: decay rate of the second moment, in [0, 1).
      eps: added to the denominator, outside the square root.
      eps_root: added inside the square root.
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
      >>> tx = sr8.adan(1e-3)
      >>> params, state = tx.step(grads, tx.init(params), params)
      >>> state.g["w"].dtype
      dtype('uint8')

    References:
      Xie et al., Adan: Adaptive Nesterov Momentum Algorithm, 2022, https://arxiv.org/abs/2208.06677
    """
    hyper = {"learning_rate": learning_rate, "b1": b1, "b2": b2, "b3": b3, "eps": eps, "eps_root": eps_root}
    rule = Rule("adan", (M, V, N, G), AdanState, scalars, update, flags=(True,))
    return Definition(rule, hyper | {"weight_decay": weight_decay}, (mask,), rates=("b1", "b2", "b3"))
