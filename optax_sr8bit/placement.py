"""How a leaf's moments and scales are placed: as the parameter, which the caller has placed."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.sharding import AxisType, NamedSharding

from optax_sr8bit.partition import axes_of, cuts_a_block, pieces, scale_axes, spec_of
from optax_sr8bit.plan import SHORTEST_AXIS, LeafPlan, shown
from optax_sr8bit_kernels.xla import into_blocks, unsigned


def sharding_of(leaf: Any) -> NamedSharding | None:
    """The NamedSharding of an array, a ShapeDtypeStruct, or a tracer on a mesh with Explicit axes; None if unknown."""
    found = None
    if isinstance(leaf, Tracer):
        typed = getattr(jax.typeof(leaf), "sharding", None)
        if typed is not None and not typed.mesh.empty and AxisType.Explicit in typed.mesh.axis_types:
            found = typed
    else:
        found = getattr(leaf, "sharding", None)
    return found if isinstance(found, NamedSharding) else None


def like(sharding: NamedSharding, shape: Sequence[int], whole: Sequence[int]) -> NamedSharding:
    """The sharding of an array that belongs to a parameter: codes, scales, or anything else of that many axes.

    Args:
      sharding: of the parameter.
      shape: of the array: the parameter's, but for a last axis that counts blocks.
      whole: shape of the parameter.
    """
    axes = axes_of(sharding.spec, len(whole))
    if len(shape) != len(whole) or tuple(shape[:-1]) != tuple(whole[:-1]):
        axes = ((),) * len(shape)
    elif shape and shape[-1] != whole[-1]:
        axes = scale_axes(axes, shape[-1], sharding.mesh.shape)
    if axes == axes_of(sharding.spec, len(whole)):
        return sharding
    return NamedSharding(sharding.mesh, spec_of(axes), memory_kind=sharding.memory_kind)


def everywhere(sharding: NamedSharding) -> NamedSharding:
    """The sharding of what every device holds."""
    return NamedSharding(sharding.mesh, jax.sharding.PartitionSpec(), memory_kind=sharding.memory_kind)


def filled_like(leaf: Any, shape: Sequence[int], value: float, dtype: Any) -> jax.Array:
    """An array full of a value, placed like the parameter that it belongs to, as far as that is known or XLA decides.

    Args:
      leaf: the parameter: an array, a tracer, a ShapeDtypeStruct, or one of Optax's placeholders.
      shape: of the array; see `like`.
      value: what it holds.
      dtype: of the array.
    """
    if isinstance(leaf, Tracer) and shape and leaf.size:
        return _follow(leaf, shape, value, dtype)
    sharding = None if isinstance(leaf, Tracer | jax.ShapeDtypeStruct) else sharding_of(leaf)
    # Made where it belongs: a whole leaf may not fit one device, nor should it go from process to process.
    return jnp.full(shape, value, dtype, device=sharding and like(sharding, shape, leaf.shape))


def held_everywhere(x: jax.Array, leaves: Sequence[Any]) -> jax.Array:
    """The array on all devices of the parameters' mesh, where that is known."""
    for leaf in leaves:
        if not isinstance(leaf, Tracer | jax.ShapeDtypeStruct) and (sharding := sharding_of(leaf)):
            return jax.device_put(x, everywhere(sharding))
    return x


def _follow(leaf: jax.Array, shape: Sequence[int], value: float, dtype: Any) -> jax.Array:
    """For tracers, whose shardings XLA may decide: it shards what it computes from a parameter like that.

    The result does not depend on the parameter, but XLA must not see so before it has decided.
    """
    if (sharding := sharding_of(leaf)) and shape[-1] != leaf.shape[-1]:
        # As the scales, of which the last axis is whole where edges cut blocks.
        last = axes_of(like(sharding, shape, leaf.shape).spec, len(shape))[-1]
        if cuts_a_block(leaf.shape, (last,), sharding.mesh.shape, -(-leaf.shape[-1] // shape[-1])):
            last = ()
        axes = (*axes_of(sharding.spec, leaf.ndim)[:-1], last)
        leaf = jax.sharding.reshard(leaf, NamedSharding(sharding.mesh, spec_of(axes)))
    zero = jax.lax.optimization_barrier(jnp.uint32(0))
    nothing = unsigned(leaf).astype(jnp.uint32) & zero
    if shape[-1] != leaf.shape[-1]:
        nothing = into_blocks(nothing, -(-leaf.shape[-1] // shape[-1]))[..., 0]
    pattern = unsigned(jnp.asarray(value, dtype))
    return jax.lax.bitcast_convert_type(nothing.astype(pattern.dtype) | pattern, dtype)


def on_device(x: jax.Array) -> jax.Array:
    """The array in the memory of its device, where it is kept in the host's."""
    return jax.device_put(x, jax.memory.Space.Device) if jax.typeof(x).memory_space == jax.memory.Space.Host else x


def kept_with(new: Any, old: jax.Array) -> Any:
    """The array in the host's memory, where the old one is kept there."""
    return jax.device_put(new, jax.memory.Space.Host) if jax.typeof(old).memory_space == jax.memory.Space.Host else new


def cut_blocks(plans: Sequence[LeafPlan], leaves: Sequence[Any]) -> dict[str, str]:
    """By name the leaves of which a shard's edge cuts a block, with what that costs and how to avoid it."""
    found = {}
    for plan, leaf in zip(plans, leaves, strict=True):
        sharding = sharding_of(leaf)
        if sharding is None or plan.block is None:
            continue
        axes, sizes = axes_of(sharding.spec, len(plan.shape)), sharding.mesh.shape
        if cuts_a_block(plan.shape, axes, sizes, plan.block):
            found[shown(plan.name)] = advice(plan, pieces(axes[-1:], sizes))
    return found


def advice(plan: LeafPlan, count: int) -> str:
    """What to do about a last axis in so many pieces whose edges cut blocks."""
    n = plan.shape[-1]
    told = f"{n} columns in {count} pieces and in blocks of {plan.block}"
    largest = math.gcd(n // count, 2048) if n % count == 0 else 1
    if largest >= SHORTEST_AXIS:
        return f"{told}; block_size={largest} avoids it"
    return f"{told}; no block_size avoids it: shard another axis"
