"""The step of leaves that are sharded over eight GPUs, compiled without one: nothing is exchanged, nothing copied."""

import importlib.util
import re

import deviceless
import jax
import pytest
from tables import ADAMW, BF16, LION, named

import optax_sr8bit as sr8
from optax_sr8bit_kernels import obstacle

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("jax_cuda13_plugin") is None or importlib.util.find_spec("jax_triton") is None,
    reason="needs JAX's CUDA plugin and jax-triton",
)
P = jax.P
LEAVES = {
    "leading": ((4096, 1024), P("a")),
    "last": ((1024, 4096), P(None, "b")),
    "both": ((1024, 2048), P("a", "b")),
    "swapped": ((2048, 1024), P("b", "a")),
    "together": ((1024, 768), P(("a", "b"))),
    "stacked": ((8, 512, 2048), P(None, "a", "b")),
    "experts": ((4, 16, 64, 512), P(None, "a", "b")),  # rows in no runs of one stride: XLA steps it
    "ragged": ((64, 700), P("a")),
    "replicated": ((512, 512), P()),
    "norm": ((1024,), P()),
    "bias": ((4096,), P("a")),
}
CUT = {"cut": ((512, 768), P("a", "b"))}
COLLECTIVES = r"(all-gather|all-reduce|collective-permute|all-to-all|reduce-scatter)(?:-start)?\("


def compiled(monkeypatch, tx, leaves, kind):
    """A training step's order of arguments, donated; where types do not say it, told how results are placed."""
    monkeypatch.setattr("optax_sr8bit.implementation.triton_obstacle", lambda: None)
    monkeypatch.setattr(obstacle, "capabilities", lambda: [(9, 0)])
    try:
        mesh = deviceless.mesh((4, 2), ("a", "b"), kind)
    except NotImplementedError as error:  # where the plugin finds no driver, and JAX_PLATFORMS=cpu does not say so
        pytest.skip(str(error))
    params = {
        name: jax.ShapeDtypeStruct(shape, BF16, sharding=jax.NamedSharding(mesh, spec))
        for name, (shape, spec) in leaves.items()
    }
    placed = sr8.shardings(tx, params)
    state = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), jax.eval_shape(tx.init, params), placed
    )

    def step(params, state, grads):
        return tx.step(grads, state, params)

    out = (jax.tree.map(lambda p: p.sharding, params), placed)
    with deviceless.absent(mesh):
        traced = jax.jit(step, donate_argnums=(0, 1), out_shardings=out).trace(params, state, params)
        return traced.lower(lowering_platforms=("cuda",)).compile()


@pytest.mark.parametrize("kind", [jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit], ids=str)
@pytest.mark.parametrize("opt", **named((ADAMW, LION)))
def test_no_collective_and_no_copy(monkeypatch, opt, kind):
    program = compiled(monkeypatch, opt(), LEAVES, kind)
    text = program.as_text()
    assert len(re.findall(r'custom_call_target="[^"]*triton', text)) >= 3
    assert not re.findall(COLLECTIVES, text)
    copied = re.findall(r"= (?:bf16|u8|f32)\[[\d,]+\]\S* copy(?:-start)?\(", text)
    assert not copied, copied
    analysis = program.memory_analysis()
    experts = 4 * 16 * 64 * 512 // 8
    assert analysis.temp_size_in_bytes < 9 * experts
    assert analysis.alias_size_in_bytes >= analysis.output_size_in_bytes - 4096


@pytest.mark.filterwarnings("ignore:edges of shards cut blocks")
@pytest.mark.parametrize("kind", [jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit], ids=str)
def test_only_the_leaf_whose_block_is_cut_is_exchanged(monkeypatch, kind):
    text = compiled(monkeypatch, ADAMW(), LEAVES | CUT, kind).as_text()
    assert set(re.findall(COLLECTIVES, text)) == {"all-gather"}
    gathered = [line for line in text.splitlines() if re.search(COLLECTIVES, line)]
    shapes = {s for line in gathered for s in re.findall(r"(?:bf16|u8|f32)(\[[\d,]+\])", line.split("all-gather")[1])}
    assert shapes == {"[128,384]", "[256,384]"}, gathered  # the leaf's pieces and two of them, along b alone
