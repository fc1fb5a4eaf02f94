"""What `kahan`, `split24` and `split32` keep beside a bfloat16: by exhaustion, over long sums, and in an optimizer."""

import functools
import pickle

import jax
import jax.numpy as jnp
import meshes
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from oracles import rounding as oracle
from tables import ADAMW, BF16, F16, F32, LION, assert_same_bits, grads_like, named, normal, run, small

import optax_sr8bit as sr8
from optax_sr8bit import rounding

CORRECTED = {"kahan": BF16, "split24": jnp.uint8, "split32": jnp.uint16}
EVERY_CORRECTED = pytest.mark.parametrize("how", CORRECTED)
# All high halves with low halves on and around the ties of 16 and of 24 bits, and any.
LOW = [0, 1, 0x7F, 0x80, 0x81, 0xFF, 0x7FFF, 0x8000, 0x8001, 0xFFFF, *np.random.default_rng(0).integers(0, 65536, 6)]
PATTERNS = ((np.arange(65536, dtype=np.uint32) << 16)[:, None] | np.array(LOW, np.uint32)).reshape(-1)
X = PATTERNS.view(np.float32)
FINITE = np.isfinite(X)


def taken_apart(how, x):
    """The patterns stored of float32s and kept beside them, and what is joined of both."""
    one = rounding.get(how)
    stored = one.encoders["bfloat16"](x, jnp.zeros(x.shape, jnp.uint32))
    kept = one.rest(x, stored)
    return stored, kept, one.join(stored, kept)


@functools.cache
def exhausted(how):
    return tuple(map(np.asarray, jax.jit(functools.partial(taken_apart, how))(jnp.asarray(X))))


def distance(master):
    """From x, in units in the last place of float32: of numbers of one sign their patterns differ by as much."""
    return np.abs(master.view(np.uint32).astype(np.int64) - PATTERNS)


def test_split32_is_the_float32():
    stored, kept, master = exhausted("split32")
    np.testing.assert_array_equal(distance(master)[~np.isnan(X)], 0)  # ±0 and ±Inf among them
    assert np.isnan(master[np.isnan(X)]).all()
    np.testing.assert_array_equal(stored[FINITE], oracle.nearest_away(X[FINITE], oracle.BFLOAT16))
    assert kept.max() < 2**16


def test_split24_is_the_nearest_of_24_bits():
    stored, kept, master = exhausted("split24")
    assert distance(master)[~np.isnan(X)].max() == 128
    assert np.isnan(master[np.isnan(X)]).all()
    assert (master.view(np.uint32)[~np.isnan(X)] & 0xFF == 0).all()
    nearest = oracle.nearest(X[FINITE], oracle.BFLOAT24)
    np.testing.assert_array_equal(master.view(np.uint32)[FINITE] >> 8, nearest)
    again = jax.jit(functools.partial(taken_apart, "split24"))(jnp.asarray(master))
    for first, second in zip((stored, kept, master.view(np.uint32)), again, strict=True):
        second = np.asarray(second)
        np.testing.assert_array_equal(first, second.view(np.uint32) if second.dtype == np.float32 else second)
    whole = FINITE & np.isfinite(master)
    np.testing.assert_array_equal(stored[whole], oracle.nearest_away(master[whole], oracle.BFLOAT16))
    assert kept.max() < 2**8


@pytest.mark.parametrize("how", ["split24", "split32"])
def test_what_is_kept_moves_a_parameter_by_less_than_a_spacing(how):
    """Whatever is kept, beside a parameter that was changed meanwhile, to zero for one: no sign turns, none is NaN."""
    stored = np.arange(65536, dtype=np.uint32)
    stored = stored[stored & 0x7FFF < 0x7F80, None]
    kept = np.array([0, 1, 0x7F, 0x80, 0xFF, *((0x7FFF, 0x8000, 0xFFFF) if how == "split32" else ())], np.uint32)
    master = np.asarray(jax.jit(rounding.get(how).join)(jnp.asarray(stored), jnp.asarray(kept))).view(np.uint32)
    assert (np.abs(master.astype(np.int64) - (stored << 16).astype(np.int64)) <= 0xFFFF).all()
    assert (master >> 31 == stored >> 15).all()
    assert (master & 0x7FFFFFFF < 0x7F800000).all()


