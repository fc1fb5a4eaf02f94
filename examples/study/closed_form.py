"""Rounded updates beside closed forms: sums of tiny updates, decay, dead zones, noise floors, and controls that fail.

Weights begin in [1, 2), where the spacing D of BF16 is 2**-7. With the learning rate e and T steps:

    accumulate  e g = f D, constant       stochastic: each step is a Bernoulli(f) draw, mean T f D, variance
                                          T f (1 - f) D**2; nearest does not move
    decay       g = 0, weight decay d     E[w] = w0 (1 - e d)**T; nearest does not move
    dead_zone   g = h (w - w*)            nearest stops within (n - 1, n] spacings of w*, n = 1/(2 e h); stochastic goes
                                          on to the two neighbours of w*: mean distance 1/3, mean square 1/6
    floor       g = h (w - w*) + noise    E[(w - w*)**2] = (e**2 s**2 + D**2 E[q (1 - q)]) / (2 e h - e**2 h**2)

s is the noise's deviation and q the fractional part of e |g| / D. While e |g| < D, q is e |g| / D itself, and the floor

    D E|g| / (2 h)

without any e. The noise of SGD, e s**2 / (2 h), is not added to it: a jump of one spacing with the chance e |g| / D has
the second moment e |g| D, which holds e**2 g**2 already. Far above, q is as good as uniform, and the floor the noise
of SGD and D**2 / (12 e h).
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import optax_sr8bit as sr8

SPACING = 2.0**-7
START = 1.9375
"""120 spacings above the next binade, which is as far as tiny updates may lead."""
COLUMNS = 256
LIBRARY = ("nearest", "stochastic", "kahan", "split24")
FEW = "bits"
"""A control's name: this and how many of 16 random bits it draws."""


def cells(settings: dict[str, Any]) -> list[dict[str, Any]]:
    """The measurements, one a rounding (or control) and point."""
    points = {"accumulate": "fractions", "decay": "rates", "dead_zone": "products", "floor": "rates"}
    return [
        {"kind": kind, "rounding": rounding, "at": at}
        for kind, name in points.items()
        for rounding in settings[kind]["roundings"] + settings[kind].get("controls", [])
        for at in settings[kind][name]
    ]


def measure(settings: dict[str, Any], cell: dict[str, Any]) -> dict[str, Any]:
    """Measured and expected values; `within`: whether every one lies within its tolerance."""
    own = settings[cell["kind"]] | {"elements": settings["elements"], "errors": settings["standard_errors"]}
    return significant(KINDS[cell["kind"]](own, cell["rounding"], cell["at"]))


def significant(result: Any) -> Any:
    """Floats rounded to six significant digits, not finite ones as None."""
    if isinstance(result, dict):
        return {name: significant(value) for name, value in result.items()}
    if isinstance(result, list):
        return [significant(value) for value in result]
    if isinstance(result, bool | int | str) or result is None:
        return result
    return float(f"{result:.6g}") if math.isfinite(result) else None


@functools.cache
def program(optimizer: str, rounding: str, noisy: bool = False) -> Any:
    """The loop of steps, compiled once for all rates.

    Returns:
      A function of (weights of any shape, learning rate, constant gradient, curvature, target, noise, seed, steps) that
      steps with the gradient constant + curvature (w - target) + noise × a normal draw; -> the weights in FP32.
    """
    plain = rounding if rounding in LIBRARY else "stochastic"
    decay = {"weight_decay": 0.1} if optimizer == "adamw" else {}

    @jax.jit
    def run(weights, rate, constant, curvature, target, noise, seed, steps):
        tx = getattr(sr8, optimizer)(lambda _: rate, rounding=plain, **decay)
        key = jax.random.key(seed)

        def body(step, carry):
            weights, state = carry
            wide, drawn = weights.astype(jnp.float32), jax.random.fold_in(key, step)
            gradient = constant + curvature * (wide - target)
            if noisy:
                gradient += noise * jax.random.normal(drawn, wide.shape)
            if rounding.startswith(FEW):
                return few_bits(wide - rate * gradient, drawn, int(rounding.removeprefix(FEW))), state
            if rounding == "frozen":  # the address of the random bits is the count: the same bits in every step
                state = state._replace(count=jnp.zeros_like(state.count))
            return tx.step(gradient, state, weights)

        dtype = jnp.float32 if rounding == "float32" else jnp.bfloat16
        first = weights.astype(dtype)
        return jax.lax.fori_loop(0, steps, body, (first, tx.init(first)))[0].astype(jnp.float32)

    return run


