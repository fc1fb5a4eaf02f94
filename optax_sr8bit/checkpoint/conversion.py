"""`convert`: a running job's state for another optimizer."""

from typing import Any

import numpy as np
import optax

from optax_sr8bit.checkpoint.states import by_name, find, read
from optax_sr8bit.checkpoint.target import Target, codecs_of


def convert(state: Any, tx: optax.GradientTransformation, params: Any) -> Any:
    """A state for `tx` that continues `state`.

    Of `state` the moments and the count are kept, and the seed if it has one (else that of `tx`). Moments that are
    stored alike in both, in codec, block and dtype, are the same arrays, bit for bit. All others are decoded to
    float32 and, if `tx` stores them in 8 bits, rounded to the nearest code without dither; non-finite ones become zero
    on the way into 8 bits, as in a step. What a rounding keeps beside parameters stays where both keep the same, and
    begins at nothing else: the parameters then stand for themselves. `optax_sr8bit/checkpoint/README.md` has the bounds
    of the error.

    Other parts of the state (links of a chain, what wrappers keep, injected hyperparameters) are taken from `state`
    where both have the same types, shapes and dtypes at the same place. Else they are those of `tx.init(params)`, but
    schedules go on from the count.

    Args:
      state: of any optimizer of this library, or with Optax's `ScaleByAdamState` or `ScaleByLionState` (of
        `optax.adamw`, `optax.adam`, `optax.lion`), alone or within chains and wrappers; concrete arrays, also NumPy's.
        Its codecs and block size are read from its `format`.
      tx: the optimizer that is to continue, with the same moments: one of this library, alone or within chains and
        wrappers, or one of Optax. Optax keeps moments in the parameters' dtype, so for bfloat16 parameters in bfloat16
        unless `mu_dtype` says otherwise for mu.
      params: the parameters, arrays or ShapeDtypeStructs, of the same paths and shapes as the state's moments. Moments
        are sharded as they are; scales too, but their last axis only where it divides.

    Returns:
      What `tx.init(params)` would be, filled. It shares arrays with `state`: donate one of the two.

    Raises:
      TypeError: under jit or vmap, or for a state whose count, seed or format is abstract.
      ValueError: where the state has no moments or several optimizers', other moments than `tx`, other leaves or shapes
        than `params`, or contradicts itself; names every leaf concerned. Nothing is computed then.

    Example:
      >>> import jax.numpy as jnp, optax, optax_sr8bit as sr8
      >>> params = {"w": jnp.ones((64, 128), jnp.float32)}
      >>> state = optax.adamw(1e-3).init(params)
      >>> tx = sr8.adamw(1e-3)
      >>> state = sr8.checkpoint.convert(state, tx, params)
      >>> state.mu["w"].dtype
      dtype('uint8')
    """
    shapes = {name: tuple(np.shape(leaf)) for name, leaf in by_name(params, "params").items()}
    source = read(find(state, "state"), "state", codecs_of(tx, params), shapes)
    target = Target(tx, params)
    target.check(source)
    return target.fill(source, state)
