"""The oracles against Optax's own optimizers in float64: a row is a setting, and no oracle shares code with Optax."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from oracles import adafactor, adamw, adan, ademamix, muon, rmsprop, schedule_free, sgd, trust

STEPS = 50

# Errors are relative to the largest parameter: some ten float64 roundings (2e-15 was the most seen), with room.
FLOAT64 = 1e-13
# Whatever the parameter's dtype, Optax has t**-decay_rate of Adafactor in float32, and step / warmup_steps.
FLOAT32 = 3e-7


def falling(step):
    """A schedule for JAX and NumPy."""
    return 0.02 / (1 + 0.1 * step)


def rising(step):
    """A schedule from zero."""
    return 0.02 * step


def slower(step):
    """A decay that approaches one."""
    return 1 - 0.1 / (1 + 0.2 * step)


ROW, MATRIX, TALL, CUBE = (7,), (6, 9), (9, 4), (5, 3, 8)
DION = (  # of Dion's authors, who give every step its own
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)


def of_adamw(optimizer, **fixed):
    """An oracle of `adamw.py` under Optax's name of the weight decay."""

    def oracle(p, grads, lr, **hyper):
        if "weight_decay" in hyper:
            hyper["decay"] = hyper.pop("weight_decay")
        return optimizer(p, grads, lr, **fixed, **hyper)

    return oracle


OPTIMIZERS = {  # ours, Optax's; its Adafactor has a float32 momentum unless told otherwise
    "adafactor": (adafactor.adafactor, functools.partial(optax.adafactor, dtype_momentum=jnp.float64)),
    "adagrad": (rmsprop.adagrad, optax.adagrad),
    "adamw": (of_adamw(adamw.adamw), optax.adamw),
    "adan": (adan.adan, optax.adan),
    "ademamix": (ademamix.ademamix, optax.contrib.ademamix),
    "lamb": (trust.lamb, optax.lamb),
    "lars": (trust.lars, optax.lars),
    "lion": (of_adamw(adamw.lion), optax.lion),
    "muon": (muon.muon, optax.contrib.muon),
    "nadam": (of_adamw(adamw.adamw, nesterov=True, decay=0.0), optax.nadam),
    "nadamw": (of_adamw(adamw.adamw, nesterov=True), optax.nadamw),
    "rmsprop": (rmsprop.rmsprop, optax.rmsprop),
    "schedule_free_adamw": (schedule_free.schedule_free_adamw, optax.contrib.schedule_free_adamw),
    "sgd": (sgd.sgd, optax.sgd),
}

