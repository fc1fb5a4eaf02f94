"""What happens to each leaf: decided from its path, its global shape and its dtype alone."""

import dataclasses
import difflib
import fnmatch
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from optax_sr8bit import codecs, rounding, seeds
from optax_sr8bit.codecs import Codec
from optax_sr8bit.options import Options
from optax_sr8bit.rounding import Rounding

PARAM_DTYPES = (jnp.bfloat16, jnp.float16, jnp.float32, jnp.float8_e4m3fn, jnp.float8_e5m2)
SHORTEST_AXIS = 32
FLOAT32 = codecs.Float32()


@dataclasses.dataclass(frozen=True)
class LeafPlan:
    """How one leaf is kept and stepped.

    Attributes:
      name: its path, which also names its noise.
      shape: its global shape.
      dtype: its dtype.
      codec: of its moments.
      rounding: of its new value.
      block: elements a scale, or None for moments in float32.
      reason: why this codec.
    """

    name: str
    shape: tuple[int, ...]
    dtype: Any
    codec: Codec
    rounding: Rounding
    block: int | None
    reason: str

    @property
    def code_shape(self) -> tuple[int, ...]:
        """The shape of a stored moment."""
        return self.codec.code_shape(self.shape)

    @property
    def scale_shape(self) -> tuple[int, ...]:
        """One scale a block; one unused a row for float32 moments, since Orbax saves no empty arrays."""
        return scale_shape(self.shape, self.block)

    @property
    def correction(self) -> Any:
        """The dtype of what the rounding keeps beside each parameter, or None."""
        return self.rounding.correction_of(self.dtype)

    @property
    def correction_shape(self) -> tuple[int, ...]:
        """Of that; of one unused byte a row where it keeps nothing, so that all leaves have an array."""
        return scale_shape(self.shape, None) if self.correction is None else self.shape

    @property
    def correction_dtype(self) -> Any:
        """Of that array."""
        return jnp.uint8 if self.correction is None else self.correction


def scale_shape(shape: tuple[int, ...], block: int | None) -> tuple[int, ...]:
    """The shape of the scales of a leaf of that shape: one a block, or one a row where there are no blocks."""
    if not shape:
        return ()
    return (*shape[:-1], 1 if block is None else -(-shape[-1] // block))


def named_leaves(tree: Any) -> list[tuple[str, Any]]:
    """The leaves of a tree with their names, in order."""
    return [(seeds.path_name(path), leaf) for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]]


def plan_leaf(name: str, leaf: Any, options: Options) -> LeafPlan:
    """Plans one leaf, an array or a ShapeDtypeStruct."""
    shape, dtype = tuple(leaf.shape), jnp.dtype(leaf.dtype)
    codec, reason = _choose("codec", options.codec, codecs.get, "offset", name, leaf), "as asked"
    if options.codec == "offset":
        reason = "default"
    if codec.blockwise:
        if not shape:
            codec, reason = FLOAT32, "a scalar"
        elif shape[-1] < SHORTEST_AXIS:
            codec, reason = FLOAT32, f"last axis shorter than {SHORTEST_AXIS}"
        elif math.prod(shape) < options.min_8bit_size:
            codec, reason = FLOAT32, f"fewer than {options.min_8bit_size} elements"
    block = min(options.block_size, shape[-1]) if codec.blockwise else None
    how = _choose("rounding", options.rounding, rounding.get, "stochastic", name, leaf)
    return LeafPlan(name, shape, dtype, codec, how, block, reason)


def plan_tree(params: Any, options: Options) -> list[LeafPlan]:
    """Plans all leaves of a tree, in order.

    Raises:
      TypeError: names every leaf that is no array of `PARAM_DTYPES`.
      ValueError: names leaves whose paths coincide, patterns that match no leaf, and dtypes that a rounding knows not.
    """
    leaves = named_leaves(params)
    offenders = [f"{shown(name)}: {_kind(leaf)}" for name, leaf in leaves if not _is_param(leaf)]
    if offenders:
        known = ", ".join(jnp.dtype(dtype).name for dtype in PARAM_DTYPES)
        raise TypeError(
            f"parameters must be arrays of {known}; keep others out of the tree (optax.masked, nnx.Param filters, "
            "eqx.filter(model, eqx.is_inexact_array)). Offending leaves: " + "; ".join(offenders)
        )
    names = [name for name, _ in leaves]
    noise = [seeds.noise_name(name) for name in names]
    if len(set(noise)) < len(noise):
        twins = [shown(name) for name, n in zip(names, noise, strict=True) if noise.count(n) > 1]
        raise ValueError(
            "leaves must differ in their paths, which address their noise (keys joined by '/', less a final 'value'); "
            f"rename one of: {', '.join(twins)}"
        )
    _check_patterns("codec", options.codec, names)
    _check_patterns("rounding", options.rounding, names)
    plans = [plan_leaf(name, leaf, options) for name, leaf in leaves]
    unknown = [
        f"{shown(plan.name)} is {plan.dtype}, {plan.rounding.name!r} takes {sorted(plan.rounding.encoders)}"
        for plan in plans
        if plan.dtype != jnp.float32 and plan.dtype.name not in plan.rounding.encoders
    ]
    if unknown:
        raise ValueError("rounding, which a mapping of path patterns chooses by leaf: " + "; ".join(unknown))
    return plans


def differences(leaves: list[tuple[str, Any]], plans: list[LeafPlan]) -> str:
    """In words how the leaves of a tree differ from the planned ones; empty where they are the same."""
    found, expected = [name for name, _ in leaves], [plan.name for plan in plans]
    if list(map(seeds.noise_name, found)) == list(map(seeds.noise_name, expected)):
        return ""
    missing, extra = [n for n in expected if n not in found], [n for n in found if n not in expected]
    if not missing and not extra:
        return f"the same leaves in another order: {found}, not {expected}"
    return f"missing: {missing}, not expected: {extra}"


def shown(name: str) -> str:
    """A leaf's name for people: the whole tree may be one leaf, with an empty path."""
    return name or "(root)"


def _choose(argument: str, choice: Any, get: Callable[[Any], Any], default: str, name: str, leaf: Any) -> Any:
    """The codec or rounding of a leaf, from a name, an object, a mapping of patterns, or a function."""
    if isinstance(choice, Mapping):
        return get(next((value for pattern, value in choice.items() if _matches(name, pattern)), default))
    if not callable(choice):
        return get(choice)
    try:
        return get(choice(name, jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)))
    except ValueError as error:
        raise ValueError(f"{argument} function at {shown(name)}: {error}") from None


def _matches(name: str, pattern: str) -> bool:
    """With and without the final `value` that containers add."""
    return any(fnmatch.fnmatchcase(n, pattern) for n in (name, seeds.noise_name(name)))


def _check_patterns(argument: str, choice: Any, names: list[str]) -> None:
    if isinstance(choice, Mapping) and names:
        idle = [pattern for pattern in choice if not any(_matches(name, pattern) for name in names)]
        if idle:
            near = [n for pattern in idle for n in difflib.get_close_matches(pattern, names, n=3, cutoff=0.3)]
            raise ValueError(f"{argument}: no leaf matches {idle}; leaves are named like {near or names[:3]}")


def _is_param(leaf: Any) -> bool:
    return hasattr(leaf, "shape") and getattr(leaf, "dtype", None) in PARAM_DTYPES


def _kind(leaf: Any) -> str:
    return str(leaf.dtype) if hasattr(leaf, "dtype") else type(leaf).__name__
