"""The step of one leaf, compiled once for all leaves that are alike."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from optax_sr8bit import rounding, tile
from optax_sr8bit.codecs import Codec
from optax_sr8bit.rounding import Rounding
from optax_sr8bit.rule import Rule
from optax_sr8bit_kernels import xla


@dataclasses.dataclass(frozen=True)
class LeafSpec:
    """All that is static in the step of a leaf, beside shapes and dtypes.

    Attributes:
      rule: the optimizer's rule.
      flags: its switches for this leaf.
      codec: of the moments.
      rounding: of the parameter.
      block: elements a scale, or None for float32 moments.
      delta_dtype: dtype of the update wanted, or None for the new parameter itself.
    """

    rule: Rule
    flags: tuple[bool, ...]
    codec: Codec
    rounding: Rounding
    block: int | None
    delta_dtype: Any


@functools.partial(jax.jit, static_argnames="spec")
def step_leaf(param, grad, codes, scales, scalars, count, seed, name, *, spec: LeafSpec):
    """One step of one leaf.

    Args:
      param: bfloat16, float16 or float32, any shape.
      grad: the parameter's shape, any floating dtype.
      codes: per moment uint8 (or float32) of the parameter's shape.
      scales: per moment float32 [..., ceil(n / block)].
      scalars: the rule's float32 scalars.
      count: int32 scalar, steps taken before this one.
      seed: uint32[2].
      name: uint32[2], the words of the leaf's name.
      spec: all that is static.

    Returns:
      (new parameter or update, new codes, new scales).
    """
    kinds = [spec.codec.code(moment.signed) for moment in spec.rule.moments]
    fused = functools.partial(
        tile.fused_step,
        tables=tuple(None if kind.table is None else jnp.asarray(kind.table) for kind in kinds),
        scalars=scalars,
        words=(seed[0], seed[1], count.astype(jnp.uint32), name[0], name[1]),
        **tile.parts(spec.rule, spec.flags, spec.codec, spec.rounding, param.dtype),
    )
    new_param, codes, scales = xla.run_tile(
        fused, param, grad, codes, scales, block=spec.block, zeros=tuple(kind.zero for kind in kinds)
    )
    result = new_param if spec.delta_dtype is None else delta(new_param, param, spec.delta_dtype)
    return result, codes, scales


def delta(new_param: jax.Array, param: jax.Array, dtype: Any) -> jax.Array:
    """new_param - param, rounded to nearest: rounding it with the parameter's bits would bias by half a spacing."""
    difference = xla.load(new_param) - xla.load(param)
    if dtype == jnp.bfloat16:
        return xla.store(rounding.nearest_bfloat16(difference, None), dtype)
    if dtype == jnp.float16:
        return xla.store(rounding.nearest_float16(difference, None), dtype)
    return difference.astype(dtype)
