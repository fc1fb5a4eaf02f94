"""Whole runs of all optimizers but AdamW and Lion: against the oracles in float64, Optax and bitsandbytes.

`test_trajectories.py` has those two.
"""

import functools
import inspect
from pathlib import Path

import jax
import numpy as np
import optax
import pytest
import tolerances
from oracles import adamw, adan, ademamix, rmsprop, sgd, trust
from oracles.adamw import single
from tables import F32, door_1, grads_like, tree
from test_trajectories import assert_follows, bitsandbytes, gradients, initial, run, warmup

import optax_sr8bit as sr8

pytestmark = pytest.mark.slow


def nadamw(p, grads, lr, weight_decay=1e-4, **hyper):
    return adamw.adamw(p, grads, lr, decay=weight_decay, nesterov=True, **hyper)


def nadam(p, grads, lr, **hyper):
    return nadamw(p, grads, lr, weight_decay=0.0, **hyper)


def gentle(step):
    """As `warmup`, for steps that are several times as long: no parameter comes near zero."""
    return 1e-4 * (0.1 + step / 250)


def fading(step):
    return 0.5 - step / 1000


def slower(step):
    """A decay rate exact in float32, since 1 minus it is what counts."""
    return 0.75 + step / 1024


OPTIMIZERS = {  # ours, the oracle
    "adagrad": (sr8.adagrad, rmsprop.adagrad),
    "adan": (sr8.adan, adan.adan),
    "ademamix": (sr8.ademamix, ademamix.ademamix),
    "lamb": (sr8.lamb, trust.lamb),
    "lars": (sr8.lars, trust.lars),
    "nadam": (sr8.nadam, nadam),
    "nadamw": (sr8.nadamw, nadamw),
    "rmsprop": (sr8.rmsprop, rmsprop.rmsprop),
    "sgd": (sr8.sgd, sgd.sgd),
}
SETTINGS = {  # (learning rate, hyperparameters): the defaults, then each hyperparameter where it shows
    "adagrad": [
        (1e-3, {}),
        (warmup, dict(initial_accumulator_value=0.0, eps=1e-3)),
        (1e-3, dict(initial_accumulator_value=0.0, eps=0.0)),
    ],
    "adan": [
        (1e-3, {}),
        (warmup, dict(b1=0.9, b2=0.7, b3=0.95, eps=1e-3, eps_root=1e-4, weight_decay=fading)),
    ],
    "ademamix": [
        (1e-3, {}),
        (warmup, dict(b1=0.8, b2=0.95, b3=0.99, alpha=8.0, eps=1e-3, eps_root=1e-4, weight_decay=0.1)),
        (gentle, dict(b3=slower, alpha=lambda step: step / 16, weight_decay=fading)),
    ],
    "lamb": [
        (1e-3, {}),
        (warmup, dict(b1=0.8, b2=0.95, eps=1e-3, eps_root=1e-4, weight_decay=fading)),
    ],
    "lars": [
        (1e-1, {}),
        (warmup, dict(weight_decay=fading, trust_coefficient=0.1, eps=0.5, momentum=0.7, nesterov=True)),
    ],
    "nadam": [(warmup, dict(b1=0.8, b2=0.95, eps=1e-3, eps_root=1e-4))],
    "nadamw": [(1e-3, dict(weight_decay=fading))],
    "rmsprop": [
        (1e-3, {}),
        (warmup, dict(decay=0.8, eps=1e-3, momentum=0.9, initial_scale=1.0)),
        (1e-3, dict(eps=1e-3, eps_in_sqrt=False, bias_correction=True, momentum=0.5, nesterov=True)),
        (warmup, dict(eps=1e-3, centered=True, momentum=0.5)),
        # From an initial scale of 0 the variance of one corrected gradient is zero but for rounding, of either sign.
        (1e-3, dict(initial_scale=1.0, centered=True, eps_in_sqrt=False, bias_correction=True)),
    ],
    "sgd": [
        (1e-3, {}),
        (gentle, dict(momentum=0.9)),
        (1e-4, dict(momentum=0.8, nesterov=True)),
    ],
}
CASES = [
    pytest.param(name, *setting, id=f"{name}-{number}")
    for name, settings in SETTINGS.items()
    for number, setting in enumerate(settings)
]


