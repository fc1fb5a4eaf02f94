"""What few bits do to a second moment's average in closed loop, v = decode(encode(b2 v + (1 - b2) g**2)).

A step shrinks v by a share of 1 - b2 at most. Where that is under half the distance to the next code, rounding to
nearest takes it back and v stays where it is; where v rounds to zero, the next update may be huge.

    average     v beside the FP32 average of the same normal gradients, in blocks of 256 elements of different scales
    trajectory  gradients recorded in a run of FP32 AdamW, replayed through AdamW with both moments stored

Stores of the library are measured in its AdamW, on FP32 weights, at the learning rate 1 from zero: the new weights are
the update. `offset_wrapped` is its `quantize_moments` around Optax's Adam, which carries the floor of the code into the
average, as a wrapper must. The others are round trips of this file.
"""

import functools
import json
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import optax_sr8bit as sr8
import tasks
from closed_form import significant
from optax_sr8bit import codecs

BLOCK = 256
B1, EPS = 0.9, 1e-8
LEAST = 4096
"""Elements; smaller leaves keep FP32 moments in the library and are left out, so `average` must have as many."""


class Store(NamedTuple):
    """AdamW's direction with moments kept in one way; gradients, updates and v are trees of rows of 256 or fewer."""

    init: Callable[[Any], Any]  # tree of gradients -> state
    step: Callable[[Any, Any], tuple[Any, Any]]  # (gradients, state) -> (updates without a learning rate, state)
    second: Callable[[Any], tuple[Any, Any]]  # state -> (v as the next step decodes it, its floor in the denominator)


def library(codec: codecs.Codec, b2: Any, wrapped: bool = False) -> Store:
    """The library's AdamW with that codec, or `quantize_moments` around Optax's Adam."""
    tx: Any = sr8.adamw(1.0, B1, b2, EPS, weight_decay=0.0, codec=codec, min_8bit_size=LEAST)
    if wrapped:
        tx = sr8.quantize_moments(optax.scale_by_adam(B1, b2, EPS), codec, min_8bit_size=LEAST)

    def step(grads, state):
        if wrapped:
            return tx.update(grads, state)
        moved, state = tx.step(grads, state, jax.tree.map(jnp.zeros_like, grads))
        return jax.tree.map(jnp.negative, moved), state

    def second(state):
        code = codec.unsigned
        nu, scale = (state.inner.nu, state.scale.nu) if wrapped else (state.nu, state.nu_scale)
        wide = jax.tree.map(lambda c, s: jnp.repeat(s, BLOCK, axis=-1)[..., : c.shape[-1]], nu, scale)
        floor = jax.tree.map(code.floor, wide)
        v = jax.tree.map(lambda c, s: code.decode(c.astype(jnp.uint32), s), nu, wide)
        return (jax.tree.map(jnp.maximum, v, floor), floor) if wrapped else (v, floor)

    return Store(tx.init, step, second)


def round_trips(signed: Callable, unsigned: Callable, b2: Any) -> Store:
    """AdamW whose moments go through these functions, FP32 -> FP32 of the same shape, after each step."""
    zeros = functools.partial(jax.tree.map, jnp.zeros_like)

    def step(grads, state):
        m, v, count = state
        count += 1
        m = jax.tree.map(lambda m, g: B1 * m + (1 - B1) * g, m, grads)
        v = jax.tree.map(lambda v, g: b2 * v + (1 - b2) * g * g, v, grads)
        update = jax.tree.map(lambda m, v: direction(m, v, count, b2), m, v)
        return update, (jax.tree.map(signed, m), jax.tree.map(unsigned, v), count)

    return Store(lambda grads: (zeros(grads), zeros(grads), 0), step, lambda state: (state[1], zeros(state[1])))


def direction(m: jax.Array, v: jax.Array, count: jax.Array, b2: Any) -> jax.Array:
    """m/(1 - b1**t) / (sqrt(v/(1 - b2**t)) + eps) after t = count steps."""
    return m / (1 - B1**count) / (jnp.sqrt(v / (1 - b2**count)) + EPS)


def absmax(x: jax.Array) -> jax.Array:
    """Of each row, a block: [..., 1]; at least 2**-100."""
    return jnp.maximum(jnp.abs(x).max(-1, keepdims=True), 2.0**-100)


def bfloat16_nearest(x: jax.Array) -> jax.Array:
    """BF16 values, in FP32; compilers may drop a pair of casts."""
    return jax.lax.reduce_precision(x, 8, 7)