def kahan_bound(x):
    """Of |x| from 2^e on the rest is 2^(e-8) at most, with a spacing of 2^(e-16); what is subnormal may be flushed."""
    exponent = np.frexp(x.astype(np.float64))[1] - 1
    return np.maximum(np.ldexp(1.0, exponent - 17), 2.0**-126)


def test_kahan_keeps_what_rounding_loses():
    stored, kept, master = exhausted("kahan")
    np.testing.assert_array_equal(stored[FINITE], oracle.nearest(X[FINITE], oracle.BFLOAT16))
    whole = FINITE & (stored & 0x7FFF < 0x7F80)
    assert (kept[~whole] == 0).all()  # NaN, Inf, and what is nearest to Inf
    np.testing.assert_array_equal(np.isnan(X), np.isnan(master))
    x = X[whole]
    lost = x.astype(np.float64) - oracle.floats(stored[whole], oracle.BFLOAT16)
    arithmetic = np.abs(lost) >= 2.0**-126
    assert (lost == lost.astype(np.float32)).all()
    expected = oracle.nearest(lost[arithmetic], oracle.BFLOAT16)
    np.testing.assert_array_equal(kept[whole][arithmetic], expected)
    assert (np.abs(x - master[whole].astype(np.float64)) <= kahan_bound(x)).all()
    assert (master[X == 0] == 0).all()


# In units in the last place of float32, of which a bfloat16 has 65,536 to a spacing; `kahan` of its largest rests.
RESOLVED = {"kahan": 128, "split24": 256, "split32": 1}
SPACING, ULP = 2.0**-7, 2.0**-23  # of bfloat16 and of float32 in [1, 2)


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def summed(how, mean, deviation, steps):
    """Sums of random steps from 1: the master, `nearest`, the exact sum in two parts, how far the worst step is off."""

    def step(carry, key):
        stored, kept, plain, total, low, worst = carry
        u = mean + deviation * jax.random.normal(key, (64,))
        old = rounding.get(how).join(stored, kept)
        stored, kept, new = taken_apart(how, old + u)
        worst = jnp.maximum(worst, jnp.abs((new - old) - u))
        plain = rounding.nearest_bfloat16(jax.lax.bitcast_convert_type(plain << 16, F32) + u, stored)
        more = total + u
        low = low + ((total - more) + u)  # what the float32 sum loses
        return (stored, kept, plain, more, low, worst), None

    one, none, zero = jnp.full(64, 0x3F80, jnp.uint32), jnp.zeros(64, jnp.uint32), jnp.zeros(64)
    start = (one, none, one, zero + 1.0, zero, zero)
    end, _ = jax.lax.scan(step, start, jax.random.split(jax.random.key(3), steps))
    return rounding.get(how).join(*end[:2]), *end[2:]


@pytest.mark.parametrize(("how", "spacings"), [("split32", 1e-3), ("kahan", 1e-3), ("split24", 4e-3)])
def test_sums_of_steps_far_below_a_spacing(how, spacings):
    """Steps of both signs, of random sizes, that sum up: `nearest` loses all of them.

    Each is off by half of what is resolved at most, and by a rounding of float32. Sizes are spread over half of what is
    resolved at least, so that errors are as good as independent, and none has a side.
    """
    steps, size = 100_000, spacings * SPACING
    master, plain, total, low, worst = map(np.asarray, summed(how, 0.15 * size, size, steps))
    exact = total.astype(np.float64) + low
    assert (plain == 0x3F80).all()
    assert (exact - 1 > 10 * SPACING).all()
    assert (exact < 2).all()
    assert worst.max() <= (RESOLVED[how] / 2 + 1) * ULP
    error = master - exact
    deviation = RESOLVED[how] * ULP * (steps / 12) ** 0.5
    print(
        f"{how}: moved {(exact - 1).mean() / SPACING:.1f} spacings, off by {np.abs(error).max() / SPACING:.4f}, ",
        end="",
    )
    print(f"{error.mean() / SPACING:.4f} on average, {np.sqrt((error**2).mean()) / deviation:.2f} deviations")
    assert np.abs(error).max() <= 5 * deviation
    assert np.abs(error.mean()) <= 5 * deviation / error.size**0.5


