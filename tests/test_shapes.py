"""Every shape steps, and what a leaf gets is decided by the options that name it, before and after `init` alike."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tables import (
    ADAMW,
    BF16,
    EVERY_RULE,
    F32,
    RULES,
    SHAPES,
    assert_same_bits,
    avals,
    grads_like,
    is_8bit,
    normal,
    run,
    small,
)

import optax_sr8bit as sr8


def test_every_shape_simply_works():
    opt = ADAMW
    params = {name: normal(shape, 1, 0.02, BF16) for name, shape in SHAPES.items()}
    params |= {"none": None, "dict": {}, "list": [], "tuple": ()}
    grads, tx = grads_like(params, 0), opt()
    grads = jax.tree.unflatten(jax.tree.structure(params), jax.tree.leaves(grads))
    state = tx.init(params)
    new, new_state = tx.step(grads, state, params)
    assert avals((new, new_state)) == avals((params, state))
    for name, shape in SHAPES.items():
        assert np.isfinite(np.asarray(new[name], np.float32)).all(), name
        if 0 not in shape and shape:
            assert np.mean(np.asarray(new[name]) != np.asarray(params[name])) > 0.3, name
    sr8.explain(tx, params)
    sr8.check(new_state, tx, params)


@pytest.mark.parametrize("name", [n for n, s in SHAPES.items() if 0 in s or not s])
def test_small_leaf_alone(name):
    for opt in RULES:
        params, tx = jnp.ones(SHAPES[name], BF16), opt()
        new, state = tx.step(params, tx.init(params), params)
        assert avals((new, state)) == avals((params, tx.init(params)))
        updates, _ = tx.update(params, state, params)
        assert avals(updates) == avals(params)


@EVERY_RULE
@pytest.mark.parametrize("limit", [0, 1, 4095, 4096, 4097, 10**9])
def test_size_limit_decides(opt, limit):
    params = {name: jax.ShapeDtypeStruct(shape, BF16) for name, shape in SHAPES.items() if 0 not in shape}
    mu = jax.eval_shape(opt(min_8bit_size=limit).init, params).mu
    for name, leaf in params.items():
        assert mu[name].dtype == (jnp.uint8 if is_8bit(leaf.shape, limit) else F32), name


def choose(path, leaf):
    return "offset_wide" if path == "embed" and leaf.ndim == 2 else "offset"


PER_LEAF = {
    "mapping": {"embed": "offset_wide"},
    "pattern": {"emb*": sr8.codecs.OffsetWide(), "*": "offset"},
    "first match": {"embed": "offset_wide", "embe*": "float32"},
    "function": choose,
}


@EVERY_RULE
def test_codec_per_leaf(opt):
    """A leaf steps as it does where all leaves have its codec, at init, at update and in later steps."""
    params = {"embed": small()["layer"]["kernel"], "layer": {"kernel": small()["layer"]["kernel"]}}
    wide, plain = opt(codec="offset_wide"), opt()
    all_wide, all_plain = (run(tx.step, params, tx.init(params), 2) for tx in (wide, plain))
    for codec in PER_LEAF.values():
        tx = opt(codec=codec)
        new, state = run(tx.step, params, tx.init(params), 2)
        for part, desired in (("embed", all_wide), ("layer", all_plain)):
            assert_same_bits((new[part], state.mu[part]), (desired[0][part], desired[1].mu[part]))
        with pytest.raises(ValueError, match="embed"):
            plain.step(params, state, params)
    with pytest.raises(ValueError, match=r"no_such"):
        opt(codec={"no_such*": "float32"}).init(params)
    with pytest.raises(ValueError, match=r"codec.*offset"):
        opt(codec={"embed": "offest"})


@EVERY_RULE
def test_rounding_per_leaf(opt):
    params = {"embed": small()["layer"]["kernel"], "layer": {"kernel": small()["layer"]["kernel"]}}
    nearest, stochastic = opt(rounding="nearest"), opt()
    tx = opt(rounding={"embed": "nearest"})
    grads = grads_like(params, 0)
    new, by_nearest, by_stochastic = (t.step(grads, t.init(params), params)[0] for t in (tx, nearest, stochastic))
    assert_same_bits(new, {"embed": by_nearest["embed"], "layer": by_stochastic["layer"]})
    assert np.any(np.asarray(by_nearest["layer"]["kernel"]) != np.asarray(by_stochastic["layer"]["kernel"]))
