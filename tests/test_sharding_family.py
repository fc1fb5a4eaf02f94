"""Steps over eight devices are those of one: of rules with norms or without moments, packed codes, corrections."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec as P
from tables import BF16, F32, assert_same_bits, grads_like, normal

import optax_sr8bit as sr8

pytestmark = pytest.mark.skipif(jax.device_count() < 8, reason="needs eight devices")

SPECS = {"rows": P("x"), "columns": P(None, "y"), "both": P("x", "y"), "whole": P()}
OPTIMIZERS = {
    "sgd": lambda: sr8.sgd(1e-2),
    "four_bit": lambda: sr8.adamw(1e-2, codec="four_bit"),
    "byte_scales": lambda: sr8.lion(1e-3, codec=sr8.codecs.Offset(scales="power_of_two")),
    "split24": lambda: sr8.adamw(1e-2, rounding={"rows": "split24", "both": "kahan"}),
    "ademamix": lambda: sr8.ademamix(1e-2),
    "lamb": lambda: sr8.lamb(1e-2, weight_decay=0.1),
    "lars": lambda: sr8.lars(1.0, weight_decay=0.1),
}
SUMS = ("lamb", "lars")  # of norms, over devices in another order


def params():
    return {name: normal((16, 1024), i, 0.02, BF16) for i, name in enumerate(SPECS)}


@functools.cache
def alone(name):
    """Parameters and state after three steps on one device."""
    tx, p = OPTIMIZERS[name](), params()
    state = tx.init(p)
    for i in range(3):
        p, state = tx.step(grads_like(p, i), state, p)
    return p, state


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_eight_devices_step_as_one(name, kind):
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(kind,) * 2)
    placed = {leaf: jax.NamedSharding(mesh, spec) for leaf, spec in SPECS.items()}
    tx, p = OPTIMIZERS[name](), jax.device_put(params(), placed)
    state = tx.init(p)
    wanted = sr8.shardings(tx, p)
    with jax.set_mesh(mesh):
        step = jax.jit(tx.step, donate_argnums=(1, 2), out_shardings=(placed, wanted))
        for i in range(3):
            p, state = step(jax.device_put(grads_like(params(), i), placed), state, p)
    for array, sharding in zip(jax.tree.leaves(state), jax.tree.leaves(wanted), strict=True):
        assert array.sharding.is_equivalent_to(sharding, array.ndim)
    if name not in SUMS:
        assert_same_bits((p, state), alone(name))
        return
    for a, b in zip(jax.tree.leaves(p), jax.tree.leaves(alone(name)[0]), strict=True):
        a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
        assert (a != b).mean() < 1e-3
        np.testing.assert_allclose(a, b, rtol=2.0**-6, atol=1e-6)  # where a sum rounds otherwise, a neighbour


@pytest.mark.parametrize("name", ["lamb", "split24"])
def test_inside_shard_map(name):
    """Pieces are stepped as the whole; norms are summed over the axes that cut a leaf."""
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    tx, p = OPTIMIZERS[name](), params()
    state = tx.init(p)
    placed = {leaf: jax.NamedSharding(mesh, spec) for leaf, spec in SPECS.items()}
    specs = jax.tree.map(lambda s: s.spec, sr8.shardings(tx, jax.device_put(p, placed)))
    into, out = (SPECS, specs, SPECS), (SPECS, specs)
    step = jax.shard_map(lambda g, s, q: tx.step(g, s, q, specs=SPECS), mesh=mesh, in_specs=into, out_specs=out)
    for i in range(3):
        p, state = jax.jit(step)(grads_like(params(), i), state, p)
    wanted, _ = alone(name)
    for a, b in zip(jax.tree.leaves(p), jax.tree.leaves(wanted), strict=True):
        assert (np.asarray(a, np.float32) != np.asarray(b, np.float32)).mean() < (1e-3 if name in SUMS else 1e-9)


def test_the_norm_of_the_clip_is_that_of_all_devices():
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    tx = sr8.chain(sr8.clip_by_global_norm(0.1), sr8.sgd(1.0, momentum=0.9))
    p = {"w": normal((16, 512), 0, 0.02, F32)}
    g = grads_like(p, 0, 1.0)
    want, _ = tx.step(g, tx.init(p), p)
    rows = jax.NamedSharding(mesh, P("x"))
    q, h = jax.device_put((p, g), rows)
    got, _ = jax.jit(tx.step)(h, tx.init(q), q)
    np.testing.assert_allclose(got["w"], want["w"], rtol=1e-5, atol=1e-7)
    moved = jnp.linalg.norm(want["w"] - p["w"])
    np.testing.assert_allclose(moved, 0.1, rtol=1e-5)


@pytest.mark.parametrize("name", ["lamb", "lars", "split24"])
def test_an_ensemble_over_an_explicit_axis(name):
    """Members are stepped where they are; each has norms of its own."""
    mesh = jax.make_mesh((8,), ("member",), axis_types=(AxisType.Explicit,))
    members = {"w": normal((8, 64, 128), 0, 0.02, BF16)}
    tx = OPTIMIZERS[name]() if name in SUMS else sr8.adamw(1e-2, rounding="split24")
    step = jax.jit(jax.vmap(lambda g, s, p: tx.step(g, s, p)[0]))
    grads, state = grads_like(members, 0), jax.vmap(tx.init)(members)
    cut = jax.NamedSharding(mesh, P("member"))
    got = step(*jax.device_put((grads, state, members), cut))
    want = step(grads, state, members)
    assert (np.asarray(got["w"], np.float32) != np.asarray(want["w"], np.float32)).mean() < 1e-3
