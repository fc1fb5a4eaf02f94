"""States converted: between codecs, blocks and Optax, within wrappers and over meshes, in the middle of a run."""

import re

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from moment_codes import values_of
from oracles import codes as oracle
from tables import (
    ADAMW,
    BF16,
    CODECS,
    EVERY_RULE,
    F32,
    LION,
    assert_same_bits,
    avals,
    grads_like,
    normal,
    run,
)

import optax_sr8bit as sr8
from optax_sr8bit.checkpoint import convert


def model(dtype=BF16):
    """A leaf in whole and short blocks, one that stays float32, a scalar."""
    return {
        "layer": {"kernel": normal((16, 300), 0, 0.02, dtype), "bias": normal((40,), 1, 0.02, dtype)},
        "temperature": jnp.asarray(0.5, dtype),
    }


def moments(opt, params, seed=0, dtype=F32):
    """Optax's state after 3 steps, with moments over several decades."""
    draw = lambda p, i: normal(p.shape, seed + i, 1e-3) * 10 ** normal(p.shape, seed + 50 + i)  # noqa: E731
    mu = jax.tree.map(lambda p: draw(p, 0).astype(dtype), params)
    if opt is LION:
        return optax.ScaleByLionState(jnp.int32(3), mu)
    nu = jax.tree.map(lambda p: jnp.square(draw(p, 7)).astype(dtype), params)
    return optax.ScaleByAdamState(jnp.int32(3), mu, nu)


def values(state, field, name, codec, block):
    """Moments of one leaf in float64, from the definition of the code."""
    code, scale = (np.asarray(getattr(state, f)[name]) for f in (field, field + "_scale"))
    if codec == "float32":
        return code.astype(np.float64)
    row = f"{codec}-{field}"
    top = 1.0 if codec == "dynamic" else MOMENT_TOPS[row]
    return (values_of(row) * top)[code] * np.repeat(scale.astype(np.float64), block, -1)[..., : code.shape[-1]]


MOMENT_TOPS = {
    "offset-mu": oracle.OFFSET_MU.top,
    "offset-nu": oracle.OFFSET_NU.top,
    "offset_wide-mu": oracle.WIDE_MU.top,
    "offset_wide-nu": oracle.WIDE_NU.top,
}


@pytest.mark.parametrize("source", CODECS)
@pytest.mark.parametrize("target", CODECS)
def test_every_codec_to_every_other(source, target):
    """To the nearest code of what the old code means, for another block too."""
    params = {"w": normal((16, 600), 0, 0.02, BF16)}
    for old_block, new_block in ((256, 256), (128, 512)):
        old_tx = sr8.adamw(1e-3, codec=source, block_size=old_block, seed=3)
        new_tx = sr8.adamw(1e-3, codec=target, block_size=new_block)
        old = convert(moments(ADAMW, params), old_tx, params)._replace(seed=jnp.asarray([5, 6], jnp.uint32))
        new = convert(old, new_tx, params)
        sr8.check(new, new_tx, params)
        assert new.count == 3
        np.testing.assert_array_equal(new.seed, [5, 6])
        if target == source and (new_block == old_block or source == "float32"):
            assert new.mu["w"] is old.mu["w"]
            assert_same_bits(new, old._replace(format=new.format))
            continue
        for field in ("mu", "nu"):
            x = values(old, field, "w", source, old_block)
            y = values(new, field, "w", target, new_block)
            if target == "float32":
                np.testing.assert_allclose(y, x, rtol=1e-6)
                continue
            pad = [(0, 0), (0, -x.shape[-1] % new_block)]
            tiles = np.abs(np.pad(x, pad)).reshape(16, -1, new_block)
            absmax = np.repeat(tiles.max(-1), new_block, -1)[..., : x.shape[-1]]
            # Each value is as near as the nearest of all 256, but for float32's roundings at ties.
            excess = oracle.excess(x / absmax, np.asarray(getattr(new, field)["w"]), values_of(f"{target}-{field}"))
            assert (excess <= 1e-6 * np.abs(x / absmax) + 1e-9).all()
            np.testing.assert_allclose(y, absmax * values_of(f"{target}-{field}")[getattr(new, field)["w"]], rtol=2e-6)