def as_float32(value):
    """A hyperparameter as the library computes with it."""
    return value if callable(value) or isinstance(value, bool) else single(value)


def exact(name, p, grads, lr, hyper):
    """The oracle's parameters, from hyperparameters as float32 has them."""
    ours, oracle = OPTIMIZERS[name]
    defaults = {k: v.default for k, v in inspect.signature(ours).parameters.items() if isinstance(v.default, float)}
    given = {**defaults, **hyper, "lr": lr}
    floats = {k: single(v) if isinstance(v, float) else v for k, v in given.items()}
    return oracle(p, grads, **floats)


@pytest.mark.parametrize(("name", "lr", "hyper"), CASES)
def test_float32_is_the_oracle(name, lr, hyper):
    ours, _ = OPTIMIZERS[name]
    p, grads = initial(), gradients()
    if name in ("lars", "sgd"):  # their steps are as long as gradients are: of one scale, none is a few spacings
        grads /= np.logspace(-3, 1, len(p), dtype=np.float32)[:, None]
    tx = ours(lr, **hyper) if (name, hyper) == ("sgd", {}) else ours(lr, **hyper, codec="float32")
    got, _ = run(tx, p, grads)
    assert_follows(got, exact(name, p, grads, lr, hyper))


@pytest.mark.parametrize("name", ["lamb", "lars"])
def test_a_parameter_of_zeros_starts(name):
    """The trust ratio is 1 while a norm is 0: of the parameter at first, of the gradient in the second step."""
    grads = gradients(3)
    grads[1] = 0
    p = np.zeros_like(grads[0])
    got, _ = run(OPTIMIZERS[name][0](1e-3, codec="float32"), p, grads)
    assert got[0].any()
    for ours, theirs in zip(got, exact(name, p, grads, 1e-3, {}), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=tolerances.FLOAT32_ELEMENT)


# Masks by leaf: of the weight decay, and of what else there is to mask.
MASK = {"embed": True, "layer": {"kernel": False, "bias": True}, "temperature": False}
OTHER = {"embed": True, "layer": True, "temperature": False}
MASKED = {
    "adan": dict(weight_decay=0.5, mask=MASK),
    "ademamix": dict(weight_decay=0.5, mask=lambda _: MASK),
    "lamb": dict(weight_decay=0.5, mask=OTHER),
    "lars": dict(weight_decay=0.5, weight_decay_mask=MASK, trust_ratio_mask=lambda _: OTHER),
}


@pytest.mark.parametrize("name", MASKED)
def test_masks_are_optaxs(name):
    """Beside leaves of other norms, which are none of the leaf's business."""
    ours, theirs = OPTIMIZERS[name][0], getattr(optax, name, None) or getattr(optax.contrib, name)
    kwargs = MASKED[name]
    ours, theirs = ours(1e-2, codec="float32", **kwargs), theirs(1e-2, **kwargs)
    p = q = tree(F32, scale=1.0, rows=2)
    s, t = ours.init(p), theirs.init(q)
    for i in range(3):
        grads = grads_like(p, i, scale=1.0)
        (p, s), (q, t) = ours.step(grads, s, p), door_1(theirs, jit=True)(grads, t, q)
    # Optax has 1 - b**t in float32: 3e-5 of a step, as test_schedules.py says.
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=2e-6, atol=3 * 1e-2 * 3e-5), p, q)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_nan_spreads_no_further_than_in_optax(name):
    """To its own parameter; where norms are taken, to the whole leaf. Moments stay finite."""
    p = {"w": initial((8, 512)), "other": initial((8, 512))}
    grads = jax.tree.map(np.copy, p)
    grads["w"][3, 77] = np.nan
    tx = OPTIMIZERS[name][0](1e-3)
    new, state = tx.step(grads, tx.init(p), p)
    lost = np.isnan(new["w"])
    assert lost.all() if name in ("lamb", "lars") else lost[3, 77] and lost.sum() == 1
    assert all(np.isfinite(x).all() for x in jax.tree.leaves((new["other"], state)))


