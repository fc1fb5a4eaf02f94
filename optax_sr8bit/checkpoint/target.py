"""The state that a conversion builds: laid out by the new optimizer, filled with the old one's moments."""

import warnings
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer
from jax.sharding import AbstractMesh, NamedSharding

from optax_sr8bit.checkpoint.moments import Layout, convert_leaf
from optax_sr8bit.checkpoint.states import (
    Moments,
    by_name,
    difference,
    find,
    has_moments,
    moments_of,
    read,
)
from optax_sr8bit.codecs import Codec
from optax_sr8bit.placement import everywhere, like, sharding_of
from optax_sr8bit.plan import plan_tree
from optax_sr8bit.seeds import noise_name, path_name
from optax_sr8bit.transform import Transformation

# States of Optax that count the steps of a schedule beside others, and would begin it again if they stayed fresh.
INJECTED = (optax.InjectHyperparamsState, optax.InjectStatefulHyperparamsState)
NOTHING = object()


class Target:
    """What `tx.init(params)` would be.

    Attributes:
      moments: its moments, whose arrays are abstract.
    """

    moments: Moments

    def __init__(self, tx: optax.GradientTransformation, params: Any):
        """Lays the state out; computes nothing but its small parts.

        Raises:
          TypeError: for a tx that is no transformation, and traced params.
          ValueError: where its state has no moments, or several optimizers'.
        """
        if not (hasattr(tx, "init") and hasattr(tx, "update")):
            raise TypeError(f"tx must be an optimizer, got a {type(tx).__name__}; pass what optax.adamw(...) returns")
        if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(params)):
            raise TypeError("params are traced; convert outside of jit, vmap and grad")
        self._params = params
        self._template, self._fresh = _laid_out(tx, params)
        state = find(self._template, "what tx.init builds")
        small = find(self._fresh, "what tx.init builds")
        whole = small._replace(**{field: getattr(state, field) for field in _big_fields(state)})
        shapes = {name: tuple(leaf.shape) for name, leaf in by_name(params, "params").items()}
        self.moments = read(whole, "what tx.init builds", codecs_of(tx, params), shapes)

    def check(self, source: Moments) -> None:
        """Raises a ValueError where the moments of another state do not fit, which names every one that does not."""
        mine = self.moments
        if source.names != mine.names:
            raise ValueError(
                f"{source.kind} has the moments {', '.join(source.names)}, {mine.kind} needs {', '.join(mine.names)}: "
                "they average other things, and one optimizer cannot continue another. Start with tx.init(params), or "
                "pass a tx of the old kind"
            )
        if wrong := difference(source.leaves, mine.leaves):
            raise ValueError(
                f"the moments of {source.kind} are of other leaves than those of tx and params; {wrong}. Rename the "
                "leaves of the state, or pass the parameters that it was trained with"
            )

    def fill(self, source: Moments, others: Any = NOTHING) -> Any:
        """The state with the source's count, seed and moments.

        Args:
          source: checked.
          others: a state whose parts beside the moments are kept where they are alike.
        """
        names, template = self.moments.names, find(self._fresh, "what tx.init builds")
        built = find(self._template, "what tx.init builds")
        at = by_name(self._params, "params")
        columns: dict[str, list[Any]] = {field: [] for field in _big_fields(built)}
        for name, wanted in self.moments.leaves.items():
            leaf = source.leaves[name]
            codes, scales = (_placed_like(at.get(name), arrays, wanted.layout) for arrays in (leaf.codes, leaf.scales))
            new = convert_leaf(type(leaf)(leaf.layout, codes, scales), wanted.layout, self.moments.moments)
            codes, scales = (_placed_like(at.get(name), arrays, wanted.layout) for arrays in (new.codes, new.scales))
            for i, field in enumerate(names):
                columns[field].append(codes[i])
                if field + "_scale" in columns:
                    columns[field + "_scale"].append(scales[i])
        fields = {
            field: jax.tree.unflatten(jax.tree.structure(getattr(built, field)), column)
            for field, column in columns.items()
        }
        if getattr(built, "correction", None) is not None:
            fields["correction"] = self._corrections(built.correction, template.correction, source)
        small = {"count": np.asarray(source.count, built.count.dtype)}
        if hasattr(template, "seed"):
            small["seed"] = np.asarray(template.seed) if source.seed is None else source.seed
            small["format"] = np.asarray(template.format)
        fields |= {field: _held_everywhere(value, self._params) for field, value in small.items()}
        return _graft(self._fresh, others, template._replace(**fields), source.count)

    def _corrections(self, built: Any, fresh: Any, source: Moments) -> Any:
        """Those of the source where they are alike; else none are known, and the parameters stand for themselves."""
        at = by_name(self._params, "params")

        def kept(path: Any, wanted: Any, zeros: Any) -> Any:
            name = noise_name(path_name(path))
            old = source.corrections.get(name)
            if old is None or (tuple(old.shape), old.dtype) != (tuple(wanted.shape), wanted.dtype):
                return zeros
            layout = self.moments.leaves[name].layout
            return _placed_like(at.get(name), (old,), layout)[0]

        return jax.tree_util.tree_map_with_path(kept, built, fresh)