def root_linear(x: jax.Array, levels: int) -> jax.Array:
    """The square root in so many equal steps a side: c = round(levels sqrt(|x|/absmax)); x = ±(c/levels)**2 absmax."""
    c = jnp.round(levels * jnp.sqrt(jnp.abs(x) / absmax(x)))
    return jnp.sign(x) * (c / levels) ** 2 * absmax(x)


def dynamic(x: jax.Array, code: codecs.MomentCode, least: int) -> jax.Array:
    """The library's dynamic map, with no code under `least`."""
    found = jnp.maximum(code.encode(x, absmax(x), None).astype(jnp.uint32), least)
    return code.decode(found, jnp.broadcast_to(absmax(x), x.shape))


def without_zero(x: jax.Array) -> jax.Array:
    """The unsigned dynamic map whose zero is replaced by its least value, 3.25e-7 absmax."""
    return dynamic(x, codecs.Dynamic.unsigned, 1)


OWN = {  # (signed, unsigned)
    "float32": (lambda x: x, lambda x: x),
    "bfloat16": (bfloat16_nearest, bfloat16_nearest),
    "dynamic_without_zero": (lambda x: dynamic(x, codecs.Dynamic.signed, 0), without_zero),
    "sqrt_linear": (lambda x: root_linear(x, 127), lambda x: root_linear(x, 255)),
}
LIBRARY = {
    "dynamic": codecs.Dynamic(),
    "companded": codecs.Companded(),
    "fp8": codecs.Fp8(),
    "offset_nearest": codecs.Offset(dither="nearest"),
    "offset_weyl": codecs.Offset(),
    "offset_philox": codecs.Offset(dither="philox"),
    "offset_wrapped": codecs.Offset(),
}


def store(name: str, b2: Any) -> Store:
    """By its name."""
    return round_trips(*OWN[name], b2) if name in OWN else library(LIBRARY[name], b2, name == "offset_wrapped")


def cells(settings: dict[str, Any]) -> list[dict[str, Any]]:
    """The measurements: averages by store, case and b2 (all seeds at once), trajectories by seed and store."""
    names, own, seeds = settings["stores"], settings["average"], range(settings["trajectory"]["seeds"])
    points = [{"case": case, "b2": b2} for case in own["cases"] for b2 in own["b2s"]]
    averages = [{"kind": "average", "store": name} | point for name in names for point in points]
    return averages + [{"kind": "trajectory", "store": name, "seed": seed} for seed in seeds for name in names]


def measure(settings: dict[str, Any], cell: dict[str, Any]) -> dict[str, Any]:
    """The results of a cell, and whether they are as registered (`as_expected`; None where nothing is)."""
    own = settings[cell["kind"]]
    result = {"average": average, "trajectory": trajectory}[cell["kind"]](own, cell)
    bounds = [b for b in own["expect"] if all(cell[k] in b[k] for k in ("store", "case", "b2") if k in b)]
    held = [b.get("least", -np.inf) <= result[b["what"]] <= b.get("most", np.inf) for b in bounds]
    return significant(result | {"as_expected": all(map(bool, held)) if held else None})


def average(own: dict[str, Any], cell: dict[str, Any]) -> dict[str, Any]:
    """v / v_true at the end, over the elements that dropped, or would have; a seed is a group of rows.

    largest: of |m|/(sqrt(v) + eps) over all steps and elements, m in FP32, v what a step divides by: the new average
    before it is stored, not below the floor. largest_stored: with v as stored. zeros: share of v stored as zero.
    """
    seeds, rows, half = own["seeds"], own["seeds"] * own["blocks"], own["decades"] / 2
    steps = 2 * round(own["time_constants"] / (1 - cell["b2"]))
    scales = 10.0 ** np.random.default_rng(0).uniform(-half, half, (rows, BLOCK))
    falls = np.arange(BLOCK) >= own["kept"]
    if cell["case"] == "outlier":
        scales[:, 0] = own["outlier"] * scales.max(-1)
    factor = np.where(falls, 1.0 if cell["case"] == "stationary" else own["drop"], 1.0)
    arguments = np.float32(scales), np.float32(factor), np.float32(cell["b2"]), steps
    v, exact, largest, largest_stored = average_program(cell["store"])(*arguments)
    v, exact = (np.asarray(x, np.float64).reshape(seeds, -1, BLOCK)[..., falls] for x in (v, exact))
    ratio, updates = v / exact, {"largest": float(largest), "largest_stored": float(largest_stored)}
    result = {"mean": ratio.mean(), "std": ratio.std(), "median": np.median(ratio), "zeros": (v == 0).mean()}
    return result | {"mean_by_seed": ratio.mean((1, 2)).tolist()} | updates