def test_there_and_back_keeps_every_code():
    params = model(F32)
    for codec in ("offset", "offset_wide"):
        tx = ADAMW(codec=codec, min_8bit_size=0)
        state = convert(moments(ADAMW, params), tx, params)
        again = convert(convert(state, optax.adamw(1e-3), params), tx, params)
        for field in ("mu", "nu"):
            assert_same_bits(getattr(again, field), getattr(state, field))
            scales = (getattr(x, field + "_scale") for x in (again, state))
            jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=3e-7), *scales)


@EVERY_RULE
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_moments_that_stay_floats_keep_their_values(opt, dtype):
    """Small leaves and `float32` are exact; so is BF16 on the way up, and back."""
    params = model(dtype)
    given = moments(opt, params, dtype=dtype)
    state = convert(given, opt(codec="float32"), params)
    back = convert(state, opt.reference(), params)[0]
    for field in opt.moments:
        want = getattr(given, field)
        assert_same_bits(getattr(state, field), jax.tree.map(lambda x: x.astype(F32), want))
        assert_same_bits(getattr(back, field), want)
    mixed = convert(given, opt(), params)
    assert_same_bits(mixed.mu["layer"]["bias"], given.mu["layer"]["bias"].astype(F32))


def test_non_finite_moments_become_zero_as_in_a_step():
    params = {"w": jnp.zeros((16, 512), F32)}
    given = moments(ADAMW, params)
    given.mu["w"] = given.mu["w"].at[0, 3].set(jnp.nan)
    given.nu["w"] = given.nu["w"].at[1, 5].set(jnp.inf)
    clean = jax.tree.map(lambda x: x.at[0, 3].set(0.0).at[1, 5].set(0.0) if x.ndim else x, given)
    assert_same_bits(*(convert(x, ADAMW(), params) for x in (given, clean)))


def test_other_parts_are_kept_where_alike_and_schedules_go_on():
    params = model(F32)
    schedule = optax.linear_schedule(1e-2, 0.0, 9)
    plain = optax.adamw(schedule)
    _, state = run(as_step(plain), params, plain.init(params), 3)
    # Optax's chain becomes one of ours, and its schedule's count the optimizer's.
    ours = sr8.chain(optax.clip(1.0), sr8.adamw(schedule))
    new = convert(state, ours, params)
    assert new[1].count == 3
    assert convert(new, plain, params)[-1] == optax.ScaleByScheduleState(jnp.int32(3))
    # An average before the optimizer is kept, if its place and shapes agree, and fresh otherwise.
    before, after = (sr8.chain(optax.ema(0.9), sr8.adamw(1e-3, codec=codec)) for codec in ("offset", "dynamic"))
    _, state = run(before.step, params, before.init(params), 2)
    new = convert(state, after, params)
    assert_same_bits(new[0], state[0])
    assert_same_bits(convert(state[1], after, params)[0], after.init(params)[0])
    # So are hyperparameters that were changed, and gradients that wait.
    injected = sr8.inject_hyperparams(sr8.adamw)(schedule, b2=0.9, codec="offset_wide")
    old = injected.init(params)
    old.hyperparams["b2"] = jnp.float32(0.95)
    new = convert(old, sr8.inject_hyperparams(sr8.adamw)(schedule, b2=0.8), params)
    assert new.hyperparams["b2"] == jnp.float32(0.95)
    new = convert(state, injected, params)
    assert new.hyperparams["b2"] == jnp.float32(0.9)
    assert new.count == new.hyperparams_states["learning_rate"].count == new.inner_state.count == 2
    waiting, then = (optax.MultiSteps(tx, 4).gradient_transformation() for tx in (plain, sr8.adamw(1e-3)))
    _, state = waiting.update(grads_like(params, 0), waiting.init(params), params)
    new = convert(state, then, params)
    assert_same_bits(new.acc_grads, state.acc_grads)
    assert new.mini_step == 1