def _big_fields(state: Any) -> list[str]:
    names = {moment.name + suffix for moment in moments_of(state) for suffix in ("", "_scale")}
    return [field for field in state._fields if field in names]


def _laid_out(tx: optax.GradientTransformation, params: Any) -> tuple[Any, Any]:
    """`tx.init(params)` in shapes and dtypes, and in arrays but for the moments, which are never allocated."""
    whole = None

    def init(params: Any) -> Any:
        nonlocal whole
        state = tx.init(params)
        whole = jax.tree.map(lambda x: jax.ShapeDtypeStruct(np.shape(x), jnp.result_type(x)), state)
        find(whole, "what tx.init builds")
        bare = lambda x: x._replace(**dict.fromkeys(_big_fields(x))) if has_moments(x) else x  # noqa: E731
        return jax.tree.map(bare, state, is_leaf=has_moments)

    leaves = jax.tree.leaves(params)
    devices = {frozenset(leaf.sharding.device_set) for leaf in leaves if isinstance(leaf, jax.Array)}
    with warnings.catch_warnings(record=True) as caught:
        if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves):
            fresh = jax.jit(lambda: init(params))()
        else:
            fresh = (jax.jit(init) if len(devices) <= 1 else init)(params)
    for warning in caught:
        warnings.warn(warning.message, warning.category, stacklevel=4)  # at the caller of `convert`
    return whole, fresh


def codecs_of(tx: Any, params: Any) -> Mapping[int, Codec]:
    """The codecs that a tx of this library uses, among which may be the user's own."""
    if not isinstance(tx, Transformation):
        return {}
    return {plan.codec.format: plan.codec for plan in plan_tree(params, tx.options)}


def _placed_like(param: Any, arrays: tuple[Any, ...], layout: Layout) -> tuple[Any, ...]:
    """Arrays of a leaf, codes or scales, placed as its parameter, or left in place if that is nowhere in particular."""
    if sharding := _sharding(param):
        return tuple(jax.device_put(x, _in_memory_of(x, like(sharding, np.shape(x), layout.shape))) for x in arrays)
    if getattr(param, "committed", False):
        return tuple(jax.device_put(x, param.sharding) for x in arrays)
    return tuple(map(jnp.asarray, arrays))


def _in_memory_of(x: Any, sharding: NamedSharding) -> NamedSharding:
    """The sharding in the host's memory, where the array is kept there."""
    on_host = isinstance(x, jax.Array) and jax.typeof(x).memory_space == jax.memory.Space.Host
    return sharding.with_memory_kind(x.sharding.memory_kind or "pinned_host") if on_host else sharding


def _held_everywhere(x: np.ndarray, params: Any) -> jax.Array:
    """The array on all devices of the parameters' mesh, if they are on one."""
    sharding = next(filter(None, map(_sharding, jax.tree.leaves(params))), None)
    return jnp.asarray(x) if sharding is None else jax.device_put(x, everywhere(sharding))


def _sharding(param: Any) -> NamedSharding | None:
    """That of an array, or of a ShapeDtypeStruct that names devices, over several of them."""
    sharding = sharding_of(param)
    return None if sharding is None or isinstance(sharding.mesh, AbstractMesh) else sharding


def _graft(fresh: Any, old: Any, state: Any, count: np.ndarray) -> Any:
    """`fresh` with its state of moments replaced, alike parts of `old` kept, and schedules where the count is."""
    if has_moments(fresh):
        return state
    # A schedule's own state is nothing but a count.
    if isinstance(fresh, INJECTED) or getattr(fresh, "_fields", ()) == ("count",):
        fresh = fresh._replace(count=jnp.asarray(count, jnp.asarray(fresh.count).dtype))
    if not _holds_moments(fresh) and _alike(fresh, old):
        return old
    children, node = _one_level(fresh)
    if len(children) == 1 and children[0] is fresh:
        return fresh
    theirs, their_node = _one_level(old)
    if node != their_node or has_moments(old):
        theirs = [NOTHING] * len(children)
    grafted = [_graft(child, other, state, count) for child, other in zip(children, theirs, strict=True)]
    return jax.tree.unflatten(node, grafted)


def _one_level(x: Any) -> tuple[list[Any], Any]:
    return jax.tree.flatten(x, is_leaf=lambda y: y is not x)


def _holds_moments(x: Any) -> bool:
    return any(map(has_moments, jax.tree.leaves(x, is_leaf=has_moments)))


def _alike(fresh: Any, old: Any) -> bool:
    """Whether two states have the same structure, shapes and dtypes."""
    if old is NOTHING or jax.tree.structure(fresh) != jax.tree.structure(old):
        return False
    pairs = zip(jax.tree.leaves(fresh), jax.tree.leaves(old), strict=True)
    return all(np.shape(a) == np.shape(b) and jnp.result_type(a) == jnp.result_type(b) for a, b in pairs)
