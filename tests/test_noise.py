"""No two leaves, steps, seeds, rows or members share their noise, and the noise is unbiased where it is used."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
from tables import ADAMW, BF16, EVERY_RULE, LION


def coin(opt, name="w", seed=0, steps=1, shape=(64, 512), **kwargs):
    """A fair coin per element: BF16 weights of 1.5 that are to move by half their spacing up or stay, at random."""
    tx = opt.factory(2.0**-8, weight_decay=0.0, seed=seed, min_8bit_size=1, **kwargs)
    params = {name: jnp.full(shape, 1.5, BF16)}
    grads, state = {name: jnp.full(shape, -1.0, BF16)}, tx.init(params)
    for _ in range(steps):
        new, state = tx.step(grads, state, params)
    return np.asarray(new[name]) != 1.5, state


def assert_independent(a, b):
    """Two fair coins agree in half of the throws, within five standard errors."""
    assert abs(np.mean(a == b) - 0.5) < 2.5 / np.sqrt(a.size)


@EVERY_RULE
def test_leaves_steps_seeds_and_rows_have_their_own_noise(opt):
    throws = {
        "": coin(opt)[0],
        "another leaf": coin(opt, name="v")[0],
        "another step": coin(opt, steps=2)[0],
        "the step after": coin(opt, steps=3)[0],
        **{f"seed {s}": coin(opt, seed=s)[0] for s in (1, 2**32, 2**64, 2**70, -1)},
        "key": coin(opt, seed=jax.random.key(7))[0],
    }
    for a, b in itertools.combinations(throws.values(), 2):
        assert_independent(a, b)
    first = throws[""]
    assert abs(first.mean() - 0.5) < 2.5 / np.sqrt(first.size)
    agreement = (2.0 * first - 1) @ (2.0 * first - 1).T / first.shape[1]  # of every two rows
    assert np.abs(agreement - np.eye(len(first))).max() < 6 / np.sqrt(first.shape[1])
    for shift in range(1, 17):  # neighbouring columns, also those that share one call of the generator
        assert_independent(first[:, shift:], first[:, :-shift])
    for field in (f for f in opt.moments):  # the moments' dither is not the parameter's noise
        code = np.asarray(getattr(coin(opt, codec="offset_wide")[1], field)["w"], np.float64)
        if code.std() > 0:
            assert abs(np.corrcoef(code.ravel(), first.ravel())[0, 1]) < 5 / np.sqrt(first.size)


def test_a_stack_of_layers_has_its_own_noise_per_layer():
    layers, _ = coin(LION, shape=(4, 16, 512))
    for a, b in itertools.combinations(layers, 2):
        assert_independent(a, b)


def test_every_form_of_a_seed():
    for same in ((5, np.int64(5), jnp.uint32(5)), (jax.random.key(5), jax.random.PRNGKey(5))):
        first = coin(LION, seed=same[0], shape=(8, 512))[0]
        for seed in same[1:]:
            np.testing.assert_array_equal(coin(LION, seed=seed, shape=(8, 512))[0], first)


def test_weight_decay_survives_bfloat16():
    """lr * wd far below half a spacing: nearest rounding never moves, stochastic rounding decays on average."""
    shape, steps = (64, 512), 50
    for rounding, expected in (("stochastic", 1.5 * (1 - 1e-4) ** steps), ("nearest", 1.5)):
        tx = ADAMW.factory(1e-2, weight_decay=1e-2, rounding=rounding)
        params, grads = {"w": jnp.full(shape, 1.5, BF16)}, {"w": jnp.zeros(shape, BF16)}
        body = lambda c, _: (tx.step(grads, c[1], c[0]), None)  # noqa: B023, E731
        (new, _), _ = jax.jit(lambda c: jax.lax.scan(body, c, length=steps))((params, tx.init(params)))  # noqa: B023
        w = np.asarray(new["w"], np.float64)
        # A walk of `steps` roundings, each of a variance below f times the squared spacing, f = 1.5e-4 / 2^-7.
        error = 2.0**-7 * np.sqrt(steps * 1.5e-4 * 2**7 / w.size)
        assert abs(w.mean() - expected) < (5 * error if rounding == "stochastic" else 1e-12)
