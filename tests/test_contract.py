"""What Optax's own contract tests ask of an optimizer, asked of every row of the table.

After `optax/_src/alias_test.py`, `optax/contrib/_common_test.py` and `optax/_src/sharding_test.py`. The targets are
tiled to 64 columns, so that the moments are really held in 8 bits.
"""

import inspect
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from tables import (
    BF16,
    EVERY_KIND,
    EVERY_OPTIMIZER,
    F16,
    F32,
    OPTIMIZERS,
    SHAPES,
    assert_same_bits,
    avals,
    door_1,
    grads_like,
    is_8bit,
    normal,
    scale_shape,
    small,
    tree,
)

import optax_sr8bit as sr8


def parabola(params):
    return jnp.sum(jnp.square(params - jnp.tile(jnp.array([1.0, -1.0, 0.5, 2.0], F32), 16)))


def rosenbrock(params):
    x, y = params
    return jnp.sum(jnp.square(1.0 - x) + 100.0 * jnp.square(y - x**2))


# name: (function, start, solution)
TARGETS = {
    "parabola": (parabola, np.linspace(-3, 3, 64), np.tile([1.0, -1.0, 0.5, 2.0], 16)),
    "rosenbrock": (rosenbrock, np.linspace(-1, 1, 128).reshape(2, 64), np.ones((2, 64))),
}


# In float32 too SGD leaves Rosenbrock's valley with such rates, and these have not come to its end after 3,000 steps.
NOT_IN_VALLEYS = ("sgd", "adagrad", "ademamix")
CONVERGE = [
    (opt, *target)
    for opt in OPTIMIZERS
    for target in (("parabola", BF16), ("rosenbrock", F32), ("rosenbrock", BF16))
    if target[0] == "parabola" or opt.name not in NOT_IN_VALLEYS
]


@pytest.mark.parametrize(
    ("opt", "target", "dtype"),
    CONVERGE,
    ids=[f"{opt.name}-{target}-{jnp.dtype(dtype).name}" for opt, target, dtype in CONVERGE],
)
def test_converges(opt, target, dtype):
    function, start, solution = TARGETS[target]
    steps = 3000
    tx = opt(optax.linear_schedule(opt.fast, 0.0, steps), min_8bit_size=1)
    params = jnp.asarray(start, dtype)

    def body(carry, _):
        params, state = carry
        # The function is evaluated in float32: BF16 would lose its minimum, whatever the optimizer does.
        grads = jax.grad(lambda p: function(p.astype(F32)))(params)
        return tx.step(grads, state, params), None

    (params, state), _ = jax.jit(lambda c: jax.lax.scan(body, c, length=steps))((params, tx.init(params)))
    assert getattr(state, opt.moments[0]).dtype == jnp.uint8
    # Optax's own tolerance for float32. BF16 has a spacing of 2^-7 near 1: the parabola ends within four of them, while
    # Rosenbrock's valley, curved 2,500 times less along than across, lets the noise of rounding drift along it.
    tolerance = {F32: 3e-2, BF16: 2.0**-5 if target == "parabola" else 0.2}[dtype]
    np.testing.assert_allclose(np.asarray(params, np.float32), solution, rtol=tolerance, atol=tolerance)


@EVERY_OPTIMIZER
def test_is_an_optax_transformation_with_step(opt):
    tx = opt()
    assert isinstance(tx, optax.GradientTransformationExtraArgs)
    init, update = tx
    assert (init, update) == (tx.init, tx.update)
    assert callable(tx.step)


