"""One run: a task trained by an arm at one learning rate from one seed, with probes of what its steps do.

All steps between two probes are one program (`lax.scan`) that is compiled once for an arm: learning rate, seed and
batches are its arguments.
"""

import dataclasses
import functools
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from arms import Arm, step_of
from probes import Probe, measure
from tasks import Task

B2 = 0.999  # Optax's default for AdamW


@dataclasses.dataclass(frozen=True)
class Run:
    """What came of a run.

    Attributes:
      validation: by name, "loss" in nats.
      training: mean loss of the last twentieth of the steps.
      probes: at equal distances, the last one at the last step; by leaf, and "all".
      params: the weights, as stored.
      seconds: of a step, the median over the programs between probes.
      kept_bytes: of weights and optimizer state, per parameter.
      temporary_bytes: of the program, per parameter, by XLA's own analysis; activations are among them.
    """

    validation: dict[str, float]
    training: float
    probes: list[dict[str, Probe]]
    params: Any
    seconds: float
    kept_bytes: float
    temporary_bytes: float


def average_of_squares(average: jax.Array, grad: jax.Array) -> jax.Array:
    """Adam's second moment, in FP32."""
    return B2 * average + (1 - B2) * jnp.square(grad.astype(jnp.float32))


def begin(task: Task, arm: Arm, rate: float, seed: int, follow: bool, start: Any = None) -> tuple[Any, Any, Any]:
    """Weights as stored, optimizer state, averages of squares (scalars where they are not followed)."""
    weights = task.initial(seed) if start is None else start
    params, state = arm.begin(lambda count: rate * task.shape(count), seed, weights)
    squares = jax.tree.map(lambda p: jnp.zeros(p.shape if follow else (), jnp.float32), params)
    return params, state, squares


@functools.cache
def program(task: Task, arm: Arm, follow: bool, steps: int) -> Any:
    """Compiled: (what `begin` gives, batches, rate) -> (that before the last step, its gradients, after it, losses)."""

    def segment(carry: Any, batches: jax.Array, rate: jax.Array) -> Any:
        step = step_of(arm.build(lambda count: rate * task.shape(count), 0))

        def once(carry: Any, batch: jax.Array) -> tuple[Any, jax.Array, Any]:
            params, state, squares = carry
            value, grads = jax.value_and_grad(task.loss)(params, batch)
            if follow:
                squares = jax.tree.map(average_of_squares, squares, grads)
            return (*step(grads, state, params), squares), value, grads

        before, values = jax.lax.scan(lambda carry, batch: once(carry, batch)[:2], carry, batches[:-1])
        after, value, grads = once(before, batches[-1])
        return before, grads, after, jnp.append(values, value)

    carry = jax.eval_shape(lambda: begin(task, arm, 1.0, 0, follow))
    one = task.batches(0)[0]
    batches = jax.ShapeDtypeStruct((steps, *one.shape), one.dtype)
    return jax.jit(segment, donate_argnums=0).lower(carry, batches, jax.ShapeDtypeStruct((), jnp.float32)).compile()


def train(task: Task, arm: Arm, rate: float, seed: int, *, probes: int, follow: bool, start: Any = None) -> Run:
    """Train.

    Args:
      task: what.
      arm: how.
      rate: peak of the learning rate.
      seed: of the initial weights, the batches and the arm's random bits.
      probes: how many.
      follow: whether to keep an FP32 average of squares beside the run, for the probes to compare nu with.
      start: FP32 weights to start from, in place of the task's own.
    """
    carry = begin(task, arm, rate, seed, follow, start)
    size = sum(leaf.size for leaf in jax.tree.leaves(carry[0]))
    kept = sum(leaf.nbytes for leaf in jax.tree.leaves(carry[:2]))
    batches = task.batches(seed)
    segments = batches.reshape(probes, len(batches) // probes, *batches.shape[1:])
    segment = program(task, arm, follow, segments.shape[1])
    values, found, times = [], [], []
    for part in map(jnp.asarray, segments):
        begun = time.perf_counter()
        before, grads, carry, losses = jax.block_until_ready(segment(carry, part, jnp.float32(rate)))
        times.append(time.perf_counter() - begun)
        values.append(np.asarray(losses))
        found.append(measure(arm, task.shape, rate, before, grads, carry))
    return Run(
        validation=task.validate(carry[0]),
        training=float(np.concatenate(values)[-max(1, len(batches) // 20) :].mean()),
        probes=found,
        params=carry[0],
        seconds=float(np.median(times)) / segments.shape[1],
        kept_bytes=kept / size,
        temporary_bytes=segment.memory_analysis().temp_size_in_bytes / size,
    )
