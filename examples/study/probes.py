"""What one step does: the intended and the applied change of each weight beside the spacing of BF16, and nu's error."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import optax_sr8bit as sr8
from arms import Arm, step_of

Schedule = Callable[[Any], Any]

LEAST = 4096
"""Smaller leaves (gains of norms, biases) keep FP32 moments and are left out."""


@dataclasses.dataclass(frozen=True)
class Probe:
    """Of one step, over the elements of a leaf, or of all leaves that are not small.

    Attributes:
      ratio: median of |intended change| / spacing of BF16 at the weight.
      lost: share of weights whose intended change is less than half that spacing.
      moved: share of stored weights that differ afterwards.
      applied: <applied, intended> / <intended, intended>: the share of the intended change that arrived; with a
        correction beside the weights, in their sum.
      nu: median of nu / the FP32 average of the same gradients' squares, where that is not zero; None where nothing of
        the kind was kept.
      root_nu: sum of sqrt(nu) over that of the FP32 averages; or None.
    """

    ratio: float
    lost: float
    moved: float
    applied: float
    nu: float | None = None
    root_nu: float | None = None


def spacing(x: jax.Array) -> jax.Array:
    """Of BF16 numbers at x, float32; among the smallest that of 2**-100, whose spacing is still a normal number."""
    exponent = jnp.maximum(jax.lax.bitcast_convert_type(jnp.abs(x), jnp.uint32) >> 23, 27)
    return jax.lax.bitcast_convert_type((exponent - 7) << 23, jnp.float32)


@functools.cache
def unrounded_step(arm: Arm, shape: Schedule) -> Any:
    """The arm's step on FP32 weights: what is meant before weights are rounded. Compiled once for all rates."""

    @jax.jit
    def step(grads: Any, state: Any, params: Any, rate: jax.Array) -> Any:
        return step_of(arm.unrounded(lambda count: rate * shape(count)))(grads, state, params)[0]

    return step


def measure(arm: Arm, shape: Schedule, rate: float, before: Any, grads: Any, after: Any) -> dict[str, Probe]:
    """Probe one step.

    Args:
      arm: whose step it was.
      shape: of its learning rate over the steps.
      rate: the peak of it.
      before: (weights, state, averages of squares or scalars in their place) that it was given. The averages are of the
        gradients before `grads`, like the state's.
      grads: the gradients.
      after: (weights, state, ...) that it made.

    Returns:
      Probes by leaf, and that of all together as "all".
    """
    params, state, squares = before
    weights, reached = _view(arm, shape, params, state), _view(arm, shape, after[0], after[1])
    alone = state._replace(correction=None) if arm.corrects else state
    target = unrounded_step(arm, shape)(grads, alone, weights, jnp.float32(rate))
    names = [
        jax.tree_util.keystr(p, simple=True, separator="/") for p, _ in jax.tree_util.tree_flatten_with_path(weights)[0]
    ]
    nus = _second_moments(arm, shape, state, weights)
    followed = nus is not None and jax.tree.leaves(squares)[0].ndim > 0
    trees = (weights, target, reached, params, after[0], *((nus, squares) if followed else ()))
    columns = [
        [leaf.ravel() for leaf in leaves]
        for leaves in zip(*map(jax.tree.leaves, trees), strict=True)
        if leaves[0].size >= LEAST
    ]
    large = [name for name, leaf in zip(names, jax.tree.leaves(weights), strict=True) if leaf.size >= LEAST]
    together = [jnp.concatenate(parts) for parts in zip(*columns, strict=True)]
    return {
        name: Probe(**{key: float(value) for key, value in _numbers(*leaves).items()})
        for name, leaves in zip([*large, "all"], [*columns, together], strict=True)
    }


def _second_moments(arm: Arm, shape: Schedule, state: Any, weights: Any) -> Any:
    """nu in FP32, or None for optimizers without it and for states that cannot be decoded."""
    if arm.optimizer != "adamw" or arm.rounds_momentum:
        return None
    return sr8.checkpoint.convert(state, sr8.adamw(shape, codec="float32"), weights).nu


def _view(arm: Arm, shape: Schedule, params: Any, state: Any) -> Any:
    """The weights in FP32, with what is kept beside them."""
    if arm.corrects:
        return sr8.master_params(arm.build(shape, 0), params, state)
    return jax.tree.map(lambda p: p.astype(jnp.float32), params)


@jax.jit
def _numbers(
    weights: jax.Array,
    target: jax.Array,
    reached: jax.Array,
    stored: jax.Array,
    stored_after: jax.Array,
    nu: jax.Array | None = None,
    average: jax.Array | None = None,
) -> dict[str, jax.Array]:
    """The fields of a probe of flat arrays."""
    intended, applied = target - weights, reached - weights
    ratio = jnp.abs(intended) / spacing(weights)
    numbers = {
        "ratio": jnp.median(ratio),
        "lost": jnp.mean(ratio < 0.5),
        "moved": jnp.mean(stored != stored_after),
        "applied": jnp.sum(applied * intended) / jnp.maximum(jnp.sum(intended * intended), 1e-38),
    }
    if nu is not None and average is not None:
        numbers["nu"] = jnp.nanmedian(jnp.where(average > 0, nu / average, jnp.nan))
        numbers["root_nu"] = jnp.sum(jnp.sqrt(nu)) / jnp.sum(jnp.sqrt(average))
    return numbers
