"""States of bitsandbytes' 8-bit optimizers for PyTorch, read and written as NumPy arrays."""

import fnmatch
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import optax

from optax_sr8bit.checkpoint.states import Moments, difference, find, read
from optax_sr8bit.checkpoint.target import Target
from optax_sr8bit.checkpoint.torch_dict import MIN_8BIT_SIZE, MOMENTS, entries, flattened
from optax_sr8bit.checkpoint.torch_leaf import faults, read_leaf, written_leaf
from optax_sr8bit.plan import shown
from optax_sr8bit.seeds import noise_name

Names = Mapping[str, int | str]
Axes = Mapping[str, Sequence[int]]


def from_bitsandbytes(
    state_dict: Mapping[Any, Any],
    tx: optax.GradientTransformation,
    params: Any,
    names: Names,
    axes: Axes | None = None,
) -> Any:
    """A state for `tx` that continues AdamW8bit, Adam8bit or Lion8bit of bitsandbytes (their 32-bit forms too).

    Where a leaf has the codec `dynamic` and each of its blocks lies within one block of bitsandbytes (256 elements of
    the flattened tensor), codes and scales are taken over bit for bit: so with a block size of 256 or less, if nothing
    is transposed and the last axis is a multiple of 256 or a power of two from 32 on. They decode to bitsandbytes'
    values within 3 units in the last place, since `dynamic` computes its map. All other leaves are decoded with their
    own map, to bitsandbytes' float32 values exactly, and rounded to the nearest code of `tx`.

    Args:
      state_dict: of the optimizer, values as NumPy arrays or ints: as `Optimizer.state_dict()` nests it, keys 0, 1
        and so on, or flat, with keys like "0.state1", as `safetensors.numpy.load_file` returns it. Per parameter
        `step`, and `state1`, `qmap1`, `absmax1` (`state2`, ... for Adam), or float32 `state1`, `state2` alone. PyTorch
        numbers parameters in the order of the optimizer's parameter groups.
      tx: the optimizer that is to continue, alone or within chains and wrappers. Its Adam must have bitsandbytes'
        hyperparameters, which are not read.
      params: the parameters, arrays or ShapeDtypeStructs.
      names: for each leaf of `params`, by its path like "layer/kernel", the key in `state_dict`.
      axes: by patterns of leaf paths (`fnmatch`), how PyTorch's axes lie in `params`, as `numpy.transpose` takes them:
        (1, 0) for kernels [in, out] of weights [out, in], (2, 3, 1, 0) for convolutions. Others lie as they are.

    Returns:
      What `tx.init(params)` would be, filled; its count is the steps taken.

    Raises:
      TypeError: for a state_dict that is no mapping, or under jit.
      ValueError: for leaves without a key and keys without a leaf, steps that differ, missing or unknown fields, other
        dtypes or shapes, scales that are not finite; names each. Nothing is computed then.

    References:
      bitsandbytes 0.50.2, optim/optimizer.py; Dettmers et al., 8-bit Optimizers via Block-wise Quantization, 2022.
    """
    target = Target(tx, params)
    moments, layouts = target.moments.moments, {name: leaf.layout for name, leaf in target.moments.leaves.items()}
    _check_kind(target.moments)
    found, keys = entries(state_dict), _keys(names, layouts)
    if wrong := difference(found, map(str, keys.values())):
        raise ValueError(f"state_dict has other parameters than names; {wrong}")
    turned = _axes(axes, {name: len(layout.shape) for name, layout in layouts.items()})
    states = {name: found[str(key)] for name, key in keys.items()}
    offenders = [
        f"{shown(name)} ({keys[name]}): {fault}"
        for name, layout in layouts.items()
        for fault in faults(states[name], moments, _torch_shape(layout.shape, turned[name]))
    ]
    if offenders:
        raise ValueError(f"state_dict does not fit {target.moments.kind} and params: " + "; ".join(offenders))
    steps = {shown(name): int(np.asarray(fields["step"]).reshape(())) for name, fields in states.items()}
    if len(set(steps.values())) > 1:
        raise ValueError(f"there is one count for all leaves, but they took different numbers of steps: {steps}")
    count = np.asarray(max(steps.values(), default=0), np.int32)
    leaves = {name: read_leaf(states[name], moments, layout, turned[name]) for name, layout in layouts.items()}
    return target.fill(Moments("bitsandbytes", moments, count, None, leaves))


KINDS = ("AdamState", "LionState", "ScaleByAdamState", "ScaleByLionState")


