"""The float32 view of parameters that keep a correction: what the optimizer takes them to be."""

from typing import Any

import jax
import jax.numpy as jnp

from optax_sr8bit import state as states
from optax_sr8bit.plan import plan_tree
from optax_sr8bit.report import require, states_in
from optax_sr8bit.transform import Transformation
from optax_sr8bit_kernels.xla import load, unsigned


def master_params(tx: Transformation, params: Any, state: Any) -> Any:
    """The parameters in float32, with what their rounding keeps beside them: of `split32` the FP32 weights themselves.

    Args:
      tx: the optimizer, or an `sr8.chain` that ends in it.
      params: its parameters.
      state: its state.

    Returns:
      A tree of float32 arrays like the parameters; those without a correction are widened.

    Raises:
      ValueError: where the state is not that of these parameters.
      TypeError: where tx is no optimizer of this library.

    Example:
      >>> import jax.numpy as jnp, optax_sr8bit as sr8
      >>> params = {"w": jnp.ones((64, 128), jnp.bfloat16)}
      >>> tx = sr8.adamw(1e-4, rounding="split32")
      >>> params, state = tx.step(params, tx.init(params), params)
      >>> float(params["w"][0, 0]), f"{sr8.master_params(tx, params, state)['w'][0, 0]:.4f}"
      (1.0, '0.9999')
    """
    require(tx)
    rule = tx.definition.rule
    found = states_in(state, rule)
    if len(found) != 1:
        raise ValueError(f"expected one {rule.state.__name__} in the state, found {len(found)}")
    plans = plan_tree(params, tx.options)
    states.check(rule, found[0], plans, tx.options)
    leaves, structure = jax.tree.flatten(params)
    joined = []
    beside = jax.tree.leaves(found[0].correction) or [None] * len(plans)
    for plan, leaf, kept in zip(plans, leaves, beside, strict=True):
        if plan.correction is None or plan.rounding.join is None:
            joined.append(load(leaf))
        else:
            joined.append(plan.rounding.join(*(unsigned(x).astype(jnp.uint32) for x in (leaf, kept))))
    return jax.tree.unflatten(structure, joined)
