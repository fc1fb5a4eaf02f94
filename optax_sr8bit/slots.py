"""Which arrays of an inner state belong to parameters, and how each of them is kept."""

import dataclasses
import difflib
import fnmatch
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optax_sr8bit import codecs, seeds
from optax_sr8bit.options import Options
from optax_sr8bit.plan import FLOAT32, named_leaves, plan_leaf, shown
from optax_sr8bit.signs import EXACT, NEVER_NEGATIVE, PARAMETERS, listed
from optax_sr8bit.stored import Storage


class Slot(NamedTuple):
    """One array of an inner state.

    Attributes:
      name: its path in the inner state, which also addresses its noise.
      group: arrays of one state and one parameter, which become zero together where one of them is not finite.
      param: the path of its parameter.
      how: it is kept; None for what belongs to no parameter.
    """

    name: str
    group: str = ""
    param: str = ""
    how: Storage | None = None


@dataclasses.dataclass(frozen=True)
class Choice:
    """What the caller wants, see `quantize_moments`."""

    options: Options
    select: Mapping[str, Any] | Callable[..., Any] | None
    unsigned: tuple[str, ...]

    def __post_init__(self):
        """Raises a ValueError for what no array could be kept as."""
        for pattern, codec in self.select.items() if isinstance(self.select, Mapping) else ():
            checked(codec, f"select[{pattern!r}]")

    def slots(self, inner: optax.GradientTransformation, expected: Any, params: Any) -> list[Slot]:
        """Per array of a state, in order, how it is kept.

        Args:
          inner: the transformation.
          expected: what `inner.init` gives for float32 parameters: arrays or ShapeDtypeStructs.
          params: arrays or ShapeDtypeStructs.
        """
        found, shapes = [], {name: tuple(leaf.shape) for name, leaf in named_leaves(params)}
        here, marks = placeholders(inner)

        def visit(path: Any, mark: Any, below: Any) -> None:
            state, parent = seeds.path_name(path), _node(expected, path[:-1])
            field = getattr(path[-1], "name", "") if path else ""
            for name, leaf in named_leaves(below):
                whole = "/".join(filter(None, (state, name)))
                how = None
                if isinstance(mark, here) and name in shapes and jnp.issubdtype(leaf.dtype, jnp.floating):
                    how = self._storage(whole, name, leaf, shapes[name], parent, field)
                found.append(Slot(whole, f"{seeds.path_name(path[:-1])}/{name}", name, how))

        try:
            jax.tree_util.tree_map_with_path(visit, marks, expected, is_leaf=lambda x: isinstance(x, here))
        except (ValueError, TypeError) as error:
            if isinstance(error, ChoiceError):
                raise
            raise ValueError(f"quantize_moments: optax.tree.map_params knows not this inner state; {error}") from None
        self._check_patterns([slot for slot in found if slot.how is not None])
        return found

    def _storage(self, name: str, param: str, leaf: Any, shape: tuple[int, ...], parent: Any, field: str) -> Storage:
        signed = not (listed(NEVER_NEGATIVE, parent, field) or any(matches(name, p) for p in self.unsigned))
        as_it_is = Storage(tuple(leaf.shape), FLOAT32, None, signed, exact=True)
        chosen, codec = self._selected(name, leaf)
        if tuple(leaf.shape) != shape or codec is None or (not chosen and listed(EXACT, parent, field)):
            return as_it_is
        bfloat16 = isinstance(codec, str) and codec == "bfloat16"
        options = dataclasses.replace(self.options, codec="offset" if bfloat16 else codec)
        plan = plan_leaf(param, jax.ShapeDtypeStruct(leaf.shape, jnp.float32), options)
        if plan.block is not None and (bfloat16 or (not chosen and listed(PARAMETERS, parent, field))):
            return Storage(shape, FLOAT32, None, signed, bfloat16=True)
        return as_it_is if bfloat16 else Storage(shape, plan.codec, plan.block, signed)

    def _selected(self, name: str, leaf: Any) -> tuple[bool, Any]:
        """Whether `select` decides on an array, and the codec."""
        if isinstance(self.select, Mapping):
            for pattern, codec in self.select.items():
                if matches(name, pattern):
                    return True, codec
        elif self.select is not None:
            struct = jax.ShapeDtypeStruct(leaf.shape, jnp.float32)
            return True, checked(self.select(name, struct), f"select function at {name}")
        return False, self.options.codec

    def _check_patterns(self, slots: list[Slot]) -> None:
        names = [slot.name for slot in slots]
        params = [slot.param for slot in slots]
        codec = self.options.codec
        for argument, patterns, among in (
            ("select", self.select, names),
            ("unsigned", self.unsigned, names),
            ("codec", codec if isinstance(codec, Mapping) else (), params),
        ):
            if not names or not isinstance(patterns, Iterable):
                continue
            idle = [pattern for pattern in patterns if not any(matches(name, pattern) for name in among)]
            if idle:
                near = [n for pattern in idle for n in difflib.get_close_matches(pattern, among, n=3, cutoff=0.3)]
                raise ChoiceError(
                    f"{argument}: no array of the state matches {idle}; they are named like {near or among[:3]}"
                )


