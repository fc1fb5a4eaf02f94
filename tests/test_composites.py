"""Muon, Adafactor and schedule-free AdamW: Optax's mathematics, this library's moments and rounding."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from oracles.adafactor import adafactor
from oracles.muon import muon
from oracles.schedule_free import schedule_free_adamw
from tables import BF16, F32, assert_same_bits, avals, door_1, grads_like, normal, run

import optax_sr8bit as sr8

STEPS = 50
MUON = {"learning_rate": 0.02, "weight_decay": 0.1}
FACTORED = {"learning_rate": 0.05, "momentum": 0.9, "weight_decay_rate": 1e-3, "min_dim_size_to_factor": 32}
FREE = {"learning_rate": 0.01, "warmup_steps": 10, "weight_decay": 0.1}
COMPOSITES = (
    pytest.param(sr8.muon, optax.contrib.muon, MUON, 3.02, id="muon"),
    pytest.param(sr8.adafactor, optax.adafactor, FACTORED, 3.4, id="adafactor"),
    pytest.param(sr8.schedule_free_adamw, optax.contrib.schedule_free_adamw, FREE, 5.04, id="schedule_free_adamw"),
)
EVERY = pytest.mark.parametrize(("factory", "namesake", "kwargs", "size"), COMPOSITES)


def gradients(shape, scale=0.1):
    return [np.asarray(normal(shape, 100 + i, scale), np.float64) for i in range(STEPS)]


def trajectory(tx, param, grads):
    """The parameter, and the state, after each step."""
    state, step = tx.init({"w": param}), jax.jit(tx.step)
    params = {"w": param}
    for g in grads:
        params, state = step({"w": jnp.asarray(g, F32)}, state, params)
        yield params["w"], state


def assert_follows(ours, oracle):
    for mine, exact in zip(ours, oracle, strict=True):
        np.testing.assert_allclose(mine, exact, rtol=0, atol=1e-5 * np.abs(exact).max())


@EVERY
def test_arguments_are_those_of_optax(factory, namesake, kwargs, size):
    ours, theirs = (inspect.signature(f).parameters for f in (factory, namesake))
    assert [(p.name, p.default, p.kind) for p in theirs.values()] == [
        (p.name, p.default, p.kind) for p in list(ours.values())[: len(theirs)]
    ]
    shared = ["seed", "rounding", "codec", "block_size", "min_8bit_size", "implementation", "in_place", "delta_dtype"]
    assert list(ours)[len(theirs) :] == shared
    assert "Shared keyword arguments" in factory.__doc__


@pytest.mark.parametrize("kwargs", [{}, {"nesterov": False, "consistent_rms": 0.2, "adaptive": True}])
def test_muon_follows_the_oracle(kwargs):
    param, grads = normal((64, 96), 0, 0.1), gradients((64, 96))
    tx = sr8.muon(**MUON, **kwargs, codec="float32")
    oracle = muon(param, grads, MUON["learning_rate"], weight_decay=MUON["weight_decay"], **kwargs)
    assert_follows((p for p, _ in trajectory(tx, param, grads)), oracle)


@pytest.mark.parametrize("kwargs", [{}, {"min_dim_size_to_factor": 128}, {"momentum": None, "learning_rate": None}])
def test_adafactor_follows_the_oracle(kwargs):
    param, grads, kwargs = normal((64, 96), 0, 0.1), gradients((64, 96)), {**FACTORED, **kwargs}
    tx = sr8.adafactor(**kwargs, codec="float32")
    oracle = adafactor(
        param, grads, kwargs["learning_rate"], **{k: v for k, v in kwargs.items() if k != "learning_rate"}
    )
    assert_follows((p for p, _ in trajectory(tx, param, grads)), oracle)


def test_schedule_free_follows_the_oracle():
    param, grads = normal((64, 96), 0, 0.1), gradients((64, 96))
    tx = sr8.schedule_free_adamw(**FREE, codec="float32")
    arguments = [param, grads, FREE["learning_rate"], FREE["warmup_steps"]]
    oracles = [schedule_free_adamw(*arguments, weight_decay=0.1, evaluate=where) for where in (False, True)]
    ours = list(trajectory(tx, param, grads))
    assert_follows([p for p, _ in ours], oracles[0])
    assert_follows([sr8.schedule_free_eval_params(state, {"w": p})["w"] for p, state in ours], oracles[1])


@EVERY
def test_they_train_in_8_bits(factory, namesake, kwargs, size):
    """A matrix is learned from noisy products, in about the steps that Optax takes in float32."""
    goal, inputs = normal((64, 96), 0, 0.3), normal((256, 64), 1)

    def loss(params):
        return jnp.mean((inputs @ params["w"].astype(F32) + params["b"].astype(F32) - inputs @ goal) ** 2)

    def trained(tx, dtype):
        params = {"w": normal((64, 96), 2, 0.1, dtype), "b": jnp.zeros((96,), dtype)}
        state, step = tx.init(params), jax.jit(lambda p, s: door_1(tx)(jax.grad(loss)(p), s, p))
        for _ in range(200):
            params, state = step(params, state)
        if factory is sr8.schedule_free_adamw:
            evaluate = sr8.schedule_free_eval_params
            return float(loss(evaluate(state, jax.tree.map(lambda x: x.astype(F32), params))))
        return float(loss(params))

    ours, theirs = trained(factory(**kwargs), BF16), trained(namesake(**kwargs), F32)
    assert theirs < 2.0 < float(loss({"w": jnp.zeros((64, 96)), "b": jnp.zeros(96)}))
    assert ours < 1.2 * theirs + 0.02


@EVERY
def test_bytes_doors_and_compilations(factory, namesake, kwargs, size):
    params = {"w": normal((256, 256), 0, 0.02, BF16)}
    tx = factory(**kwargs)
    state, step = tx.init(params), jax.jit(tx.step)
    assert sum(x.nbytes for x in jax.tree.leaves((params, state))) / params["w"].size < size
    before = avals(state)
    by_step = run(step, params, state, 2)
    assert avals(by_step[1]) == before
    assert step._cache_size() == 1
    by_update = run(door_1(factory(**kwargs, delta_dtype=F32), jit=True), params, state, 2)
    assert_same_bits(by_update[0], by_step[0])
    grads = grads_like(params, 0)
    assert tx.update(grads, state, params)[0]["w"].dtype == grads["w"].dtype  # as Optax's, for apply_if_finite


def test_what_muon_and_adafactor_keep():
    params = {"w": jnp.ones((64, 128), BF16), "v": {"b": jnp.ones((8192,), BF16)}}
    states = sr8.muon(1e-3).init(params)[0].inner.inner_states
    assert str(states["muon"].inner_state[0].mu["w"].dtype) == "uint8"
    adam = states["adam"].inner_state[0]
    assert [str(x.dtype) for x in (adam.mu["v"]["b"], adam.nu["v"]["b"])] == ["uint8", "uint8"]
    state = sr8.adafactor(momentum=0.9).init(params)[0].inner
    assert {str(x.dtype) for x in jax.tree.leaves(state[0][1:])} == {"float32"}
    (ema,) = (link.ema for link in state if hasattr(link, "ema"))
    assert {str(x.dtype) for x in jax.tree.leaves(ema)} == {"uint8"}


def test_z_is_bfloat16_and_found_within_wrappers():
    params = {"w": normal((64, 128), 0, 1.0, BF16), "b": jnp.ones((8,), BF16)}
    tx = sr8.chain(sr8.clip_by_global_norm(1.0), sr8.schedule_free_adamw())
    state = tx.init(params)
    (z,) = [x for x in jax.tree.leaves(state) if x.dtype == BF16]
    assert_same_bits(z, params["w"])
    assert_same_bits(sr8.schedule_free_eval_params(state, params), params)
    named = sr8.inject_hyperparams(sr8.schedule_free_adamw)(1e-3)
    assert_same_bits(sr8.schedule_free_eval_params(named.init(params), params), params)


def test_hyperparameters_may_be_injected():
    params = {"w": normal((64, 96), 0, 0.1, BF16)}
    tx, plain = sr8.inject_hyperparams(sr8.muon)(**MUON), sr8.muon(**MUON)
    grads = grads_like(params, 0)
    injected, _ = jax.jit(tx.step)(grads, tx.init(params), params)
    expected, _ = jax.jit(plain.step)(grads, plain.init(params), params)
    apart = np.abs(np.asarray(injected["w"], np.float32) - np.asarray(expected["w"], np.float32))
    assert np.mean(apart > 0) < 0.01  # constants are folded in another order


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: sr8.muon(1e-3, mu_dtype=BF16), "mu_dtype=.*codec="),
        (lambda: sr8.adafactor(1e-3, dtype_momentum=BF16), "dtype_momentum=.*codec="),
        (lambda: sr8.schedule_free_adamw(state_dtype=F32), "state_dtype=.*codec="),
        (lambda: sr8.muon(1e-3, nesterov=1), "nesterov must be True or False"),
        (lambda: sr8.muon(1e-3, codec="int8"), "unknown codec 'int8'"),
        (lambda: sr8.adafactor(1e-3, rounding="up"), "unknown rounding 'up'"),
        (lambda: sr8.schedule_free_eval_params((), {}), "needs one optax.contrib.ScheduleFreeState, found 0"),
    ],
)
def test_errors(make, told):
    with pytest.raises(ValueError, match=told):
        make()


def test_z_in_codes_is_refused():
    params = {"w": jnp.ones((64, 128), BF16)}
    state = sr8.quantize_moments(optax.contrib.schedule_free_adamw(), select={"z/*": "offset"}).init(params)
    with pytest.raises(ValueError, match="z is kept in codes"):
        sr8.schedule_free_eval_params(state, params)
    with pytest.raises(TypeError, match="unexpected keyword argument 'momentum'"):
        sr8.muon(1e-3, momentum=0.9)
