"""Inside `shard_map` and `pmap` a device sees its pieces alone, and must be told where they lie in the whole leaves."""

from typing import Any

import jax
from jax.core import Tracer

from optax_sr8bit.partition import axes_of, is_spec, pieces
from optax_sr8bit.plan import named_leaves, shown
from optax_sr8bit_kernels.shard import Shard

HELP = (
    "pass specs=, the parameters' PartitionSpecs (the in_specs of the shard_map, a tree or a prefix of one), so that "
    "each device can address its random bits; specs=jax.P() says that every device holds the whole parameters"
)


def manual_axes() -> dict[str, int]:
    """Names and sizes of the mesh axes that are manual here; none outside of `shard_map` and `pmap`."""
    mesh = jax.sharding.get_abstract_mesh()
    return {} if mesh.empty else {name: mesh.shape[name] for name in mesh.manual_axes}


def all_manual() -> bool:
    """Whether XLA has nothing left to partition here."""
    mesh = jax.sharding.get_abstract_mesh()
    return mesh.empty or set(mesh.manual_axes) == set(mesh.axis_names)


def refuse_pieces(params: Any) -> None:
    """Raises a ValueError where parameters are seen to be pieces: what happens to a leaf depends on its whole shape."""
    if differing := _differing(params):
        raise ValueError(
            f"inside a shard_map, parameters differ over its axes ({differing}): call tx.init outside of it, under jit"
        )


def shards_of(params: Any, specs: Any, seed: jax.Array) -> list[Shard] | None:
    """How each parameter is cut, or None where none is.

    Args:
      params: a tree of arrays.
      specs: their PartitionSpecs, or a prefix of that tree, or None.
      seed: of the state; over axes over which it differs parameters may too: they are members of an ensemble.

    Raises:
      ValueError: where specs are missing, not wanted, or do not fit, with the leaf's name.
    """
    sizes = manual_axes()
    leaves = named_leaves(params)
    ensemble = varying(seed)
    if specs is None:
        if not sizes:
            return None
        if differing := _differing(params, ensemble):
            raise ValueError(f"inside a shard_map, parameters differ over its axes ({differing}): {HELP}")
        if leaves and not tracked():
            raise ValueError(
                f"inside a shard_map with check_vma=False, or a pmap, over the axes {sorted(sizes)}, it cannot be seen "
                f"whether parameters differ over them: {HELP}"
            )
        return None
    if not sizes:
        raise ValueError("specs= is for steps inside a shard_map; outside, arrays know their shardings: drop it")
    try:
        full = jax.tree.map(lambda spec, below: jax.tree.map(lambda _: spec, below), specs, params, is_leaf=is_spec)
    except (ValueError, TypeError) as error:
        raise ValueError(f"specs must be a tree of PartitionSpecs like the parameters, or a prefix: {error}") from None
    found = jax.tree.leaves(full, is_leaf=is_spec)
    return [_shard(shown(name), leaf, spec, sizes, ensemble) for (name, leaf), spec in zip(leaves, found, strict=True)]


def _differing(params: Any, ensemble: frozenset[str] = frozenset()) -> dict[str, list[str]]:
    """By name the manual axes, but for those of an ensemble, over which a parameter is known to differ."""
    return {shown(name): sorted(axes) for name, leaf in named_leaves(params) if (axes := varying(leaf) - ensemble)}


def _shard(name: str, leaf: Any, spec: Any, sizes: dict[str, int], ensemble: frozenset[str]) -> Shard:
    if not is_spec(spec):
        raise ValueError(f"specs must hold PartitionSpecs, at {name} it has a {type(spec).__name__}")
    if len(spec) > leaf.ndim:
        raise ValueError(f"the spec {spec} of {name} has more axes than its {leaf.ndim}")
    axes = axes_of(spec, leaf.ndim)
    named = {axis for names in axes for axis in names}
    if len(named) < sum(map(len, axes)):
        raise ValueError(f"the spec {spec} of {name} names an axis twice")
    if unknown := named - set(sizes):
        raise ValueError(f"the spec {spec} of {name} has axes that are not manual here: {sorted(unknown)}")
    if unnamed := set(varying(leaf)) - named - ensemble:
        raise ValueError(
            f"{name} differs over the axes {sorted(unnamed)}, which its spec {spec} does not name: all its copies "
            "would draw the same random bits"
        )
    if (same := named - varying(leaf)) and tracked():
        raise ValueError(
            f"{name} is the same over the axes {sorted(same)}, over which its spec {spec} cuts it: its copies would "
            "draw different random bits. Specs are those of what tx.step is given, less axes that vmap has taken"
        )
    return Shard(tuple(n * pieces((names,), sizes) for n, names in zip(leaf.shape, axes, strict=True)), axes)


def varying(x: Any) -> frozenset[str]:
    """The manual axes over which an array is known to differ."""
    kind = getattr(jax.typeof(x), "manual_axis_type", None) if isinstance(x, Tracer) else None
    return getattr(kind, "varying", None) or frozenset()


def tracked() -> bool:
    """Whether types say here over which manual axes arrays differ: a device's own index does, if any."""
    return bool(varying(jax.lax.axis_index(next(iter(manual_axes())))))