SETTINGS = {  # (learning rate, shape, hyperparameters): the defaults, then each hyperparameter where it shows
    "adafactor": [
        (0.02, MATRIX, {}),
        (None, ROW, dict(clipping_threshold=0.5)),
        (falling, ROW, dict(multiply_by_parameter_scale=False, momentum=0.8, weight_decay_rate=0.01, eps=1e-3)),
        (falling, MATRIX, dict(min_dim_size_to_factor=4, eps=1e-3, clipping_threshold=None)),
        (0.02, TALL, dict(min_dim_size_to_factor=4, decay_rate=0.6, decay_offset=-3, clipping_threshold=0.3)),
        (0.02, TALL, dict(min_dim_size_to_factor=5)),
        (0.02, CUBE, dict(min_dim_size_to_factor=4, momentum=0.9, weight_decay_rate=rising)),
        (0.02, (4, 4, 3, 4), dict(min_dim_size_to_factor=4)),
        (0.02, MATRIX, dict(min_dim_size_to_factor=4, decay_offset=-3, factored=False)),
        (0.02, (129, 128), {}),
    ],
    "adagrad": [
        (0.1, ROW, {}),
        (falling, ROW, dict(initial_accumulator_value=0.0, eps=1e-3)),
        (0.1, ROW, dict(initial_accumulator_value=0.0, eps=0.0)),
        (0.1, ROW, dict(initial_accumulator_value=2.0)),
    ],
    "adamw": [
        (0.01, ROW, {}),
        (falling, ROW, dict(b1=0.8, b2=0.95, eps=1e-3, eps_root=1e-2, weight_decay=rising)),
    ],
    "adan": [
        (0.01, ROW, {}),
        (falling, ROW, dict(b1=0.9, b2=0.7, b3=0.95, eps=1e-3, eps_root=1e-2, weight_decay=0.1)),
        (0.01, MATRIX, dict(b2=0.3, eps_root=0.0, weight_decay=rising)),
    ],
    "ademamix": [
        (0.01, ROW, {}),
        (falling, ROW, dict(b1=0.8, b2=0.95, b3=0.99, alpha=8.0, eps=1e-3, eps_root=1e-2, weight_decay=0.1)),
        (0.01, MATRIX, dict(b3=slower, alpha=rising, weight_decay=rising)),
    ],
    "lamb": [
        (0.01, MATRIX, {}),
        (falling, MATRIX, dict(b1=0.8, b2=0.95, eps=1e-3, eps_root=1e-2, weight_decay=0.3)),
        (0.01, ROW, dict(weight_decay=rising)),
    ],
    "lars": [
        (1.0, MATRIX, {}),
        (falling, MATRIX, dict(weight_decay=0.3, trust_coefficient=0.1, eps=0.5, momentum=0.7)),
        (1.0, ROW, dict(weight_decay=rising, trust_coefficient=0.01, nesterov=True)),
    ],
    "lion": [
        (0.01, ROW, {}),
        (falling, ROW, dict(b1=0.8, b2=0.95, weight_decay=0.1)),
    ],
    "muon": [
        (0.02, MATRIX, {}),
        (falling, TALL, dict(beta=0.8, eps=1e-2, weight_decay=0.1, nesterov=False)),
        (0.02, MATRIX, dict(ns_coeffs=(2.0, -1.5, 0.5), ns_steps=3, weight_decay=rising, consistent_rms=0.2)),
        (0.02, TALL, dict(ns_coeffs=DION, consistent_rms=0.2)),
        (0.02, MATRIX, dict(adaptive=True, preconditioning="spectral", eps=1e-2)),
        (0.02, MATRIX, dict(preconditioning="schatten")),
        (0.02, MATRIX, dict(preconditioning="aol")),
        (0.02, TALL, dict(preconditioning="aol")),
    ],
    "nadam": [(falling, ROW, dict(b1=0.8, b2=0.95, eps=1e-3, eps_root=1e-2))],
    "nadamw": [(0.01, ROW, {}), (0.01, ROW, dict(weight_decay=rising))],
    "rmsprop": [
        (0.01, ROW, {}),
        (falling, ROW, dict(decay=0.8, eps=1e-2, momentum=0.9)),
        (0.01, ROW, dict(eps=1e-2, eps_in_sqrt=False, bias_correction=True, momentum=0.9, nesterov=True)),
        (0.01, ROW, dict(initial_scale=1.0, centered=True)),
        # From an initial scale of 0 the variance of one corrected gradient is zero but for rounding, of either sign.
        (0.01, ROW, dict(initial_scale=1.0, centered=True, eps=1e-2, eps_in_sqrt=False, bias_correction=True)),
        (falling, ROW, dict(decay=0.8, initial_scale=1.0, centered=True, momentum=0.5)),
    ],
    "schedule_free_adamw": [
        (0.0025, ROW, {}),
        (0.02, ROW, dict(warmup_steps=10, b1=0.8, b2=0.95, eps=1e-3, weight_decay=0.1, weight_lr_power=1.5)),
        (falling, ROW, dict(weight_decay=0.1)),
        (rising, ROW, dict(weight_lr_power=1.0)),
        (0.0, ROW, {}),
    ],
    "sgd": [
        (0.01, ROW, {}),
        (falling, ROW, dict(momentum=0.9)),
        (falling, ROW, dict(momentum=0.8, nesterov=True)),
    ],
}
CASES = [
    pytest.param(name, *setting, id=f"{name}-{number}")
    for name, settings in SETTINGS.items()
    for number, setting in enumerate(settings)
]


