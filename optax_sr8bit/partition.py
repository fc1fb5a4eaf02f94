"""The step of a group of leaves over the devices of a mesh: each device steps the pieces that it holds.

XLA partitions the program of its own back end, but an opaque kernel it would run on gathered arrays, so a kernel says
how it is cut: by `custom_partitioning` where XLA decides on shardings (Auto axes), by `shard_map` where types have them
(Explicit axes). Both call the step with a `Shard` a leaf, and nothing is exchanged unless an edge cuts a block.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.experimental.custom_partitioning import ArrayMapping, SdyShardingRule, custom_partitioning
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from optax_sr8bit_kernels.shard import Shard

Axes = tuple[tuple[str, ...], ...]
Step = Callable[..., Any]
"""(params, grads, codes, scales, control, names, shards=): as `leaf.step_group`, on pieces where shards says so."""


def axes_of(spec: Any, rank: int) -> Axes:
    """Per axis of an array the names in its PartitionSpec."""
    named = tuple(() if e is None else (e,) if isinstance(e, str) else tuple(e) for e in spec)
    return named + ((),) * (rank - len(named))


def spec_of(axes: Axes) -> PartitionSpec:
    """The PartitionSpec with such names, in the short form that people write."""
    last = max((i + 1 for i, names in enumerate(axes) if names), default=0)
    return PartitionSpec(*((names[0] if len(names) == 1 else names or None) for names in axes[:last]))


def pieces(axes: Axes, sizes: Mapping[str, int]) -> int:
    """Into how many pieces an array is cut."""
    return math.prod(sizes[name] for names in axes for name in names)


def cuts_a_block(shape: Sequence[int], axes: Axes, sizes: Mapping[str, int], block: int | None) -> bool:
    """Whether the pieces of the last axis are no whole blocks."""
    return bool(axes) and shape[-1] % (pieces(axes[-1:], sizes) * (block or 1)) > 0 and pieces(axes[-1:], sizes) > 1


def shard_of(shape: Sequence[int], held: Sequence[Axes], sizes: Mapping[str, int], block: int | None) -> Shard:
    """How a leaf is stepped: cut as the finest of its arrays, whose last axes are whole where an edge cuts a block."""
    usable = [(*axes[:-1], ()) if cuts_a_block(shape, axes, sizes, block) else axes for axes in held]
    return Shard(tuple(shape), max(usable, key=lambda axes: pieces(axes, sizes)))


def scale_axes(axes: Axes, blocks: int, sizes: Mapping[str, int]) -> Axes:
    """How the scales of a leaf are cut: as the leaf, but the last axis only where its blocks divide."""
    if not axes or blocks % pieces(axes[-1:], sizes) == 0:
        return axes
    return (*axes[:-1], ())


def _if_cut(shards: tuple[Shard, ...], sizes: Mapping[str, int]) -> tuple[Shard, ...] | None:
    """The shards, or None where every device has whole leaves and needs no offsets."""
    return shards if any(pieces(shard.axes, sizes) > 1 for shard in shards) else None


def explicit_mesh(params: Sequence[Any]) -> Any:
    """The mesh in the parameters' types, where it has Explicit axes; or None."""
    for param in params:
        mesh = getattr(getattr(jax.typeof(param), "sharding", None), "mesh", None)
        if mesh is not None and not mesh.empty and AxisType.Explicit in mesh.axis_types:
            return mesh
    return None


def over_auto_axes(step: Step, block: int | None) -> Step:
    """The step where XLA decides how arrays are cut; runs as it is on a single device."""

    def whole(*operands):
        return step(*operands, shards=None)

    def partition(mesh, operands, results):
        del results

        def held(array):
            spec = getattr(array.sharding, "spec", None)  # without a mesh there are no names, and the leaf stays whole
            return axes_of(spec or (), len(array.shape))

        shards = _shards(operands, held, mesh.shape, block)

        def on_a_device(*operands):
            return step(*operands, shards=_if_cut(shards, mesh.shape))

        at, out = _specs(shards, operands, mesh.shape)
        place = lambda spec: NamedSharding(mesh, spec)  # noqa: E731
        return mesh, on_a_device, jax.tree.map(place, out, is_leaf=is_spec), jax.tree.map(place, at, is_leaf=is_spec)

    def stepped(*operands):
        call = custom_partitioning(whole)
        call.def_partition(partition, sharding_rule=_rule(operands))
        return call(*operands)

    return stepped


