"""Gradients no one wants: NaN, Inf, huge, tiny, constant and zero ones, in a block with others."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tables import (
    ADAMW,
    BF16,
    EVERY_CODEC,
    EVERY_RULE,
    F32,
    LION,
    OPTIMIZERS,
    RULES,
    assert_same_bits,
    decode_offset,
    door_1,
    named,
    normal,
    run,
)

SHAPE, AT = (8, 512), (3, 77)
BAD = {"nan": jnp.nan, "inf": jnp.inf, "-inf": -jnp.inf}


def example(dtype=BF16, warm=None):
    """Parameters and gradients of one leaf; with `warm`, after two steps of that optimizer."""
    params, grads = {"w": normal(SHAPE, 0, 0.02, dtype)}, {"w": normal(SHAPE, 1, 1e-3, BF16)}
    state = warm.init(params) if warm else None
    return (*run(warm.step, params, state, 2), grads) if warm else (params, grads)


def put(grads, value):
    return {"w": grads["w"].at[AT].set(value)}


def without(x):
    """All but the element under test."""
    return np.delete(np.asarray(x).ravel(), np.ravel_multi_index(AT, SHAPE))


def decoded(opt, codec, state):
    """The element's stored moments, by the codec's own decode (0.0 is a special code in each)."""
    from optax_sr8bit import codecs

    values = []
    for moment in opt.moments:
        code, scale = getattr(state, moment)["w"], getattr(state, f"{moment}_scale")["w"]
        c = codecs.get(codec).code(moment == "mu")
        block = AT[1] // 256
        byte = code[AT].astype(jnp.uint32)
        x = code[AT] if code.dtype == F32 else c.decode(byte, scale[AT[0], block])
        values.append((float(x), int(code[AT])))
    return values


@EVERY_RULE
@EVERY_CODEC
@pytest.mark.parametrize("name", list(BAD))
def test_one_bad_element(opt, codec, name):
    tx = opt(codec=codec)
    params, state, grads = example(warm=tx)
    new, new_state = tx.step(put(grads, BAD[name]), state, params)
    absent, absent_state = tx.step(put(grads, 0.0), state, params)

    p, old = float(new["w"][AT]), float(params["w"][AT])
    if opt is LION and name != "nan":
        assert abs(p - old) <= 1.01 * opt.learning_rate + 2.0**-8 * abs(old)
        assert (p < old) == (name == "inf")
    else:
        assert not np.isfinite(p)
    # The others step exactly as if it were absent (it was not the largest of its block).
    np.testing.assert_array_equal(without(new["w"]), without(absent["w"]))
    for moment in opt.moments:
        scale, want = (getattr(s, f"{moment}_scale")["w"] for s in (new_state, absent_state))
        assert_same_bits(scale, want)
        codes, want = (getattr(s, moment)["w"] for s in (new_state, absent_state))
        np.testing.assert_array_equal(without(codes), without(want))
    for moment, (value, code) in zip(opt.moments, decoded(opt, codec, new_state), strict=True):
        if (codec, moment) == ("offset_wide", "nu"):  # which has no zero
            assert code == 0
        else:
            assert value == 0.0


@EVERY_RULE
@EVERY_CODEC
def test_from_a_fresh_state_a_bad_element_is_a_zero_one(opt, codec):
    params, grads = example()
    tx = opt(codec=codec)
    _, desired = tx.step(put(grads, 0.0), tx.init(params), params)
    for value in BAD.values():
        _, state = tx.step(put(grads, value), tx.init(params), params)
        if codec == "offset_wide" and "nu" in opt.moments:
            state = state._replace(nu={"w": state.nu["w"].at[AT].set(desired.nu["w"][AT])})
        assert_same_bits(state, desired)


@EVERY_RULE
def test_bad_element_in_float32_moments(opt):
    tx = opt(min_8bit_size=10**9)
    params, state, grads = example(warm=tx)
    new, new_state = tx.step(put(grads, jnp.nan), state, params)
    absent, _ = tx.step(put(grads, 0.0), state, params)
    assert np.isnan(float(new["w"][AT]))
    np.testing.assert_array_equal(without(new["w"]), without(absent["w"]))
    assert all(float(getattr(new_state, m)["w"][AT]) == 0.0 for m in opt.moments)


@EVERY_RULE
@EVERY_CODEC
def test_whole_block_and_whole_leaf_bad(opt, codec):
    params, tx = example()[0], opt(codec=codec)
    grads = {"w": example()[1]["w"].at[2, :256].set(jnp.nan).at[5].set(jnp.inf)}
    new, state = tx.step(grads, tx.init(params), params)
    healthy = np.ones(SHAPE, bool)
    healthy[2, :256] = healthy[5] = False
    assert np.isfinite(np.asarray(new["w"], np.float32)[healthy]).all()
    assert all(np.isfinite(np.asarray(x, np.float32)).all() for x in jax.tree.leaves(state))
    again, _ = tx.step(example()[1], state, params)  # once the gradients are well, so is everything
    assert np.isfinite(np.asarray(again["w"], np.float32)).all()


@EVERY_CODEC
def test_huge_finite_gradient_leaves_all_finite(codec):
    """|g| = 1e25: its square overflows, its update is 0 / Inf, and its moments are dropped."""
    for opt in RULES:
        tx = opt(codec=codec)
        params, state, grads = example(warm=tx)
        new, new_state = tx.step(put(grads, 1e25), state, params)
        assert np.isfinite(np.asarray(new["w"], np.float32)).all()
        assert all(np.isfinite(np.asarray(x, np.float32)).all() for x in jax.tree.leaves(new_state))
        if opt is ADAMW:
            absent, _ = tx.step(put(grads, 0.0), state, params)
            np.testing.assert_array_equal(without(new["w"]), without(absent["w"]))
            assert abs(float(new["w"][AT]) - float(params["w"][AT])) <= 2.0**-8 * abs(float(params["w"][AT]))
            assert decoded(opt, codec, new_state)[0][0] == 0.0


@pytest.mark.parametrize("opt", **named(OPTIMIZERS))
@pytest.mark.parametrize("exponent", [-15, -12, -8, -4, 0, 8, 18])
def test_gradient_scales(opt, exponent):
    """Float32 parameters, the default eps: the same path as Optax in float32 moments, from 1e-15 to 1e18."""
    params = {"w": normal(SHAPE, 0, 0.02)}
    ours, theirs = opt(1e-3), opt.reference(1e-3)
    (p, s), (q, t) = (params, ours.init(params)), (params, theirs.init(params))
    for i in range(5):
        grads = {"w": normal(SHAPE, 10 + i) * np.float32(10.0**exponent)}
        p, s = ours.step(grads, s, p)
        q, t = door_1(theirs)(grads, t, q)
        assert all(np.isfinite(np.asarray(x, np.float32)).all() for x in jax.tree.leaves((p, s)))
    moved, desired = (np.asarray(x["w"] - params["w"], np.float64) for x in (p, q))
    share = 0.1 if opt is not LION else 0.25  # a sign that differs costs Lion twice a step
    resolution = 5 * 2**-24 * np.linalg.norm(params["w"])
    assert np.linalg.norm(moved - desired) < share * np.linalg.norm(desired) + resolution


@EVERY_RULE
def test_codes_follow_the_gradients_scale(opt):
    """Powers of two: parameters and codes do not know them, scales carry them, as far as float32 goes."""
    params, grads = example()
    tx = opt(1e-3, **({"eps": 0.0} if opt is ADAMW else {}))
    desired, state = tx.step(grads, tx.init(params), params)
    for exponent in (-30, 20, 60):
        scaled = {"w": grads["w"] * jnp.bfloat16(2.0**exponent)}
        new, new_state = tx.step(scaled, tx.init(params), params)
        assert_same_bits((new, [getattr(new_state, m) for m in opt.moments]), (desired, [getattr(state, m) for m in opt.moments]))  # fmt: skip # noqa: E501


@EVERY_RULE
@EVERY_CODEC
def test_constant_block_zero_gradients_and_both_extremes(opt, codec):
    params = {"w": jnp.full(SHAPE, 0.5, BF16)}
    tx = opt.factory(2.0**-6, weight_decay=0.0, codec=codec)
    zero = {"w": jnp.zeros(SHAPE, BF16)}
    new, state = run(lambda g, s, p: tx.step(zero, s, p), params, tx.init(params), 3)
    assert_same_bits(new, params)  # an exact zero never moves
    assert all(np.isfinite(np.asarray(x, np.float32)).all() for x in jax.tree.leaves(state))

    constant = {"w": jnp.full(SHAPE, 3e-4, BF16)}
    new, _ = tx.step(constant, tx.init(params), params)
    assert (np.abs(np.asarray(new["w"], np.float32) - (0.5 - 2.0**-6)) <= 2.0**-9).all()

    mixed = {"w": zero["w"].at[:, 0].set(1e-3).at[:, 1].set(-1e-3)}
    moved, state = tx.step(mixed, tx.init(params), params)
    w = np.asarray(moved["w"], np.float32)
    assert (w[:, 0] < 0.5).all()
    assert (w[:, 1] > 0.5).all()
    assert (w[:, 2:] == 0.5).all()
    if codec == "offset":
        m = decode_offset(state.mu["w"], state.mu_scale["w"], signed=True)
        first = float(jnp.float32(jnp.bfloat16(1e-3))) * (0.1 if opt is ADAMW else 0.01)
        np.testing.assert_allclose(m[:, 0], first, rtol=1 / 16)
        np.testing.assert_allclose(m[:, 1], -first, rtol=1 / 16)
        assert (m[:, 2:] == 0).all()


@EVERY_CODEC
def test_moments_too_small_for_float32_never_give_nan(codec):
    """Gradients of tokens that were never seen: squares near 1e-43, far below the smallest normal number."""
    params = {"w": normal(SHAPE, 0, 0.02, BF16)}
    for opt in RULES:
        tx = opt(codec=codec)
        for scale in (1e-19, 1e-22, 1e-30, 1e-38, 1e-41):
            grads = {"w": normal(SHAPE, 3) * np.float32(scale)}
            p, state = params, tx.init(params)
            for _ in range(3):
                p, state = tx.step(grads, state, p)
            assert all(np.isfinite(np.asarray(x, np.float32)).all() for x in jax.tree.leaves((p, state)))
            assert np.abs(np.asarray(p["w"], np.float32) - np.asarray(params["w"], np.float32)).max() < 0.1


def test_guards_see_a_bad_gradient():
    """Door 1 hands the NaN on, as Optax does: `optax.apply_if_finite` and monitors rely on it."""
    params, grads = example()
    for opt in RULES:
        tx = opt()
        updates, _ = jax.jit(tx.update)(put(grads, jnp.nan), tx.init(params), params)
        assert np.isnan(float(updates["w"][AT]))
        assert np.isfinite(without(updates["w"].astype(F32))).all()
        assert not bool(jnp.isfinite(optax.tree.norm(updates)))
