"""Schedules and decay masks mean what they mean in Optax; float32 moments and parameters tell."""

import functools

import jax
import numpy as np
import optax
import pytest
from tables import EVERY_OPTIMIZER, F32, RULES, door_1, grads_like, named, small, tree


def matrices(params):
    return jax.tree.map(lambda p: p.ndim > 1, params)


SCHEDULES = {
    "rate": lambda opt: dict(learning_rate=optax.exponential_decay(1e-2, 1, 0.7)),
    "decay": lambda opt: dict(
        learning_rate=1e-2, **({"weight_decay": optax.exponential_decay(0.5, 1, 0.7)} if opt.decays else {})
    ),
    "both, masked": lambda opt: dict(
        learning_rate=optax.warmup_cosine_decay_schedule(0.0, 1e-2, 2, 6),
        **({"weight_decay": lambda count: 0.3 / (1 + count), opt.masked: matrices} if opt.decays else {}),
    ),
}


@EVERY_OPTIMIZER
@pytest.mark.parametrize("name", list(SCHEDULES))
def test_schedules_are_read_at_optax_counts(opt, name):
    kwargs = SCHEDULES[name](opt)
    params = small(F32)
    ours, theirs = opt(**kwargs, codec="float32"), opt.reference(**kwargs)
    (p, s), (q, t) = (params, ours.init(params)), (params, theirs.init(params))
    for i in range(5):
        grads = grads_like(params, i, scale=1.0)
        p, s = ours.step(grads, s, p)
        q, t = door_1(theirs, jit=True)(grads, t, q)
    assert int(s.count) == 5
    for a, b in zip(jax.tree.leaves(p), jax.tree.leaves(q), strict=True):
        # Optax computes 1 - b2**t in float32, where 0.999 costs it up to 2^-24 / 1e-3 of the square, so 3e-5 of a step;
        # a schedule read one step early or late would differ by a tenth of a step or more.
        np.testing.assert_allclose(a, b, rtol=2e-6, atol=5 * 1e-2 * 3e-5)


@pytest.mark.parametrize("opt", **named([row for row in RULES if row.decays]))
def test_mask_is_optax_mask(opt):
    params = tree(F32, scale=1.0, rows=2)
    as_tree = {"embed": True, "layer": {"kernel": False, "bias": True}, "temperature": False}
    for mask in (as_tree, lambda _: as_tree, {"embed": True, "layer": False, "temperature": True}):
        kwargs = dict(weight_decay=0.5, mask=mask, b1=0.8, b2=0.9)
        ours, theirs = opt.factory(1e-2, codec="float32", **kwargs), opt.optax(1e-2, **kwargs)
        new, _ = ours.step(grads_like(params, 0), ours.init(params), params)
        desired, _ = door_1(theirs, jit=True)(grads_like(params, 0), theirs.init(params), params)
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=2e-6, atol=1e-7), new, desired)
