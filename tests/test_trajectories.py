"""Whole runs: against AdamW and Lion in float64, against float32 moments on real gradients, against bitsandbytes."""

from pathlib import Path

import jax
import jax.numpy as jnp
import language_model
import ml_dtypes
import numpy as np
import pytest
import tolerances
from oracles import adamw as oracle
from oracles.adamw import single

import optax_sr8bit as sr8

STEPS = 200
SHAPE = (32, 256)


def gradients(steps=STEPS, shape=SHAPE, seed=0):
    """Gradients with row scales over four decades, a mean that turns slowly, and some exact zeros."""
    rng = np.random.default_rng(seed)
    phase = np.sin(np.arange(steps)[:, None, None] / 30 + rng.uniform(0, 6, shape))
    g = (rng.standard_normal((steps, *shape)) + phase) * np.logspace(-3, 1, shape[0])[:, None]
    g[:, :, ::37] = 0
    return g.astype(np.float32)


def initial(shape=SHAPE, seed=1):
    """Parameters of magnitude about one, never near zero: an error relative to the parameter has a meaning."""
    rng = np.random.default_rng(seed)
    return (rng.uniform(0.5, 2, shape) * rng.choice([-1, 1], shape)).astype(np.float32)


def run(tx, p, grads):
    """The parameter after every step, `tx.step` under scan."""

    @jax.jit
    def trajectory(p, grads):
        def body(carry, g):
            p, state = tx.step(g, carry[1], carry[0])
            return (p, state), p

        (_, state), ps = jax.lax.scan(body, (p, tx.init(p)), grads)
        return ps, state

    return jax.device_get(trajectory(jnp.asarray(p), jnp.asarray(grads)))


def warmup(step):
    """A schedule that both JAX and NumPy evaluate: float32 inside the library, float64 in the oracle."""
    return 1e-3 * (0.1 + step / 250)


ADAMW = {
    "plain": {},
    "decay": {"weight_decay": 0.1},
    "eps_root": {"eps_root": 1e-6, "eps": 1e-3},
    "nesterov": {"nesterov": True, "weight_decay": 0.1},
    "betas": {"b1": 0.8, "b2": 0.95},
    "schedule": {"learning_rate": warmup},
    "decay_schedule": {"weight_decay": lambda step: 0.5 - step / 1000, "learning_rate": warmup},
}


def assert_follows(trajectory, exact):
    """Every step, in L2 and element by element."""
    for ours, theirs in zip(trajectory, exact, strict=True):
        error = np.abs(ours - theirs)
        assert np.linalg.norm(error) <= tolerances.FLOAT32_TRAJECTORY * np.linalg.norm(theirs)
        assert (error <= tolerances.FLOAT32_ELEMENT * np.abs(theirs)).all(), (error / np.abs(theirs)).max()


@pytest.mark.parametrize("case", ADAMW)
def test_adamw_is_the_oracle(case):
    args = {"learning_rate": 1e-3, "b1": 0.9, "b2": 0.999, "eps": 1e-8, "eps_root": 0.0, "weight_decay": 0.0}
    args |= ADAMW[case]
    p, grads = initial(), gradients()
    got, _ = run(sr8.adamw(**args, codec="float32"), p, grads)
    floats = {k: v if callable(v) or isinstance(v, bool) else single(v) for k, v in args.items()}
    floats["lr"], floats["decay"] = floats.pop("learning_rate"), floats.pop("weight_decay")
    assert_follows(got, oracle.adamw(p, grads, **floats))


@pytest.mark.parametrize("nesterov", [False, True])
def test_adam_is_adamw_without_decay(nesterov):
    p, grads = initial(), gradients(50)
    got, _ = run(sr8.adam(1e-3, codec="float32", nesterov=nesterov), p, grads)
    rates = {"lr": single(1e-3), "b1": single(0.9), "b2": single(0.999), "eps": single(1e-8), "decay": 0.0}
    assert_follows(got, oracle.adamw(p, grads, **rates, nesterov=nesterov))


# Without decay every step is the same number: a power of two, or float32 rounds each of them the same way.
LION = {
    "plain": {},
    "decay": {"weight_decay": 0.5},
    "betas": {"b1": 0.95, "b2": 0.98},
    "schedule": {"learning_rate": warmup, "weight_decay": lambda step: 1.0 - step / 1000},
}


@pytest.mark.parametrize("case", LION)
def test_lion_is_the_oracle(case):
    args = {"learning_rate": 2.0**-13, "b1": 0.9, "b2": 0.99, "weight_decay": 0.0, **LION[case]}
    p, grads = initial(), gradients()
    got, _ = run(sr8.lion(**args, codec="float32"), p, grads)
    floats = {k: v if callable(v) else single(v) for k, v in args.items()}
    floats["lr"], floats["decay"] = floats.pop("learning_rate"), floats.pop("weight_decay")
    # A sign that float32 gets wrong, or of an exact zero, would show as a difference of lr or more.
    assert_follows(got, oracle.lion(p, grads, **floats))