def few_bits(x: jax.Array, key: jax.Array, count: int) -> jax.Array:
    """Stochastic rounding to BF16 with `count` random bits, those below them zero; finite x. Biased toward zero."""
    random = (jax.random.bits(key, x.shape, jnp.uint32) >> (32 - count)) << (16 - count)
    rounded = (jax.lax.bitcast_convert_type(x, jnp.uint32) + random) & jnp.uint32(0xFFFF0000)
    return jax.lax.bitcast_convert_type(rounded, jnp.float32).astype(jnp.bfloat16)


def simulate(optimizer, rounding, n, steps, rate, *, start=START, constant=0.0, curvature=0.0, target=0.0, noise=0.0):
    """The weights after so many steps, float64[n]."""
    weights = jnp.full((n // COLUMNS, COLUMNS), start, jnp.float32)
    target = np.broadcast_to(np.float32(target), n).reshape(weights.shape)
    run = program(optimizer, rounding, noise > 0)
    return np.asarray(run(weights, rate, constant, curvature, target, noise, 0, steps), np.float64).ravel()


def targets(n: int, base: float) -> np.ndarray:
    """Optima spread evenly over one spacing from `base` on, so that where they lie between weights averages out."""
    return np.random.default_rng(0).permutation(base + (np.arange(n) + 0.5) / n * SPACING)


def accumulate(own: dict[str, Any], rounding: str, at: int) -> dict[str, Any]:
    """Displacement after constant updates of at/65,536 spacings, in spacings.

    Nearest never moves. Only the weight is read, half a spacing off what is kept beside it. That is rounded too: in
    split24 to 2**-8 spacings, so that each update is f rounded to these; in BF16 (kahan), up to 1/2 in magnitude, by
    2**-10 a step at most. Frozen bits move the same elements in every step; few bits round f up, where weights shrink.
    """
    bits = int(rounding.removeprefix(FEW)) if rounding.startswith(FEW) else None
    control = rounding == "frozen" or bits is not None
    n, steps, f = own["elements"], own["control_steps" if control else "steps"], at / 65536
    moved = (START - simulate("sgd", rounding, n, steps, f * SPACING, constant=1.0)) / SPACING
    result = {"mean": moved.mean(), "variance": moved.var(), "expected_mean": steps * f, "expected_variance": 0.0}
    errors = (0.0, 0.0)
    if rounding == "nearest":
        result["expected_mean"] = 0.0
    elif rounding == "split24":
        result["expected_mean"], errors = steps * round(f * 256) / 256, (0.5, 0.0)
    elif rounding == "kahan":
        errors = (0.5 + steps * 2.0**-10, 0.0)
    elif rounding != "float32":
        variance = result["expected_variance"] = steps * f * (1 - f)
        fourth = variance * (1 + 3 * variance - 6 * variance / steps)
        errors = tuple(own["errors"] * math.sqrt(square / n) for square in (variance, fourth - variance**2))
    if bits is not None:
        result["biased_mean"] = steps * math.ceil(f * 2**bits) / 2**bits
    if rounding == "frozen":
        result["frozen_variance"] = steps**2 * f * (1 - f)
    result |= {"mean_tolerance": errors[0], "variance_tolerance": errors[1]}
    within = [abs(result[x] - result[f"expected_{x}"]) <= result[f"{x}_tolerance"] for x in ("mean", "variance")]
    return result | {"within": all(map(bool, within))}


def decay(own: dict[str, Any], rounding: str, at: float) -> dict[str, Any]:
    """Mean weight over the first one after steps of AdamW with gradients zero; weight decay 0.1."""
    n, steps = own["elements"], own["steps"]
    w = simulate("adamw", rounding, n, steps, at) / START
    expected = 1.0 if rounding == "nearest" else (1 - at * 0.1) ** steps
    tolerance = {
        "nearest": 0.0,
        "stochastic": own["errors"] * w.std() / math.sqrt(n),
        "float32": steps * 2.0**-24,  # a rounding a step
    }.get(rounding, expected * (steps * 2.0**-16 + 2.0**-8))  # of the pair, at most; and the weight alone is read
    within = abs(w.mean() - expected) <= tolerance
    return {"mean": w.mean(), "expected": expected, "tolerance": tolerance, "within": bool(within)}


def dead_zone(own: dict[str, Any], rounding: str, at: float) -> dict[str, Any]:
    """Distance to the optimum of a quadratic, in spacings, at the end of noiseless SGD with e h = at."""
    n, steps = own["elements"], round(own["time_constants"] / at)
    target = targets(n, own["target"])
    w = simulate("sgd", rounding, n, steps, at, start=own["from"], curvature=1.0, target=target)
    distance = np.abs(w - target) / SPACING
    result = {"mean": distance.mean(), "square": (distance**2).mean()}
    result |= {"least": distance.min(), "largest": distance.max()}
    limit, wide = 1 / (2 * at), 2.0**-16  # FP32's spacing, in BF16's; its roundings, half of it each, blur the limit
    if rounding == "stochastic":
        expected = {"mean": 1 / 3, "square": 1 / 6}
        errors = {"mean": own["errors"] * distance.std() / math.sqrt(n)}
        errors["square"] = own["errors"] * (distance**2).std() / math.sqrt(n)
        within = all(abs(result[x] - expected[x]) <= errors[x] for x in expected)
        result |= {f"expected_{x}": expected[x] for x in expected} | {f"{x}_tolerance": errors[x] for x in errors}
    elif rounding == "nearest":
        slack = wide / at
        within = limit - 1 - slack <= distance.min() and distance.max() <= limit + slack
        result |= {"expected_least": limit - 1, "expected_largest": limit, "tolerance": slack}
    else:  # FP32 has a dead zone too; the optimum is rounded as well
        within = distance.max() <= (limit + 1) * wide
        result |= {"expected_largest": limit * wide, "tolerance": wide}
    return result | {"within": bool(within)}


def floor(own: dict[str, Any], rounding: str, at: float) -> dict[str, Any]:
    """E[(w - w*)**2] at the learning rate `at`; also the limit of small rates, and its `sum` with SGD's noise."""
    n, h, s = own["elements"], own["curvature"], own["noise"]
    steps = round(own["time_constants"] / (at * h))
    target = targets(n, START)
    square = (simulate("sgd", rounding, n, steps, at, curvature=h, target=target, noise=s) - target) ** 2
    sgd = at * s**2 / (2 * h - at * h**2)
    stochastic, small, beyond = noise_floor(at, h, s)
    expected = sgd if rounding == "float32" else stochastic
    tolerance = own["errors"] * square.std() / math.sqrt(n)
    result = {"square": square.mean(), "expected": expected, "tolerance": tolerance}
    if rounding != "float32":
        result |= {"small_rate": small, "sum": small + sgd, "share_beyond": beyond}
    return result | {"within": bool(abs(square.mean() - expected) <= tolerance)}


def noise_floor(rate: float, curvature: float, noise: float) -> tuple[float, float, float]:
    """(the floor, what D E|g| / (2 h) makes of it, share of gradients with e |g| > D), with g taken as normal."""
    z = np.linspace(0, 8, 100_001)
    weight = np.exp(-(z**2) / 2)
    weight /= weight.sum()
    square = 0.0
    for _ in range(50):  # the gradient's deviation depends on the floor, weakly
        deviation = math.sqrt(noise**2 + curvature**2 * square)
        jump = rate * deviation * z / SPACING
        rounding = SPACING**2 * (weight * (jump % 1) * (1 - jump % 1)).sum()
        square = (rate**2 * noise**2 + rounding) / (2 * rate * curvature - (rate * curvature) ** 2)
    small = SPACING * deviation * math.sqrt(2 / math.pi) / (2 * curvature)
    return square, small, float(weight[jump > 1].sum())


KINDS = {"accumulate": accumulate, "decay": decay, "dead_zone": dead_zone, "floor": floor}
