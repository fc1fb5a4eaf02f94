"""States saved, restored and damaged: nothing changes on the way, and damage is named before anything is computed."""

import pickle
import re

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from tables import (
    ADAMW,
    BF16,
    EVERY_RULE,
    F32,
    assert_same_bits,
    grads_like,
    normal,
    run,
    small,
)

import optax_sr8bit as sr8
from optax_sr8bit.checkpoint import convert

# Beyond a plain `offset` state, which test_invariance.py restores.
SAVED = {
    "chain": lambda: sr8.chain(optax.clip_by_global_norm(1.0), ADAMW(optax.linear_schedule(1e-2, 0.0, 9), seed=7)),
    "injected": lambda: sr8.inject_hyperparams(sr8.lion)(optax.linear_schedule(1e-2, 0.0, 9), block_size=64),
    "mixed": lambda: ADAMW(codec={"*kernel": "dynamic", "*": "offset_wide"}, block_size=128, min_8bit_size=0),
}

# Reads of a damaged file that Orbax abandons, and complains of in whichever test comes later.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


def through_orbax(state, tmp_path, template=None):
    checkpointer = ocp.StandardCheckpointer()
    checkpointer.save(tmp_path / "saved", state)
    checkpointer.wait_until_finished()
    return checkpointer.restore(tmp_path / "saved", template)


def through_state_dict(state, template):
    plain = jax.tree.map(np.asarray, flax.serialization.to_state_dict(state))
    return flax.serialization.from_state_dict(template, plain)


@pytest.mark.parametrize("name", SAVED)
def test_round_trips(name, tmp_path):
    params, tx = small(), SAVED[name]()
    params, state = run(tx.step, params, tx.init(params), 2)
    desired = tx.step(grads_like(params, 2), state, params)
    template = jax.eval_shape(tx.init, params)
    restored = {
        "orbax": through_orbax(state, tmp_path, template),
        "flax bytes": flax.serialization.from_bytes(tx.init(params), flax.serialization.to_bytes(state)),
        "flax state dict": through_state_dict(state, tx.init(params)),
        "pickle": pickle.loads(pickle.dumps(state)),
    }
    for how, other in restored.items():
        assert jax.tree.structure(other) == jax.tree.structure(state), how
        assert_same_bits(other, state)
        sr8.check(other, tx, params)
        assert_same_bits(SAVED[name]().step(grads_like(params, 2), other, params), desired)


@pytest.mark.skipif(len(jax.devices()) < 2, reason="needs two devices")
def test_orbax_restores_onto_a_mesh(tmp_path):
    params, tx = small(), ADAMW()
    params, state = run(tx.step, params, tx.init(params), 1)
    mesh = jax.make_mesh((2,), ("x",), devices=jax.devices()[:2], axis_types=(jax.sharding.AxisType.Auto,))
    rows = lambda x: jax.NamedSharding(mesh, jax.P("x") if np.ndim(x) == 2 else jax.P())  # noqa: E731
    template = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=rows(x)), state)
    restored = through_orbax(state, tmp_path, template)
    assert restored.mu["layer"]["kernel"].sharding == rows(params["layer"]["kernel"])
    assert_same_bits(restored, state)


@EVERY_RULE
def test_a_state_restored_without_its_template_is_refused(opt, tmp_path):
    params, tx = small(), opt()
    restored = through_orbax(tx.init(params), tmp_path)
    assert isinstance(restored, dict)
    for call in (lambda: convert(restored, tx, params), lambda: sr8.check(restored, tx, params)):
        with pytest.raises(ValueError, match="dict"):
            call()
    with pytest.raises(ValueError, match=r"mu_scale.*eval_shape\(tx.init"):
        convert(restored, tx, params)