@pytest.mark.parametrize(("how", "ulps"), [("split32", 0.5), ("split24", 128), ("kahan", 64)])
def test_equal_steps_below_half_of_what_is_resolved_are_lost(how, ulps):
    """A deterministic rounding with fewer bits than float32 stalls later than `nearest`, but stalls."""
    for factor, moves in ((0.9, False), (1.1, True)):
        master, *_ = summed(how, factor * ulps * ULP, 0.0, 5000)
        assert (np.asarray(master) > 1 + 128 * ulps * ULP * 2).all() == moves


def moments_of(opt, state):
    return [getattr(state, name + end) for name in opt.moments for end in ("", "_scale")]


@pytest.mark.parametrize("codec", ["offset", "float32"])
@pytest.mark.parametrize("opt", **named((ADAMW, LION)))
def test_split32_trains_as_float32_does(opt, codec):
    """Step for step, bit for bit: parameters, codes and scales."""
    half, whole = opt(rounding="split32", codec=codec), opt(codec=codec)
    params = small()
    master = jax.tree.map(lambda p: p.astype(F32), params)
    state, reference = half.init(params), whole.init(master)
    for i in range(50):
        grads = grads_like(params, i, dtype=F32)
        params, state = half.step(grads, state, params)
        master, reference = whole.step(grads, reference, master)
        assert_same_bits(sr8.master_params(half, params, state), master)
        assert_same_bits(moments_of(opt, state), moments_of(opt, reference))
    assert (np.asarray(params["layer"]["kernel"], np.float32) != np.asarray(master["layer"]["kernel"])).mean() > 0.9


def mixed():
    """Leaves with moments in 8 bits and in float32, and one of float32, beside which nothing is kept."""
    return small() | {"norm": normal((40,), 5, 1.0, F32)}


@pytest.mark.parametrize("opt", **named((ADAMW, LION)))
def test_split32_goes_on_from_float32_weights(opt):
    """From weights that are no multiples of their spacing: every step bit for bit, those in a chain and in jit too."""
    half, whole = sr8.chain(optax.clip_by_global_norm(1.0), opt(rounding="split32")), opt()
    master = jax.tree.map(lambda p: normal(p.shape, p.size, 0.02, F32), small())
    params, state = jax.jit(lambda master: sr8.from_master(half, master))(master)
    assert {p.dtype for p in jax.tree.leaves(params)} == {jnp.dtype(BF16)}
    reference = whole.init(master)
    clip = optax.clip_by_global_norm(1.0)
    for i in range(10):
        assert_same_bits(sr8.master_params(half, params, state), master)
        grads = grads_like(params, i, dtype=F32)
        params, state = half.step(grads, state, params)
        clipped, _ = clip.update(grads, clip.init(master))
        master, reference = whole.step(clipped, reference, master)