@EVERY_OPTIMIZER
def test_signature_mirrors_optax(opt):
    ours, theirs = (inspect.signature(f).parameters for f in (opt.factory, opt.optax))
    positional = [n for n, p in theirs.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert [n for n, p in ours.items() if p.kind is p.POSITIONAL_OR_KEYWORD] == positional
    for name, parameter in theirs.items():
        assert (ours[name].default, ours[name].kind) == (parameter.default, parameter.kind), name
    own = {"seed": 0, "rounding": "stochastic", "codec": "offset", "block_size": 256, "min_8bit_size": 4096,
           "implementation": None}  # fmt: skip
    for name, default in own.items():
        assert (ours[name].default, ours[name].kind) == (default, inspect.Parameter.KEYWORD_ONLY), name


@pytest.mark.parametrize(
    ("opt", "name"), [(opt, name) for opt in OPTIMIZERS for name in opt.arguments if name.endswith("_dtype")]
)
def test_dtypes_of_moments_name_codec(opt, name):
    opt(**{name: None})
    with pytest.raises(ValueError, match="codec="):
        opt(**{name: BF16})


@EVERY_KIND
def test_accepts_extra_args_and_compiles_once(opt):
    tx, params, traces = opt(optax.linear_schedule(1e-2, 0.0, 100)), {"w": normal((16, 300), 0, 0.02, BF16)}, []

    @jax.jit
    def update(grads, state, params):
        traces.append("update")
        updates, state = tx.update(grads, state, params, unexpected_extra_argument=1)
        return optax.apply_updates(params, updates), state

    @jax.jit
    def step(grads, state, params):
        traces.append("step")
        return tx.step(grads, state, params, unexpected_extra_argument=1)

    for advance in (update, step):
        p, state = params, tx.init(params)
        for i in range(3):
            p, state = advance(grads_like(params, i), state, p)
        assert advance._cache_size() == 1  # also with the arrays that came out of the first call
    assert traces == ["update", "step"]


@EVERY_KIND
@pytest.mark.parametrize("grad_dtype", [BF16, F16, F32], ids=["g_bf16", "g_f16", "g_f32"])
@pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=["bf16", "f16", "f32"])
def test_dtypes(opt, dtype, grad_dtype):
    params = small(dtype)
    tx, grads = opt(), grads_like(params, 0, dtype=grad_dtype)
    state = tx.init(params)
    updates, after_update = jax.eval_shape(tx.update, grads, state, params)
    stepped, after_step = jax.eval_shape(tx.step, grads, state, params)
    assert {u.dtype for u in jax.tree.leaves(updates)} == {jnp.dtype(grad_dtype)}
    assert avals(stepped) == avals(params)
    assert avals(after_update) == avals(after_step) == avals(state)
    wide, _ = jax.eval_shape(opt(delta_dtype=F32).update, grads, state, params)
    assert {u.dtype for u in jax.tree.leaves(wide)} == {jnp.dtype(F32)}


@EVERY_KIND
@pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=["bf16", "f16", "f32"])
def test_state_is_stable_under_cond(opt, dtype):
    params = small(dtype)
    tx = opt()

    def choose(flag, grads, state, params):
        updates, state = jax.lax.cond(flag, lambda: tx.update(grads, state, params), lambda: (grads, state))
        return jax.lax.cond(flag, lambda: tx.step(grads, state, params), lambda: (params, state))

    state = tx.init(params)  # tracing alone refuses branches of different types
    assert avals(jax.eval_shape(choose, True, grads_like(params, 0), state, params)) == avals((params, state))


@EVERY_OPTIMIZER
def test_state_layout(opt):
    params = {name: jnp.zeros(shape, BF16) for name, shape in SHAPES.items()}
    state = opt().init(params)
    assert state._fields[: 1 + len(opt.moments)] == ("count", *opt.moments)
    assert state._fields[-3:] == ("seed", "format", "correction")
    assert state.correction is None
    assert (state.seed.dtype, state.seed.shape) == (jnp.uint32, (2,))
    assert state.format.dtype == jnp.uint32
    for name, shape in SHAPES.items():
        for moment in opt.moments:
            codes, scales = getattr(state, moment)[name], getattr(state, f"{moment}_scale")[name]
            assert (codes.shape, codes.dtype) == (shape, jnp.uint8 if is_8bit(shape) else F32), name
            assert (scales.ndim, scales.shape[:-1], scales.dtype) == (len(shape), shape[:-1], F32), name
            if is_8bit(shape):
                assert scales.shape == scale_shape(shape), name


