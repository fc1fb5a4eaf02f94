"""Three doors, one result: `update` + `apply_updates`, `step`, and `in_place=True` in loops that apply themselves."""

import operator
import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn, nnx
from flax.training.train_state import TrainState
from tables import (
    ADAMW,
    BF16,
    EVERY_OPTIMIZER,
    EVERY_RULE,
    F16,
    F32,
    RULES,
    as_bits,
    assert_same_bits,
    door_1,
    grads_like,
    nnx_leaves,
    normal,
    run,
    small,
)

ORDER = np.int64(1) << 15


def ordered(x):
    """BF16 patterns as integers in the order of the numbers: neighbours differ by one."""
    bits = as_bits(x).astype(np.int64)
    return np.where(bits >= ORDER, ORDER - bits, bits)


def spacing(x):
    """Distance of neighbouring BF16 numbers at x."""
    return np.exp2(np.floor(np.log2(np.maximum(np.abs(x), 1e-30))) - 7)


@EVERY_OPTIMIZER
def test_float32_delta_equals_step(opt):
    params = small()
    cases = [("stochastic", BF16), ("stochastic", F32), ("nearest", BF16)] if opt in RULES else [("stochastic", BF16)]
    for rounding, grad_dtype in cases:
        tx = opt(1e-3, rounding=rounding, delta_dtype=F32)
        desired = run(tx.step, params, tx.init(params), 3, dtype=grad_dtype)
        assert_same_bits(run(door_1(tx), params, tx.init(params), 3, dtype=grad_dtype), desired)


@EVERY_RULE
@pytest.mark.parametrize("dtype", [F16, F32], ids=["f16", "f32"])
def test_float32_delta_on_other_parameters(opt, dtype):
    params, tx = small(dtype), opt(1e-3, delta_dtype=F32)
    desired, state = run(tx.step, params, tx.init(params), 1, dtype=BF16)
    actual, same_state = run(door_1(tx), params, tx.init(params), 1, dtype=BF16)
    assert_same_bits(same_state, state)
    for old, a, b in zip(*map(jax.tree.leaves, (params, actual, desired)), strict=True):
        old, a, b = (np.asarray(x, np.float64) for x in (old, a, b))
        exact = (b / np.where(old == 0, 1, old) >= 0.5) & (b / np.where(old == 0, 1, old) <= 2)  # Sterbenz
        np.testing.assert_array_equal(a[exact], b[exact])
        np.testing.assert_allclose(a, b, rtol=0, atol=2.0**-24 * np.maximum(np.abs(old), np.abs(b)).max())


@EVERY_OPTIMIZER
def test_bfloat16_delta_is_exact_nearly_always_and_a_neighbour_else(opt):
    params, tx = {"w": normal((256, 512), 0, 0.02, BF16)}, opt(3e-4)
    desired, state = run(tx.step, params, tx.init(params), 1)
    actual, same_state = run(door_1(tx), params, tx.init(params), 1)
    assert_same_bits(same_state, state)
    distance = np.abs(ordered(actual["w"]) - ordered(desired["w"]))
    assert np.mean(distance == 0) >= 0.98
    # A delta rounded to nearest is off by half its spacing at most, and so is the sum by one of the two's spacings.
    delta = np.asarray(desired["w"], np.float64) - np.asarray(params["w"], np.float64)
    off = np.abs(np.asarray(actual["w"], np.float64) - np.asarray(desired["w"], np.float64))
    assert (off <= np.maximum(spacing(delta), spacing(np.asarray(desired["w"], np.float64)))).all()
    assert (distance[np.abs(delta) <= np.abs(np.asarray(desired["w"], np.float64))] <= 1).all()


@EVERY_RULE
def test_bfloat16_delta_is_not_biased(opt):
    """Steps as large as the weights, where the delta has to be rounded: its error must not point anywhere."""
    params = {"w": normal((512, 512), 0, 0.02, BF16)}
    tx = opt(0.013)
    grads = {"w": normal((512, 512), 1, 1.0, BF16)}
    exact, _ = tx.step(grads, tx.init(params), params)
    through, _ = door_1(tx)(grads, tx.init(params), params)
    old, exact, through = (np.asarray(x["w"], np.float64) for x in (params, exact, through))
    error = (through - exact) / spacing(exact - old)
    inexact = error != 0
    assert np.mean(inexact) > 0.02
    for direction in (np.ones_like(old), np.sign(exact - old), np.sign(exact), np.sign(old)):
        e = (error * direction)[inexact]
        assert abs(e.mean()) < 5 * e.std() / np.sqrt(e.size)


# How loops of other libraries take a step: (transformation, gradients, its state, parameters) -> new parameters.
def through_optax(tx, grads, state, params):
    return optax.apply_updates(params, tx.update(grads, state, params)[0])


def through_equinox(tx, grads, state, params):
    return eqx.apply_updates(params, tx.update(grads, state, params)[0])


def through_train_state(tx, grads, state, params):
    train_state = TrainState(step=0, apply_fn=lambda _: None, params=params, tx=tx, opt_state=state)
    return train_state.apply_gradients(grads=grads).params


def partition(tx):
    return optax.partition({"a": tx, "b": optax.sgd(0.1)}, {"kernel": "a"})


# name: (what wraps the optimizer, the loop)
LOOPS = {
    "apply_updates": (lambda tx: tx, through_optax),
    "TrainState": (lambda tx: tx, through_train_state),
    "equinox": (lambda tx: tx, through_equinox),
    "masked": (lambda tx: optax.masked(tx, {"kernel": True}), through_optax),
    "partition": (partition, through_optax),
    "chain": (lambda tx: optax.chain(optax.identity(), tx), through_optax),
}