def test_decay_reaches_only_masked_leaves():
    p, grads = initial(), gradients(50)
    params = {"decayed": jnp.asarray(p), "free": jnp.asarray(p)}
    tx = sr8.adamw(1e-3, weight_decay=0.1, mask={"decayed": True, "free": False}, codec="float32")
    state, step = tx.init(params), jax.jit(tx.step)
    for g in grads:
        params, state = step({"decayed": g, "free": g}, state, params)
    for name, decay in (("decayed", single(0.1)), ("free", 0.0)):
        rates = {"lr": single(1e-3), "b1": single(0.9), "b2": single(0.999), "eps": single(1e-8), "decay": decay}
        *_, exact = oracle.adamw(p, grads, **rates)
        assert_follows([params[name]], [exact])


def directions(tx, grads):
    """-u of every step: door 1 with learning rate 1 from parameters that are zero."""
    zeros = jax.tree.map(lambda g: jnp.zeros(g.shape[1:], jnp.float32), grads)

    @jax.jit
    def replay(grads):
        def body(state, g):
            updates, state = tx.update(g, state, zeros)
            return state, updates

        return jax.lax.scan(body, tx.init(zeros), grads)[1]

    return jax.device_get(replay(jax.tree.map(jnp.asarray, grads)))


def test_offset_follows_float32_moments_on_a_real_run():
    """Adam's direction from 8-bit moments, within 10 % of the exact one in L2 at every step."""
    losses, grads = language_model.recorded_run(200)
    assert losses[-20:].mean() < 0.75 * losses[:5].mean(), "the model has not learnt: no real trajectory"
    exact = {}
    for name, g in grads.items():
        m, v = 0.0, 0.0
        b1, b2 = single(0.9), single(0.999)
        exact[name] = np.empty(g.shape, np.float32)
        for t, gt in enumerate(g.astype(np.float64), start=1):
            m, v = b1 * m + (1 - b1) * gt, b2 * v + (1 - b2) * gt * gt
            exact[name][t - 1] = -oracle.direction(m, v, gt, t, b1, b2, single(1e-8))

    def errors(codec):
        ours = directions(sr8.adamw(1.0, weight_decay=0.0, codec=codec), grads)
        square = sum(((ours[n].astype(np.float64) - exact[n]) ** 2).reshape(len(losses), -1).sum(1) for n in grads)
        return np.sqrt(square / sum((exact[n].astype(np.float64) ** 2).reshape(len(losses), -1).sum(1) for n in grads))

    table = {codec: errors(codec) for codec in ("offset", "dynamic", "float32")}
    report = "; ".join(f"{k}: mean {e.mean():.4f}, last {e[-1]:.4f}, worst {e.max():.4f}" for k, e in table.items())
    print(report)
    assert table["float32"].max() < 1e-5, report
    assert table["offset"].max() < tolerances.OFFSET_DIRECTION, report


def bitsandbytes(optimizer, dtype):
    golden = np.load(Path(__file__).parent / "golden" / "bitsandbytes_trajectories.npz")
    prefix = f"{optimizer}.{dtype}."
    run = {k.removeprefix(prefix): golden[k] for k in golden.files if k.startswith(prefix)}
    if dtype == "bfloat16":
        run["params"] = run["params"].view(ml_dtypes.bfloat16)
    cast = jnp.dtype(dtype)
    return golden["p0"].astype(cast), golden["grads"].astype(cast), golden["steps"], run


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("optimizer", ["adamw", "lion"])
def test_dynamic_follows_bitsandbytes(optimizer, dtype):
    """Within the tolerances of its own tests. It decays after the update and rounds BF16 twice: no bit equality."""
    p, grads, steps, recorded = bitsandbytes(optimizer, dtype)
    options = {"codec": "dynamic", "rounding": "nearest", "weight_decay": 0.1}
    tx = sr8.adamw(1e-3, **options) if optimizer == "adamw" else sr8.lion(1e-4, **options)
    got, state = run(tx, p, grads)
    for step, theirs in zip(steps, recorded["params"].astype(np.float64), strict=True):
        error = np.abs(got[step - 1].astype(np.float64) - theirs)
        mean, relative = tolerances.BITSANDBYTES[dtype]
        assert error.mean() < mean
        assert (error / (np.abs(theirs) + 1e-9)).mean() < relative
    moments = [(state.mu, state.mu_scale, "1")] + ([(state.nu, state.nu_scale, "2")] if optimizer == "adamw" else [])
    for code, scale, number in moments:
        np.testing.assert_allclose(scale[:, 0], recorded["absmax" + number], rtol=2e-5)
        off = np.abs(code.astype(int) - recorded["state" + number])
        # A value within an ulp of a tie may round otherwise, and that element then goes a way of its own.
        assert (off > 0).mean() <= 1e-3
        assert (off > 1).sum() <= 1
