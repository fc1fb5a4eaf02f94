"""Schedule-free AdamW."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
import optax.contrib

from optax_sr8bit.composite import composite
from optax_sr8bit_kernels.xla import load


@composite(optax.contrib.schedule_free_adamw, rates=("b1", "b2"))
def schedule_free_adamw(
    learning_rate: jax.typing.ArrayLike = 0.0025,
    warmup_steps: int | None = None,
    b1: jax.typing.ArrayLike = 0.9,
    b2: jax.typing.ArrayLike = 0.999,
    eps: jax.typing.ArrayLike = 1e-8,
    weight_decay: jax.typing.ArrayLike = 0.0,
    weight_lr_power: jax.typing.ArrayLike = 2.0,
    state_dtype: None = None,
):
    r"""Schedule-free AdamW with an 8-bit second moment and stochastically rounded parameters.

    .. math::

      v &\leftarrow b_2 v + (1 - b_2) g^2 \\
      z &\leftarrow \text{round}(z - \text{learning\_rate} \, (g / (\sqrt{v / (1 - b_2^t)} + \text{eps})
          + \text{weight\_decay} \, y)) \\
      x &\leftarrow (1 - c_t) x + c_t z, \qquad y \leftarrow \text{round}((1 - b_1) z + b_1 x)

    Optax's own, in float32. The parameters are y, where gradients are taken; x, where the model is to be evaluated, is
    computed from y and z by `schedule_free_eval_params`. v is kept as `codec` says, z in bfloat16 where v is in codes,
    stochastically rounded as y is: 5.02 bytes a parameter.

    Args:
      learning_rate: a number; about that of AdamW or larger.
      warmup_steps: over how many steps the learning rate rises from zero, or None.
      b1: how far y is from z towards x, above 0.
      b2: decay rate of the second moment.
      eps: added to the denominator, outside the square root.
      weight_decay: multiplied with the learning rate.
      weight_lr_power: power of the largest learning rate so far that weights z in x.
      state_dtype: must stay None.

    Returns:
      A `Transformation`: `init`, `update`, `step`.

    Raises:
      ValueError: for arguments out of range.

    Example:
      >>> import jax.numpy as jnp, optax_sr8bit as sr8
      >>> params = {"w": jnp.ones((64, 128), jnp.bfloat16)}
      >>> tx = sr8.schedule_free_adamw(1e-3, warmup_steps=10)
      >>> state = tx.init(params)
      >>> params, state = tx.step(params, state, params)
      >>> x = sr8.schedule_free_eval_params(state, params)

    References:
      Defazio et al., The Road Less Scheduled, NeurIPS 2024, https://arxiv.org/abs/2405.15682
    """


def schedule_free_eval_params(state: Any, params: Any) -> Any:
    r"""Where a model trained by `schedule_free_adamw`, or any `optax.contrib.schedule_free`, is to be evaluated.

    .. math::

      x = (y - (1 - b_1) z) / b_1

    In float32, then to the nearest of the parameter's dtype, for the compiled model to take it; pass the parameters in
    float32 to have it in float32.

    Args:
      state: of the optimizer, at any depth of chains and wrappers.
      params: y, the parameters as they are trained.

    Returns:
      x, a tree like the parameters.

    Raises:
      ValueError: where the state has no ScheduleFreeState, or more than one; where its z is kept as codes.
    """
    found = _within(state)
    if len(found) != 1:
        raise ValueError(f"schedule_free_eval_params needs one optax.contrib.ScheduleFreeState, found {len(found)}")
    b1, z = jnp.asarray(found[0].b1).astype(jnp.float32), found[0].z
    codes = [str(x.dtype) for x in jax.tree.leaves(z) if not jnp.issubdtype(x.dtype, jnp.floating)]
    if codes:
        raise ValueError(
            f"schedule_free_eval_params: z is kept in codes ({codes[0]}), too coarse for parameters; by "
            'default, and with select={"z*": "bfloat16"}, quantize_moments keeps it in bfloat16'
        )
    return jax.tree.map(lambda y, z: ((load(jnp.asarray(y)) - (1.0 - b1) * load(z)) / b1).astype(y.dtype), params, z)


def _within(state: Any) -> list[Any]:
    kind = optax.contrib.ScheduleFreeState
    nodes = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, kind))
    # The scales of a QuantizedState have the structure of its inner state.
    return [x for x in nodes if isinstance(x, kind) and not isinstance(x.b1, optax.MaskedNode)]
