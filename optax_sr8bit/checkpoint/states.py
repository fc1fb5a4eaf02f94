"""What a state holds, whoever built it: found within chains and wrappers, checked, taken apart into leaves."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from optax_sr8bit import optimizers
from optax_sr8bit.checkpoint.moments import FLOAT32, Layout, Leaf
from optax_sr8bit.codecs import CODECS, BlockCodec, Codec
from optax_sr8bit.plan import named_leaves, shown
from optax_sr8bit.quantize import QuantizedState
from optax_sr8bit.rule import Moment
from optax_sr8bit.seeds import noise_name
from optax_sr8bit.state import VERSION

OURS = tuple(x for x in vars(optimizers).values() if isinstance(x, type) and hasattr(x, "moments"))
# Optax's states with the same moments as one of ours.
OPTAX = {kind.optax: kind.moments for kind in OURS if kind.optax is not None}


@dataclasses.dataclass(frozen=True)
class Moments:
    """The state of one optimizer, by leaf.

    Attributes:
      kind: the name of its type.
      moments: what it remembers; their names are fields of the state.
      count: int32, the steps taken; for a template whatever it was initialised with.
      seed: uint32[2], or None where the state has none.
      leaves: by the name that also addresses a leaf's noise.
      corrections: by that name what a rounding keeps beside a parameter, where it keeps something.
    """

    kind: str
    moments: tuple[Moment, ...]
    count: np.ndarray
    seed: np.ndarray | None
    leaves: dict[str, Leaf]
    corrections: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def names(self) -> tuple[str, ...]:
        """The fields of a state."""
        return tuple(moment.name for moment in self.moments)


def has_moments(x: Any) -> bool:
    """Whether x itself is a state with moments: one of this library's, or one of Optax's that has the same."""
    return (_is_ours(x) and bool(type(x).moments)) or isinstance(x, tuple(OPTAX))


def moments_of(state: Any) -> tuple[Moment, ...]:
    """The moments that a state has."""
    known = type(state).moments if _is_ours(state) else OPTAX[type(state)]
    return tuple(moment for moment in known if getattr(state, moment.name) is not None)


def find(tree: Any, what: str) -> Any:
    """The one state with moments in a tree.

    Raises:
      ValueError: where there is none, or more than one.
    """
    is_quantized = lambda x: isinstance(x, QuantizedState)  # noqa: E731
    if any(map(is_quantized, jax.tree.leaves(tree, is_leaf=is_quantized))):
        raise ValueError(
            f"{what} holds a QuantizedState of quantize_moments, which cannot be converted: keep the arguments that it "
            "was built with, or begin anew with tx.init(params)"
        )
    found = [
        (jax.tree_util.keystr(path), leaf)
        for path, leaf in jax.tree_util.tree_flatten_with_path(tree, is_leaf=has_moments)[0]
        if has_moments(leaf)
    ]
    if not found:
        raise ValueError(
            f"{what}, {_kind(tree)}, holds no state with moments: none of optax_sr8bit, and of Optax no "
            f"{' or '.join(sorted(kind.__name__ for kind in OPTAX))}. Restore a checkpoint into the structure that it "
            "was saved from, jax.eval_shape(tx.init, params) of the old optimizer, before it is converted"
        )
    if len(found) > 1:
        places = ", ".join(f"{type(state).__name__} at {path or 'its root'}" for path, state in found)
        raise ValueError(f"{what} holds more than one state with moments: {places}. Convert them one by one")
    return found[0][1]


def read(
    state: Any, what: str, known: Mapping[int, Codec] | None = None, shapes: Mapping[str, tuple[int, ...]] | None = None
) -> Moments:
    """Takes a state with moments apart.

    Args:
      state: for which `has_moments`; codes and scales may be abstract, count, seed and format may not.
      what: it is, for messages.
      known: codecs by their numbers, beside those of the library.
      shapes: of the leaves by name, where known; else the first moment's.

    Raises:
      TypeError: where what must be concrete is not.
      ValueError: where the state contradicts itself; names every array that does.
    """
    ours, kind, moments = _is_ours(state), type(state).__name__, moments_of(state)
    names = tuple(moment.name for moment in moments)
    if not names:
        raise ValueError(f"{what}: this {kind} keeps no moments, so there is nothing to convert; use tx.init(params)")
    shapes = {} if shapes is None else shapes
    small = [state.count, state.seed, state.format] if ours else [state.count]
    if any(isinstance(x, Tracer | jax.ShapeDtypeStruct) for x in small):
        raise TypeError(
            f"{what}: count, seed and format of the {kind} must be concrete, since they say what its bytes mean. "
            "Convert outside of jit, vmap and eval_shape, and restore the checkpoint first"
        )
    if any(isinstance(x, jax.Array) and not isinstance(x, Tracer) and x.is_deleted() for x in jax.tree.leaves(state)):
        raise ValueError(f"{what}: arrays of the {kind} were donated and are gone; convert the state that replaced it")
    count = np.asarray(state.count)
    if count.ndim:
        raise ValueError(
            f"{what}: the {kind} is an ensemble's, its count is {list(count.shape)}. Convert the members one by one: "
            "jax.tree.map(lambda x: x[i], state)"
        )
    if count.dtype.kind not in "iu" or count < 0:
        raise ValueError(f"{what}: count must be a non-negative integer, is {count.dtype} {count}")
    trees = [by_name(getattr(state, name), f"{what}: {kind}.{name}") for name in names]
    _same_leaves(f"{what}: {kind}", names[0], trees[0], names, trees)
    if not ours:
        leaves = _float_leaves(what, names, trees, shapes)
        return Moments(kind, moments, count.astype(np.int32), None, leaves)
    fields = [name + "_scale" for name in names]
    scales = [by_name(getattr(state, field), f"{what}: {kind}.{field}") for field in fields]
    _same_leaves(f"{what}: {kind}", names[0], trees[0], fields, scales)
    seed = np.asarray(state.seed)
    if seed.shape != (2,) or seed.dtype != np.uint32:
        raise ValueError(f"{what}: seed must be uint32[2], is {seed.dtype}{list(seed.shape)}")
    published = (*CODECS.values(), *map(_exponents, CODECS.values()))
    codecs = {codec.format: codec for codec in published} | dict(known or {})
    leaves = _coded_leaves(np.asarray(state.format), what, names, trees, scales, codecs, shapes)
    beside = {} if state.correction is None else by_name(state.correction, f"{what}: {kind}.correction")
    return Moments(kind, moments, count.astype(np.int32), seed, leaves, beside)


def by_name(tree: Any, what: str) -> dict[str, Any]:
    """The leaves of a tree by the names that address their noise, in order.

    Raises:
      ValueError: where two leaves have the same name, or a leaf is no array.
    """
    leaves = [(noise_name(name), leaf) for name, leaf in named_leaves(tree)]
    names = [name for name, _ in leaves]
    twins = sorted({shown(name) for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []
    if twins:
        raise ValueError(f"{what} has leaves whose paths coincide: {', '.join(twins)}; rename them")
    bare = [shown(name) for name, leaf in leaves if not (hasattr(leaf, "shape") and hasattr(leaf, "dtype"))]
    if bare:
        raise ValueError(f"{what} has leaves that are no arrays: {', '.join(bare)}")
    return dict(leaves)


def difference(found: Iterable[str], expected: Iterable[str]) -> str:
    """In words how two sets of leaves differ; empty where they do not."""
    found, expected = set(found), set(expected)
    parts = (("missing", expected - found), ("not expected", found - expected))
    return "; ".join(f"{word}: {', '.join(map(shown, sorted(names)))}" for word, names in parts if names)


def _is_ours(x: Any) -> bool:
    return isinstance(x, tuple) and hasattr(type(x), "moments")


def _exponents(codec: Codec) -> Codec:
    """The codec with scales that are powers of two, if it has blocks."""
    return dataclasses.replace(codec, scales="power_of_two") if isinstance(codec, BlockCodec) else codec


def _kind(tree: Any) -> str:
    keys = f" of {sorted(map(str, tree))}" if isinstance(tree, Mapping) else ""
    return f"a {type(tree).__name__}{keys}"


def _same_leaves(
    what: str, name: str, first: Iterable[str], fields: Iterable[str], trees: list[dict[str, Any]]
) -> None:
    for field, tree in zip(fields, trees, strict=True):
        if wrong := difference(tree, first):
            raise ValueError(f"{what}.{field} has other leaves than {name}; {wrong}")


def _float_leaves(
    what: str, names: tuple[str, ...], trees: list[dict[str, Any]], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, Leaf]:
    leaves, wrong = {}, []
    for name, first in trees[0].items():
        shape = shapes.get(name, tuple(first.shape))
        arrays = tuple(tree[name] for tree in trees)
        for field, array in zip(names, arrays, strict=True):
            if not jnp.issubdtype(array.dtype, jnp.floating) or tuple(array.shape) != shape:
                wrong.append(f"{field}/{name} is {array.dtype}{list(array.shape)}, expected floats {list(shape)}")
        layout = Layout(shape, FLOAT32, None, tuple(jnp.dtype(array.dtype) for array in arrays))
        leaves[name] = Leaf(layout, arrays, ())
    _raise(what, wrong)
    return leaves


def _coded_leaves(
    form: np.ndarray,
    what: str,
    names: tuple[str, ...],
    trees: list[dict[str, Any]],
    scales: list[dict[str, Any]],
    codecs: Mapping[int, Codec],
    shapes: Mapping[str, tuple[int, ...]],
) -> dict[str, Leaf]:
    if form.shape != (2 + len(trees[0]),):
        raise ValueError(f"{what}: format is {list(form.shape)}, but there are {len(trees[0])} leaves: of another tree")
    if form[0] != VERSION:
        raise ValueError(f"{what}: format version {form[0]}, this library reads version {VERSION}")
    if not 5 <= form[1] <= 11:
        raise ValueError(f"{what}: format gives blocks of 2**{form[1]} elements; no optimizer has built it")
    leaves, wrong = {}, []
    for (name, first), number in zip(trees[0].items(), form[2:].tolist(), strict=True):
        shape, codec = shapes.get(name, tuple(first.shape)), codecs.get(number)
        if codec is not None and codec.bits == 4 and name not in shapes:
            wrong.append(
                f"{shown(name)} is packed in pairs, which do not say how long rows are: convert to another codec first"
            )
            continue
        if codec is None:
            wrong.append(f"{shown(name)} has codec number {number}, of no codec of the library nor of tx")
            continue
        if codec.blockwise and not shape:
            wrong.append(f"{shown(name)} is a scalar with codec {codec.name}")
            continue
        block = min(2 ** int(form[1]), shape[-1]) if codec.blockwise else None
        layout = Layout(shape, codec, block, (jnp.dtype(codec.code_dtype),) * len(names))
        kept = Leaf(layout, tuple(tree[name] for tree in trees), tuple(scale[name] for scale in scales))
        of_codes, of_scales = (codec.code_shape(shape), codec.code_dtype), (layout.scale_shape, codec.scale_dtype)
        expected = [(f, a, *of_codes) for f, a in zip(names, kept.codes, strict=True)]
        expected += [(f + "_scale", a, *of_scales) for f, a in zip(names, kept.scales, strict=True)]
        for field, array, wanted, kind in expected:
            if tuple(array.shape) != wanted or array.dtype != kind:
                wrong.append(
                    f"{field}/{name} is {array.dtype}{list(array.shape)}, expected {jnp.dtype(kind)}{list(wanted)}"
                )
        leaves[name] = kept
    _raise(what, wrong)
    return leaves


def _raise(what: str, wrong: list[str]) -> None:
    if wrong:
        raise ValueError(f"{what} is damaged, mixed up, or of other parameters: " + "; ".join(wrong))