def test_truncated_orbax_checkpoints_restore_nothing(tmp_path):
    """Some files are copies or notes that no restore reads; half of any other is an error, never other arrays."""
    params, tx = small(), ADAMW()
    _, state = run(tx.step, params, tx.init(params), 1)
    template = jax.eval_shape(tx.init, params)
    through_orbax(state, tmp_path)
    refused = set()
    for path in [path for path in (tmp_path / "saved").rglob("*") if path.is_file() and path.stat().st_size]:
        whole = path.read_bytes()
        path.write_bytes(whole[: len(whole) // 2])
        try:
            assert_same_bits(ocp.StandardCheckpointer().restore(tmp_path / "saved", template), state)
        except AssertionError:
            raise
        except Exception:  # whatever Orbax and its storage say
            refused.add(path.parent.name if path.parent.name == "d" else path.name)
        path.write_bytes(whole)
    assert {"_METADATA", "manifest.ocdbt", "d"} <= refused
    assert_same_bits(ocp.StandardCheckpointer().restore(tmp_path / "saved", template), state)


@pytest.mark.parametrize("options", [{"block_size": 128}, {"codec": "dynamic"}, {"min_8bit_size": 10**9}], ids=str)
def test_orbax_checkpoints_of_other_options_are_refused(options, tmp_path):
    """By Orbax, or by the next check: a template of another block makes it cut or fill up what it restores."""
    params, tx, other = small(), ADAMW(), ADAMW(**options)
    through_orbax(tx.init(params), tmp_path)
    template = jax.eval_shape(other.init, params)
    with pytest.raises(ValueError, match=r"convert|shape"):
        sr8.check(ocp.StandardCheckpointer().restore(tmp_path / "saved", template), other, params)


def test_truncated_bytes_restore_nothing():
    params, tx = small(), ADAMW()
    state = tx.init(params)
    template = tx.init(params)
    data = flax.serialization.to_bytes(state), pickle.dumps(state)
    for keep in np.linspace(0, 1, 9)[:-1]:
        cut = [whole[: int(len(whole) * keep)] for whole in data]
        with pytest.raises(Exception):  # noqa: B017, PT011 - whatever msgpack says
            flax.serialization.from_bytes(template, cut[0])
        with pytest.raises((EOFError, pickle.UnpicklingError)):
            pickle.loads(cut[1])
    assert_same_bits(template, tx.init(params))


def replaced(state, field, name, value):
    tree = getattr(state, field)
    return state._replace(**{field: {**tree, name: value(tree[name])}})


# name: (damage to a state of two leaves, v of the shape of w but for its rows, and what the messages must name)
DAMAGE = {
    "leaves mixed up": (lambda s: s._replace(mu={"w": s.mu["v"], "v": s.mu["w"]}), ["mu/w", "mu/v"]),
    "codes and scales": (lambda s: s._replace(mu=s.mu_scale, mu_scale=s.mu), ["mu/w", "mu_scale/v"]),
    "a leaf lost": (lambda s: s._replace(mu_scale={"w": s.mu_scale["w"]}), ["mu_scale", "missing.*v"]),
    "a leaf too many": (lambda s: s._replace(mu={**s.mu, "u": s.mu["w"]}), ["u"]),
    "codes as float32": (lambda s: replaced(s, "mu", "w", lambda x: x.astype(F32)), ["mu/w.*float32", "uint8"]),
    "codes as int8": (lambda s: replaced(s, "mu", "v", lambda x: x.astype(jnp.int8)), ["mu/v.*int8"]),
    "scales as bfloat16": (lambda s: replaced(s, "mu_scale", "w", lambda x: x.astype(BF16)), ["mu_scale/w.*bfloat16"]),
    "rows lost": (lambda s: replaced(s, "mu", "w", lambda x: x[:-1]), ["mu/w", "7, 1024"]),
    "scales lost": (lambda s: replaced(s, "mu_scale", "w", lambda x: x[..., :-1]), ["mu_scale/w", "8, 3"]),
    "format cut": (lambda s: s._replace(format=s.format[:-1]), ["format"]),
    "another version": (lambda s: s._replace(format=s.format.at[0].set(9)), ["version 9"]),
    "a codec not known": (lambda s: s._replace(format=s.format.at[2].set(200)), ["200"]),
    "block of another size": (lambda s: s._replace(format=s.format.at[1].set(6)), ["64|mu_scale/w"]),
    "count": (lambda s: s._replace(count=jnp.int32(-1)), ["count.*-1"]),
    "seed": (lambda s: s._replace(seed=jnp.zeros(3, jnp.uint32)), ["seed.*3"]),
}


@EVERY_RULE
@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_named(opt, name):
    """By the step, by `check` and by `convert`, also to another codec; none of which changes anything."""
    params = {"w": normal((8, 1024), 0, 0.02, BF16), "v": normal((10, 1024), 1, 0.02, BF16)}
    tx, other = opt(), opt(codec="dynamic")
    damage, words = DAMAGE[name]
    state = damage(tx.init(params))
    before = jax.tree.map(np.array, (params, state))
    calls = {
        "step": lambda: jax.eval_shape(lambda: tx.step(params, state, params)),
        "check": lambda: sr8.check(state, tx, params),
        "convert": lambda: convert(state, tx, params),
        "to another codec": lambda: convert(state, other, params),
        "to optax": lambda: convert(state, opt.reference(), params),
    }
    for call in calls:
        with pytest.raises(ValueError) as error:  # noqa: PT011
            calls[call]()
        assert [w for w in words if re.search(w, str(error.value))], f"{call}: {error.value}"
    assert_same_bits((params, state), before)


OTHER_OPTIONS = {"codec": "dynamic"}, {"block_size": 128}, {"min_8bit_size": 10**9}, {"codec": "float32"}


@EVERY_RULE
def test_errors_of_other_options_say_how_to_convert(opt):
    params = small()
    tx = opt()
    for options in OTHER_OPTIONS:
        state = opt(**options).init(params)
        for call in (lambda s: sr8.check(s, tx, params), lambda s: tx.step(params, s, params)):
            with pytest.raises(ValueError, match=r"sr8\.checkpoint\.convert\(state, tx, params\)"):
                call(state)
            call(convert(state, tx, params))
    with pytest.raises(ValueError, match=r"sr8\.checkpoint\.convert"):
        jax.jit(tx.step)(params, opt(block_size=128).init(params), params)