def gradients(shape):
    """Gradients of scales over four decades; beneath most eps at first, zero at one step and in one element."""
    rng = np.random.default_rng(0)
    g = rng.standard_normal((STEPS, *shape)) + rng.standard_normal(shape)
    g *= 10 ** rng.uniform(-3, 1, (STEPS,) + (1,) * len(shape))
    g[:3] *= 1e-6
    g[20] = 0
    g.reshape(STEPS, -1)[:, 0] = 0
    return g


def initial(shape):
    """A parameter of about one."""
    return np.random.default_rng(1).standard_normal(shape)


def optax_run(tx, p, grads, evaluate=None):
    """The parameter after every step of Optax in float64; `evaluate` makes it from the state and the parameter."""

    @jax.jit
    def trajectory(p, grads):
        def step(carry, g):
            updates, state = tx.update(g, carry[1], carry[0])
            p = optax.apply_updates(carry[0], updates)
            return (p, state), p if evaluate is None else evaluate(state, p)

        return jax.lax.scan(step, (p, tx.init(p)), grads)[1]

    ps = jax.device_get(trajectory(jnp.asarray(p), jnp.asarray(grads)))
    assert ps.dtype == np.float64
    return ps


def bound(name, hyper):
    """How far an oracle may be from Optax."""
    return FLOAT32 if name == "adafactor" or "warmup_steps" in hyper else FLOAT64


def error(ours, theirs):
    """The largest difference, relative to the largest parameter."""
    return np.max(np.abs(np.stack(list(ours)) - theirs)) / np.max(np.abs(theirs))


@pytest.fixture
def x64():
    """Float64 in this test and no other."""
    with jax.enable_x64(True):
        yield


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(("name", "lr", "shape", "hyper"), CASES)
def test_the_oracle_is_optax(name, lr, shape, hyper):
    ours, theirs = OPTIMIZERS[name]
    p, grads = initial(shape), gradients(shape)
    assert error(ours(p, grads, lr, **hyper), optax_run(theirs(lr, **hyper), p, grads)) < bound(name, hyper)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("name", ["adafactor", "lamb", "lars"])
def test_a_parameter_of_zeros(name):
    """Their steps are relative to the parameter, with an exception for one that is zero."""
    ours, theirs = OPTIMIZERS[name]
    p, grads = np.zeros(MATRIX), gradients(MATRIX)
    assert error(ours(p, grads, 0.01), optax_run(theirs(0.01), p, grads)) < bound(name, {})


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("hyper", [{}, dict(warmup_steps=10, b1=0.8)])
def test_where_schedule_free_evaluates(hyper):
    p, grads = initial(ROW), gradients(ROW)
    ours, theirs = OPTIMIZERS["schedule_free_adamw"]
    theirs = optax_run(theirs(0.02, **hyper), p, grads, optax.contrib.schedule_free_eval_params)
    assert error(ours(p, grads, 0.02, evaluate=True, **hyper), theirs) < bound("schedule_free_adamw", hyper)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_defaults_are_optaxs(name):
    ours = inspect.signature(OPTIMIZERS[name][0]).parameters
    theirs = inspect.signature(getattr(optax, name, None) or getattr(optax.contrib, name)).parameters
    shared = {k: p.default for k, p in ours.items() if p.default is not p.empty and k not in ("lr", "evaluate")}
    assert shared == {k: theirs[k].default for k in shared}
    if "lr" in ours:
        assert ours["lr"].default == theirs["learning_rate"].default


def test_float64_ends_with_the_test():
    assert jnp.asarray(1.0).dtype == jnp.float32
