"""What one step does: the intended and the applied change of each weight beside the spacing of BF16, and nu's error."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

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
    nu: float | None
    root_nu: float | None


def spacing(x: np.ndarray) -> np.ndarray:
    """Of BF16 numbers at x, float32; among subnormals that of the least normal number."""
    _, exponent = np.frexp(np.maximum(np.abs(x), np.float32(2.0**-126)))
    return np.ldexp(np.float32(1.0), exponent - 8)


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
    nus = _second_moments(arm, shape, state, weights)
    if nus is None:
        nus = jax.tree.map(lambda p: jnp.zeros(()), weights)
    trees = (weights, target, reached, params, after[0], nus, squares)
    paths = [path for path, _ in jax.tree_util.tree_flatten_with_path(weights)[0]]
    columns: dict[str, list[np.ndarray]] = {}
    for path, *leaves in zip(paths, *(map(_flat, jax.tree.leaves(tree)) for tree in trees), strict=True):
        if leaves[0].size >= LEAST:
            columns[jax.tree_util.keystr(path, simple=True, separator="/")] = leaves
    probes = {name: _probe(*leaves) for name, leaves in columns.items()}
    return probes | {"all": _probe(*(np.concatenate(parts) for parts in zip(*columns.values(), strict=True)))}


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


def _flat(leaf: jax.Array) -> np.ndarray:
    return np.asarray(leaf.astype(jnp.float32)).ravel()


def _probe(
    weights: np.ndarray,
    target: np.ndarray,
    reached: np.ndarray,
    stored: np.ndarray,
    stored_after: np.ndarray,
    nu: np.ndarray,
    average: np.ndarray,
) -> Probe:
    intended = (target - weights).astype(np.float64)
    applied = (reached - weights).astype(np.float64)
    ratio = np.abs(intended) / spacing(weights)
    followed = nu.size == average.size == weights.size
    known = average > 0 if followed else None
    return Probe(
        ratio=float(np.median(ratio)),
        lost=float(np.mean(ratio < 0.5)),
        moved=float(np.mean(stored != stored_after)),
        applied=float(applied @ intended / max(intended @ intended, 1e-300)),
        nu=float(np.median(nu[known] / average[known])) if followed else None,
        root_nu=float(np.sqrt(nu).sum() / np.sqrt(average).sum()) if followed else None,
    )
