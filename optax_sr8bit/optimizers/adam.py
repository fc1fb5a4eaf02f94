"""Adam and AdamW."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from optax_sr8bit.factory import optimizer
from optax_sr8bit.hyperparameters import bias_correction
from optax_sr8bit.rule import Definition, Moment, Rule, state_type
from optax_sr8bit_kernels.names import maximum, reciprocal, sqrt, unfused

MU, NU = Moment("mu", signed=True), Moment("nu", signed=False)
AdamState = state_type(__name__, "AdamState", MU, NU, optax=optax.ScaleByAdamState)


def scalars(hyper: dict[str, jax.Array], count: jax.Array) -> tuple[jax.Array, ...]:
    """The float32 scalars of step count + 1, as `update` unpacks them."""
    t = count.astype(jnp.uint32) + 1
    b1, b2 = hyper["b1"], hyper["b2"]
    correction = bias_correction(jnp.stack([b1, b1, b2]), jnp.stack([t, t + 1, t]))
    given = (hyper[name] for name in ("learning_rate", "b1", "b2", "eps_root", "weight_decay"))
    ahead = b1 * (correction[0] / correction[1])
    return (*given, correction[0], correction[0] * hyper["eps"], ahead, 1.0 / correction[2])


def update(param, grad, moments, floors, scalars, zero, flags):
    """One step of AdamW on a tile, in float32; the formula stands in `adamw`."""
    step, new = direction(param, grad, moments, floors, scalars, zero, flags)
    return param - unfused(scalars[0] * step, zero), new


def direction(param, grad, moments, floors, scalars, zero, flags):
    """What AdamW multiplies with the learning rate, and the new moments.

    The first moment's bias correction, mu / (1 - b1**t), multiplies the denominator instead: one operation less.
    """
    b1, b2, eps_root, weight_decay = scalars[1], scalars[2], scalars[3], scalars[4]
    correct_mu, correct_eps, ahead, debias_nu = scalars[5], scalars[6], scalars[7], scalars[8]
    mu, nu = moments
    new_grad = unfused((1.0 - b1) * grad, zero)
    mu = unfused(b1 * mu, zero) + new_grad
    nu = unfused(b2 * nu, zero) + unfused((1.0 - b2) * (grad * grad), zero)
    if flags[1]:  # nesterov
        step = unfused(ahead * mu, zero) + new_grad
    else:
        step = mu
    root = sqrt(unfused(maximum(nu, floors[1]) * debias_nu, zero) + eps_root)
    step = step * reciprocal(unfused(root * correct_mu, zero) + correct_eps)
    if flags[0]:  # weight decay
        step = unfused(step, zero) + unfused(weight_decay * param, zero)
    return step, (mu, nu)


def _rule(name: str, decay: bool, nesterov: bool) -> Rule:
    return Rule(name, (MU, NU), AdamState, scalars, update, flags=(decay, nesterov))


@optimizer
def adam(
    learning_rate: optax.ScalarOrSchedule,
    b1: jax.typing.ArrayLike = 0.9,
    b2: jax.typing.ArrayLike = 0.999,
    eps: jax.typing.ArrayLike = 1e-8,
    eps_root: jax.typing.ArrayLike = 0.0,
    mu_dtype: None = None,
    *,
    nesterov: bool = False,
) -> Definition:
    """Adam with 8-bit moments and stochastically rounded parameters: `adamw` without weight decay.

    Args:
      learning_rate: a number or a schedule of the count.
      b1: decay rate of the first moment, in [0, 1).
      b2: decay rate of the second moment, in [0, 1).
      eps: added to the denominator, outside the square root.
      eps_root: added inside the square root.
      mu_dtype: must stay None; moments are kept as `codec` says.
      nesterov: whether to look ahead, as `optax.adam` does.

    Returns:
      A `Transformation`: `init`, `update`, and the fused `step`.

    Raises:
      ValueError: for arguments out of range.

    Example:
      >>> import jax.numpy as jnp, optax_sr8bit as sr8
      >>> params = {"w": jnp.ones((64, 128), jnp.bfloat16)}
      >>> grads = {"w": jnp.full((64, 128), 0.1, jnp.bfloat16)}
      >>> tx = sr8.adam(1e-3)
      >>> state = tx.init(params)
      >>> params, state = tx.step(grads, state, params)
      >>> state.mu["w"].dtype
      dtype('uint8')

    References:
      Kingma and Ba, Adam: A Method for Stochastic Optimization, 2014, https://arxiv.org/abs/1412.6980
    """
    hyper = {"learning_rate": learning_rate, "b1": b1, "b2": b2, "eps": eps, "eps_root": eps_root}
    return Definition(_rule("adam", False, nesterov), hyper | {"weight_decay": 0.0})


@optimizer
def adamw(
    learning_rate: optax.ScalarOrSchedule,
    b1: jax.typing.ArrayLike = 0.9,
    b2: jax.typing.ArrayLike = 0.999,
    eps: jax.typing.ArrayLike = 1e-8,
    eps_root: jax.typing.ArrayLike = 0.0,
    mu_dtype: None = None,
    weight_decay: optax.ScalarOrSchedule = 1e-4,
    mask: Any = None,
    *,
    nesterov: bool = False,
) -> Definition:
    r"""AdamW with 8-bit moments and stochastically rounded parameters.

    .. math::

      m &\leftarrow b_1 m + (1 - b_1) g, \qquad v \leftarrow b_2 v + (1 - b_2) g^2 \\
      u &= \frac{m / (1 - b_1^t)}{\sqrt{\max(v, \text{floor}) / (1 - b_2^t) + \text{eps\_root}} + \text{eps}} \\
      p &\leftarrow \text{round}(p - \text{learning\_rate} \, (u + \text{weight\_decay} \, p))

    All in float32 and rounded once; `m` and `v` are quantised after they were used. The floor belongs to the codec.

    Args:
      learning_rate: a number or a schedule of the count.
      b1: decay rate of the first moment, in [0, 1).
      b2: decay rate of the second moment, in [0, 1).
      eps: added to the denominator, outside the square root.
      eps_root: added inside the square root.
      mu_dtype: must stay None; moments are kept as `codec` says.
      weight_decay: a number or a schedule of the count, multiplied with the learning rate.
      mask: which leaves decay: a tree of booleans like the parameters (or a prefix), or a function that returns it.
      nesterov: whether to look ahead, as `optax.adamw` does.

    Returns:
      A `Transformation`: `init`, `update`, and the fused `step`.

    Raises:
      ValueError: for arguments out of range.

    Example:
      >>> import jax.numpy as jnp, optax_sr8bit as sr8
      >>> params = {"w": jnp.ones((64, 128), jnp.bfloat16)}
      >>> grads = {"w": jnp.full((64, 128), 0.1, jnp.bfloat16)}
      >>> tx = sr8.adamw(1e-3, weight_decay=0.1)
      >>> state = tx.init(params)
      >>> params, state = tx.step(grads, state, params)
      >>> params["w"].dtype
      dtype(bfloat16)

    References:
      Loshchilov and Hutter, Decoupled Weight Decay Regularization, 2019, https://arxiv.org/abs/1711.05101
    """
    hyper = {"learning_rate": learning_rate, "b1": b1, "b2": b2, "eps": eps, "eps_root": eps_root}
    return Definition(_rule("adamw", True, nesterov), hyper | {"weight_decay": weight_decay}, (mask,))
