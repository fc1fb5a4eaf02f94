"""`quantize_moments` and `stochastic_round`: any chain of Optax, with this library's moments and rounding."""

import functools
import re

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from tables import BF16, F32, assert_same_bits, avals, door_1, grads_like, normal, run, tree

import optax_sr8bit as sr8

MASKED = functools.partial(optax.tree.map_params, is_leaf=lambda x: isinstance(x, optax.MaskedNode))
LEARNING_RATE = optax.linear_schedule(1e-2, 5e-3, 100)


def adamw_chain(codec="offset", rounding="stochastic", **kwargs):
    """AdamW out of Optax's links."""
    moments = sr8.quantize_moments(optax.scale_by_adam(), codec, **kwargs)
    decay, rate = optax.add_decayed_weights(0.1), optax.scale_by_learning_rate(LEARNING_RATE)
    return sr8.chain(moments, decay, rate, sr8.stochastic_round(0, rounding=rounding))


def exact_chain(rounding="stochastic", **kwargs):
    """The same with powers of two, so that Optax's products are exact, however XLA contracts them with additions."""
    moments = sr8.quantize_moments(optax.scale_by_adam(b1=0.5, b2=0.5), **kwargs)
    decay, rate = optax.add_decayed_weights(0.125), optax.scale_by_learning_rate(2.0**-7)
    return sr8.chain(moments, decay, rate, sr8.stochastic_round(0, rounding=rounding))


def wide(dtype=BF16, rows=16):
    return {"layer": {"kernel": normal((rows, 700), 0, 0.02, dtype), "bias": normal((64,), 1, 0.02, dtype)}}


# --- The same optimizer -----------------------------------------------------------------------------------------------


def test_in_float32_it_is_optax():
    params, tx, reference = tree(F32), adamw_chain("float32"), optax.adamw(LEARNING_RATE, weight_decay=0.1)
    ours, _ = run(jax.jit(tx.step), params, tx.init(params), 100)
    theirs, _ = run(door_1(reference, jit=True), params, reference.init(params), 100)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7), ours, theirs)


def test_in_8_bits_it_follows_adamw():
    inputs, hidden = normal((256, 64), 2), normal((64, 64), 3)
    targets = inputs @ hidden

    def loss(params):
        return jnp.mean((inputs @ params["w"].astype(F32) - targets) ** 2)

    def trained(tx):
        params = {"w": jnp.zeros((64, 64), BF16)}
        state, step = tx.init(params), jax.jit(lambda p, s: tx.step(jax.grad(loss)(p), s, p))
        losses = []
        for _ in range(300):
            params, state = step(params, state)
            losses.append(float(loss(params)))
        return np.array(losses)

    ours, native = trained(adamw_chain()), trained(sr8.adamw(LEARNING_RATE, weight_decay=0.1))
    assert native[-1] < 0.4 * native[0]
    np.testing.assert_allclose(ours, native, rtol=0.03)


@pytest.mark.parametrize("codec", ["offset", "dynamic", "four_bit", sr8.codecs.Fp8(scales="power_of_two")])
def test_codes_are_those_of_the_native_optimizer(codec):
    """A leaf whose path has the same name draws the same bits; with b = 1/2 products are exact, however contracted."""
    params = {"w": normal((16, 700), 0, 0.02, F32)}
    tx = optax.chain(sr8.quantize_moments(optax.trace(0.5), codec), optax.scale(-1e-3), sr8.stochastic_round(0))
    native = sr8.sgd(1e-3, momentum=0.5, codec=codec)
    state, other = tx.init(params), native.init({"trace": params})
    update, step = jax.jit(tx.update), jax.jit(native.step)
    for i in range(3):
        grads = grads_like(params, i)
        _, state = update(grads, state, params)
        _, other = step({"trace": grads}, other, {"trace": params})
        assert_same_bits(
            (state[0].inner.trace, state[0].scale.trace), (other.trace["trace"], other.trace_scale["trace"])
        )


