"""What random bits cost: the same step with and without them, turn by turn, alone and within a training step.

A round times the program of each arm once, one after the other, beginning with another arm than the round before. An
arm's cost is its time less the base's in the same round, so that a clock that drifts changes both. The base runs under
two names: what the second seems to cost is the error of the method, but for what differs between processes.
"""

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import tasks
import training
from arms import Arm, step_of
from closed_form import significant

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))
from step import IN_THE_LOOP, looped

AGAIN = "again"
"""The name of the base's second turn."""


def cells(settings: dict[str, Any]) -> list[dict[str, Any]]:
    """The kind "optimizer" times the step alone, "training" forward, backward and step."""
    return [{"kind": kind} for kind in KINDS]


def measure(settings: dict[str, Any], cell: dict[str, Any]) -> dict[str, Any]:
    """Milliseconds a step by arm, a value a round, and the number of parameters."""
    task, steps = tasks.language(settings), settings["loop"][cell["kind"]]
    names = [AGAIN if name in settings["arms"][:at] else name for at, name in enumerate(settings["arms"])]
    arms = [Arm.named(settings["optimizer"], name) for name in settings["arms"]]
    turns = [KINDS[cell["kind"]](task, arm, settings["tuned"], steps) for arm in arms]
    times: dict[str, list[float]] = {name: [] for name in names}
    for number in range(settings["rounds"] + 1):
        for place in range(len(names)):
            at = (number + place) % len(names)
            times[names[at]].append(1e3 * turns[at]() / steps)
    times = {name: values[1:] for name, values in times.items()}  # the first round warms up
    size = sum(leaf.size for leaf in jax.tree.leaves(task.initial(0)))
    return {"parameters": size, "ms": significant(times)}


def optimizer(task: tasks.Task, arm: Arm, rate: float, steps: int) -> Callable[[], float]:
    """A program of that many steps with the same gradients, as a function that runs it once and returns its seconds."""
    params, state, _ = training.begin(task, arm, rate, 0, False)
    leaves, structure = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(1), len(leaves))
    drawn = [1e-3 * jax.random.normal(key, leaf.shape, arm.dtype) for key, leaf in zip(keys, leaves, strict=True)]
    grads = jax.tree.unflatten(structure, drawn)
    step = step_of(arm.build(lambda count: rate * task.shape(count), 0))
    loop = looped(lambda params, state, grads: step(grads, state, params), steps)
    program = jax.jit(loop, donate_argnums=(0, 1)).lower(params, state, grads).compile(IN_THE_LOOP)
    return _timed(lambda carry: program(*carry, grads), (params, state))


def whole(task: tasks.Task, arm: Arm, rate: float, steps: int) -> Callable[[], float]:
    """The same of training steps, on the first batches."""
    program = training.program(task, arm, False, steps)
    batches = jnp.asarray(task.batches(0)[:steps])
    return _timed(
        lambda carry: program(carry, batches, jnp.float32(rate))[2], training.begin(task, arm, rate, 0, False)
    )


def _timed(run: Callable[[Any], Any], carry: Any) -> Callable[[], float]:
    """Seconds of `carry = run(carry)`, which may donate it."""
    held = [carry]

    def turn() -> float:
        begun = time.perf_counter()
        held[0] = jax.block_until_ready(run(held[0]))
        return time.perf_counter() - begun

    return turn


KINDS = {"optimizer": optimizer, "training": whole}
