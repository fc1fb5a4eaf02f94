"""The last link of any chain: updates are added to the parameters in float32, and the sums are rounded."""

from collections.abc import Callable, Mapping
from typing import Any

import jax

from optax_sr8bit.options import Options
from optax_sr8bit.rounding import Rounding
from optax_sr8bit.rule import Definition, Rule, state_type
from optax_sr8bit.transform import Transformation, build

StochasticRoundState = state_type(__name__, "StochasticRoundState")


def scalars(hyper: dict[str, jax.Array], count: jax.Array) -> tuple[jax.Array, ...]:
    """The float32 scalars of a step: none."""
    del hyper, count
    return ()


def update(param, grad, moments, floors, scalars, zero, flags):
    """One step on a tile, in float32: what stands where others have a gradient is the update itself."""
    return param + grad, ()


def stochastic_round(
    seed: Any = 0,
    *,
    rounding: str | Rounding | Mapping[str, Any] | Callable[..., Any] = "stochastic",
    implementation: str | None = None,
    in_place: bool = False,
    delta_dtype: Any = None,
) -> Transformation:
    r"""The last link of a chain of Optax's transformations, which rounds the new parameters stochastically.

    .. math::

      p \leftarrow \text{round}(p + u)

    In float32 and rounded once; u are the updates that reach it, with Optax's sign: learning rate and minus are in them
    already. It keeps no moments; those of the links before it are kept in 8 bits by `quantize_moments`.

    Args:
      seed: of the random bits, an int or a JAX PRNG key. Runs that share it share their noise.
      rounding: of parameters below float32: a name ("stochastic", "nearest", "kahan", "split24", "split32"), an object,
        a mapping from patterns of leaf paths (`fnmatch`, the first match counts, "stochastic" where none does) to
        these, or a function of (path, leaf).
      implementation: "xla", "triton", or None for the best that runs here.
      in_place: `update` returns objects that only `optax.apply_updates` (or `p + u`) can use, and which give it the new
        parameters without a further pass; both in one jit.
      delta_dtype: dtype of the updates that `update` returns, by default that of the updates that reach it.

    Returns:
      A `Transformation`: `init`, `update`, and `step`, which an `sr8.chain` that ends in it has too.

    Raises:
      ValueError: for arguments out of range.

    Example:
      >>> import jax.numpy as jnp, optax, optax_sr8bit as sr8
      >>> params = {"w": jnp.ones((64, 128), jnp.bfloat16)}
      >>> grads = {"w": jnp.full((64, 128), 0.1, jnp.bfloat16)}
      >>> tx = sr8.chain(optax.scale_by_sign(), optax.scale_by_learning_rate(1e-4), sr8.stochastic_round(0))
      >>> state = tx.init(params)
      >>> params, state = tx.step(grads, state, params)
    """
    rule = Rule("stochastic_round", (), StochasticRoundState, scalars, update)
    how = {"implementation": implementation, "in_place": in_place, "delta_dtype": delta_dtype}
    return build(Definition(rule, {}), Options(seed=seed, rounding=rounding, **how))