def to_bitsandbytes(
    state: Any,
    names: Names,
    axes: Axes | None = None,
    *,
    min_8bit_size: int = MIN_8BIT_SIZE,
    flat: bool = False,
) -> dict[str, Any]:
    """The state_dict with which AdamW8bit, Adam8bit or Lion8bit of bitsandbytes continues a state.

    Leaves of `min_8bit_size` elements or more become 8-bit, in blocks of 256 of the flattened tensor: codes and scales
    bit for bit where they are `dynamic` and the scale is the same all over each such block, else the nearest codes of
    the decoded values. Smaller leaves become float32.

    To load it: `d = optimizer.state_dict()`, `d["state"] = ` the result's "state" with arrays as tensors,
    `optimizer.load_state_dict(d)`.

    Args:
      state: as `convert` takes it, with the moments of Adam or Lion.
      names: for each leaf, by its path, the key that PyTorch has for it.
      axes: as in `from_bitsandbytes`: how PyTorch's axes lie in this library's.
      min_8bit_size: that of the optimizer.
      flat: whether keys are joined, "0.state1", and all values arrays, for `safetensors.numpy.save_file`.

    Returns:
      {"state": {key: {"step": int, "state1": uint8 or float32 of PyTorch's shape, "qmap1": float32[256], "absmax1":
      float32[ceil(n / 256)], ...}}}, or the flat mapping.

    Raises:
      TypeError: for abstract states.
      ValueError: as `convert`; for leaves without a key, keys without a leaf.
    """
    elsewhere = [x for x in jax.tree.leaves(state) if isinstance(x, jax.Array) and not _reachable(x)]
    if elsewhere:
        raise ValueError(
            f"{len(elsewhere)} arrays of the state lie on devices of other processes; bring them here first, with "
            "jax.experimental.multihost_utils.process_allgather(state, tiled=True)"
        )
    source = read(find(state, "state"), "state")
    _check_kind(source)
    keys = _keys(names, source.leaves)
    turned = _axes(axes, {name: len(leaf.layout.shape) for name, leaf in source.leaves.items()})
    result = {}
    for name, leaf in source.leaves.items():
        in_8_bits = math.prod(leaf.layout.shape) >= min_8bit_size
        result[keys[name]] = {"step": int(source.count), **written_leaf(leaf, source.moments, turned[name], in_8_bits)}
    return flattened(result) if flat else {"state": result}


def _reachable(x: jax.Array) -> bool:
    return x.is_fully_addressable or x.is_fully_replicated


def _check_kind(moments: Moments) -> None:
    unknown = set(moments.names) - set(MOMENTS)
    if unknown or moments.kind not in KINDS:
        raise ValueError(f"{moments.kind} is not read from nor written for bitsandbytes: only Adam and Lion are")


def _keys(names: Names, leaves: Iterable[str]) -> dict[str, int | str]:
    """PyTorch's keys by the names of the leaves, each of both once."""
    if not isinstance(names, Mapping):
        raise TypeError(f"names must be a mapping from leaf paths to keys of PyTorch, got a {type(names).__name__}")
    keys = {noise_name(name): key for name, key in names.items()}
    if wrong := difference(keys, leaves):
        raise ValueError(f"names has other leaves than the parameters; {wrong}")
    written = [str(key) for key in keys.values()]
    if twins := sorted({key for key in written if written.count(key) > 1}):
        raise ValueError(f"names gives several leaves the same key: {', '.join(twins)}")
    return keys


def _axes(axes: Axes | None, ranks: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
    """By leaf how PyTorch's axes lie; the first pattern that matches counts."""
    axes = {} if axes is None else axes
    if not isinstance(axes, Mapping):
        raise TypeError(f"axes must be a mapping from patterns of leaf paths to permutations, got {axes!r}")
    matches = {name: [p for p in axes if fnmatch.fnmatchcase(name, noise_name(p))] for name in ranks}
    if idle := [pattern for pattern in axes if not any(pattern in found for found in matches.values())]:
        raise ValueError(f"axes: no leaf matches {idle}; leaves are named like {[*ranks][:3]}")
    turned = {name: tuple(axes[found[0]]) if found else tuple(range(ranks[name])) for name, found in matches.items()}
    wrong = [f"{shown(name)}: {t}" for name, t in turned.items() if sorted(t) != list(range(ranks[name]))]
    if wrong:
        raise ValueError("axes: no permutation of the leaf's axes: " + "; ".join(wrong))
    return turned


def _torch_shape(shape: tuple[int, ...], axes: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(shape[axes.index(axis)] for axis in range(len(shape)))
