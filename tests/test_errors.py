"""Bad input: each a clear error that names every offending leaf and says what to do, before anything changes."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tables import (
    ADAM,
    ADAMW,
    BF16,
    CODECS,
    EVERY_OPTIMIZER,
    EVERY_RULE,
    F32,
    LION,
    assert_same_bits,
    grads_like,
    tree,
)

import optax_sr8bit as sr8


def raises(error, words, absent, call, *args, **kwargs):
    """`call` raises `error` with each of `words` (patterns) in its message and none of `absent`."""
    with pytest.raises(error) as info:
        call(*args, **kwargs)
    message = str(info.value)
    for word in words:
        assert re.search(word, message), f"{word!r} not in: {message}"
    for word in absent:
        assert not re.search(word, message), f"{word!r} in: {message}"


# name: (a leaf that cannot be trained, what the message calls it)
BAD_LEAVES = {
    "integer": (jnp.ones((4, 8), jnp.int32), "int32"),
    "unsigned": (jnp.ones((4, 8), jnp.uint8), "uint8"),
    "bool": (jnp.ones((4, 8), bool), "bool"),
    "complex": (jnp.ones((4, 8), jnp.complex64), "complex64"),
    "numpy": (np.ones(3, np.int16), "int16"),
}


@EVERY_RULE
def test_leaves_that_are_not_floats(opt):
    bad = {name: leaf for name, (leaf, _) in BAD_LEAVES.items()}
    params = {"good": jnp.ones((4, 8), BF16), "layer": bad, "list": [jnp.ones(3, BF16), jnp.arange(3)]}
    words = (
        [f"layer/{name}" for name in bad] + [dtype for _, dtype in BAD_LEAVES.values()] + ["list/1", "mask|partition"]
    )
    tx = opt()
    for call in (tx.init, jax.eval_shape, sr8.explain):
        args = (params,) if call is tx.init else (tx.init, params) if call is jax.eval_shape else (tx, params)
        raises((TypeError, ValueError), words, ["good", "list/0"], call, *args)


# name: (change of the gradients, names in the message, names not in it)
BAD_GRADIENTS = {
    "missing": (lambda g: {"embed": g["embed"], "temperature": g["temperature"]}, ["layer"], []),
    "extra": (lambda g: {**g, "extra": g["embed"]}, ["extra"], ["embed"]),
    "none": (lambda g: {**g, "embed": None}, ["embed"], ["layer/bias"]),
    "shapes": (
        lambda g: {**g, "embed": g["embed"][:1], "layer": {**g["layer"], "bias": g["layer"]["bias"][None]}},
        ["embed", "layer/bias", r"512", r"300"],
        ["layer/kernel", "temperature"],
    ),
    "transposed": (lambda g: {**g, "embed": g["embed"].T}, ["embed"], ["layer"]),
    "integers": (lambda g: {**g, "embed": g["embed"].astype(jnp.int32)}, ["embed", "int32"], ["layer"]),
    "float0": (lambda g: {**g, "embed": np.zeros(g["embed"].shape, jax.dtypes.float0)}, ["embed", "float0"], ["layer"]),
    "complex": (lambda g: {**g, "temperature": g["temperature"].astype(jnp.complex64)}, ["temperature"], ["layer"]),
    "list": (lambda g: list(g.values()), [], []),
}


@EVERY_RULE
@pytest.mark.parametrize("name", list(BAD_GRADIENTS))
def test_gradients_that_do_not_match(opt, name):
    change, words, absent = BAD_GRADIENTS[name]
    params, tx = tree(), opt()
    grads, state = change(grads_like(params, 0)), tx.init(params)
    for call in (tx.step, tx.update):
        raises((TypeError, ValueError), [*words, "grad"], absent, call, grads, state, params)
        if name != "float0":  # jit itself refuses a float0 argument of numpy
            raises((TypeError, ValueError), [*words, "grad"], absent, jax.jit(call), grads, state, params)


@EVERY_OPTIMIZER
def test_params_none(opt):
    params, tx = tree(), opt()
    state = tx.init(params)
    raises(ValueError, ["params"], [], tx.update, params, state)
    raises(ValueError, ["params"], [], tx.update, params, state, None)
    raises((TypeError, ValueError), ["params"], [], tx.step, params, state, None)


# (arguments, what the message must say)
BAD_ARGUMENTS = [
    *[(dict(codec=c), ["codec", *CODECS]) for c in ("offest", "int8", 8)],
    *[(dict(rounding=r), ["rounding", "stochastic", "nearest"]) for r in ("sr", "up", 1)],
    *[(dict(implementation=i), ["implementation", "triton", "xla"]) for i in ("cuda", "pallas", 1)],
    *[(dict(block_size=b), ["block_size", "32", "2048", str(b)]) for b in (0, -256, 16, 33, 100, 255, 4096)],
    *[(dict(block_size=b), ["block_size", "int"]) for b in (256.0, "256", None, True)],
    *[(dict(b1=b), ["b1", str(b)]) for b in (-0.1, 1.0, 1.5, float("nan"))],
    *[(dict(b2=b), ["b2"]) for b in (-0.1, 1.0, np.float32(1.5), jnp.float32(1.0))],
    *[
        (dict(learning_rate=lr), ["learning_rate", "negative|>= 0|non-negative"])
        for lr in (-1e-3, np.float32(-1), jnp.float32(-1))
    ],
    *[(dict(weight_decay=wd), ["weight_decay"]) for wd in (-1e-3, np.float64(-1))],
    *[(dict(momentum=m), ["momentum", r"\[0, 1\)"]) for m in (-0.1, 1.0, jnp.float32(1.0))],
    *[(dict(decay=d), ["decay", r"\[0, 1\)"]) for d in (-0.1, 1.0)],
    *[(dict(b3=b), ["b3", r"\[0, 1\)"]) for b in (-0.1, 1.0)],
    *[({name: -1.0}, [name, "negative"]) for name in ("eps", "eps_root", "alpha", "trust_coefficient")],
    *[
        ({name: value}, [name, str(value)])
        for name in ("initial_scale", "initial_accumulator_value")
        for value in (-1.0, float("inf"), float("nan"), "one")
    ],
    *[({name: 1}, [name, "True or False"]) for name in ("nesterov", "centered", "eps_in_sqrt", "bias_correction")],
    *[({name: lambda count: 0.5}, [name, "schedule"]) for name in ("b1", "momentum", "decay", "eps")],
    (dict(mu_dtype=BF16), ["mu_dtype", "codec="]),
    (dict(mu_dtype="float32"), ["mu_dtype", "codec="]),
    (dict(delta_dtype=jnp.int8), ["delta_dtype"]),
    (dict(min_8bit_size=-1), ["min_8bit_size"]),
    (dict(in_place=True, delta_dtype=F32), ["in_place", "delta_dtype"]),  # nothing is accepted and ignored
]


@EVERY_OPTIMIZER
def test_arguments(opt):
    """Refused by the factory, not by the first step of a job."""
    for kwargs, words in BAD_ARGUMENTS:
        if not opt.takes(kwargs):
            continue
        try:
            raises(ValueError, words, [], opt, **kwargs)
        except BaseException as error:
            error.add_note(f"with {kwargs}")
            raise
    raises(TypeError, [], [], opt, unknown_argument=1)


@EVERY_OPTIMIZER
def test_arguments_at_their_limits_are_accepted(opt):
    for kwargs in ({"learning_rate": 0.0}, {"b1": 0.0, "b2": 0.0}, {"block_size": 32}, {"block_size": 2048},
                   {"block_size": np.int64(64)}, {"min_8bit_size": 0}, {"seed": 2**70}, {"seed": jax.random.key(3)},
                   {"initial_scale": jnp.float32(0.1)}, {"initial_accumulator_value": np.array(0)}):  # fmt: skip
        if opt.takes(kwargs):
            opt(**kwargs)
    # A traced value cannot be checked and must not be refused.
    params = {"w": jnp.ones((2, 8), BF16)}
    traced = {name: 0.9 for name in ("b1", "momentum", "decay") if name in opt.arguments}
    jax.eval_shape(lambda lr, given: opt(lr, **given).step(params, opt(**given).init(params), params), 1e-3, traced)


def states_of_others(opt):
    """(name, state of another configuration, names in the message)."""
    params = {"w": jnp.ones((8, 512), BF16), "short": jnp.ones((64, 100), BF16)}
    tx = opt()
    state = tx.init(params)
    yield "codec", opt(codec="offset_wide").init(params), ["offset_wide", "offset"]
    yield "dynamic", opt(codec="dynamic").init(params), ["dynamic", "offset"]
    yield "float32", opt(codec="float32").init(params), ["float32|w"]
    yield "block", opt(block_size=128).init(params), ["128", "256"]
    yield "min_8bit_size", opt(min_8bit_size=10**9).init(params), ["w", "short"]
    yield "version", state._replace(format=state.format.at[0].set(250)), ["version"]
    yield "dtype", state._replace(mu=jax.tree.map(lambda x: x.astype(F32), state.mu)), ["mu.*w", "short", "uint8"]
    yield "leaf", state._replace(mu={"w": state.mu["w"]}), ["short"]
    yield "shape", state._replace(mu={**state.mu, "w": state.mu["w"].T}), ["w"]
    yield "seed", state._replace(seed=jax.random.key(0)), ["seed"]
    yield "rule", (LION if opt is not LION else ADAM)().init(params), []
    yield "tuple", tuple(state), []


@EVERY_RULE
def test_state_of_another_configuration(opt):
    params = {"w": jnp.ones((8, 512), BF16), "short": jnp.ones((64, 100), BF16)}
    tx = opt()
    for name, state, words in states_of_others(opt):
        try:
            for call in (tx.update, tx.step):
                raises((TypeError, ValueError), words, [], call, params, state, params)
            raises((TypeError, ValueError), words, [], sr8.check, state, tx, params)
            if name in ("codec", "dynamic", "block", "version"):  # the format alone tells these apart
                raises((TypeError, ValueError), words, [], sr8.check, state, tx)
        except BaseException as error:
            error.add_note(f"case {name}")
            raise
    sr8.check(tx.init(params), tx)
    sr8.check(tx.init(params), tx, params)


@EVERY_RULE
def test_shapes_and_dtypes_of_a_state_are_checked_under_jit(opt):
    params = {"w": jnp.ones((8, 512), BF16), "short": jnp.ones((64, 100), BF16)}
    tx = opt()
    for name, state, _ in states_of_others(opt):
        if name in ("block", "min_8bit_size", "dtype", "leaf", "shape"):
            with pytest.raises((TypeError, ValueError), match=r"w|short"):
                jax.jit(tx.step)(params, state, params)


@EVERY_RULE
def test_nothing_changes_when_an_error_is_raised(opt):
    params = tree()
    tx = opt()
    grads, state = grads_like(params, 0), tx.init(params)
    step = jax.jit(tx.step, donate_argnums=(0, 1, 2))
    before = jax.tree.map(np.array, (params, state))
    with pytest.raises((TypeError, ValueError)):
        step({**grads, "embed": grads["embed"].T}, state, params)
    assert not any(x.is_deleted() for x in jax.tree.leaves((grads, params, state)))
    assert_same_bits((params, state), before)


@EVERY_RULE
def test_triton_where_it_cannot_run(opt):
    params = tree()

    def train():
        tx = opt(implementation="triton")
        return tx.step(params, tx.init(params), params)

    if jax.default_backend() == "gpu":
        pytest.skip("here it may run")
    raises(NotImplementedError, ["triton", r"xla|implementation=None"], [], train)


def test_leaves_whose_paths_coincide_do_not_share_their_noise():
    params = {"a/b": jnp.ones((8, 512), BF16), "a": {"b": jnp.ones((8, 512), BF16)}, "c": jnp.ones(3, BF16)}
    raises(ValueError, ["a/b"], [r"\bc\b"], ADAMW().init, params)