@pytest.mark.parametrize("rounding", ["stochastic", "kahan"])
def test_the_doors_are_equal(rounding):
    params, tx = wide(), exact_chain(rounding)
    by_step, by_update = (run(f, params, tx.init(params), 2) for f in (jax.jit(tx.step), door_1(tx, jit=True)))
    assert_same_bits(by_update, by_step)


def test_the_rounding_takes_updates_in_place_and_8_bit_parameters():
    links = optax.scale_by_sign(), optax.scale(-1e-2)
    tx, in_place = (sr8.chain(*links, sr8.stochastic_round(0, in_place=b)) for b in (False, True))
    params = {"w": normal((16, 512), 0, 0.1, jnp.float8_e4m3fn)}
    grads = {"w": normal((16, 512), 1, 1.0)}
    stepped, _ = jax.jit(tx.step)(grads, tx.init(params), params)
    applied, _ = jax.jit(door_1(in_place))(grads, in_place.init(params), params)
    assert_same_bits(applied, stepped)
    assert stepped["w"].dtype == jnp.float8_e4m3fn
    moved = stepped["w"].astype(F32) - params["w"].astype(F32)
    np.testing.assert_allclose(-jnp.mean(moved * jnp.sign(grads["w"])), 1e-2, rtol=0.1)


def test_rounding_is_right_on_average():
    params = {"w": jnp.ones((64, 512), BF16)}
    tx = sr8.stochastic_round(3)
    params, state = jax.jit(tx.step)({"w": jnp.full((64, 512), 1e-3)}, tx.init(params), params)
    np.testing.assert_allclose(jnp.mean(params["w"].astype(F32)), 1.001, atol=1e-4)
    assert state._fields == ("count", "seed", "format", "correction")


# --- What is kept -----------------------------------------------------------------------------------------------------


def test_a_wide_leaf_costs_4_bytes_a_parameter_and_compiles_once():
    params, tx = {"w": normal((64, 1024), 0, 0.02, BF16)}, adamw_chain()
    state = tx.init(params)
    step = jax.jit(tx.step, donate_argnums=(1, 2))
    kept = sum(x.nbytes for x in jax.tree.leaves((params, state)))
    assert kept / params["w"].size < 4.04
    before = avals(state)
    params, state = run(step, params, state, 3)
    assert avals(state) == before
    assert step._cache_size() == 1
    assert avals(jax.eval_shape(tx.init, params)) == before


def test_small_leaves_are_float32_whatever_the_parameter():
    state = sr8.quantize_moments(optax.scale_by_adam()).init({"b": jnp.ones((64,), BF16), "s": jnp.ones((), BF16)})
    assert {x.dtype for x in jax.tree.leaves((state.inner.mu, state.inner.nu))} == {jnp.dtype(F32)}


def test_the_sign_is_read_off_optax_states():
    params = {"w": normal((8, 512), 0)}
    grads = {"w": normal((8, 512), 1)}
    inner = optax.chain(optax.scale_by_adam(b1=0.5, b2=0.5), optax.trace(0.5))
    tx = sr8.quantize_moments(inner, sr8.codecs.Offset("nearest"))
    signed = sr8.quantize_moments(optax.trace(0.5), unsigned="trace/*")
    _, state = jax.jit(tx.update)(grads, tx.init(params))
    mu, nu = state.inner[0].mu["w"], state.inner[0].nu["w"]
    np.testing.assert_array_equal((mu > 127), (grads["w"] < 0))
    assert int(jnp.max(nu)) == 255  # all bits are magnitude
    assert int(jnp.max(state.inner[1].trace["w"] & 127)) == 127
    _, state = signed.update(jax.tree.map(jnp.abs, grads), signed.init(params))
    assert int(jnp.max(state.inner.trace["w"])) == 255