BITSANDBYTES = {
    "sgd": sr8.sgd(1e-3, momentum=0.9, codec="dynamic"),
    "ademamix": sr8.ademamix(1e-3, weight_decay=0.1, codec="dynamic"),
    "rmsprop": sr8.rmsprop(1e-3, decay=0.99, eps_in_sqrt=False, codec="dynamic"),
    "adagrad": sr8.adagrad(1e-3, initial_accumulator_value=0.0, eps=1e-20, codec="dynamic"),
}


def recorded(name):
    """Parameters and gradients, and what bitsandbytes made of them."""
    p, grads, *_ = bitsandbytes("adamw", "float32")
    golden = np.load(Path(__file__).parent / "golden" / "bitsandbytes_family.npz")
    run = {k.removeprefix(name + "."): golden[k] for k in golden.files if k.startswith(name + ".")}
    return p, grads, golden["steps"] - 1, run


@pytest.mark.parametrize("name", ["sgd", "ademamix"])
def test_dynamic_follows_bitsandbytes(name):
    """Within the tolerances of its own tests; the codes too."""
    p, grads, steps, theirs = recorded(name)
    got, state = run(BITSANDBYTES[name], p, grads)
    error = np.abs(got[steps].astype(np.float64) - theirs["params"])
    mean, relative = tolerances.BITSANDBYTES["float32"]
    assert error.mean((1, 2)).max() < mean
    assert (error / (np.abs(theirs["params"]) + 1e-9)).mean((1, 2)).max() < relative
    for field, code, absmax in codes_of(name, theirs):
        np.testing.assert_allclose(getattr(state, field + "_scale")[:, 0], absmax, rtol=2e-5)
        off = np.abs(getattr(state, field).astype(int) - code)
        # A value within an ulp of a tie may round otherwise, and that element then goes a way of its own.
        assert (off > 0).mean() <= 1e-3, field
        assert (off > 1).sum() <= 1, field


def codes_of(name, theirs):
    """(our name of a moment, their codes, their absmax): they keep AdEMAMix' two means in one array."""
    if name == "sgd":
        return [("trace", theirs["state1"], theirs["absmax1"])]
    means = zip(("m1", "m2"), theirs["state1"], theirs["absmax1"], strict=True)
    return [*means, ("nu", theirs["state2"], theirs["absmax2"])]


@pytest.mark.parametrize("name", ["rmsprop", "adagrad"])
def test_dynamic_is_no_further_from_float64_than_bitsandbytes(name):
    """It keeps sums and averages of squares in its signed map, half of whose codes they never take."""
    p, grads, steps, theirs = recorded(name)
    got, _ = run(BITSANDBYTES[name], p, grads)
    hyper = {
        "rmsprop": dict(decay=0.99, eps_in_sqrt=False),
        "adagrad": dict(initial_accumulator_value=0.0, eps=1e-20),
    }[name]
    oracle = np.stack(list(exact(name, p, grads, 1e-3, hyper)))[steps]
    ours, its = (np.abs(ps.astype(np.float64) - oracle).mean((1, 2)) for ps in (got[steps], theirs["params"]))
    assert ours[0] < 1e-8  # the first step is exact in both
    assert its[0] < 1e-8
    assert (ours[1:] < its[1:]).all(), (ours, its)
    assert its[-1] < 0.03 * np.abs(oracle[-1] - p).mean(), its  # the recording is of this optimizer
