"""Optax's wrappers around our optimizers: each must compose, and give the bits of the bare optimizer where it can."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tables import (
    ADAMW,
    BF16,
    EVERY_KIND,
    EVERY_OPTIMIZER,
    EVERY_RULE,
    F32,
    RULES,
    as_bits,
    assert_same_bits,
    avals,
    door_1,
    grads_like,
    small,
)

import optax_sr8bit as sr8


def with_nan(grads):
    return {"layer": {**grads["layer"], "kernel": grads["layer"]["kernel"].at[0, 3].set(jnp.nan)}}


@EVERY_KIND
def test_multi_steps(opt):
    params, inner = {"bf16": small()["layer"]["kernel"], "f32": small(F32)["layer"]["bias"]}, opt()
    grads = grads_like(params, 0)
    tx = optax.MultiSteps(inner, every_k_schedule=2)
    update = jax.jit(tx.update)
    zeros, state = update(grads, tx.init(params), params)
    assert avals(zeros) == avals(grads)
    assert not any(np.asarray(z).any() for z in jax.tree.leaves(zeros))
    assert_same_bits(state.inner_opt_state, inner.init(params))
    updates, state = update(grads, state, params)  # twice the same gradients: their mean is exact
    assert_same_bits(
        (optax.apply_updates(params, updates), state.inner_opt_state),
        door_1(inner)(grads, inner.init(params), params),
    )


@EVERY_KIND
def test_apply_if_finite(opt):
    params, inner = small(), opt()
    tx = optax.apply_if_finite(inner, max_consecutive_errors=3)
    grads, state = grads_like(params, 0), tx.init(params)
    guarded = door_1(tx, jit=True)
    kept, state = guarded(with_nan(grads), state, params)
    assert_same_bits((kept, state.inner_state), (params, inner.init(params)))
    moved, state = guarded(grads, state, params)
    assert_same_bits((moved, state.inner_state), door_1(inner)(grads, inner.init(params), params))


@EVERY_RULE
def test_leaves_behind_a_mask_step_as_they_do_alone(opt):
    """`masked`, `partition`, `freeze` and `selective_transform` hide leaves and do not move the others' noise."""
    params, inner = small(), opt()
    train = {"layer": {"kernel": True, "bias": False}}
    freeze = jax.tree.map(lambda t: not t, train)
    labels = jax.tree.map(lambda t: "train" if t else "freeze", train)
    wrapped = {
        "masked": optax.chain(optax.masked(inner, train), optax.masked(optax.set_to_zero(), freeze)),
        "partition": optax.partition({"train": inner, "freeze": optax.set_to_zero()}, labels),
        "freeze": optax.chain(inner, optax.transforms.freeze(freeze)),
        "selective": optax.transforms.selective_transform(inner, freeze_mask=freeze),
    }
    grads = grads_like(params, 0)
    alone, _ = door_1(inner)(grads, inner.init(params), params)
    desired = jax.tree.map(lambda t, new, old: new if t else old, train, alone, params)
    for name, tx in wrapped.items():
        state = tx.init(params)
        new, new_state = door_1(tx)(grads, state, params)
        assert avals(new_state) == avals(state), name
        assert_same_bits(new, desired)


@EVERY_OPTIMIZER
def test_chain_keeps_step(opt):
    params, inner = small(), opt(delta_dtype=F32)
    grads = grads_like(params, 0, scale=10.0)
    plain = optax.chain(optax.clip_by_global_norm(1.0), inner)
    ours = sr8.chain(optax.clip_by_global_norm(1.0), inner)
    assert isinstance(ours, optax.GradientTransformationExtraArgs)
    state = ours.init(params)
    assert_same_bits(state, plain.init(params))
    desired = door_1(plain)(grads, plain.init(params), params)
    assert_same_bits(door_1(ours)(grads, state, params), desired)
    assert_same_bits(ours.step(grads, state, params), desired)
    twice = sr8.chain(optax.identity(), ours)  # chains nest
    assert_same_bits(twice.step(grads, twice.init(params), params)[0], desired[0])


def test_chain_passes_extra_arguments_and_wants_rounding_last():
    seen = []

    def update(updates, state, params=None, **extra):
        seen.append(extra["value"])
        return updates, state

    spy = optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)
    params, tx = small(), sr8.chain(spy, sr8.adamw(1e-3))
    jax.eval_shape(lambda g, s, p: tx.step(g, s, p, value=3), params, tx.init(params), params)
    assert seen == [3]
    with pytest.raises(ValueError, match="last"):
        sr8.chain(sr8.adamw(1e-3), optax.scale(0.5))


@EVERY_OPTIMIZER
def test_inject_hyperparams(opt):
    """A value changed while training acts as the same value given to a new optimizer."""
    params = small()
    grads = grads_like(params, 0)
    tx = sr8.inject_hyperparams(opt.factory)(learning_rate=1e-3, **opt.kwargs)
    state = tx.init(params)
    assert {k: v.dtype for k, v in state.hyperparams.items()}.get("learning_rate") == F32
    step = jax.jit(tx.step)
    fixed = opt(1e-3)
    new, new_state = step(grads, state, params)
    assert_same_bits((new, new_state.inner_state), fixed.step(grads, fixed.init(params), params))
    new_state.hyperparams["learning_rate"] = jnp.float32(5e-3)
    again, again_state = step(grads, new_state, new)
    assert_same_bits((again, again_state.inner_state), opt(5e-3).step(grads, new_state.inner_state, new))
    assert step._cache_size() == 1
    assert_same_bits(door_1(tx)(grads, state, params)[0], door_1(fixed)(grads, fixed.init(params), params)[0])