def test_select_by_array():
    params = {"a": normal((8, 512), 0, 1.0, BF16), "b": normal((8, 512), 1, 1.0, BF16)}
    tx = sr8.quantize_moments(
        optax.chain(optax.scale_by_adam(), optax.ema(0.9)),
        select={"*/mu/a": "bfloat16", "*/nu/*": None, "*/ema/b": sr8.codecs.Dynamic()},
    )
    state = tx.init(params)
    assert [str(state.inner[0].mu[k].dtype) for k in "ab"] == ["bfloat16", "uint8"]
    assert [str(state.inner[0].nu[k].dtype) for k in "ab"] == ["float32", "float32"]
    # version, log2 of the block, then mu, nu, ema, each of a and b
    assert state.format.tolist() == [1, 8, 256, 1, 0, 0, 1, sr8.codecs.Dynamic.number]
    by_function = sr8.quantize_moments(
        optax.scale_by_adam(), select=lambda path, leaf: "bfloat16" if path == "mu/a" else "float32"
    )
    assert by_function.init(params).format.tolist() == [1, 8, 256, 0, 0, 0]


def test_bfloat16_is_rounded_stochastically():
    params = {"w": jnp.zeros((64, 512))}
    tx = sr8.quantize_moments(optax.trace(1.0), select={"trace/*": "bfloat16"})
    state = tx.init(params)
    update = jax.jit(tx.update)
    _, state = update({"w": jnp.ones((64, 512))}, state)
    for _ in range(20):
        _, state = update({"w": jnp.full((64, 512), 1e-3)}, state)  # a fourth of half a spacing
    np.testing.assert_allclose(jnp.mean(state.inner.trace["w"].astype(F32)), 1.02, atol=1e-3)


def test_denominators_are_not_zero_beside_numerators_that_are_not():
    params = {"w": jnp.zeros((8, 512))}
    grads = {"w": jnp.full((8, 512), 1e-5).at[:, 0].set(1.0)}
    tx = sr8.quantize_moments(optax.scale_by_adam())
    state, update = tx.init(params), jax.jit(tx.update)
    for _ in range(10):
        updates, state = update(grads, state)
    assert float(jnp.max(jnp.abs(updates["w"]))) < 2.0


def test_what_is_not_finite_becomes_zero_with_its_partner():
    params = {"w": jnp.zeros((8, 512)), "b": jnp.zeros((8,))}
    grads = {"w": jnp.ones((8, 512)).at[0, 0].set(1e30).at[0, 1].set(jnp.nan), "b": jnp.ones((8,)).at[0].set(jnp.inf)}
    tx = sr8.quantize_moments(optax.scale_by_adam())
    _, state = jax.jit(tx.update)(grads, tx.init(params))
    _, state = jax.jit(tx.update)(jax.tree.map(jnp.ones_like, grads), state)  # nothing is left of it
    for moment in (state.scale.mu, state.scale.nu, state.inner.mu["b"], state.inner.nu["b"]):
        assert all(bool(jnp.all(jnp.isfinite(x)) and jnp.max(x) < 10) for x in jax.tree.leaves(moment))
    kept = sr8.quantize_moments(optax.scale_by_adam(), select={"*": None})
    _, state = jax.jit(kept.update)(grads, kept.init(params))
    assert not bool(jnp.all(jnp.isfinite(state.inner.mu["w"])))


def test_noise_depends_on_no_other_leaf():
    one, two = wide(), wide() | {"another": normal((32, 300), 5, 0.02, BF16)}
    grads = grads_like(two, 1)
    results = []
    tx = sr8.quantize_moments(optax.scale_by_adam())
    for params in (one, two):
        updates, state = jax.jit(tx.update)({k: grads[k] for k in params}, tx.init(params))
        results.append((updates["layer"], state.inner.mu["layer"], state.inner.nu["layer"]))
    assert_same_bits(*results)