@functools.cache
def average_program(name: str) -> Any:
    """(scales [rows, 256], factors of the second half [256], b2, steps) -> (v, v in FP32, the largest updates)."""

    @jax.jit
    def run(scales, factor, b2, steps):
        kept = store(name, b2)

        def body(step, carry):
            state, m, exact, largest, stored = carry
            normal = jax.random.normal(jax.random.fold_in(jax.random.key(0), step), scales.shape)
            g = scales * normal * jnp.where(2 * step < steps, 1.0, factor)
            m, exact = B1 * m + (1 - B1) * g, b2 * exact + (1 - b2) * g * g
            v, floor = kept.second(state)
            u = direction(m, jnp.maximum(b2 * v + (1 - b2) * g * g, floor), step + 1, b2)
            state = kept.step(g, state)[1]
            again = direction(m, jnp.maximum(*kept.second(state)), step + 1, b2)
            return state, m, exact, jnp.maximum(largest, abs(u).max()), jnp.maximum(stored, abs(again).max())

        zeros = jnp.zeros(scales.shape, jnp.float32)
        first = (kept.init(zeros), zeros, zeros, jnp.float32(0), jnp.float32(0))
        state, _, exact, largest, stored = jax.lax.fori_loop(0, steps, body, first)
        return kept.second(state)[0], exact, largest, stored

    return run


def trajectory(own: dict[str, Any], cell: dict[str, Any]) -> dict[str, Any]:
    """|u - u_FP32| / |u_FP32|, mean after `warm` steps and last; at the end sum sqrt(v) over FP32's; largest |u|."""
    grads = recorded(json.dumps(own["model"]), cell["seed"])
    errors, roots, largest, exact = map(np.asarray, replay_program(cell["store"], own["b2"])(grads))
    result = {"direction": errors[own["warm"] :].mean(), "last_direction": errors[-1], "root_nu": roots[-1]}
    return result | {"largest": largest.max(), "largest_float32": exact.max()}


@functools.cache
def replay_program(name: str, b2: float) -> Any:
    """Gradients {leaf: [steps, ...]} -> per step: direction error, sum sqrt(v) over FP32's, largest |u|, FP32's."""

    def flat(tree):
        return jnp.concatenate([leaf.ravel() for leaf in jax.tree.leaves(tree)])

    @jax.jit
    def run(grads):
        kept, exact = store(name, b2), store("float32", b2)
        first = jax.tree.map(lambda g: g[0], grads)

        def body(states, g):
            (u, state), (true, true_state) = kept.step(g, states[0]), exact.step(g, states[1])
            u, true, v, true_v = map(flat, (u, true, kept.second(state)[0], exact.second(true_state)[0]))
            error = jnp.linalg.norm(u - true) / jnp.linalg.norm(true)
            roots = jnp.sqrt(v).sum() / jnp.sqrt(true_v).sum()
            return (state, true_state), (error, roots, abs(u).max(), abs(true).max())

        return jax.lax.scan(body, (kept.init(first), exact.init(first)), grads)[1]

    return run


@functools.lru_cache(maxsize=1)
def recorded(model: str, seed: int) -> dict[str, jax.Array]:
    """Gradients of a run of FP32 AdamW, {path: float32[steps, ...]}, of the leaves that are not small."""
    task = tasks.language(settings := json.loads(model))
    tx = optax.adamw(lambda step: settings["tuned"] * task.shape(step), weight_decay=0.1)

    @jax.jit
    def run(params, batches):
        def body(carry, batch):
            grads = jax.grad(task.loss)(carry[0], batch)
            updates, state = tx.update(grads, carry[1], carry[0])
            named = jax.tree_util.tree_flatten_with_path(grads)[0]
            large = {jax.tree_util.keystr(path): leaf for path, leaf in named if leaf.size >= LEAST}
            return (optax.apply_updates(carry[0], updates), state), large

        return jax.lax.scan(body, (params, tx.init(params)), batches)[1]

    return run(task.initial(seed), task.batches(seed))
