"""Runs a tile function on XLA: CPU, any GPU, TPU."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from optax_sr8bit_kernels.names import block_max, finite
from optax_sr8bit_kernels.shard import Shard

Array = jax.Array


def step_leaf(
    parts: Any,
    param: Array,
    grad: Array,
    codes: Sequence[Array],
    scales: Sequence[Array],
    scalars: Sequence[Array],
    grad_scale: Array | float,
    words: Sequence[Array],
    *,
    result_dtype: Any,
    block: int | None,
    shard: Shard | None = None,
) -> tuple[Array, tuple[Array, ...], tuple[Array, ...]]:
    """Steps a whole leaf at once, or the piece of it that a device holds.

    Leading axes stay as they are, so that a sharding of them needs no exchange. The last axis is cut into blocks, and
    the last block of a row that is too short is filled up with parameters and gradients 0 and moments 0.

    Args:
      parts: the tile functions `advance` and `encode`, and what else is static, see `optax_sr8bit.tile.Parts`.
      param: bfloat16, float16, float32 or an 8-bit float, any shape.
      grad: the parameter's shape, any floating dtype.
      codes: per moment uint8 of the parameter's shape (half its last axis for codes of 4 bits; float32 where block is
        None); if `parts.corrected`, last what is kept beside the parameter, of its shape, any dtype of 8 or 16 bits.
      scales: per moment float32 [..., ceil(n / block)], or uint8.
      scalars: float32 scalars, handed to the tile functions.
      grad_scale: likewise.
      words: uint32 scalars that address the random bits, likewise.
      result_dtype: of the new parameter, or of the difference that `parts` say to hand back.
      block: the block's length, or None where scales are handed on untouched.
      shard: how the leaf is cut where the arrays are pieces of it, and never within a block.

    Returns:
      (result of the parameter's shape, new codes, new scales).
    """
    if param.ndim == 0:
        lone = [x.reshape(1) for x in (param, grad, *codes)]
        rest = {"result_dtype": result_dtype, "block": None}
        result, new_codes, _ = step_leaf(parts, lone[0], lone[1], lone[2:], scales, scalars, grad_scale, words, **rest)
        return result.reshape(()), tuple(x.reshape(()) for x in new_codes), tuple(scales)

    n, place = param.shape[-1], coordinates(param.shape, shard)
    codes, kept = (codes[:-1], codes[-1]) if parts.corrected else (codes, None)
    pattern: Any = () if kept is None else unsigned(kept).astype(jnp.uint32)
    if block is None:
        stored, rest, moments = parts.advance(
            load(param), load(grad), tuple(codes), tuple(scales), pattern, place, scalars, grad_scale, words, parts
        )
        new_codes = finite(moments) if moments else ()
        if kept is not None:
            new_codes = (*new_codes, store(rest, kept.dtype))
        return store(stored, result_dtype), new_codes, tuple(scales)

    def advance(grad: Array, codes: Sequence[Array], scales: Sequence[Array]) -> tuple[Any, Any, Any]:
        return parts.advance(
            load(into_blocks(param, block)),
            load(into_blocks(grad, block)),
            *from_stored(parts, codes, scales, n, block),
            into_blocks(pattern, block) if parts.corrected else (),
            place,
            scalars,
            grad_scale,
            words,
            parts,
        )

    place = tuple(into_blocks(x, block) for x in place)
    stored, rest, moments = advance(grad, codes, scales)
    # XLA runs a tile as several loops over the whole leaf. What the search for absmax reads is cheaper computed again
    # from the 8-bit inputs than kept in float32 temporaries; behind the barrier XLA does not see that it is the same.
    _, _, again = advance(*lax.optimization_barrier((grad, codes, scales)))
    new_codes, new_scales = parts.encode(finite(moments), block_max(finite(again)), place, words, parts)
    result = store(out_of_blocks(stored, n), result_dtype)
    new_codes, new_scales = to_stored(parts, new_codes, new_scales, n)
    if kept is not None:
        codes, new_codes = (*codes, kept), (*new_codes, store(out_of_blocks(rest, n), kept.dtype))
    zero = words[2] >> 31  # the steps taken before are an int32 count and never negative, which no compiler knows
    if n % (8 * block):  # else eight devices cannot cut a block; on a GPU it would cost 4 bytes and 13 % of the speed
        new_codes = tuple(placed_like(c, old, zero) for c, old in zip(new_codes, codes, strict=True))
    new_scales = tuple(placed_like(s, old, zero) for s, old in zip(new_scales, scales, strict=True))
    return placed_like(result, param, zero), new_codes, new_scales


def sums_of_squares(
    parts: Any,
    param: Array,
    grad: Array,
    codes: Sequence[Array],
    scales: Sequence[Array],
    scalars: Sequence[Array],
    grad_scale: Array | float,
    zero: Array,
    *,
    block: int | None,
) -> Array:
    """The sums of the squares of what a rule measures in a leaf, or in the piece of it that a device holds.

    Args:
      parts: see `step_leaf`, of which the other arguments are too.
      param: see parts.
      grad: see parts.
      codes: see parts.
      scales: see parts.
      scalars: see parts.
      grad_scale: see parts.
      zero: a uint32 0 that XLA does not know to be one.
      block: see parts.

    Returns:
      float32, one a tile.
    """
    n = param.shape[-1] if param.ndim else 1
    codes, kept = (codes[:-1], codes[-1]) if parts.corrected else (codes, None)
    pattern: Any = () if kept is None else unsigned(kept).astype(jnp.uint32)
    tile = [load(param), load(grad), tuple(codes), tuple(scales), pattern]
    if block is not None:
        tile[2], tile[3] = from_stored(parts, codes, scales, n, block)
        tile[0], tile[1], tile[4] = (x if isinstance(x, tuple) else into_blocks(x, block) for x in (*tile[:2], tile[4]))
    return jnp.stack([total(x * x) for x in parts.measured(*tile, scalars, grad_scale, zero, parts)])


def total(x: Array) -> Array:
    """The sum of a float32 array, over one axis after another, so that no long sum loses small terms.

    XLA decides on the order within an axis, and over devices.
    """
    for _ in range(x.ndim):
        x = jnp.sum(x, axis=-1)
    return x


def from_stored(
    parts: Any, codes: Sequence[Array], scales: Sequence[Array], n: int, block: int
) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
    """Codes and scales as the tile functions take them: [..., blocks, block] and [..., blocks, 1].

    Args:
      parts: see `step_leaf`.
      codes: per moment as they are stored.
      scales: likewise.
      n: length of the leaf's rows.
      block: the block's length.
    """
    loaded = zip(codes, parts.zeros, strict=True)
    return (
        tuple(into_blocks(unpacked(c, parts.code_bits, n), block, z).astype(jnp.uint32) for c, z in loaded),
        tuple(lax.expand_dims(s.astype(jnp.uint32) if parts.power_of_two else s, (s.ndim,)) for s in scales),
    )


def to_stored(
    parts: Any, codes: Sequence[Array], scales: Sequence[Array], n: int
) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
    """Codes and scales as they are stored, from what the tile function `encode` returns; undoes `from_stored`."""
    squeezed = (lax.squeeze(s, (s.ndim - 1,)) for s in scales)
    return (
        tuple(packed(out_of_blocks(c, n).astype(jnp.uint8), parts.code_bits) for c in codes),
        tuple(s.astype(jnp.uint8) if parts.power_of_two else s for s in squeezed),
    )


def packed(codes: Array, bits: int) -> Array:
    """Codes of 4 bits in pairs along the last axis, the first of a pair in the low half of its byte; others as is."""
    if bits != 4:
        return codes
    odd = codes.shape[-1] % 2
    pairs = lax.pad(codes, jnp.uint8(0), [(0, 0, 0)] * (codes.ndim - 1) + [(0, odd, 0)])
    pairs = pairs.reshape(*codes.shape[:-1], pairs.shape[-1] // 2, 2)
    return pairs[..., 0] | (pairs[..., 1] << 4)


def unpacked(codes: Array, bits: int, n: int) -> Array:
    """The n codes of a row whose pairs are `packed`."""
    if bits != 4:
        return codes
    pairs = jnp.stack([codes & 15, codes >> 4], axis=-1)
    return out_of_blocks(pairs, n)


def placed_like(x: Array, other: Array, zero: Array) -> Array:
    """x itself, which XLA shards like `other` of its shape, through a reshape that cuts blocks too.

    Args:
      x: any float, or uint8.
      other: likewise.
      zero: a uint32 0 that XLA does not know to be one.
    """
    nothing = (unsigned(other).astype(jnp.uint32) & zero).astype(unsigned(x).dtype)
    return lax.bitcast_convert_type(unsigned(x) | nothing, x.dtype)


def unsigned(x: Array) -> Array:
    """The bit patterns."""
    return lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}"))


def coordinates(shape: Sequence[int], shard: Shard | None = None) -> tuple[Array, Array]:
    """The row (leading axes flattened, modulo 2**32) and the column of each element, uint32 of that shape."""
    shard = shard or Shard(tuple(shape), ((),) * len(shape))
    row = jnp.zeros(tuple(shape), jnp.uint32)
    for axis in range(len(shape) - 1):
        row = row + lax.broadcasted_iota(jnp.uint32, tuple(shape), axis) * np.uint32(shard.stride(axis))
    column = lax.broadcasted_iota(jnp.uint32, tuple(shape), len(shape) - 1)
    if shard.whole:
        return row, column
    first_row, first_column = shard.origin(shape)
    return row + first_row, column + first_column


def into_blocks(x: Array, block: int, fill: int = 0) -> Array:
    """[..., n] to [..., ceil(n / block), block], filled up at the end."""
    n = x.shape[-1]
    blocks = -(-n // block)
    if blocks * block != n:
        padding = [(0, 0, 0)] * (x.ndim - 1) + [(0, blocks * block - n, 0)]
        x = lax.pad(x, jnp.asarray(fill, x.dtype), padding)
    return x.reshape(*x.shape[:-1], blocks, block)


def out_of_blocks(x: Array, n: int) -> Array:
    """[..., blocks, block] to [..., n]."""
    x = x.reshape(*x.shape[:-2], x.shape[-2] * x.shape[-1])
    return x if x.shape[-1] == n else lax.slice_in_dim(x, 0, n, axis=-1)


def load(x: Array) -> Array:
    """A floating array as float32, from its bits: XLA may fold a pair of casts away, and with it the rounding."""
    if x.dtype == jnp.bfloat16:
        return lax.bitcast_convert_type(lax.bitcast_convert_type(x, jnp.uint16).astype(jnp.uint32) << 16, jnp.float32)
    if x.dtype.itemsize < 4:
        x = lax.optimization_barrier(x)
    return x.astype(jnp.float32)


def store(x: Array, dtype: Any) -> Array:
    """The bit pattern in a uint32 as a value of 8 or 16 bits; a float32 as itself, or cast to another dtype."""
    if x.dtype == jnp.uint32:
        return lax.bitcast_convert_type(x.astype(jnp.dtype(f"uint{8 * jnp.dtype(dtype).itemsize}")), dtype)
    return x.astype(dtype)