@pytest.mark.parametrize("inner", [optax.sm3(1e-3), optax.amsgrad(1e-3), optax.rmsprop(1e-3, centered=True)])
def test_other_optimizers_step(inner):
    params = wide()
    tx = sr8.chain(sr8.quantize_moments(inner), sr8.stochastic_round(0))
    params, _ = run(jax.jit(tx.step), params, tx.init(params), 20)
    assert all(bool(jnp.all(jnp.isfinite(x.astype(F32)))) for x in jax.tree.leaves(params))


def test_copies_of_parameters_are_bfloat16():
    params = {"w": normal((16, 512), 0, 1.0, BF16)}
    for codec, dtype in (("offset", BF16), ({"w": "float32"}, F32)):
        tx = sr8.quantize_moments(optax.contrib.schedule_free_sgd(), codec)
        assert_same_bits(tx.init(params).inner.z["w"], params["w"].astype(dtype))


def test_centered_averages_stay_float32():
    state = sr8.quantize_moments(optax.scale_by_stddev()).init(wide())
    assert {x.dtype for x in jax.tree.leaves((state.inner.mu, state.inner.nu))} == {jnp.dtype(F32)}


# --- Trees, files, meshes ---------------------------------------------------------------------------------------------


def test_map_params_finds_codes_and_scales():
    params, tx = wide(), adamw_chain()
    state = tx.init(params)
    seen = []
    optax.tree.map_params(tx, lambda x, p: seen.append((x.shape[:-1], p.shape[:-1])), state, params)
    assert len(seen) == 8  # two moments of two leaves, and their scales
    assert all(mine == theirs for mine, theirs in seen)
    masked = sr8.quantize_moments(optax.masked(optax.scale_by_adam(), {"layer": {"kernel": True, "bias": False}}))
    counted = MASKED(masked, lambda x, p: 0 if isinstance(x, optax.MaskedNode) else 1, masked.init(params), params)
    assert sum(jax.tree.leaves(counted.scale)) == 2


@pytest.mark.parametrize("through", ["flax", "orbax"])
def test_round_trips(through, tmp_path):
    params, tx = wide(), adamw_chain(select={"mu/layer/kernel": "bfloat16"})
    _, state = run(jax.jit(tx.step), params, tx.init(params), 2)
    if through == "flax":
        restored = flax.serialization.from_bytes(tx.init(params), flax.serialization.to_bytes(state))
    else:
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(tmp_path / "state", state)
            checkpointer.wait_until_finished()
            restored = checkpointer.restore(tmp_path / "state", jax.eval_shape(tx.init, params))
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    assert_same_bits(restored, state)
    jax.jit(tx.step)(grads_like(params, 3), restored, params)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def test_eight_devices_give_the_bits_of_one(kind):
    tx, params = exact_chain(min_8bit_size=2048), wide()
    alone = run(jax.jit(tx.step), params, tx.init(params), 3)
    mesh = jax.make_mesh((8,), ("a",), axis_types=(kind,))
    rows = {"layer": {"kernel": NamedSharding(mesh, P("a")), "bias": NamedSharding(mesh, P("a"))}}
    params = jax.device_put(params, rows)
    placed = sr8.shardings(tx, params)
    assert placed[0].inner.mu["layer"]["kernel"].spec == placed[0].scale.mu["layer"]["kernel"].spec == P("a")
    with jax.set_mesh(mesh):
        for state in (tx.init(params), jax.jit(tx.init)(params)):
            assert state[0].inner.nu["layer"]["kernel"].sharding.is_equivalent_to(rows["layer"]["kernel"], 2)
        cut = run(jax.jit(tx.step), params, state, 3)
        assert cut[1][0].inner.nu["layer"]["kernel"].sharding.is_equivalent_to(rows["layer"]["kernel"], 2)
    assert_same_bits(cut, alone)


