"""What a factory returns and refuses: static to JAX, copied at will, the same bits whatever a compiler knows."""

import copy

import chex
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tables import BF16, EVERY_KIND, EVERY_OPTIMIZER, F32, assert_same_bits, grads_like, small

import optax_sr8bit as sr8
from optax_sr8bit_kernels import names


@EVERY_KIND
def test_it_is_static_to_jax_and_may_be_copied(opt):
    tx, params = opt(), small()
    state, grads = tx.init(params), grads_like(small(), 0)
    desired = tx.step(grads, state, params)
    assert jax.tree.leaves(tx) == []
    assert_same_bits(eqx.filter_jit(lambda tx, s, p: tx.step(grads, s, p))(tx, state, params), desired)
    assert_same_bits(copy.deepcopy(tx).step(grads, state, params), desired)
    assert_same_bits(jax.tree.map(lambda x: x, tx).step(grads, state, params), desired)


@EVERY_OPTIMIZER
def test_one_trace_for_all_steps(opt):
    chex.clear_trace_counter()
    tx, params = opt(optax.linear_schedule(1e-2, 0.0, 10)), small()
    step = jax.jit(chex.assert_max_traces(tx.step, n=1))
    state = tx.init(params)
    for i in range(3):
        params, state = step(grads_like(params, i), state, params)
    chex.assert_tree_all_finite(params)


@pytest.mark.parametrize("constant", ["gradients", "none"])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_what_the_compiler_knows_does_not_change_bits(constant, decay):
    tx = sr8.adamw(1e-2, weight_decay=decay)
    params = {"f": jax.random.normal(jax.random.key(0), (64, 512)), "h": jnp.full((64, 512), 0.3, BF16)}
    first, second = grads_like(params, 0), grads_like(params, 1)
    params, state = jax.jit(tx.step)(first, tx.init(params), params)
    desired = tx.step(second, state, params)
    programs = {
        "gradients": lambda: jax.jit(lambda s, p: tx.step(second, s, p))(state, params),
        "none": lambda: jax.jit(tx.step)(second, state, params),
    }
    assert_same_bits(programs[constant](), desired)


REFUSED = {
    "b2_is_one_in_float32": ({"b2": 1 - 1e-9}, "b2"),
    "infinite_rate": ({"learning_rate": float("inf")}, "learning_rate"),
    "schedule_for_b1": ({"b1": lambda count: 0.9}, "b1"),
    "complex_rate": ({"learning_rate": 1j}, "learning_rate"),
    "seed_is_text": ({"seed": "a"}, "seed"),
    "seed_is_bool": ({"seed": True}, "seed"),
    "codec_is_a_class": ({"codec": sr8.codecs.Offset}, r"Offset\(\)"),
    "rounding_is_a_class": ({"rounding": sr8.rounding.Nearest}, r"Nearest\(\)"),
    "codec_is_the_base_class": ({"codec": sr8.codecs.Codec()}, "codec"),
    "rounding_is_the_base_class": ({"rounding": sr8.rounding.Rounding()}, "rounding"),
    "in_place_is_text": ({"in_place": "no"}, "in_place"),
    "nesterov_is_text": ({"nesterov": "False"}, "nesterov"),
    "delta_dtype_is_fp8": ({"delta_dtype": jnp.float8_e4m3fn}, "delta_dtype"),
}


@pytest.mark.parametrize(("arguments", "named"), REFUSED.values(), ids=REFUSED)
def test_the_factory_refuses(arguments, named):
    with pytest.raises(ValueError, match=named):
        sr8.adamw(**({"learning_rate": 1e-3} | arguments))


def test_a_schedule_that_gives_no_scalar_is_named():
    params = small()
    for bad in (lambda count: None, lambda count: jnp.ones(1) * count):
        tx = sr8.adamw(bad)
        with pytest.raises(ValueError, match="learning_rate"):
            tx.step(params, tx.init(params), params)


def test_a_codec_function_that_gives_nonsense_names_the_leaf():
    with pytest.raises(ValueError, match=r"layer/kernel.*unknown codec 'int3'"):
        sr8.adamw(1e-3, codec=lambda path, leaf: "int3" if path.endswith("kernel") else "offset").init(small())


def test_a_codec_with_a_number_that_is_taken_is_refused():
    class Impostor(sr8.codecs.Float32):
        name, number = "impostor", sr8.codecs.Dynamic.number

    with pytest.raises(ValueError, match="dynamic"):
        sr8.adamw(1e-3, codec=Impostor())


@pytest.mark.parametrize("count", [np.int32(-1), np.float32(3), np.uint32(3), np.zeros(1, np.int32)])
def test_a_count_that_is_none_is_refused(count):
    tx, params = sr8.adamw(1e-3), small()
    state = tx.init(params)._replace(count=jnp.asarray(count))
    with pytest.raises(ValueError, match="count"):
        tx.step(params, state, params)
    with pytest.raises(ValueError, match="count"):
        sr8.check(state, tx)


def test_a_parameter_named_value_keeps_its_name():
    params = {"attn": {"value": jnp.ones((64, 128), BF16), "query": jnp.ones((64, 128), BF16)}}
    tx = sr8.adamw(1e-3, codec={"attn/value": "float32"})
    assert tx.init(params).mu["attn"]["value"].dtype == F32
    assert tx.init(params).mu["attn"]["query"].dtype == jnp.uint8


def test_varying_parameters_inside_shard_map_are_refused():
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
    tx, spec, params = sr8.adamw(1e-3), jax.sharding.PartitionSpec("x"), {"w": jnp.ones((64, 512), BF16)}
    inside = jax.shard_map(lambda p, s: tx.step(p, s, p)[0], mesh=mesh, in_specs=(spec, jax.P()), out_specs=spec)
    with pytest.raises(ValueError, match=r"shard_map.*'w': \['x'\].*specs="):
        jax.jit(inside)(params, tx.init(params))
    inside = jax.shard_map(lambda p: tx.init(p).mu, mesh=mesh, in_specs=spec, out_specs=spec)
    with pytest.raises(ValueError, match=r"shard_map.*'w': \['x'\].*tx\.init outside"):
        jax.jit(inside)(params)


def test_both_back_ends_have_the_same_names():
    triton_names = pytest.importorskip("optax_sr8bit_kernels.triton_names", reason="Triton cannot be installed here")
    defined = {n for n, value in vars(names).items() if getattr(value, "__module__", None) == names.__name__}
    public = {n for n in defined if not n.startswith("_")}
    assert public <= set(vars(triton_names))
    assert len(public) > 10
