"""Gradient clipping that costs no pass of its own over the gradients, but for reading them."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.core import Tracer

from optax_sr8bit.manual import manual_axes, tracked, varying
from optax_sr8bit.plan import named_leaves, shown
from optax_sr8bit_kernels.xla import load, total


class GradientScale(optax.GradientTransformationExtraArgs):
    """An Optax transformation that multiplies all gradients with one scalar, which `sr8.chain` hands to the kernel.

    Attributes:
      init: params -> state, without fields.
      update: (updates, state, params, **extra_args) -> (updates, state), as any Optax transformation.
      scale: (gradients, what they are to be multiplied with already, or None) -> the scalar, float32.
    """

    scale: Callable[[Any, jax.Array | None], jax.Array]

    def __new__(cls, scale: Callable[[Any, jax.Array | None], jax.Array]):
        """A transformation that multiplies with that scalar."""

        def update(updates: Any, state: Any, params: Any = None, **extra_args: Any) -> tuple[Any, Any]:
            refuse_scale(extra_args)
            return scaled(updates, scale(updates, None)), state

        self = super().__new__(cls, lambda params: optax.EmptyState(), update)
        self.scale = scale
        return self

    def __getnewargs__(self) -> tuple[Any, ...]:
        """What copies are made from."""
        return (self.scale,)


def refuse_scale(extra_args: dict[str, Any]) -> None:
    """Raises a ValueError where a transformation is to scale gradients that an earlier link has already seen."""
    if extra_args.get("grad_scale") is not None:
        raise ValueError("grad_scale= needs sr8.chain, or an optimizer alone: within optax.chain links see it too late")


def scaled(gradients: Any, scale: jax.Array) -> Any:
    """The gradients times a scalar, multiplied in float32, in their own dtypes."""
    return jax.tree.map(lambda g: (g.astype(jnp.float32) * scale).astype(g.dtype), gradients)


def global_norm(tree: Any) -> jax.Array:
    """The L2 norm over all elements of all leaves, float32 whatever their dtypes.

    `optax.global_norm` adds squares up in the dtype of each leaf, which in bfloat16 has no more than 8 bits.

    Args:
      tree: of floating arrays.

    Returns:
      float32 scalar.

    Raises:
      ValueError: inside a `shard_map`, where a device sees its pieces alone.
    """
    apart = [shown(name) for name, leaf in named_leaves(tree) if varying(leaf)]
    if apart or (manual_axes() and not tracked()):
        raise ValueError(
            f"inside a shard_map over {sorted(manual_axes())} the norm of all pieces is not known"
            + f" (they differ: {', '.join(apart)})" * bool(apart)
            + "; compute it from the psum of their squares and pass grad_scale= to tx.step"
        )
    squares = [total(jnp.square(load(x))) for x in jax.tree.leaves(tree)]
    return jnp.sqrt(jnp.sum(jnp.stack(squares))) if squares else jnp.float32(0)


def clip_by_global_norm(max_norm: Any) -> GradientScale:
    """`optax.clip_by_global_norm` with the norm in float32, and fused where it stands before an optimizer.

    As the last link before the optimizer in `sr8.chain` it reads the gradients once for their norm and writes nothing:
    the kernel multiplies. Elsewhere it is a transformation as any other. Where the norm is not finite, gradients become
    what Optax makes of them: NaN, or 0 beside an infinite one.

    Args:
      max_norm: the largest norm that passes, a positive number or float32 scalar.

    Returns:
      A `GradientScale`.

    Raises:
      ValueError: for a concrete max_norm that is not positive.

    Example:
      >>> import optax_sr8bit as sr8
      >>> tx = sr8.chain(sr8.clip_by_global_norm(1.0), sr8.adamw(1e-3))

    References:
      Pascanu et al., On the Difficulty of Training Recurrent Neural Networks, 2013, https://arxiv.org/abs/1211.5063
    """
    if not isinstance(max_norm, Tracer) and not (jnp.ndim(max_norm) == 0 and float(max_norm) > 0):
        raise ValueError(f"max_norm must be a positive number, got {max_norm!r}")

    def scale(gradients: Any, before: jax.Array | None) -> jax.Array:
        norm = global_norm(gradients)
        factor = jnp.float32(1) if before is None else before
        norm = norm * jnp.abs(factor)
        return jnp.where(norm < max_norm, factor, factor * (max_norm / norm))

    return GradientScale(scale)