def over_explicit_axes(step: Step, mesh: Any, block: int | None, opaque: bool = False) -> Step:
    """The step where types say how arrays are cut; results are cut as what they replace.

    Args:
      step: the step.
      mesh: the mesh in the types.
      block: elements a scale, or None.
      opaque: whether XLA cannot partition the step. What it can, and what needs no exchange, is left to it: `vmap` over
        an axis that is cut itself knows no `shard_map`.
    """
    explicit = _explicit(mesh)
    sizes = dict(zip(mesh.axis_names, mesh.axis_sizes, strict=True))

    def stepped(*operands):
        params, _, codes, scales, *_ = operands

        shards = _shards(operands, _typed, sizes, block)
        at, out = _specs(shards, operands, sizes)
        if not opaque and all(jax.tree.leaves(jax.tree.map(_is_cut_so, operands, at))):
            return step(*operands, shards=None)
        operands = jax.tree.map(_recut, operands, at)
        on_a_device = jax.shard_map(
            lambda *operands: step(*operands, shards=_if_cut(shards, sizes)),
            mesh=mesh,
            in_specs=at,
            out_specs=out,
            axis_names=explicit,
            check_vma=False,
        )
        old = (params, codes, scales)
        return jax.tree.map(lambda new, old: _recut(new, spec_of(_typed(old))), on_a_device(*operands), old)

    return stepped


def sums_over_explicit_axes(measure: Step, mesh: Any, block: int | None) -> Step:
    """Sums over whole leaves where types say how arrays are cut.

    Args:
      measure: of what a step is given, and `shards=`, over which it sums; what it returns is the same on all devices.
      mesh: the mesh in the types.
      block: elements a scale, or None.
    """
    explicit = _explicit(mesh)
    sizes = dict(zip(mesh.axis_names, mesh.axis_sizes, strict=True))

    def measured(*operands):
        shards = _shards(operands, _typed, sizes, block)
        if _if_cut(shards, sizes) is None:  # a `vmap` over an axis that is cut itself knows no `shard_map`
            return measure(*operands, shards=None)
        at, _ = _specs(shards, operands, sizes)
        on_a_device = jax.shard_map(
            lambda *operands: measure(*operands, shards=shards),
            mesh=mesh,
            in_specs=at,
            out_specs=PartitionSpec(),
            axis_names=explicit,
            check_vma=False,
        )
        return on_a_device(*jax.tree.map(_recut, operands, at))

    return measured


def _explicit(mesh: Any) -> set[str]:
    """The names of the mesh's Explicit axes."""
    return {n for n, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind == AxisType.Explicit}


def _typed(array: Any) -> Axes:
    """How an array is cut, as its type says."""
    return axes_of(jax.typeof(array).sharding.spec, array.ndim)


def _shards(
    operands: Sequence[Any], held: Callable[[Any], Axes], sizes: Mapping[str, int], block: int | None
) -> tuple[Shard, ...]:
    """How each leaf is stepped, from how its parameter and the codes of its first moment, if any, are held."""
    params, _, codes, *_ = operands
    arrays = zip(params, *codes[:1], strict=True)
    return tuple(shard_of(of_leaf[0].shape, [held(x) for x in of_leaf], sizes, block) for of_leaf in arrays)


def _recut(array: Any, spec: PartitionSpec) -> Any:
    """The array, cut so; itself where it is."""
    if _is_cut_so(array, spec):
        return array
    return jax.sharding.reshard(array, NamedSharding(jax.typeof(array).sharding.mesh, spec))


def _is_cut_so(array: Any, spec: PartitionSpec) -> bool:
    return _typed(array) == axes_of(spec, array.ndim)


def is_spec(x: Any) -> bool:
    """Whether it is a PartitionSpec, which `jax.tree` must not take apart."""
    return isinstance(x, PartitionSpec)


def _specs(shards: Sequence[Shard], operands: Sequence[Any], sizes: Mapping[str, int]) -> tuple[Any, Any]:
    """The PartitionSpecs of the operands and of the results of a step."""
    _, _, codes, scales, *_ = operands
    leaves = tuple(spec_of(shard.axes) for shard in shards)
    moments = tuple(leaves for _ in codes)  # codes that are packed in pairs are cut like others: blocks are even
    scaled = tuple(
        tuple(
            spec_of(scale_axes(shard.axes, scale.shape[-1] if scale.shape else 1, sizes))
            for shard, scale in zip(shards, moment, strict=True)
        )
        for moment in scales
    )
    everywhere = PartitionSpec()
    return (leaves, leaves, moments, scaled, everywhere, everywhere), (leaves, moments, scaled)


def _rule(operands: Sequence[Any]) -> SdyShardingRule:
    """For XLA: gradient and result are cut as the parameter, new moments and scales as the old ones."""
    params, grads, codes, scales, control, names = operands
    count = 0

    def mapping(array):
        nonlocal count
        count += array.ndim
        return ArrayMapping(*(f"a{count - array.ndim + axis}" for axis in range(array.ndim)))

    of_params = [mapping(param) for param in params]
    of_state = [mapping(array) for array in jax.tree.leaves((codes, scales))]
    assert len(grads) == len(params)
    return SdyShardingRule(
        (*of_params, *of_params, *of_state, mapping(control), mapping(names)), (*of_params, *of_state)
    )
