"""Adafactor."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from optax_sr8bit.composite import composite


@composite(
    optax.adafactor, select={"0/v*": None}, rates=("momentum",)
)  # the second moment is the first link's, factored or not
def adafactor(
    learning_rate: optax.ScalarOrSchedule | None = None,
    min_dim_size_to_factor: int = 128,
    decay_rate: jax.typing.ArrayLike = 0.8,
    decay_offset: jax.typing.ArrayLike = 0,
    multiply_by_parameter_scale: bool = True,
    clipping_threshold: jax.typing.ArrayLike | None = 1.0,
    momentum: jax.typing.ArrayLike | None = None,
    dtype_momentum: Any = jnp.float32,
    weight_decay_rate: optax.ScalarOrSchedule | None = None,
    eps: jax.typing.ArrayLike = 1e-30,
    factored: bool = True,
    weight_decay_mask: Any = None,
):
    r"""Adafactor with an 8-bit momentum, if any, and stochastically rounded parameters.

    .. math::

      v &\leftarrow \beta_t v + (1 - \beta_t) (g^2 + \text{eps}), \qquad \beta_t = 1 - t^{-\text{decay\_rate}} \\
      u &= g / \sqrt{v}, \qquad u \leftarrow u / \max(1, \text{rms}(u) / \text{clipping\_threshold}) \\
      u &\leftarrow \text{learning\_rate} \, \max(\text{rms}(p), 10^{-3}) \, u \\
      m &\leftarrow \text{momentum} \, m + (1 - \text{momentum}) u \\
      p &\leftarrow \text{round}(p - m - \text{weight\_decay\_rate} \, p)

    Optax's own Adafactor, in float32. Of matrices `v` is the product of the averages of its rows and of its columns;
    these, and the whole `v` of what is not factored, stay float32. The momentum is kept as `codec` says.

    Args:
      learning_rate: a number or a schedule of the count; relative to the parameter, see below. None is 1.
      min_dim_size_to_factor: the second moment is factored where two dimensions are at least so long.
      decay_rate: exponent of the decay of the second moment.
      decay_offset: taken off the count in that.
      multiply_by_parameter_scale: whether steps are relative to the RMS of the parameter.
      clipping_threshold: the largest RMS of an update before learning rate and scale, or None.
      momentum: decay rate of the average of the updates, or None for none.
      dtype_momentum: must stay float32; the momentum is kept as `codec` says.
      weight_decay_rate: a number or a schedule; not multiplied with the learning rate.
      eps: added to the squared gradient.
      factored: whether to factor at all.
      weight_decay_mask: which leaves decay: a tree of booleans (or a prefix), or a function that returns it.

    Returns:
      A `Transformation`: `init`, `update`, `step`.

    Raises:
      ValueError: for arguments out of range.

    Example:
      >>> import jax.numpy as jnp, optax_sr8bit as sr8
      >>> params = {"w": jnp.ones((128, 256), jnp.bfloat16)}
      >>> tx = sr8.adafactor(1e-2, momentum=0.9)
      >>> state = tx.init(params)
      >>> params, state = tx.step(params, state, params)
      >>> state[0].inner[0].v_row["w"].shape, str(state[0].inner[4].ema["w"].dtype)
      ((128,), 'uint8')

    References:
      Shazeer and Stern, Adafactor: Adaptive Learning Rates with Sublinear Memory Cost, ICML 2018,
      https://arxiv.org/abs/1804.04235
    """
