"""The float32 view of parameters that keep a correction, what the optimizer takes them to be, and the way back."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from optax_sr8bit import state as states
from optax_sr8bit.plan import named_leaves, plan_tree
from optax_sr8bit.report import require, states_in
from optax_sr8bit.transform import Transformation
from optax_sr8bit_kernels.xla import load, store, unsigned


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
    own = _own(tx, state)
    plans = plan_tree(params, tx.options)
    states.check(tx.definition.rule, own, plans, tx.options)
    leaves, structure = jax.tree.flatten(params)
    joined = []
    beside = jax.tree.leaves(own.correction) or [None] * len(plans)
    for plan, leaf, kept in zip(plans, leaves, beside, strict=True):
        if plan.correction is None or plan.rounding.join is None:
            joined.append(load(leaf))
        else:
            joined.append(plan.rounding.join(*(unsigned(x).astype(jnp.uint32) for x in (leaf, kept))))
    return jax.tree.unflatten(structure, joined)


def from_master(
    tx: Transformation, master: Any, narrow: Callable[[str, Any], bool] = lambda path, leaf: True
) -> tuple[Any, Any]:
    """Parameters and a fresh state for FP32 weights, with what rounding these loses kept as the correction.

    `tx.init` of parameters that were cast begins with corrections of zero: all weights lie on multiples of their
    spacing, where FP32 weights lie anywhere between. What that costs: `docs/evidence.md`.

    Args:
      tx: the optimizer, or an `sr8.chain` that ends in it, whose `rounding` keeps a correction.
      master: a tree of arrays, any shapes; those in float32 become bfloat16, to nearest where nothing is kept beside
        them. Others are handed on, not copied: donation of the parameters deletes them here too.
      narrow: (path, leaf) -> whether a float32 leaf becomes bfloat16; by default all do.

    Returns:
      (parameters like `master`, the state); `master_params` of these is `master`, as near as the rounding can say.

    Raises:
      ValueError: where nothing is kept: no leaf is float32, or the rounding keeps nothing.
      TypeError: where tx is no optimizer of this library, or for leaves that are no arrays of floats.

    Example:
      >>> import jax.numpy as jnp, optax_sr8bit as sr8
      >>> tx = sr8.adamw(1e-4, rounding="split32")
      >>> params, state = sr8.from_master(tx, {"w": jnp.full((64, 128), 0.1)})
      >>> float(params["w"][0, 0]), f"{sr8.master_params(tx, params, state)['w'][0, 0]:.9f}"
      (0.10009765625, '0.100000001')
    """
    require(tx)

    def as_param(name: str, leaf: Any) -> Any:
        wide = getattr(leaf, "dtype", None) == jnp.float32 and narrow(name, leaf)
        return jax.ShapeDtypeStruct(leaf.shape, jnp.bfloat16) if wide else leaf

    leaves, structure = jax.tree.flatten(master)
    wanted = [as_param(name, leaf) for name, leaf in named_leaves(master)]
    plans = plan_tree(jax.tree.unflatten(structure, wanted), tx.options)
    pairs = list(zip(plans, leaves, strict=True))
    rounded = [leaf.dtype == jnp.float32 and plan.correction is not None for plan, leaf in pairs]
    if not any(rounded):
        found = sorted({f"{leaf.dtype} to {plan.dtype} by {plan.rounding.name!r}" for plan, leaf in pairs})
        raise ValueError(
            f"no leaf is rounded from float32 with something kept beside it (here: {'; '.join(found)}): give float32 "
            f"weights to {tx.definition.rule.name}(rounding='kahan', 'split24' or 'split32'), or cast and call tx.init"
        )
    params, beside = [], []
    for (plan, leaf), keeps in zip(pairs, rounded, strict=True):
        if not keeps:
            params.append(leaf if leaf.dtype == plan.dtype else jnp.asarray(leaf, plan.dtype))
            beside.append(None)
            continue
        x = jnp.asarray(leaf)
        stored = plan.rounding.encoders[plan.dtype.name](x, jnp.uint32(0))  # to nearest, like all that keep a rest
        assert plan.rounding.rest is not None
        params.append(store(stored, plan.dtype))
        beside.append(store(plan.rounding.rest(x, stored), plan.correction))
    params = jax.tree.unflatten(structure, params)
    state = tx.init(params)
    own = _own(tx, state)
    zeros, of = jax.tree.flatten(own.correction)
    kept = [zero if rest is None else rest for zero, rest in zip(zeros, beside, strict=True)]
    whole = own._replace(correction=jax.tree.unflatten(of, kept))
    return params, jax.tree.map(lambda x: whole if x is own else x, state, is_leaf=lambda x: x is own)


def _own(tx: Transformation, state: Any) -> Any:
    """The optimizer's own state in that of a chain."""
    rule = tx.definition.rule
    found = states_in(state, rule)
    if len(found) != 1:
        raise ValueError(f"expected one {rule.state.__name__} in the state, found {len(found)}")
    return found[0]