@EVERY_CORRECTED
def test_float32_weights_are_kept_as_far_as_the_rounding_can(how):
    master = {
        "w": normal((64, 300), 1, 1.0, F32),
        "gain": normal((300,), 2, 1.0, F32),
        "b": normal((40,), 3, 1.0, BF16),
    }
    tx = ADAMW(rounding=how)
    params, state = sr8.from_master(tx, master, narrow=lambda path, leaf: path != "gain")
    assert [params[name].dtype for name in ("w", "gain", "b")] == [BF16, F32, BF16]
    differ = np.asarray(params["w"]) != np.asarray(master["w"].astype(BF16))
    assert differ.mean() <= (2**-7 if how == "split24" else 0)  # `split24` rounds to 24 bits first; there are no ties
    assert_same_bits({k: params[k] for k in ("gain", "b")}, {k: master[k] for k in ("gain", "b")})
    back = sr8.master_params(tx, params, state)
    assert_same_bits(back["gain"], master["gain"])
    error = np.abs(np.asarray(back["w"]) / np.asarray(master["w"]) - 1).max()
    assert error <= {"kahan": 2**-17, "split24": 2**-16, "split32": 0}[how]
    assert error >= {"kahan": 2**-19, "split24": 2**-18, "split32": 0}[how]
    assert_same_bits(tx.init(params)._replace(correction=state.correction), state)
    tx.step(params, state, params)


@pytest.mark.skipif(jax.device_count() < meshes.DEVICES, reason="needs eight devices")
@meshes.KINDS
def test_float32_weights_go_on_where_they_are(kind):
    mesh = meshes.mesh_of((4, 2), kind)
    master, tx = {"w": normal((64, 512), 1, 1.0, F32)}, ADAMW(rounding="split24")
    alone = sr8.from_master(tx, master)
    with meshes.within(mesh):
        placed = jax.device_put(master, jax.NamedSharding(mesh, jax.P("a", "b")))
        params, state = sr8.from_master(tx, placed)
        assert_same_bits((params, state), alone)
        assert params["w"].sharding == placed["w"].sharding
        meshes.assert_placed_like(state, sr8.shardings(tx, params))


def test_nothing_goes_on_where_nothing_is_kept():
    wide = jax.tree.map(lambda p: p.astype(F32), small())
    with pytest.raises(ValueError, match=r"float32 to bfloat16 by 'stochastic'.*'split24'.*tx\.init"):
        sr8.from_master(ADAMW(), wide)
    with pytest.raises(ValueError, match="here: bfloat16 to bfloat16 by 'kahan'"):
        sr8.from_master(ADAMW(rounding="kahan"), small())
    with pytest.raises(ValueError, match="here: float32 to float32 by 'kahan'"):
        sr8.from_master(ADAMW(rounding="kahan"), wide, narrow=lambda path, leaf: False)
    with pytest.raises(TypeError, match="expected an optimizer"):
        sr8.from_master(optax.adamw(1e-3), small())
    with pytest.raises(TypeError, match="w: int32"):
        sr8.from_master(ADAMW(rounding="kahan"), {"w": jnp.zeros((3,), jnp.int32)})


@EVERY_CORRECTED
def test_what_a_state_keeps(how):
    tx, params = ADAMW(rounding=how), mixed()
    correction = tx.init(params).correction
    assert (correction["norm"].dtype, correction["norm"].shape) == (jnp.uint8, (1,))  # unused
    for name, param in params["layer"].items():
        kept = correction["layer"][name]
        assert (kept.dtype, kept.shape) == (CORRECTED[how], param.shape)
        assert not np.asarray(kept).any()
    assert jax.tree.structure(correction) == jax.tree.structure(params)
    assert ADAMW().init(params).correction is None


@EVERY_CORRECTED
def test_every_door_gives_the_same(how):
    """Under jit too. What is stored are two bfloat16s, so that a float32 difference of them lands exactly."""
    params = mixed()
    tx, there = (ADAMW(rounding=how, **kwargs) for kwargs in ({}, {"in_place": True}))
    params, state = run(tx.step, params, tx.init(params), 2)
    assert all(np.asarray(x).any() for x in jax.tree.leaves(state.correction["layer"]))
    grads = grads_like(params, 2)
    desired = tx.step(grads, state, params)

    def through_updates(tx):
        def advance(grads, state, params):
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        return advance

    halves = [(p["layer"], s) for p, s in (desired, through_updates(tx)(grads, state, params))]
    assert_same_bits(*halves)  # the float32 leaf by a difference is an ulp off
    assert_same_bits(jax.jit(tx.step)(grads, state, params), desired)
    assert_same_bits(jax.jit(through_updates(there))(grads, state, params), desired)


