"""The shardings of an optimizer's state, from those of the parameters."""

from typing import Any

import jax
import optax

from optax_sr8bit.placement import everywhere, like
from optax_sr8bit.plan import named_leaves, shown


def shardings(tx: optax.GradientTransformation, params: Any, *, memory_kind: str | None = None) -> Any:
    """The sharding of each array in the state of an optimizer: for `out_shardings`, `device_put`, abstract restores.

    Codes are placed as their parameter, and scales too, but for their last axis where it does not divide; what belongs
    to no parameter is on every device. `tx.init` places states so by itself, eagerly and under jit.

    Args:
      tx: an optimizer of this library, or any Optax transformation that has one in it, `optax.chain` for one.
      params: a tree of arrays or ShapeDtypeStructs, each with a NamedSharding.
      memory_kind: where the moments are kept, "pinned_host" for one; by default where the parameters are.

    Returns:
      A tree like `tx.init(params)` of NamedShardings.

    Raises:
      ValueError: names leaves that have no NamedSharding.

    Example:
      >>> import jax, jax.numpy as jnp, optax_sr8bit as sr8
      >>> mesh = jax.make_mesh((1,), ("data",))
      >>> rows = jax.NamedSharding(mesh, jax.P("data"))
      >>> params = {"w": jax.device_put(jnp.ones((64, 512), jnp.bfloat16), rows)}
      >>> placed = sr8.shardings(sr8.adamw(1e-3), params)
      >>> placed.mu_scale["w"].spec
      P('data',)

      The specs of a `shard_map`, and what Orbax restores a state to (`jax.eval_shape` alone has no shardings):

      >>> specs = jax.tree.map(lambda s: s.spec, placed)
      >>> like = lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s)
      >>> abstract = jax.tree.map(like, jax.eval_shape(sr8.adamw(1e-3).init, params), placed)
    """
    leaves = named_leaves(params)
    without = [shown(n) for n, leaf in leaves if not isinstance(getattr(leaf, "sharding", None), jax.NamedSharding)]
    if without or not leaves:
        raise ValueError(
            f"parameters need a NamedSharding each; without are {without or 'all, the tree is empty'}: place them with "
            "jax.device_put, or pass ShapeDtypeStructs with sharding="
        )
    state = jax.eval_shape(tx.init, jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, p.dtype), params))
    shared = everywhere(leaves[0][1].sharding)

    def of_param(array: Any, param: Any) -> Any:
        if _masked(array):
            return array
        placed = like(param.sharding, array.shape, param.shape)
        return placed.with_memory_kind(memory_kind) if memory_kind else placed

    return optax.tree.map_params(tx, of_param, state, params, transform_non_params=lambda _: shared, is_leaf=_masked)


def _masked(x: Any) -> bool:
    return isinstance(x, optax.MaskedNode)