def as_step(tx):
    def step(grads, state, params):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return step


# Built as `tx.init` builds it, so that nothing compiles again.
TARGETS = {
    "ours": ADAMW(),
    "optax": optax.adamw(1e-3),
    "chain": sr8.chain(optax.clip_by_global_norm(1.0), ADAMW(optax.linear_schedule(1e-2, 0.0, 9), seed=7)),
    "injected": sr8.inject_hyperparams(sr8.adamw)(1e-3),
    "masked": optax.masked(sr8.adamw(1e-3), lambda p: jax.tree.map(lambda x: x.ndim > 0, p)),
}


@pytest.mark.parametrize("name", TARGETS)
def test_converted_states_look_like_those_of_init(name):
    """Also for abstract parameters; and the moments' leaves may lie in containers of another kind or order."""
    params, tx = model(F32), TARGETS[name]
    given = moments(ADAMW, params)
    if name == "masked":
        given = jax.tree.map(lambda x: optax.MaskedNode() if x.ndim == 0 else x, given)._replace(count=given.count)
    new = convert(given, tx, params)
    assert jax.tree.structure(new) == jax.tree.structure(tx.init(params))
    assert avals(new) == avals(tx.init(params))
    assert_same_bits(convert(jax.tree.map(np.asarray, given), tx, jax.eval_shape(lambda: params)), new)
    ordered = flax.core.freeze(params)
    assert_same_bits(jax.tree.leaves(convert(given, tx, ordered)), jax.tree.leaves(new))
    assert jax.tree.structure(convert(given, tx, ordered)) == jax.tree.structure(tx.init(ordered))


@pytest.mark.skipif(len(jax.devices()) < 2, reason="needs two devices")
@pytest.mark.parametrize("kind", [jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit], ids=str)
@pytest.mark.parametrize("spec", [("x", None), (None, "x")], ids=str)
@pytest.mark.filterwarnings("ignore:edges of shards")
def test_moments_are_sharded_as_their_parameters(kind, spec):
    mesh = jax.make_mesh((2,), ("x",), devices=jax.devices()[:2], axis_types=(kind,))
    params = {"w": normal((16, 768), 0)}
    cut = jax.device_put(params, jax.NamedSharding(mesh, jax.P(*spec)))
    given = moments(ADAMW, params)
    desired = convert(given, ADAMW(), params)
    for source in (
        given,
        jax.tree.map(np.asarray, given),
        given._replace(mu=jax.device_put(given.mu, cut["w"].sharding)),
    ):
        new = convert(source, ADAMW(), cut)
        assert_same_bits(new, desired)
        assert new.nu["w"].sharding.is_equivalent_to(cut["w"].sharding, 2)
        assert jax.tree.map(lambda x: x.sharding, new) == jax.tree.map(lambda x: x.sharding, ADAMW().init(cut))
    back = convert(new, optax.adamw(1e-3), cut)[0]
    assert back.nu["w"].sharding.is_equivalent_to(cut["w"].sharding, 2)
    assert_same_bits(back, convert(desired, optax.adamw(1e-3), params)[0])
    with jax.set_mesh(mesh):
        assert_same_bits(convert(new, ADAMW(codec="dynamic"), cut), convert(desired, ADAMW(codec="dynamic"), params))