@EVERY_CORRECTED
def test_donated_corrections_are_stepped_in_place(how):
    tx = ADAMW(rounding=how)
    params = {"w": jax.ShapeDtypeStruct((1024, 4096), BF16), "norm": jax.ShapeDtypeStruct((4096,), F32)}
    state = jax.eval_shape(tx.init, params)
    analysis = jax.jit(tx.step, donate_argnums=(1, 2)).lower(params, state, params).compile().memory_analysis()
    kept = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves((params, state)))
    assert kept >= (4 + jnp.dtype(CORRECTED[how]).itemsize) * 1024 * 4096
    assert analysis.alias_size_in_bytes >= kept - 256


@EVERY_CORRECTED
def test_states_with_corrections_are_saved(how, tmp_path):
    tx, params = ADAMW(rounding=how), mixed()
    params, state = run(tx.step, params, tx.init(params), 2)
    desired = tx.step(grads_like(params, 2), state, params)
    checkpointer = ocp.StandardCheckpointer()
    checkpointer.save(tmp_path / "saved", state)
    checkpointer.wait_until_finished()
    template = jax.eval_shape(tx.init, params)
    for other in (checkpointer.restore(tmp_path / "saved", template), pickle.loads(pickle.dumps(state))):
        assert jax.tree.structure(other) == jax.tree.structure(state)
        assert_same_bits(other, state)
        sr8.check(other, tx, params)
        assert_same_bits(tx.step(grads_like(params, 2), other, params), desired)


@EVERY_CORRECTED
def test_other_dtypes_are_refused(how):
    params = {"a": jnp.zeros((4, 64), BF16), "head": {"w": jnp.zeros((4, 64), F16)}}
    for call in (ADAMW(rounding=how).init, lambda p: sr8.explain(ADAMW(rounding=how), p)):
        with pytest.raises(ValueError, match=rf"head/w is float16, '{how}' takes \['bfloat16'\]"):
            call(params)
    ADAMW(rounding={"head/w": "nearest", "*": how}).init(params)


def test_check_names_corrections_that_are_wrong():
    params = mixed()
    states = {how: ADAMW(rounding=how).init(params) for how in (*CORRECTED, "stochastic")}
    for how, state in states.items():
        tx = ADAMW(rounding=how)
        sr8.check(state, tx, params)
        if how == "stochastic":
            continue
        for other in states.keys() - {how}:
            wrong = state._replace(correction=states[other].correction)
            for call in (lambda: sr8.check(wrong, tx, params), lambda: tx.step(params, wrong, params)):  # noqa: B023
                with pytest.raises(ValueError, match=r"correction(/layer/kernel)? is"):
                    call()
    state = states["split32"]
    for correction in (
        state.correction | {"norm": jnp.zeros((40,), jnp.uint16)},
        state.correction | {"layer": state.correction["layer"] | {"bias": jnp.zeros((41,), jnp.uint16)}},
    ):
        with pytest.raises(ValueError, match=r"correction/(norm|layer/bias) is uint16"):
            sr8.check(state._replace(correction=correction), ADAMW(rounding="split32"), params)


def test_corrections_pass_optax_masks_and_partitions():
    """Every parameter has an array, so that what Optax maps over parameters takes corrections for what they are."""
    params, grads = mixed(), grads_like(mixed(), 0)
    mask = {"layer": {"kernel": True, "bias": False}, "norm": True}
    for tx in (
        optax.masked(ADAMW(rounding="kahan"), mask),
        optax.partition({"a": ADAMW(rounding={"*kernel": "split24"}), "b": sr8.sgd(1e-2)}, {"layer": "a", "norm": "b"}),
    ):
        tx.update(grads, tx.init(params), params)
    tx = ADAMW(rounding={"*kernel": "split24"})
    optax.tree.map_params(tx, lambda array, param: array, tx.init(params), params)
    with pytest.raises(ValueError, match="params="):
        sr8.check(tx.init(params), tx)