def test_inject_hyperparams_takes_schedules_masks_and_codecs():
    params = small()
    rate = optax.linear_schedule(1e-2, 1e-3, 5)
    mask = functools.partial(jax.tree.map, lambda p: p.ndim > 1)
    options = dict(weight_decay=0.1, mask=mask, codec="offset_wide", rounding="nearest", block_size=128, seed=5)
    tx, fixed = sr8.inject_hyperparams(sr8.adamw)(rate, **options), sr8.adamw(rate, **options)
    (p, s), (q, t) = (params, tx.init(params)), (params, fixed.init(params))
    for i in range(3):
        p, s = tx.step(grads_like(params, i), s, p)
        q, t = fixed.step(grads_like(params, i), t, q)
        np.testing.assert_allclose(s.hyperparams["learning_rate"], rate(i), rtol=1e-6)
    assert_same_bits((p, s.inner_state), (q, t))


@EVERY_RULE
@pytest.mark.parametrize("dtype", [BF16, F32], ids=["bf16", "f32"])
def test_plain_inject_hyperparams_names_ours(opt, dtype):
    """On BF16 parameters it rounds b1 and b2; on any it turns the block size into an array."""
    params = small(dtype)
    tx = optax.inject_hyperparams(opt.factory)(learning_rate=1e-3)
    with pytest.raises(ValueError, match=re.escape("sr8.inject_hyperparams")):
        tx.update(params, tx.init(params), params)
    structural = ("block_size", "min_8bit_size", "seed")
    tx = optax.inject_hyperparams(opt.factory, static_args=structural)(learning_rate=1e-3)
    if dtype == BF16:
        with pytest.raises(ValueError, match=re.escape("sr8.inject_hyperparams")):
            tx.init(params)
    full = optax.inject_hyperparams(opt.factory, static_args=structural, hyperparam_dtype=F32)(learning_rate=1e-3)
    fixed = opt.factory(1e-3)
    assert_same_bits(
        door_1(full)(params, full.init(params), params)[0], door_1(fixed)(params, fixed.init(params), params)[0]
    )


@EVERY_RULE
def test_lookahead(opt):
    params = optax.LookaheadParams.init_synced(small())
    inner = opt()
    tx = optax.lookahead(inner, sync_period=2, slow_step_size=0.5)
    state, fast, inner_state = tx.init(params), params.fast, inner.init(params.fast)
    for i in range(2):
        grads = grads_like(params.fast, i)
        if i == 1:
            assert_same_bits(params.fast, fast)  # before the first synchronisation: the bare optimizer
        params, state = door_1(tx)(grads, state, params)
        fast, inner_state = door_1(inner)(grads, inner_state, fast)
    assert avals(params.fast) == avals(fast)
    assert_same_bits(state.fast_state, inner_state)
    assert all(np.isfinite(np.asarray(x, np.float32)).all() for x in jax.tree.leaves(params))


@EVERY_RULE
def test_vmap_over_an_ensemble(opt):
    members, params = 3, small()
    tx = opt()
    grads = grads_like(params, 0)
    stack = lambda t: jax.tree.map(lambda x: jnp.stack([x] * members), t)  # noqa: E731
    ensemble, state = stack(params), jax.vmap(tx.init)(stack(params))
    seeds = jnp.stack([opt(seed=i).init(params).seed for i in range(members)])
    same, _ = jax.jit(jax.vmap(tx.step))(stack(grads), state, ensemble)
    own, own_state = jax.jit(jax.vmap(tx.step))(stack(grads), state._replace(seed=seeds), ensemble)
    for i in range(members):
        take = functools.partial(jax.tree.map, lambda x, i=i: x[i])
        assert_same_bits(take(same), tx.step(grads, tx.init(params), params)[0])
        alone = opt(seed=i)
        assert_same_bits((take(own), take(own_state)), alone.step(grads, alone.init(params), params))
    assert np.mean(as_bits(own["layer"]["kernel"][0]) != as_bits(own["layer"]["kernel"][1])) > 0.01


@EVERY_KIND
def test_donation_of_parameters_and_fresh_state(opt):
    """No two leaves of a fresh state share a buffer: donating them would donate it twice."""
    params = {"a": jnp.ones((8, 512), BF16), "b": jnp.ones((8, 512), BF16)}
    tx = opt()
    state = tx.init(params)
    desired = jax.tree.map(np.array, tx.step(params, state, params))
    pointers = [x.unsafe_buffer_pointer() for x in jax.tree.leaves((params, state)) if x.size]
    assert len(set(pointers)) == len(pointers)
    grads = jax.tree.map(lambda p: p + 0, params)
    step = jax.jit(tx.step, donate_argnums=(1, 2))
    assert_same_bits(step(grads, state, params), desired)
    assert all(x.is_deleted() for x in jax.tree.leaves((params, state)) if x.size > 1000)


def test_none_leaves_and_empty_subtrees_as_equinox_leaves_them():
    params = {**small(), "static": None, "empty": {}, "list": []}
    grads = {**grads_like(small(), 0), "static": None, "empty": {}, "list": []}
    for opt in RULES:
        tx = opt()
        state = tx.init(params)
        for advance in (tx.step, door_1(tx)):
            new, new_state = advance(grads, state, params)
            assert jax.tree.structure(new) == jax.tree.structure(params)
            assert avals(new_state) == avals(state)
        for nothing in ({}, [], ()):
            assert ADAMW().step(nothing, ADAMW().init(nothing), nothing)[0] == nothing
