"""RMSProp."""

import jax
import jax.numpy as jnp
import optax

from optax_sr8bit.factory import optimizer
from optax_sr8bit.hyperparameters import bias_correction
from optax_sr8bit.rule import Definition, Moment, Rule, state_type
from optax_sr8bit_kernels.names import maximum, reciprocal, sqrt, unfused

NU, MU, TRACE = Moment("nu", signed=False), Moment("mu", signed=True), Moment("trace", signed=True)
RmspropState = state_type(__name__, "RmspropState", NU, MU, TRACE)


def scalars(hyper: dict[str, jax.Array], count: jax.Array) -> tuple[jax.Array, ...]:
    """The float32 scalars of step count + 1, as `update` unpacks them."""
    debias = 1.0 / bias_correction(hyper["decay"], count.astype(jnp.uint32) + 1)
    given = (hyper[name] for name in ("learning_rate", "decay", "eps", "momentum"))
    return (*given, jnp.where(hyper["bias_correction"] > 0, debias, 1.0))


def update(param, grad, moments, floors, scalars, zero, flags):
    """One step of RMSProp on a tile, in float32; the formula stands in `rmsprop`."""
    learning_rate, decay, eps, momentum, debias = scalars
    nu = unfused(decay * moments[0], zero) + unfused((1.0 - decay) * (grad * grad), zero)
    variance = unfused(nu * debias, zero)
    new = (nu,)
    if flags[0]:  # centered
        mu = unfused(decay * moments[1], zero) + unfused((1.0 - decay) * grad, zero)
        mean = mu * debias
        variance = variance - unfused(mean * mean, zero)
        new = new + (mu,)
    variance = maximum(variance, unfused(floors[0] * debias, zero))
    if flags[3]:  # eps inside the root
        root = sqrt(variance + eps)
    else:
        root = sqrt(variance) + eps
    step = grad * reciprocal(unfused(root, zero))
    step = unfused(learning_rate * step, zero)
    if flags[1]:  # momentum
        trace = unfused(momentum * moments[len(moments) - 1], zero) - step
        new = new + (trace,)
        if flags[2]:  # nesterov
            step = step - unfused(momentum * trace, zero)
        else:
            step = -trace
    return param - step, new


@optimizer
def rmsprop(
    learning_rate: optax.ScalarOrSchedule,
    decay: jax.typing.ArrayLike = 0.9,
    eps: jax.typing.ArrayLike = 1e-8,
    initial_scale: float = 0.0,
    eps_in_sqrt: bool = True,
    centered: bool = False,
    momentum: jax.typing.ArrayLike | None = None,
    nesterov: bool = False,
    bias_correction: bool = False,
) -> Definition:
    r"""RMSProp with 8-bit moments and stochastically rounded parameters.

    .. math::

      v &\leftarrow \text{decay} \, v + (1 - \text{decay}) g^2, \qquad
      m \leftarrow \text{decay} \, m + (1 - \text{decay}) g \; \text{(centered)} \\
      u &= g / \sqrt{\max(v - m^2, \text{floor}) + \text{eps}} \\
      p &\leftarrow \text{round}(p - \text{learning\_rate} \, u) \; \text{or, with momentum,} \;
      t \leftarrow \text{momentum} \, t - \text{learning\_rate} \, u, \; p \leftarrow \text{round}(p + t)

    The variance of `centered` is a difference of two moments, each a few per cent off in 8 bits: where the mean is many
    times the spread, use `codec="float32"`.

    Args:
      learning_rate: a number or a schedule of the count; applied before the momentum.
      decay: decay rate of the moments, in [0, 1).
      eps: added to the variance, or to its root.
      initial_scale: the second moment before the first step.
      eps_in_sqrt: whether eps is inside the root.
      centered: whether the square of the mean is taken off the second moment.
      momentum: what remains of the sum of steps after a step, in [0, 1), or None.
      nesterov: whether the momentum looks ahead.
      bias_correction: whether moments are divided by 1 - decay**t.

    Returns:
      A `Transformation`: `init`, `update`, and the fused `step`.

    Raises:
      ValueError: for arguments out of range.

    Example:
      >>> import jax.numpy as jnp, optax_sr8bit as sr8
      >>> params = {"w": jnp.ones((64, 128), jnp.bfloat16)}
      >>> grads = {"w": jnp.full((64, 128), 0.1, jnp.bfloat16)}
      >>> tx = sr8.rmsprop(1e-3, momentum=0.9)
      >>> params, state = tx.step(grads, tx.init(params), params)
      >>> state.mu is None, state.trace["w"].dtype
      (True, dtype('uint8'))

    References:
      Hinton, Neural Networks for Machine Learning, lecture 6e, 2012; Graves, Generating Sequences With Recurrent Neural
      Networks, 2013, https://arxiv.org/abs/1308.0850
    """
    if nesterov and momentum is None:
        raise ValueError("nesterov=True needs a momentum")
    nu = NU._replace(initial=initial_scale)
    moments = (nu, *((MU,) if centered else ()), *(() if momentum is None else (TRACE,)))
    flags = (centered, momentum is not None, nesterov, eps_in_sqrt)
    rule = Rule("rmsprop", moments, RmspropState, scalars, update, flags)
    hyper = {"learning_rate": learning_rate, "decay": decay, "eps": eps, "bias_correction": int(bias_correction)}
    hyper["momentum"] = 0.0 if momentum is None else momentum
    return Definition(rule, hyper, rates=("decay", "momentum"))
