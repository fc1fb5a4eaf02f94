"""A scalar for the gradients, given or from their norm, goes into the step, and does what scaled gradients would."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tables import ADAMW, BF16, EVERY_RULE, F32, assert_same_bits, door_1, grads_like, tree

import optax_sr8bit as sr8


def scaled(grads, scale):
    return jax.tree.map(lambda g: g * np.float32(scale), grads)


@EVERY_RULE
@pytest.mark.parametrize("scale", [1.0, 0.3, -2.0, 0.0])
def test_grad_scale_is_a_product_in_float32(opt, scale):
    params, tx = tree(), opt()
    grads, state = grads_like(params, 0, dtype=F32), tx.init(params)
    want = tx.step(scaled(grads, scale), state, params)
    assert_same_bits(tx.step(grads, state, params, grad_scale=scale), want)
    assert_same_bits(door_1(tx)(scaled(grads, scale), state, params)[1], want[1])
    assert_same_bits(tx.update(grads, state, params, grad_scale=scale)[1], want[1])


def test_grad_scale_is_traced_and_may_change():
    params, tx, traces = tree(), ADAMW(), []

    @jax.jit
    def step(grads, state, params, scale):
        traces.append(1)
        return tx.step(grads, state, params, grad_scale=scale)

    grads, state = grads_like(params, 0), tx.init(params)
    new = [step(grads, state, params, jnp.float32(s))[1].mu_scale["embed"] for s in (1.0, 2.0)]
    np.testing.assert_allclose(2 * new[0], new[1], rtol=1e-6)
    assert len(traces) == 1


def test_a_grad_scale_that_is_not_finite_acts_as_such_gradients_do():
    params, tx = tree(), ADAMW()
    new, state = tx.step(grads_like(params, 0), tx.init(params), params, grad_scale=jnp.nan)
    assert all(np.isnan(np.asarray(x, np.float32)).all() for x in jax.tree.leaves(new))
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(state.mu_scale))


@pytest.mark.parametrize("bad", [jnp.ones(2), 1j, "1", True, None], ids=str)
def test_grad_scale_must_be_a_real_scalar(bad):
    params, tx = tree(), ADAMW()
    call = lambda: tx.step(grads_like(params, 0), tx.init(params), params, grad_scale=bad)  # noqa: E731
    if bad is None:
        call()  # the default
    else:
        with pytest.raises(ValueError, match="grad_scale"):
            call()


@pytest.mark.parametrize("max_norm", [1e-3, 1e3])
def test_clipping_in_a_chain_is_optax_clipping(max_norm):
    params = tree(F32)
    grads = grads_like(params, 0)
    ours = sr8.chain(sr8.clip_by_global_norm(max_norm), ADAMW(codec="float32", eps=1e-3))
    theirs = optax.chain(optax.clip_by_global_norm(max_norm), ADAMW.reference(eps=1e-3))
    new, state = ours.step(grads, ours.init(params), params)
    want, _ = door_1(theirs, jit=True)(grads, theirs.init(params), params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=3e-6, atol=1e-7), new, want)
    assert state[0] == optax.EmptyState()
    assert_same_bits(ours.update(grads, ours.init(params), params)[1], state)


def test_a_clip_within_a_chain_sees_what_stands_before_it():
    params = tree(F32)
    grads = grads_like(params, 0, 1.0)
    links = (optax.scale(3.0), sr8.clip_by_global_norm(1.0), optax.scale(0.5))
    fused = sr8.chain(*links, sr8.clip_by_global_norm(0.1), sr8.sgd(1.0))
    plain = optax.chain(*links, optax.clip_by_global_norm(0.1), optax.sgd(1.0))
    new, _ = fused.step(grads, fused.init(params), params, grad_scale=2.0)
    want, _ = door_1(plain)(scaled(grads, 2.0), plain.init(params), params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), new, want)


def test_two_clips_before_an_optimizer():
    params = tree(F32)
    grads = grads_like(params, 0, 1.0)
    tx = sr8.chain(sr8.clip_by_global_norm(1.0), sr8.clip_by_global_norm(0.1), sr8.sgd(1.0))
    new, _ = tx.step(grads, tx.init(params), params, grad_scale=-1.0)
    moved = sr8.global_norm(jax.tree.map(jnp.subtract, new, params))
    np.testing.assert_allclose(moved, 0.1, rtol=1e-5)


def test_the_norm_is_in_float32():
    """In bfloat16 a sum of equal squares stands still once it is 256 of them."""
    grads = {str(i): jnp.full((64,), 1.0, BF16) for i in range(64)}
    assert float(sr8.global_norm(grads)) == 64.0
    assert float(sr8.global_norm({})) == 0.0
    zeros = jax.tree.map(jnp.zeros_like, grads)
    clip = sr8.clip_by_global_norm(1.0)
    assert_same_bits(clip.update(zeros, clip.init(zeros))[0], zeros)


def test_a_link_of_optax_chain_refuses_grad_scale():
    """It would see gradients that are scaled only later."""
    params = tree(F32)
    for link in (sr8.clip_by_global_norm(1.0), sr8.quantize_moments(optax.trace(0.9))):
        tx = optax.chain(link, sr8.sgd(1.0))
        with pytest.raises(ValueError, match=r"sr8\.chain"):
            tx.update(grads_like(params, 0), tx.init(params), params, grad_scale=0.5)


@pytest.mark.parametrize("max_norm", [0.0, -1.0, float("nan"), jnp.ones(2)], ids=str)
def test_max_norm_must_be_positive(max_norm):
    with pytest.raises(ValueError, match="max_norm"):
        sr8.clip_by_global_norm(max_norm)
