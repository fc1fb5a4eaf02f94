"""AdEMAMix."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from optax_sr8bit.factory import optimizer
from optax_sr8bit.hyperparameters import bias_correction
from optax_sr8bit.rule import Definition, Moment, Rule, state_type
from optax_sr8bit_kernels.names import maximum, reciprocal, sqrt, unfused

M1, M2, NU = Moment("m1", signed=True), Moment("m2", signed=True), Moment("nu", signed=False)
AdemamixState = state_type(__name__, "AdemamixState", M1, M2, NU)


def scalars(hyper: dict[str, jax.Array], count: jax.Array) -> tuple[jax.Array, ...]:
    """The float32 scalars of step count + 1, as `update` unpacks them."""
    t = count.astype(jnp.uint32) + 1
    correct_m1, correct_nu = bias_correction(jnp.stack([hyper["b1"], hyper["b2"]]), jnp.stack([t, t]))
    names = ("learning_rate", "b1", "b2", "b3", "alpha", "eps", "eps_root", "weight_decay")
    return (*(hyper[name] for name in names), 1.0 / correct_m1, 1.0 / correct_nu)


def update(param, grad, moments, floors, scalars, zero, flags):
    """One step of AdEMAMix on a tile, in float32; the formula stands in `ademamix`."""
    learning_rate, b1, b2, b3, alpha, eps, eps_root, weight_decay, debias_m1, debias_nu = scalars
    m1, m2, nu = moments
    m1 = unfused(b1 * m1, zero) + unfused((1.0 - b1) * grad, zero)
    m2 = unfused(b3 * m2, zero) + unfused((1.0 - b3) * grad, zero)
    nu = unfused(b2 * nu, zero) + unfused((1.0 - b2) * (grad * grad), zero)
    direction = unfused(debias_m1 * m1, zero) + unfused(alpha * m2, zero)
    step = direction * reciprocal(sqrt(unfused(maximum(nu, floors[2]) * debias_nu, zero) + eps_root) + eps)
    if flags[0]:  # weight decay
        step = unfused(step, zero) + unfused(weight_decay * param, zero)
    return param - unfused(learning_rate * step, zero), (m1, m2, nu)


@optimizer
def ademamix(
    learning_rate: optax.ScalarOrSchedule,
    b1: jax.typing.ArrayLike = 0.9,
    b2: jax.typing.ArrayLike = 0.999,
    b3: optax.ScalarOrSchedule = 0.9999,
    alpha: optax.ScalarOrSchedule = 5.0,
    eps: jax.typing.ArrayLike = 1e-8,
    eps_root: jax.typing.ArrayLike = 0.0,
    mu_dtype: None = None,
    weight_decay: optax.ScalarOrSchedule = 0.0,
    mask: Any = None,
) -> Definition:
    r"""AdEMAMix with three 8-bit moments and stochastically rounded parameters.

    .. math::

      m_1 &\leftarrow b_1 m_1 + (1 - b_1) g, \qquad m_2 \leftarrow b_3 m_2 + (1 - b_3) g, \qquad
      v \leftarrow b_2 v + (1 - b_2) g^2 \\
      u &= \frac{m_1 / (1 - b_1^t) + \alpha m_2}{\sqrt{\max(v, \text{floor}) / (1 - b_2^t) + \text{eps\_root}}
          + \text{eps}} \\
      p &\leftarrow \text{round}(p - \text{learning\_rate} \, (u + \text{weight\_decay} \, p))

    The slow average moves by a ten-thousandth a step, far below the spacing of its codes: it needs a dithered codec.

    Args:
      learning_rate: a number or a schedule of the count.
      b1: decay rate of the fast average, in [0, 1).
      b2: decay rate of the second moment, in [0, 1).
      b3: decay rate of the slow average, in [0, 1), or a schedule of the count; its bias is not corrected.
      alpha: weight of the slow average, or a schedule of the count.
      eps: added to the denominator, outside the square root.
      eps_root: added inside the square root.
      mu_dtype: must stay None; moments are kept as `codec` says.
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
      >>> tx = sr8.ademamix(1e-3)
      >>> params, state = tx.step(grads, tx.init(params), params)
      >>> state.m2["w"].dtype
      dtype('uint8')

    References:
      Pagliardini et al., The AdEMAMix Optimizer: Better, Faster, Older, 2024, https://arxiv.org/abs/2409.03137
    """
    hyper = {"learning_rate": learning_rate, "b1": b1, "b2": b2, "b3": b3, "alpha": alpha, "eps": eps}
    hyper |= {"eps_root": eps_root, "weight_decay": weight_decay}
    rule = Rule("ademamix", (M1, M2, NU), AdemamixState, scalars, update, flags=(True,))
    schedules = ("learning_rate", "b3", "alpha", "weight_decay")
    return Definition(rule, hyper, (mask,), rates=("b1", "b2", "b3"), schedules=schedules)