def test_an_ensemble_under_vmap():
    params, tx = jax.tree.map(lambda x: jnp.stack([x, x]), wide()), adamw_chain()
    stepped, _ = jax.jit(jax.vmap(tx.step))(params, jax.vmap(tx.init)(params), params)
    alone, _ = jax.jit(tx.step)(wide(), tx.init(wide()), wide())
    first = stepped["layer"]["kernel"].astype(F32)
    np.testing.assert_allclose(first[0], first[1])
    np.testing.assert_allclose(first[0], alone["layer"]["kernel"].astype(F32), rtol=2.0**-7)


def test_sr8_inject_hyperparams():
    def make(learning_rate):
        moments = sr8.quantize_moments(optax.scale_by_adam())
        return sr8.chain(moments, optax.scale_by_learning_rate(learning_rate), sr8.stochastic_round(0))

    tx, params = sr8.inject_hyperparams(make)(learning_rate=1e-2), wide()
    assert_same_bits(
        run(jax.jit(tx.step), params, tx.init(params), 2)[0],
        run(jax.jit(make(1e-2).step), params, make(1e-2).init(params), 2)[0],
    )


# --- Errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"codec": "offzet"}, "unknown codec 'offzet'"),
        ({"block_size": 100}, "block_size must be a power of two"),
        ({"select": {"mu/*": "bf16"}}, r"select\['mu/\*'\]: unknown codec 'bf16'.*\"bfloat16\", or None"),
        ({"select": {"moo/*": None}}, r"select: no array of the state matches \['moo/\*'\]; .* like \['mu/"),
        ({"unsigned": ["v/*"]}, r"unsigned: no array of the state matches \['v/\*'\]"),
        ({"codec": {"embedd": "float32"}}, r"codec: no array of the state matches \['embedd'\]"),
        ({"select": lambda path, leaf: "int8"}, "select function at mu/layer/bias: unknown codec 'int8'"),
        ({"seed": "zero"}, "seed must be an int"),
    ],
)
def test_arguments_out_of_range(arguments, told):
    with pytest.raises(ValueError, match=told):
        sr8.quantize_moments(optax.scale_by_adam(), **arguments).init(wide())


@pytest.mark.parametrize("how", ["eager", "jit"])
@pytest.mark.parametrize("arguments", [{"codec": "float32"}, {"block_size": 128}, {"select": {"mu/*": "bfloat16"}}])
def test_states_of_other_arguments_are_refused(arguments, how):
    params = wide()
    state = sr8.quantize_moments(optax.scale_by_adam()).init(params)
    update = sr8.quantize_moments(optax.scale_by_adam(), **arguments).update
    with pytest.raises(ValueError, match=r"built for other parameters or with other arguments: .*Pass the arguments"):
        (jax.jit(update) if how == "jit" else update)(params, state, params)


def test_what_cannot_be_wrapped():
    with pytest.raises(ValueError, match="in 8 bits already"):
        sr8.quantize_moments(sr8.adamw(1e-3))
    params, tx = wide(), sr8.quantize_moments(optax.scale_by_adam())
    with pytest.raises(ValueError, match="keeps a QuantizedState, got ScaleByAdamState"):
        tx.update(params, optax.scale_by_adam().init(params))
    odd = optax.GradientTransformation(lambda p: p["layer"], lambda u, s, p=None: (u, s))
    with pytest.raises(ValueError, match="must take the placeholder"):
        sr8.quantize_moments(odd).init(params)
    with pytest.raises(TypeError, match=re.escape("unexpected keyword argument 'codec'")):
        sr8.stochastic_round(0, codec="offset")


def test_pieces_in_a_shard_map_are_refused():
    tx, params = adamw_chain(), wide()
    state, mesh = tx.init(params), jax.make_mesh((8,), ("a",), axis_types=(AxisType.Auto,))

    def step(grads, state, params):
        return tx.step(grads, state, params, specs=P("a"))[0]

    with pytest.raises(ValueError, match="quantize_moments cannot step pieces"):
        jax.shard_map(step, mesh=mesh, in_specs=(P("a"), P(), P("a")), out_specs=P("a"))(params, state, params)
