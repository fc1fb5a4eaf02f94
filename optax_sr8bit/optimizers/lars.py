"""LARS."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from optax_sr8bit.factory import optimizer
from optax_sr8bit.rule import Definition, Moment, Rule, state_type
from optax_sr8bit.trust import trust_ratio
from optax_sr8bit_kernels.names import unfused

TRACE = Moment("trace", signed=True)
LarsState = state_type(__name__, "LarsState", TRACE)


def scalars(hyper: dict[str, jax.Array], count: jax.Array) -> tuple[jax.Array, ...]:
    """The float32 scalars of a step, as `update` unpacks them."""
    del count
    return tuple(hyper[name] for name in ("learning_rate", "weight_decay", "trust_coefficient", "eps", "momentum"))


def measure(param, grad, moments, floors, scalars, zero, flags):
    """The parameter and the gradient with decay, whose norms make the trust ratio."""
    return param, decayed(param, grad, scalars, zero, flags)


def decayed(param, grad, scalars, zero, flags):
    """The gradient with decay."""
    if flags[0]:
        grad = grad + unfused(scalars[1] * param, zero)
    return grad


def adapt(norms: tuple[jax.Array, ...], scalars: tuple[jax.Array, ...], flags: tuple[bool, ...]) -> tuple[jax.Array]:
    """The trust ratio with its coefficient, 1 where its mask does not reach."""
    _, _, coefficient, eps, _ = scalars
    param_norm, step_norm = norms
    return (trust_ratio(param_norm, step_norm, coefficient, eps) if flags[1] else jnp.float32(1),)


def update(param, grad, moments, floors, scalars, zero, flags):
    """One step of LARS on a tile, in float32; the formula stands in `lars`."""
    learning_rate, momentum, ratio = scalars[0], scalars[4], scalars[5]
    step = unfused(ratio * decayed(param, grad, scalars, zero, flags), zero)
    step = unfused(learning_rate * step, zero)
    trace = unfused(momentum * moments[0], zero) - step
    move = trace
    if flags[2]:  # nesterov
        move = unfused(momentum * trace, zero) - step
    return param + move, (trace,)


@optimizer
def lars(
    learning_rate: optax.ScalarOrSchedule,
    weight_decay: optax.ScalarOrSchedule = 0.0,
    weight_decay_mask: Any = True,
    trust_coefficient: jax.typing.ArrayLike = 0.001,
    eps: jax.typing.ArrayLike = 0.0,
    trust_ratio_mask: Any = True,
    momentum: jax.typing.ArrayLike = 0.9,
    nesterov: bool = False,
) -> Definition:
    r"""LARS with an 8-bit momentum and stochastically rounded parameters.

    .. math::

      u &= g + \text{weight\_decay} \, p, \qquad
      r = \text{trust\_coefficient} \, \lVert p \rVert / (\lVert u \rVert + \text{eps}) \\
      t &\leftarrow \text{momentum} \, t - \text{learning\_rate} \, r u, \qquad p \leftarrow \text{round}(p + t)

    with r = 1 where either norm is 0. Norms are those of whole leaves, as in `lamb`.

    Args:
      learning_rate: a number or a schedule of the count; applied before the momentum.
      weight_decay: a number or a schedule of the count, part of the gradient whose norm is taken.
      weight_decay_mask: which leaves decay: a tree of booleans (or a prefix of one), or a function of the parameters.
      trust_coefficient: the step in units of the parameter, for a learning rate of 1.
      eps: added to the norm of the gradient.
      trust_ratio_mask: which leaves have the ratio, given as `weight_decay_mask`; the others have r = 1.
      momentum: what remains of the sum of steps after a step, in [0, 1).
      nesterov: whether the momentum looks ahead.

    Returns:
      A `Transformation`: `init`, `update`, and the fused `step`.

    Raises:
      ValueError: for arguments out of range.

    Example:
      >>> import jax.numpy as jnp, optax_sr8bit as sr8
      >>> params = {"w": jnp.ones((64, 128), jnp.bfloat16)}
      >>> grads = {"w": jnp.full((64, 128), 0.1, jnp.bfloat16)}
      >>> tx = sr8.lars(1.0)
      >>> params, state = tx.step(grads, tx.init(params), params)
      >>> state.trace["w"].dtype
      dtype('uint8')

    References:
      You et al., Large Batch Training of Convolutional Networks, 2017, https://arxiv.org/abs/1708.03888
    """
    hyper = {"learning_rate": learning_rate, "weight_decay": weight_decay, "trust_coefficient": trust_coefficient}
    hyper |= {"eps": eps, "momentum": momentum}
    rule = Rule("lars", (TRACE,), LarsState, scalars, update, (True, True, nesterov), measure, adapt)
    return Definition(rule, hyper, (weight_decay_mask, trust_ratio_mask), rates=("momentum",))
