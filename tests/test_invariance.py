"""Random bits are addressed, not drawn: what a step gives depends on seed, step, leaf, row and column, nothing else."""

import collections
import pickle

import flax.core
import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import linen as nn, nnx
from tables import (
    ADAMW,
    BF16,
    EVERY_KIND,
    EVERY_OPTIMIZER,
    EVERY_RULE,
    F16,
    F32,
    RULES,
    as_bits,
    assert_same_bits,
    decode_offset,
    door_1,
    grads_like,
    nnx_leaves,
    normal,
    run,
    small,
)

from optax_sr8bit.transform import _control


@EVERY_KIND
def test_leaves_around(opt):
    params = {**small(), "f16": normal((8, 512), 5, 0.02, F16), "f32": normal((8, 512), 6, 0.02, F32)}
    tx = opt()
    together, state = run(tx.step, params, tx.init(params), 2)
    for name in params:
        part, alone = {name: params[name]}, tx.init({name: params[name]})
        for i in range(2):
            part, alone = tx.step({name: grads_like(params, i)[name]}, alone, part)
        assert_same_bits(part[name], together[name])
        for field in (f + s for f in opt.moments for s in ("", "_scale")):
            assert_same_bits(getattr(alone, field)[name], getattr(state, field)[name])


@EVERY_OPTIMIZER
def test_jit_or_not_and_scan_or_loop(opt):
    params, tx, steps = small(), opt(optax.linear_schedule(1e-2, 0.0, 10)), 3
    desired = run(tx.step, params, tx.init(params), steps)
    grads = jax.tree.map(lambda *g: jnp.stack(g), *(grads_like(params, i) for i in range(steps)))
    scan = jax.jit(lambda c, gs: jax.lax.scan(lambda c, g: (tx.step(g, c[1], c[0]), None), c, gs)[0])
    assert_same_bits(scan((params, tx.init(params)), grads), desired)
    if opt not in RULES:
        return
    assert_same_bits(run(jax.jit(tx.step), params, tx.init(params), steps), desired)
    unrolled = jax.jit(lambda p, s: run(tx.step, p, s, steps))
    assert_same_bits(unrolled(params, tx.init(params)), desired)


@EVERY_RULE
def test_gradients_made_in_the_same_program(opt):
    """The producer of the gradients, fused with the step, does not change it."""
    params, tx = small(), opt()
    loss = lambda p: sum(jnp.sum(jnp.square(x.astype(F32) - 0.01)) for x in jax.tree.leaves(p))  # noqa: E731
    whole = jax.jit(lambda s, p: tx.step(jax.grad(loss)(p), s, p))
    desired = tx.step(jax.jit(jax.grad(loss))(params), tx.init(params), params)
    assert_same_bits(whole(tx.init(params), params), desired)


@pytest.mark.skipif(
    jax.default_backend() != "cpu", reason="a GPU divides otherwise than the compiler that folds constants"
)
@EVERY_RULE
def test_state_made_in_the_same_program(opt):
    """A count that is a constant of the program gives the bias corrections of one that is not.

    The compiler then knows the zero that keeps products and sums apart too: an ulp of float32 decides the rounding of
    one parameter in 65,536 otherwise.
    """
    params, tx = {"w": normal((64, 512), 0, 0.02, BF16)}, opt()
    grads, state = grads_like(params, 0), tx.init(params)
    hyper, rule = {k: jnp.float32(v) for k, v in tx.definition.hyperparameters.items()}, tx.definition.rule
    assert_same_bits(
        jax.jit(lambda: _control(rule, hyper, None, state.seed, state.count))(),
        _control(rule, hyper, None, state.seed, state.count),
    )
    (new, new_state), (desired, desired_state) = (
        jax.jit(lambda g, p: tx.step(g, tx.init(p), p))(grads, params),
        tx.step(grads, state, params),
    )
    assert np.sum(as_bits(new["w"]) != as_bits(desired["w"])) <= 5
    assert_same_bits(new_state, desired_state)