def take_step(loop, tx, grads, params, jit):
    """The parameters after one step of the loop, from a state made outside of it."""
    call = jax.jit(loop, static_argnums=0) if jit else loop
    return call(tx, grads, tx.init(params), params)


@EVERY_RULE
@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
def test_in_place_equals_step_in_every_loop(opt, jit):
    params = {"kernel": small()["layer"]["kernel"]}
    grads, tx = grads_like(params, 0), opt(in_place=True)
    desired, _ = tx.step(grads, tx.init(params), params)
    for name, (wrap, loop) in LOOPS.items():
        try:
            assert_same_bits(take_step(loop, wrap(tx), grads, params, jit), desired)
        except Exception as error:
            error.add_note(f"in {name}")
            raise


@EVERY_RULE
@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
def test_in_place_nnx_optimizer(opt, jit):
    make = lambda: nnx.Linear(64, 512, rngs=nnx.Rngs(0), param_dtype=BF16)  # noqa: E731
    model, tx = make(), opt(in_place=True)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    grads = grads_like(params, 0)
    gradient_state = nnx.state(make(), nnx.Param)
    nnx.replace_by_pure_dict(gradient_state, grads)

    def train(model, optimizer, grads):
        optimizer.update(model, grads)

    (nnx.jit(train) if jit else train)(model, optimizer, gradient_state)
    desired, state = tx.step(grads, tx.init(params), params)
    assert_same_bits(nnx.to_pure_dict(nnx.state(model, nnx.Param)), desired)
    assert_same_bits(nnx_leaves(optimizer.opt_state), jax.tree.leaves(state._asdict()))


@EVERY_RULE
@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
def test_in_place_linen_train_state_with_boxed_parameters(opt, jit):
    init = nn.with_partitioning(nn.initializers.normal(0.02), (None, "x"))
    module = nn.Dense(512, param_dtype=BF16, kernel_init=init)
    params = module.init(jax.random.key(0), jnp.ones((1, 64)))["params"]
    grads, tx = grads_like(params, 0), opt(in_place=True)
    desired, _ = tx.step(grads, tx.init(params), params)
    assert_same_bits(take_step(through_train_state, tx, grads, params, jit), desired)


@EVERY_RULE
@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
def test_in_place_equinox_with_none_leaves(opt, jit):
    model = eqx.nn.MLP(64, 128, 1, 0, dtype=BF16, key=jax.random.key(0))  # its activations are no arrays
    tx = opt(in_place=True)
    params, static = eqx.partition(model, eqx.is_inexact_array)
    grads = grads_like(params, 0)
    desired, _ = tx.step(grads, tx.init(params), params)
    new = eqx.combine(take_step(through_equinox, tx, grads, params, jit), static)
    assert_same_bits(eqx.filter(new, eqx.is_inexact_array), desired)
    assert jnp.isfinite(new(jnp.ones(64, BF16))).all()


@EVERY_RULE
def test_in_place_refuses_loudly(opt):
    params, inner = small(), opt(in_place=True)
    for tx in (optax.MultiSteps(inner, every_k_schedule=2), optax.apply_if_finite(inner, 2), optax.chain(inner, optax.scale(0.5))):  # fmt: skip # noqa: E501
        for call in (tx.update, jax.jit(tx.update)):
            with pytest.raises((TypeError, ValueError)):
                call(grads_like(params, 0), tx.init(params), params)


UNARY = [operator.neg, operator.pos, abs, float, bool]
BINARY = [operator.mul, operator.sub, operator.truediv, operator.pow, operator.matmul, operator.floordiv, operator.lt]


def test_in_place_object_is_opaque():
    params, tx = small(), ADAMW(in_place=True)
    updates, _ = tx.update(grads_like(params, 0), tx.init(params), params)
    leaf, p = updates["layer"]["kernel"], params["layer"]["kernel"]
    assert jax.tree.leaves(leaf) == [leaf]
    assert jax.tree_util.all_leaves([leaf])
    assert jax.tree.structure(updates) == jax.tree.structure(params)
    assert type(leaf).__array_ufunc__ is None
    assert re.search(r"(?i)in_?place.*bfloat16.*16, 300", repr(leaf))
    door = r"step|in_place|delta"
    for operation in UNARY:
        with pytest.raises(TypeError, match=door):
            operation(leaf)
    for operation in BINARY:
        for other in (p, 2.0, 2, np.float32(2), np.ones(300, np.float32)):
            with pytest.raises(TypeError, match=door):
                operation(leaf, other)
            with pytest.raises(TypeError, match=door):
                operation(other, leaf)
    for function in (jnp.isfinite, jnp.asarray, lambda u: jnp.add(p, u), lambda u: jnp.sum(u), lambda u: jnp.where(True, u, 0)):  # fmt: skip # noqa: E501
        with pytest.raises(TypeError):
            function(leaf)
    with pytest.raises(TypeError):
        np.asarray(leaf, np.float32)


@EVERY_RULE
@pytest.mark.parametrize("dtype", [BF16, F32], ids=["bf16", "f32"])
def test_numpy_parameters(opt, dtype):
    params = small(dtype)
    grads, tx, delta = grads_like(params, 0), opt(1e-3, in_place=True), opt(1e-3)
    desired, state = tx.step(grads, tx.init(params), params)
    host = jax.tree.map(np.asarray, params)
    host_grads = jax.tree.map(np.asarray, grads)
    assert_same_bits(tx.init(host), tx.init(params))
    assert_same_bits(tx.step(host_grads, tx.init(host), host), (desired, state))
    assert_same_bits(take_step(through_optax, tx, host_grads, host, jit=False), desired)
    updates, _ = delta.update(host_grads, delta.init(host), host)
    assert_same_bits(optax.apply_updates(host, updates), door_1(delta)(grads, delta.init(params), params)[0])
