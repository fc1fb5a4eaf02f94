"""The moments of a leaf as they are stored, and from one codec and block to another."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding

from optax_sr8bit import tile
from optax_sr8bit.codecs import Codec, Float32
from optax_sr8bit.plan import scale_shape
from optax_sr8bit.rule import Moment
from optax_sr8bit_kernels.names import block_max, finite
from optax_sr8bit_kernels.xla import from_stored, into_blocks, out_of_blocks, to_stored

FLOAT32 = Float32()


@dataclasses.dataclass(frozen=True)
class Layout:
    """How the moments of one leaf are stored.

    Attributes:
      shape: of the leaf.
      codec: of the moments.
      block: elements a scale, or None without scales.
      dtypes: per moment the dtype of its codes, or that of moments that are not quantised.
    """

    shape: tuple[int, ...]
    codec: Codec
    block: int | None
    dtypes: tuple[Any, ...]

    @property
    def scale_shape(self) -> tuple[int, ...]:
        """Shape of the scales, as in a state: one unused a row for moments that are not quantised."""
        return scale_shape(self.shape, self.block)

    def same_bits(self, other: "Layout") -> bool:
        """Whether equal bytes mean equal moments; a codec is its number, since dither does not matter to a decoder."""
        mine, theirs = ((x.codec.format, x.block, x.dtypes) for x in (self, other))
        return mine == theirs


@dataclasses.dataclass(frozen=True)
class Leaf:
    """The moments of one leaf.

    Attributes:
      layout: how they are stored.
      codes: per moment an array as the codec keeps it.
      scales: likewise [..., ceil(n / block)]; where there is no block unused ones, or none at all.
    """

    layout: Layout
    codes: tuple[Any, ...]
    scales: tuple[Any, ...]


def convert_leaf(leaf: Leaf, target: Layout, moments: tuple[Moment, ...]) -> Leaf:
    """The moments in another layout: the same arrays where it is the same, else rounded to the nearest code.

    Args:
      leaf: what there is.
      target: how it is wanted, of the same shape.
      moments: what they are, which says which have a sign.

    Returns:
      The moments in that layout.
    """
    if leaf.layout.same_bits(target):
        unused = (jnp.zeros(target.scale_shape, jnp.float32) for _ in moments)
        return Leaf(target, leaf.codes, leaf.scales or tuple(unused))
    scales = leaf.scales if leaf.layout.block is not None else ()
    codes, scales = tuple(leaf.codes), tuple(scales)
    mesh = next(filter(None, map(_explicit_mesh, codes)), None)
    if mesh is None:
        return Leaf(target, *_recode(codes, scales, source=leaf.layout, target=target, moments=moments))
    # The same pieces where XLA decides on shardings: it may gather a row that is cut within a block.
    mesh = Mesh(mesh.devices, mesh.axis_names)
    codes, scales = jax.tree.map(
        lambda x: jax.device_put(x, NamedSharding(mesh, x.sharding.spec, memory_kind=x.sharding.memory_kind)),
        (codes, scales),
    )
    with jax.set_mesh(mesh):
        return Leaf(target, *_recode(codes, scales, source=leaf.layout, target=target, moments=moments))


def _explicit_mesh(x: Any) -> Any:
    """The mesh of an array, if types say how it is cut."""
    mesh = getattr(getattr(x, "sharding", None), "mesh", None)
    return mesh if AxisType.Explicit in getattr(mesh, "axis_types", ()) else None


@functools.partial(jax.jit, static_argnames=("source", "target", "moments"))
def _recode(codes: Any, scales: Any, *, source: Layout, target: Layout, moments: tuple[Moment, ...]) -> tuple[Any, Any]:
    values = codes
    if source.block is not None:
        values = _decode(codes, scales, source, moments)
    values = tuple(x.astype(jnp.float32) for x in values)
    if target.block is None:
        scales = tuple(jnp.zeros(target.scale_shape, jnp.float32) for _ in values)
        return tuple(x.astype(dtype) for x, dtype in zip(values, target.dtypes, strict=True)), scales
    return _encode(finite(values), target, moments)


def _decode(
    codes: tuple[Any, ...], scales: tuple[Any, ...], source: Layout, moments: tuple[Moment, ...]
) -> tuple[Any, ...]:
    """As a step begins."""
    assert source.block is not None
    n, parts = source.shape[-1], tile.recoding(moments, source.codec)
    values, _ = tile.decode(*from_stored(parts, codes, scales, n, source.block), parts)
    return tuple(out_of_blocks(x, n) for x in values)


def _encode(values: tuple[Any, ...], target: Layout, moments: tuple[Moment, ...]) -> tuple[Any, Any]:
    """As a step ends, without dither: a conversion is made once, so that nothing can stall for it."""
    assert target.block is not None
    n, parts = target.shape[-1], tile.recoding(moments, target.codec)
    tiles = tuple(into_blocks(x, target.block) for x in values)
    codes, scales = tile.encode(tiles, block_max(tiles), (jnp.zeros(tiles[0].shape, jnp.uint32),), (), parts)
    return to_stored(parts, codes, scales, n)