def restored_by_flax(state, template):
    return flax.serialization.from_bytes(template, flax.serialization.to_bytes(state))


@EVERY_KIND
def test_restart(opt, tmp_path):
    params, tx = small(), opt()
    middle, state = run(tx.step, params, tx.init(params), 2)
    desired = run(tx.step, middle, state, 2, first=2)
    pair = (middle, state)
    checkpointer = ocp.StandardCheckpointer()
    checkpointer.save(tmp_path / "state", pair)
    checkpointer.wait_until_finished()
    restored = {
        "pickle": pickle.loads(pickle.dumps(pair)),
        "numpy": jax.tree.map(np.asarray, pair),
        "flax": restored_by_flax(pair, (params, tx.init(params))),
        "orbax": checkpointer.restore(tmp_path / "state", jax.eval_shape(lambda: (params, tx.init(params)))),
    }
    for name, (p, s) in restored.items():
        assert jax.tree.structure(s) == jax.tree.structure(state), name
        assert_same_bits(s, state)
        assert_same_bits(run(opt().step, p, s, 2, first=2), desired)


@EVERY_RULE
def test_order_and_kind_of_containers(opt):
    params, tx = small(), opt()
    desired = tx.step(params, tx.init(params), params)
    backwards = dict(reversed(params.items()))
    ordered = collections.OrderedDict(reversed(params.items()))
    for same in (backwards, ordered, flax.core.freeze(params)):
        new, _ = tx.step(same, tx.init(same), same)
        assert_same_bits({k: new[k] for k in params}, desired[0])


class Model(nnx.Module):
    def __init__(self):
        self.embed = nnx.Embed(64, 128, param_dtype=BF16, rngs=nnx.Rngs(0))
        self.layers = nnx.List([nnx.Linear(128, 64, param_dtype=BF16, rngs=nnx.Rngs(i)) for i in range(2)])


@EVERY_RULE
def test_same_nnx_model_same_noise(opt, tmp_path):
    tx, state = opt(), nnx.state(Model(), nnx.Param)
    pure = nnx.to_pure_dict(state)
    grads = grads_like(pure, 0)
    grad_state = nnx.state(Model(), nnx.Param)
    nnx.replace_by_pure_dict(grad_state, grads)
    desired, desired_state = door_1(tx)(grads, tx.init(pure), pure)
    want = jax.tree.leaves(desired), jax.tree.leaves(desired_state)

    new, new_state = door_1(tx)(grad_state, tx.init(state), state)
    assert_same_bits((jax.tree.leaves(new), jax.tree.leaves(new_state)), want)

    model = Model()
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    optimizer.update(model, grad_state)
    assert_same_bits(nnx.to_pure_dict(nnx.state(model, nnx.Param)), desired)
    assert_same_bits(nnx_leaves(optimizer.opt_state), jax.tree.leaves(desired_state._asdict()))

    checkpointer = ocp.StandardCheckpointer()
    checkpointer.save(tmp_path / "model", state)
    checkpointer.wait_until_finished()
    typed = checkpointer.restore(tmp_path / "model", jax.eval_shape(lambda: state))
    untyped = checkpointer.restore(tmp_path / "model")  # nested dictionaries, with "value" as a last key
    assert "value" in untyped["embed"]["embedding"]
    like = jax.tree.structure(untyped)
    for restored, g in ((typed, grad_state), (untyped, jax.tree.unflatten(like, jax.tree.leaves(grad_state)))):
        new, new_state = door_1(tx)(g, tx.init(restored), restored)
        assert sorted(map(fingerprint, jax.tree.leaves(new))) == sorted(map(fingerprint, want[0]))


def fingerprint(x):
    return np.asarray(x).tobytes()


