"""SGD."""

import jax
import optax

from optax_sr8bit.factory import optimizer
from optax_sr8bit.rule import Definition, Moment, Rule, state_type
from optax_sr8bit_kernels.names import unfused

TRACE = Moment("trace", signed=True)
SgdState = state_type(__name__, "SgdState", TRACE)


def scalars(hyper: dict[str, jax.Array], count: jax.Array) -> tuple[jax.Array, ...]:
    """The float32 scalars of a step, as `update` unpacks them."""
    del count
    return hyper["learning_rate"], hyper["momentum"]


def update(param, grad, moments, floors, scalars, zero, flags):
    """One step of SGD on a tile, in float32; the formula stands in `sgd`."""
    learning_rate, momentum = scalars
    step = grad
    if len(moments) > 0:
        trace = unfused(momentum * moments[0], zero) + grad
        step = trace
        if flags[0]:  # nesterov
            step = unfused(momentum * trace, zero) + grad
        moments = (trace,)
    return param - unfused(learning_rate * step, zero), moments


@optimizer
def sgd(
    learning_rate: optax.ScalarOrSchedule,
    momentum: jax.typing.ArrayLike | None = None,
    nesterov: bool = False,
    accumulator_dtype: None = None,
) -> Definition:
    r"""SGD with an 8-bit momentum, if any, and stochastically rounded parameters.

    .. math::

      m &\leftarrow \text{momentum} \, m + g, \qquad u = m \; \text{or} \; \text{momentum} \, m + g
          \; \text{(nesterov)}, \; \text{or} \; g \; \text{without momentum} \\
      p &\leftarrow \text{round}(p - \text{learning\_rate} \, u)

    Args:
      learning_rate: a number or a schedule of the count.
      momentum: what remains of the sum of gradients after a step, in [0, 1), or None.
      nesterov: whether the momentum looks ahead.
      accumulator_dtype: must stay None; the momentum is kept as `codec` says.

    Returns:
      A `Transformation`: `init`, `update`, and the fused `step`.

    Raises:
      ValueError: for arguments out of range.

    Example:
      >>> import jax.numpy as jnp, optax_sr8bit as sr8
      >>> params = {"w": jnp.ones((64, 128), jnp.bfloat16)}
      >>> grads = {"w": jnp.full((64, 128), 0.1, jnp.bfloat16)}
      >>> tx = sr8.sgd(1e-2, momentum=0.9)
      >>> params, state = tx.step(grads, tx.init(params), params)
      >>> state.trace["w"].dtype
      dtype('uint8')

    References:
      Sutskever et al., On the Importance of Initialization and Momentum in Deep Learning, 2013
    """
    if nesterov and momentum is None:
        raise ValueError("nesterov=True needs a momentum")
    moments = () if momentum is None else (TRACE,)
    rule = Rule("sgd", moments, SgdState, scalars, update, flags=(nesterov,))
    hyper = {"learning_rate": learning_rate, "momentum": 0.0 if momentum is None else momentum}
    return Definition(rule, hyper, rates=("momentum",))
