"""Muon."""

from collections.abc import Callable
from typing import Any

import jax
import optax
import optax.contrib

from optax_sr8bit.composite import composite


@composite(optax.contrib.muon, rates=("beta", "adam_b1", "adam_b2"))
def muon(
    learning_rate: optax.ScalarOrSchedule,
    ns_coeffs: tuple[Any, ...] | str = (3.4445, -4.7750, 2.0315),
    ns_steps: int = 5,
    beta: jax.typing.ArrayLike = 0.95,
    eps: jax.typing.ArrayLike = 1e-8,
    weight_decay: jax.typing.ArrayLike = 0.0,
    weight_decay_mask: Any = None,
    mu_dtype: None = None,
    *,
    nesterov: bool = True,
    adaptive: bool = False,
    preconditioning: str = "frobenius",
    adam_b1: jax.typing.ArrayLike = 0.9,
    adam_b2: jax.typing.ArrayLike = 0.999,
    adam_eps_root: jax.typing.ArrayLike = 0.0,
    adam_weight_decay: jax.typing.ArrayLike = 0.0,
    adam_learning_rate: optax.ScalarOrSchedule | None = None,
    muon_weight_dimension_numbers: Any | Callable[..., Any] = None,
    consistent_rms: jax.typing.ArrayLike | None = None,
):
    r"""Muon with an 8-bit momentum, 8-bit Adam for what is no matrix, and stochastically rounded parameters.

    .. math::

      m &\leftarrow \text{beta} \, m + (1 - \text{beta}) g, \qquad
        \hat m = \text{beta} \frac{m}{1 - \text{beta}^{t+1}}
          + (1 - \text{beta}) \frac{g}{1 - \text{beta}^t} \; \text{(nesterov)} \\
      u &= \text{NewtonSchulz}(\hat m) \, \max(1, \text{fan\_out} / \text{fan\_in})^{1/2} \\
      p &\leftarrow \text{round}(p - \text{learning\_rate} \, (u + \text{weight\_decay} \, p))

    Optax's own Muon, in float32, whose momentum (of Adam both moments) is kept as `codec` says. What is orthogonalized
    is the momentum before it is quantised again.

    Args:
      learning_rate: a number or a schedule of the count.
      ns_coeffs: coefficients of the Newton-Schulz iteration: three, three a step, or "standard" or "dion".
      ns_steps: steps of the iteration.
      beta: decay rate of the momentum.
      eps: added to the norm, and in Adam to the denominator.
      weight_decay: multiplied with the learning rate.
      weight_decay_mask: which matrices decay: a tree of booleans (or a prefix), or a function that returns it.
      mu_dtype: must stay None; moments are kept as `codec` says.
      nesterov: whether the momentum looks ahead.
      adaptive: whether the update is multiplied by the dual norm of the momentum.
      preconditioning: "frobenius", "spectral", "aol" or "schatten": by what a matrix is divided first.
      adam_b1: decay rate of Adam's first moment.
      adam_b2: decay rate of Adam's second moment.
      adam_eps_root: added inside the square root of Adam's denominator.
      adam_weight_decay: weight decay of what Adam steps.
      adam_learning_rate: that of Adam, by default that of Muon.
      muon_weight_dimension_numbers: a tree of `optax.contrib.MuonDimensionNumbers`, None where Adam steps; or a
        function of the parameters that returns it. By default all leaves of two axes are matrices.
      consistent_rms: a number c scales updates by c max(fan_in, fan_out)**0.5 instead.

    Returns:
      A `Transformation`: `init`, `update`, `step`.

    Raises:
      ValueError: for arguments out of range.

    Example:
      >>> import jax.numpy as jnp, optax_sr8bit as sr8
      >>> params = {"w": jnp.ones((64, 128), jnp.bfloat16), "b": jnp.zeros((128,), jnp.bfloat16)}
      >>> tx = sr8.muon(0.02, weight_decay=0.1)
      >>> state = tx.init(params)
      >>> params, state = tx.step(params, state, params)
      >>> str(state[0].inner.inner_states["muon"].inner_state[0].mu["w"].dtype)
      'uint8'

    References:
      Jordan et al., Muon: An optimizer for hidden layers in neural networks, 2024,
      https://kellerjordan.github.io/posts/muon
    """
