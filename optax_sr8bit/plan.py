"""What happens to each leaf: decided from its path, its global shape and its dtype alone."""

import dataclasses
import fnmatch
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from optax_sr8bit import codecs, rounding, seeds
from optax_sr8bit.codecs import Codec
from optax_sr8bit.options import Options
from optax_sr8bit.rounding import Rounding

PARAM_DTYPES = (jnp.bfloat16, jnp.float16, jnp.float32)
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
    def code_dtype(self) -> Any:
        """The dtype of a stored moment."""
        return jnp.uint8 if self.codec.blockwise else jnp.float32

    @property
    def scale_shape(self) -> tuple[int, ...]:
        """One scale a block; one unused a row for float32 moments, since Orbax saves no empty arrays."""
        if not self.shape:
            return ()
        blocks = 1 if self.block is None else -(-self.shape[-1] // self.block)
        return (*self.shape[:-1], blocks)


def named_leaves(tree: Any) -> list[tuple[str, Any]]:
    """The leaves of a tree with their names, in order."""
    return [(seeds.path_name(path), leaf) for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]]


def plan_leaf(name: str, leaf: Any, options: Options) -> LeafPlan:
    """Plans one leaf, an array or a ShapeDtypeStruct."""
    shape, dtype = tuple(leaf.shape), jnp.dtype(leaf.dtype)
    size = 1
    for n in shape:
        size *= n
    codec, reason = codecs.get(_choose(options.codec, name, leaf, "offset")), "as asked"
    if codec.blockwise:
        if not shape:
            codec, reason = FLOAT32, "a scalar"
        elif shape[-1] < SHORTEST_AXIS:
            codec, reason = FLOAT32, f"last axis shorter than {SHORTEST_AXIS}"
        elif size < options.min_8bit_size:
            codec, reason = FLOAT32, f"fewer than {options.min_8bit_size} elements"
    block = min(options.block_size, shape[-1]) if codec.blockwise else None
    how = rounding.get(_choose(options.rounding, name, leaf, "stochastic"))
    return LeafPlan(name, shape, dtype, codec, how, block, reason)


def plan_tree(params: Any, options: Options) -> list[LeafPlan]:
    """Plans all leaves of a tree, in order.

    Raises:
      TypeError: names every leaf that is no bfloat16, float16 or float32 array.
      ValueError: names leaves whose paths coincide, and patterns that match no leaf.
    """
    leaves = named_leaves(params)
    offenders = [f"{name or '(root)'}: {_kind(leaf)}" for name, leaf in leaves if not _is_param(leaf)]
    if offenders:
        raise TypeError(
            "parameters must be bfloat16, float16 or float32 arrays; keep others out of the tree (optax.masked, "
            "nnx.Param filters, eqx.filter(model, eqx.is_inexact_array)). Offending leaves: " + "; ".join(offenders)
        )
    names = [name for name, _ in leaves]
    if len(set(names)) < len(names):
        twins = sorted({name for name in names if names.count(name) > 1})
        raise ValueError(f"leaves must differ in their paths, which name their noise; the same for: {', '.join(twins)}")
    _check_patterns("codec", options.codec, names)
    _check_patterns("rounding", options.rounding, names)
    return [plan_leaf(name, leaf, options) for name, leaf in leaves]


def _choose(choice: Any, name: str, leaf: Any, default: str) -> Any:
    if isinstance(choice, Mapping):
        return next((value for pattern, value in choice.items() if fnmatch.fnmatchcase(name, pattern)), default)
    if isinstance(choice, Callable) and not isinstance(choice, Codec | Rounding):
        return choice(name, leaf)
    return choice


def _check_patterns(argument: str, choice: Any, names: list[str]) -> None:
    if isinstance(choice, Mapping) and names:
        idle = [p for p in choice if not any(fnmatch.fnmatchcase(name, p) for name in names)]
        if idle:
            raise ValueError(f"{argument}: no leaf matches {idle}; the leaves are {names}")


def _is_param(leaf: Any) -> bool:
    return hasattr(leaf, "shape") and getattr(leaf, "dtype", None) in PARAM_DTYPES


def _kind(leaf: Any) -> str:
    return str(leaf.dtype) if hasattr(leaf, "dtype") else type(leaf).__name__