@EVERY_RULE
def test_training_that_switches_over_and_back(opt):
    """A run that switches stays near FP32's: far nearer than one that begins again with a fresh state."""
    target, noise = normal((16, 512), 1), 0.3
    params = {"w": jnp.zeros((16, 512), F32)}
    schedule = optax.linear_schedule(opt.learning_rate, opt.learning_rate / 10, 90)
    plain, ours = opt.optax(schedule), opt(schedule)

    def thirty_steps(advance):
        @jax.jit
        def loop(params, state, first):
            def body(carry, i):
                draw = jax.random.normal(jax.random.key(i), params["w"].shape)
                return advance({"w": carry[0]["w"] - target + noise * draw}, carry[1], carry[0]), None

            return jax.lax.scan(body, (params, state), first + jnp.arange(30))[0]

        return loop

    on_plain, on_ours = thirty_steps(as_step(plain)), thirty_steps(ours.step)

    def whole(change):
        p, s = on_plain(params, plain.init(params), 0)
        p, s = on_ours(p, change(s, ours, p), 30) if change else on_plain(p, s, 30)
        return on_plain(p, change(s, plain, p) if change else s, 60)

    afresh = lambda s, tx, p: tx.init(p)  # noqa: E731
    want, state = whole(None)
    got, got_state = whole(convert)
    lost, _ = whole(afresh)
    assert got_state[0].count == state[0].count == 90
    distance = lambda p: float(jnp.linalg.norm(p["w"] - want["w"]) / jnp.linalg.norm(want["w"]))  # noqa: E731
    assert distance(got) < 0.02
    assert distance(lost) > 3 * distance(got)


def donated(tx, params):
    """A state whose arrays a later step has taken."""
    state = tx.init(params)
    jax.jit(lambda state: jax.tree.map(lambda x: x + 1, state), donate_argnums=0)(state)
    return state


def two(opt):
    return {"w": jnp.ones((8, 512), BF16), "v": jnp.ones((8, 512), BF16)}


# name: (what goes wrong, error, what the message must say)
ERRORS = {
    "adam to lion": (lambda p: convert(ADAMW().init(p), LION(), p), ValueError, ["AdamState", "mu, nu", "tx.init"]),
    "lion to optax adam": (lambda p: convert(LION().init(p), optax.adam(1e-3), p), ValueError, ["LionState", "mu, nu"]),
    "no moments": (lambda p: convert(optax.sgd(1e-3).init(p), ADAMW(), p), ValueError, ["state, a tuple", "no state"]),
    "no moments in tx": (lambda p: convert(ADAMW().init(p), optax.sgd(1e-3), p), ValueError, ["tx.init builds"]),
    "two states": (
        lambda p: convert((ADAMW().init(p), {"a": optax.adam(1e-3).init(p)}), ADAMW(), p),
        ValueError,
        [r"AdamState at \[0\]", r"ScaleByAdamState at \[1\]\['a'\]\[0\]", "one by one"],
    ),
    "another tree": (
        lambda p: convert(ADAMW().init({"w": p["w"], "u": p["v"]}), ADAMW(), p),
        ValueError,
        ["missing: v", "not expected: u"],
    ),
    "another shape": (
        lambda p: convert(ADAMW().init(p), ADAMW(), {**p, "w": p["w"].T}),
        ValueError,
        ["mu/w", "512, 8"],
    ),
    "under jit": (lambda p: jax.jit(lambda s: convert(s, ADAMW(), p))(ADAMW().init(p)), TypeError, ["jit", "concrete"]),
    "abstract": (lambda p: convert(jax.eval_shape(ADAMW().init, p), ADAMW(), p), TypeError, ["restore"]),
    "traced params": (
        lambda p: (lambda s: jax.jit(lambda q: convert(s, ADAMW(), q))(p))(ADAMW().init(p)),
        TypeError,
        ["params", "jit"],
    ),
    "donated": (lambda p: convert(donated(optax.lion(1e-3), p), LION(), p), ValueError, ["donated", "replaced"]),
    "ensemble": (
        lambda p: convert(jax.vmap(lambda _: ADAMW().init(p))(jnp.arange(3)), ADAMW(), p),
        ValueError,
        ["ensemble", "members"],
    ),
    "no tx": (lambda p: convert(ADAMW().init(p), sr8.adamw, p), TypeError, ["optimizer"]),
    "integer moments": (
        lambda p: convert(optax.ScaleByLionState(jnp.int32(0), jax.tree.map(lambda x: x.astype(int), p)), LION(), p),
        ValueError,
        ["mu/w", "mu/v", "int"],
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_what_cannot_be_converted(name):
    call, error, words = ERRORS[name]
    with pytest.raises(error) as info:
        call(two(ADAMW))
    assert not [word for word in words if not re.search(word, str(info.value))], info.value