@EVERY_OPTIMIZER
def test_init_on_abstract_leaves(opt):
    params, tx = tree(), opt()
    abstract = jax.eval_shape(lambda: params)
    state = tx.init(params)
    assert_same_bits(tx.init(abstract), state)
    for shapes in (jax.eval_shape(tx.init, params), jax.eval_shape(tx.init, abstract)):
        assert avals(shapes) == avals(state)
    assert jax.tree.structure(tx.init(jax.ShapeDtypeStruct((2, 4, 8), F32))) is not None


@EVERY_OPTIMIZER
def test_map_params(opt):
    params, tx = tree(), opt()
    state = tx.init(params)
    assert_same_bits(optax.tree.map_params(tx, lambda v: v, state), state)
    specs = jax.tree.map(lambda p: P(*"xyz"[: p.ndim]), params)
    mapped = optax.tree.map_params(tx, lambda _, spec: spec, state, specs, transform_non_params=lambda _: P())
    for moment in opt.moments:
        assert getattr(mapped, moment) == getattr(mapped, f"{moment}_scale") == specs
    assert mapped.count == mapped.seed == mapped.format == P()


@EVERY_OPTIMIZER
def test_strict_promotion(opt):
    params = {name: small(dtype) for name, dtype in (("bf16", BF16), ("f16", F16), ("f32", F32))}
    schedule = lambda count: jnp.float32(1e-3) / (1 + count.astype(F32))  # noqa: E731
    for learning_rate, grad_dtype in ((1e-3, BF16), (schedule, F32)):
        tx, grads = opt(learning_rate), grads_like(params, 0, dtype=grad_dtype)
        with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
            state = tx.init(params)
            jax.eval_shape(tx.step, grads, state, params)
            jax.eval_shape(tx.update, grads, state, params)


@EVERY_KIND
def test_type_of_the_learning_rate_does_not_matter(opt):
    params, results = {"w": normal((8, 512), 0, 0.02, BF16)}, []
    for rate in (2.0**-9, np.float64(2.0**-9), np.float32(2.0**-9), jnp.float32(2.0**-9), jnp.bfloat16(2.0**-9)):
        tx = opt(rate)
        updates, _ = jax.eval_shape(tx.update, params, tx.init(params), params)
        assert updates["w"].dtype == BF16
        results.append(tx.step(params, tx.init(params), params))
    for result in results[1:]:
        assert_same_bits(result, results[0])


@EVERY_KIND
def test_state_keeps_its_type_on_an_explicit_mesh(opt):
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Explicit,), devices=jax.devices()[:2])
    with jax.set_mesh(mesh):
        put = lambda x, spec: jax.device_put(x, jax.NamedSharding(mesh, spec))  # noqa: E731
        params = {"small": put(jnp.ones((2, 8, 4), BF16), P(None, "x")), "wide": put(jnp.ones((16, 512), BF16), P("x"))}
        tx = opt()
        state = tx.init(params)
        types = jax.tree.map(jax.typeof, state)
        assert jax.tree.map(jax.typeof, jax.jit(tx.init)(params)) == types
        assert jax.tree.map(jax.typeof, tx.update(params, state, params)[1]) == types
        assert jax.tree.map(jax.typeof, jax.jit(tx.step)(params, state, params)[1]) == types


def test_transformation_is_usable_without_jit_and_state_pickles():
    params, tx = small(), sr8.adamw(1e-3)
    state = pickle.loads(pickle.dumps(tx.init(params)))
    params_jit, state_jit = door_1(tx, jit=True)(grads_like(params, 0), state, params)
    updates, state = tx.update(grads_like(params, 0), state, params)
    assert_same_bits((optax.apply_updates(params, updates), state), (params_jit, state_jit))