class ChoiceError(ValueError):
    """What is wrong with a choice."""


def checked(codec: Any, where: str) -> Any:
    """The codec, if it is one, "bfloat16" or None."""
    if codec is None or (isinstance(codec, str) and codec == "bfloat16"):
        return codec
    try:
        return codecs.get(codec)
    except ValueError as error:
        raise ChoiceError(f'{where}: {error}, "bfloat16", or None for float32') from None


def matches(name: str, pattern: str) -> bool:
    """Whether a path matches a pattern of `fnmatch`: as it is, between slashes, or without a container's `value`."""
    return any(fnmatch.fnmatchcase(n, pattern) for n in (name, f"/{name}/", seeds.noise_name(name)))


def placeholders(inner: optax.GradientTransformation) -> tuple[type, Any]:
    """The type of Optax's placeholder for a tree of parameters, and the state of which it takes their places."""
    found = []
    optax.tree.map_params(lambda here: found.append(here) or here, lambda x: x, 0)
    try:
        return type(found[0]), inner.init(found[0])
    except Exception as error:
        raise ValueError(
            "quantize_moments: inner.init must take the placeholder of optax.tree.map_params in place of parameters, "
            f"which tells what belongs to them; it raises {type(error).__name__}: {error}"
        ) from error


def _node(tree: Any, path: Any) -> Any:
    """What stands in a tree at a path; None below nodes of unknown kinds."""
    for key in path:
        if hasattr(key, "name"):
            tree = getattr(tree, key.name, None)
        elif hasattr(key, "idx") or hasattr(key, "key"):
            try:
                tree = tree[key.idx if hasattr(key, "idx") else key.key]
            except (KeyError, IndexError, TypeError):
                return None
    return tree


def differing(slots: list[Slot], arrays: list[Any], scales: list[Any]) -> list[str]:
    """In words which arrays and scales of a state are not as they are kept."""
    kept = [(slot.name, slot.how, x) for slot, x in zip(slots, arrays, strict=False) if slot.how is not None]
    if len(arrays) != len(slots) or len(scales) != len(kept):
        return [f"{len(arrays)} arrays and {len(scales)} scales, not {len(slots)} and {len(kept)}"]
    wanted = [(name, x, how.code_shape, how.code_dtype) for name, how, x in kept]
    wanted += [
        (f"scale of {name}", x, how.scale_shape, how.scale_dtype)
        for (name, how, _), x in zip(kept, scales, strict=True)
    ]
    return [
        f"{shown(name)} is {x.dtype}{list(x.shape)}, expected {dtype}{list(shape)}"
        for name, x, shape, dtype in wanted
        if tuple(x.shape) != tuple(shape) or x.dtype != dtype
    ]