@EVERY_RULE
def test_same_linen_model_same_noise(opt, tmp_path):
    init = nn.with_partitioning(nn.initializers.normal(0.02), (None, "x"))
    module = nn.Dense(512, param_dtype=BF16, kernel_init=init, bias_init=nn.with_partitioning(nn.zeros, ("x",)))
    boxed = module.init(jax.random.key(0), jnp.ones((1, 64)))["params"]
    plain, tx = nn.meta.unbox(boxed), opt()
    grads = grads_like(boxed, 0)
    desired, desired_state = tx.step(nn.meta.unbox(grads), tx.init(plain), plain)
    new, new_state = tx.step(grads, tx.init(boxed), boxed)
    assert_same_bits(nn.meta.unbox(new), desired)
    assert_same_bits(nn.meta.unbox(new_state), desired_state)
    checkpointer = ocp.StandardCheckpointer()
    checkpointer.save(tmp_path / "linen", boxed)
    checkpointer.wait_until_finished()
    restored = checkpointer.restore(tmp_path / "linen", jax.eval_shape(lambda: boxed))
    assert_same_bits(tx.step(grads, tx.init(restored), restored)[0], new)


@pytest.mark.skipif(len(jax.devices()) < 2, reason="needs two devices")
@EVERY_RULE
def test_replicas_round_alike(opt):
    params, tx = small(), opt()
    grads = grads_like(params, 0)
    desired = tx.step(grads, tx.init(params), params)
    other = jax.device_put((grads, tx.init(params), params), jax.devices()[1])
    assert_same_bits(tx.step(*other), desired)
    mesh = jax.make_mesh((2,), ("x",), devices=jax.devices()[:2])
    everywhere = jax.device_put((grads, tx.init(params), params), jax.NamedSharding(mesh, jax.P()))
    replicas = tx.step(*everywhere)
    for shard in range(2):
        assert_same_bits(jax.tree.map(lambda x, i=shard: x.addressable_shards[i].data, replicas), desired)


@EVERY_OPTIMIZER
@pytest.mark.parametrize("codec", ["offset", "offset_wide"])
def test_mirrored_gradients_mirror_the_run(opt, codec):
    params = jax.tree.map(jnp.zeros_like, small())
    tx = opt(codec=codec)
    new, state = run(tx.step, params, tx.init(params), 3)
    mirrored, mirror_state = run(tx.step, params, tx.init(params), 3, scale=-1e-3)
    assert_same_bits(mirrored, jax.tree.map(jnp.negative, new))
    same = [*opt.unsigned, *(moment + "_scale" for moment in opt.moments)]
    assert_same_bits(*([getattr(of, field) for field in same] for of in (mirror_state, state)))


@EVERY_RULE
def test_constant_gradient_converges(opt):
    """With an asymmetric code of m and nearest rounding it ends at -0.585 instead."""
    params, tx = {"w": jnp.zeros((1, 64), F32)}, opt(1e-3, b1=0.99, b2=0.99, min_8bit_size=1)
    grads = {"w": jnp.full((1, 64), -1.0)}
    body = lambda c, _: (tx.step(grads, c[1], c[0]), None)  # noqa: E731
    (_, state), _ = jax.jit(lambda c: jax.lax.scan(body, c, length=2000))((params, tx.init(params)))
    m = decode_offset(state.mu["w"], state.mu_scale["w"], signed=True)
    np.testing.assert_allclose(m, -1.0, atol=1 / 16)  # a code at the top is 1/16 of it away from the next
    assert abs(m.mean() + 1) < 0.02


@EVERY_RULE
def test_64_bit_mode(opt):
    params, tx = small(), opt()
    desired = jax.tree.map(np.asarray, run(tx.step, params, tx.init(params), 2))
    with jax.enable_x64(True):
        fresh = opt()
        actual = run(jax.jit(fresh.step), params, fresh.init(params), 2)
        assert_same_bits(actual, desired)


def test_moments_are_bits_of_the_same_run_under_both_doors():
    params, tx = small(), ADAMW(delta_dtype=F32)
    _, by_step = run(tx.step, params, tx.init(params), 2)
    _, by_update = run(door_1(tx), params, tx.init(params), 2)
    assert_same_bits(by_update, by_step)
    assert (as_bits(by_step.mu["layer"]["kernel"]) != 0).mean() > 0.5
