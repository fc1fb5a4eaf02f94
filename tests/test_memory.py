"""Where the bytes go: what persists, what is aliased under donation, and what a step needs beside that."""

import jax
import jax.numpy as jnp
import optax
import pytest
from tables import ADAMW, BF16, EVERY_RULE, F32, LION, OPTIMIZERS, tree

import optax_sr8bit as sr8

MEBI = 2**20


def nbytes(t):
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(t))


def words(state):
    """The few bytes that do not grow with the parameters."""
    return nbytes((state.count, state.seed, state.format))


def wide(rows=4096, layers=6):
    """100 million parameters, of which nothing is allocated."""
    shapes = {f"layer_{i}": jax.ShapeDtypeStruct((rows, 4096), BF16) for i in range(layers)}
    return shapes | {"norm": jax.ShapeDtypeStruct((4096,), BF16), "scale": jax.ShapeDtypeStruct((), BF16)}


def loop_in_place(tx):
    def train(grads, state, params):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return train


@pytest.mark.parametrize(("opt", "door"), [(ADAMW, "step"), (LION, "step"), (ADAMW, "in_place")])
def test_step_of_100_million_parameters_aliases_all_it_keeps(opt, door):
    tx, params = opt(in_place=door == "in_place"), wide()
    state = jax.eval_shape(tx.init, params)
    size = sum(p.size for p in jax.tree.leaves(params))
    assert size > 100e6
    function = tx.step if door == "step" else loop_in_place(tx)
    analysis = jax.jit(function, donate_argnums=(1, 2)).lower(params, state, params).compile().memory_analysis()
    kept, temporary = nbytes((params, state)), analysis.temp_size_in_bytes / size
    print(f"{opt.name} {door}: {kept / size:.4f} B kept, {temporary:.2f} B temporary per parameter")
    assert analysis.alias_size_in_bytes >= kept - 256  # all of it but a few scalars
    assert analysis.output_size_in_bytes - analysis.alias_size_in_bytes < MEBI
    assert kept / size <= opt.bytes_per_parameter
    # On a CPU, which reuses nothing between leaves; 4 to 8 measured.
    assert temporary <= 12


@EVERY_RULE
def test_bytes_of_live_arrays_are_what_explain_states(opt, capsys):
    params = {name: jnp.ones((256, 4096), BF16) for name in ("a", "b")}
    tx = opt()
    state = tx.init(params)
    report = sr8.explain(tx, params)
    text = capsys.readouterr().out
    size, kept = 2 * 256 * 4096, nbytes((params, state))
    assert kept / size <= opt.bytes_per_parameter
    assert report.bytes == kept - words(state)
    assert f"{report.bytes / size:.3f}" in text
    assert f"{4 * (1 + len(opt.moments))}.0" in text  # in float32, beside it
    for name in params:
        assert name in text


@EVERY_RULE
def test_explain_of_a_mixed_tree(opt, capsys):
    """Every leaf by name, with the reason for its codec; the totals are those of the live arrays."""
    params = {"bf16": tree(BF16), "f32": tree(F32)}
    tx = opt()
    report = sr8.explain(tx, params)
    text = capsys.readouterr().out
    for name in ("bf16/embed", "f32/layer/kernel", "bf16/layer/bias", "f32/temperature"):
        assert name in text
    assert "4096" in text  # why a small leaf falls back
    state = tx.init(params)
    assert report.bytes == nbytes((params, state)) - words(state)
    assert sr8.explain(tx, jax.eval_shape(lambda: params)).bytes == report.bytes


def test_explain_and_check_reach_through_our_wrappers(capsys):
    params, inner = tree(), ADAMW(codec={"embed": "offset_wide"})
    direct = sr8.explain(inner, params)
    for tx in (sr8.chain(optax.clip_by_global_norm(1.0), inner), sr8.inject_hyperparams(sr8.adamw)(1e-3)):
        assert sr8.explain(tx, params).bytes == direct.bytes
        sr8.check(tx.init(params), tx, params)
    assert "offset_wide" in capsys.readouterr().out
    with pytest.raises(TypeError, match=r"sr8\.chain"):
        sr8.explain(optax.chain(inner), params)
    with pytest.raises(ValueError, match="embed"):
        sr8.check(ADAMW().init(params), inner, params)


def test_explain_warns_of_dynamic_and_says_which_implementation(capsys):
    sr8.explain(ADAMW(codec="dynamic"), tree())
    text = capsys.readouterr().out
    assert "huge" in text
    assert "xla" in text or "triton" in text


PARTS = [
    *(lambda opt=opt: opt() for opt in OPTIMIZERS),
    lambda: sr8.sgd(1e-2),
    *(lambda c=c, r=r: sr8.adamw(1e-3, codec=c, rounding=r) for c in sr8.codecs.CODECS for r in sr8.rounding.ROUNDINGS),
    lambda: sr8.adamw(1e-3, codec=sr8.codecs.Offset(scales="power_of_two")),
    lambda: sr8.lion(1e-3, codec={"wide": "four_bit"}, rounding={"odd": "split24"}),
    lambda: sr8.muon(1e-2),
    lambda: sr8.adafactor(1e-2, momentum=0.9),
    lambda: sr8.schedule_free_adamw(1e-3),
]


def test_bytes_of_every_combination_are_what_explain_states():
    """All but count, seed and format, and of Optax's own states a few scalars."""
    params = {"wide": jnp.ones((16, 512), BF16), "odd": jnp.ones((32, 257), BF16), "bias": jnp.ones((40,), BF16)}
    for make in PARTS:
        tx = make()
        state = tx.init(params)
        few = nbytes((params, state)) - sr8.explain(tx, params).bytes
        assert few == 4 + 8 + 4 * (2 + 3) if hasattr(state, "seed") else 0 < few < 128, (tx.definition.rule.name, few)


def test_adamw_of_byte_scales_takes_4_008_bytes():
    params = {"w": jnp.ones((256, 4096), BF16)}
    report = sr8.explain(sr8.adamw(1e-3, codec=sr8.codecs.Offset(scales="power_of_two")), params)
    assert report.bytes_per_parameter == 4 + 2 / 256
