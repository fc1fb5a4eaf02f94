"""The compiled kernel beside XLA on a CUDA GPU, and what a training program sees of it."""

import math
import re

import jax
import jax.numpy as jnp
import kernel_cases
import language_model
import numpy as np
import optax
import pytest
from closeness import differences
from kernel_cases import CODECS, CORRECTED, E4M3, E5M2, ODD, Case
from tables import ADAMW, BF16, F16, F32, LION, NESTEROV, as_bits, assert_same_bits, grads_like, named, normal

import optax_sr8bit as sr8
from optax_sr8bit import leaf
from optax_sr8bit.implementation import select
from optax_sr8bit.plan import plan_tree
from optax_sr8bit_kernels import shard as shard_module, xla

CHOSEN, WHY = select(None)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(CHOSEN != "triton", reason=f"no GPU that runs the kernel: {WHY}")]
KERNEL = "triton"

# Each is a kernel to compile, some two seconds.
CASES = [
    *(Case("gpu", ADAMW, codec) for codec in kernel_cases.EVERY_CODEC),
    *(Case("gpu", LION, codec) for codec in CODECS),
    Case("gpu", NESTEROV),
    Case("gpu", how="nearest", shapes=((3, 44),)),
    *(Case("gpu", LION, dtype=dtype, grad=F32) for dtype in (F16, F32)),
    *(Case("gpu", dtype=dtype, delta=delta) for dtype, delta in ((BF16, F32), (F16, BF16))),
    *(Case("gpu", shapes=((3, n),), block=block) for n, block in ((257, 256), (768, 1024))),
    *(Case("gpu", LION, "float32", shapes=(shape,)) for shape in ((), (3, 257))),
    Case("gpu", shapes=kernel_cases.MIXED[:9]),
    Case("gpu", LION, shapes=kernel_cases.MIXED),
    Case("gpu", LION, "float32", "nearest", F32, F32, shapes=((1,),) * 255),
    *(Case("gpu", opt, block=256, shapes=((2, 700),), grads=g) for opt in (ADAMW, LION) for g in ("wild", "bad")),
    *(Case("gpu", opt, codec, scaled=True) for opt, codec in ((ADAMW, "offset"), (LION, "fp8"))),
    *(Case("gpu", how=how) for how in CORRECTED),
    Case("gpu", LION, "four_bit", "split24", shapes=ODD),
    *(Case("gpu", dtype=dtype) for dtype in (E4M3, E5M2)),
    Case("gpu", LION, "float32", "nearest", E4M3, F32, shapes=ODD),
]
# Tables of interpreted cases are small; a share of elements needs some.
CASES = [c._replace(shapes=tuple((s[0] * 96, *s[1:]) if len(s) > 1 else s for s in c.shapes)) for c in CASES]


def poison():
    """Leaves NaN in the memory that outputs are allocated from next."""
    jax.block_until_ready([jnp.full(2**n, jnp.nan, F32) for n in range(8, 24)])


@pytest.mark.parametrize("case", **named(CASES))
def test_the_kernel_is_close_to_xla(case):
    """Both from XLA's state, so that what differs in one step does not grow in the next."""
    params, codes, scales, names = kernel_cases.leaves(case)
    wrong = []
    for t, (grads, word) in enumerate(kernel_cases.steps(case)):
        given = (params, codes, scales, names, grads, word)
        want = kernel_cases.step(case, "xla", *given)
        poison()
        got = kernel_cases.step(case, KERNEL, *given)
        for i in range(len(params)):
            one, other = ((r[i], [m[i] for m in c], [m[i] for m in s]) for r, c, s in (got, want))
            found = differences(case.spec, case.opt.learning_rate, params[i], one, other)
            wrong += [f"step {t}, leaf {i}: {text}" for text in found]
        params, codes, scales = want[0] if case.delta is None else params, want[1], want[2]
    assert not wrong, "; ".join(wrong[:20])


@pytest.mark.parametrize("dtype", [BF16, F16])
def test_random_bits_are_the_same(dtype):
    """Lion's first step without decay is p ± a constant, rounded once: only other random bits could give another."""
    params = {"w": normal((512, 300), 3, 0.02, dtype)}
    grads, new = grads_like(params, 0), []
    for implementation in (KERNEL, "xla"):
        tx = sr8.lion(1.1e-3, weight_decay=0.0, implementation=implementation)
        new.append(tx.step(grads, tx.init(params), params)[0])
    assert_same_bits(*new)
    assert (as_bits(new[0]["w"]) != as_bits(params["w"])).mean() > 0.5


def test_a_leaf_of_more_than_two_to_the_31_elements(monkeypatch):
    rows = 2**31 // 4096 + 3
    memory = (jax.devices()[0].memory_stats() or {}).get("bytes_limit", 0)
    if memory < 32 * 2**30:
        pytest.skip(f"needs 32 GB, has {memory / 2**30:.0f}")
    check_last_rows(monkeypatch, rows)


def check_last_rows(monkeypatch, rows):
    """The kernel on a whole leaf, against XLA on its first and last rows, which it is told are where they are."""
    case = Case("large", LION, block=256, shapes=((rows, 4096),))
    spec, word = case.spec, kernel_cases.control("lion", 3)
    names = np.array([[5, 6]], np.uint32)
    make = jax.jit(lambda scale, of: (jnp.arange(rows)[:, None] % of - 3 + jnp.cos(jnp.arange(4096.0))) * scale)
    param, grad = (x.astype(BF16) for x in (make(0.02, 7), make(1e-3, 11)))
    code, scale = jnp.full((rows, 4096), 3, jnp.uint8), jnp.full((rows, 16), 1e-6, F32)
    arrays = (param, grad, code, scale)
    result, (codes,), (scales,) = leaf.step_group(
        (param,), (grad,), ((code,),), ((scale,),), word, names, spec=spec, implementation=KERNEL
    )
    coordinates = xla.coordinates
    for first in (0, rows - 6):
        part = slice(first, first + 6)

        def shifted(shape, shard=None, first=first):
            row, column = coordinates(shape, shard)
            return row + np.uint32(first), column

        monkeypatch.setattr(xla, "coordinates", shifted)
        p, g, c, s = (x[part] for x in arrays)
        scalars = tuple(jnp.asarray(word[:-3].view(np.float32)))
        address = tuple(jnp.asarray(np.concatenate([word[-3:], names[0]])))
        want = jax.jit(
            lambda *x: xla.step_leaf(spec.parts(), *x, result_dtype=BF16, block=256),  # a new function: compiled anew
        )(p, g, (c,), (s,), scalars, 1.0, address)
        got = result[0][part], [codes[0][part]], [scales[0][part]]
        assert not differences(spec, LION.learning_rate, p, got, want), first


def test_training_ends_where_xla_ends():
    """1,000 steps of a language model: the loss is within what another seed makes of it."""
    text, steps = language_model.corpus(), 1000
    rng = np.random.default_rng(1)
    starts = rng.integers(0, len(text) - language_model.CONTEXT - 1, (steps, language_model.BATCH))
    windows = jnp.asarray(text[starts[..., None] + np.arange(language_model.CONTEXT + 1)].astype(np.int32))
    params = jax.tree.map(lambda x: jnp.asarray(x, BF16), language_model.initial())

    def trainer(tx):
        def step(carry, window):
            params, state = carry
            value, grads = jax.value_and_grad(language_model.loss)(params, window[:, :-1], window[:, -1])
            params, state = tx.step(grads, state, params)
            return (params, state), value.astype(F32)

        return jax.jit(lambda state: jax.lax.scan(step, (params, state), windows)[1][-100:].mean())

    def final(implementation, seeds):
        train = trainer(sr8.adamw(2e-3, implementation=implementation))
        return [float(train(sr8.adamw(2e-3, seed=seed).init(params))) for seed in seeds]

    expected, found = final("xla", range(5)), final(KERNEL, range(2))
    print(expected, found)
    spread = max(expected) - min(expected)
    assert abs(np.mean(found) - np.mean(expected)) <= max(2 * spread, 0.01)


@pytest.mark.parametrize(("shape", "cut"), [((96, 2048), (2, 2)), ((4, 32, 1024), (1, 4, 2)), ((64, 300), (4, 1))])
def test_pieces_of_a_leaf_equal_the_whole(monkeypatch, shape, cut):
    """Each piece as the device that holds it would step it: bit for bit, since all run the kernel."""
    case = Case("gpu", block=256, shapes=(shape,), cut=cut)
    params, codes, scales, names = kernel_cases.leaves(case)
    ((grads, word),) = kernel_cases.steps(case)[:1]
    whole = jax.tree.map(np.asarray, kernel_cases.step(case, KERNEL, params, codes, scales, names, grads, word))
    expected = kernel_cases.pieces(case, whole)
    row = np.arange(math.prod(shape[:-1]), dtype=np.uint32).reshape(*shape[:-1], 1) + np.zeros(shape, np.uint32)
    column = np.arange(shape[-1], dtype=np.uint32) + np.zeros(shape, np.uint32)
    given = kernel_cases.pieces(case, (params[0], grads[0], [c[0] for c in codes], [s[0] for s in scales], row, column))
    shard = shard_module.Shard(shape, tuple(("axis",) * (k > 1) for k in cut))
    for i in range(math.prod(cut)):
        param, grad, code, scale, rows, columns = jax.tree.map(lambda x, i=i: x[i], given, is_leaf=kernel_cases.is_cut)
        origin = jnp.uint32(rows.flat[0]), jnp.uint32(columns.flat[0])
        monkeypatch.setattr(shard_module.Shard, "origin", lambda self, local, at=origin: at)
        one = tuple((c,) for c in code), tuple((s,) for s in scale)
        leaf.step_group.clear_cache()
        how = {"spec": case.spec, "implementation": KERNEL, "shards": (shard,)}
        got = leaf.step_group((param,), (grad,), *one, word, names, **how)
        want = jax.tree.map(lambda x, i=i: x[i], expected, is_leaf=kernel_cases.is_cut)
        assert_same_bits(got, want)
    leaf.step_group.clear_cache()


@pytest.mark.parametrize("kind", [jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit], ids=str)
def test_on_a_mesh_of_one_device_nothing_changes(kind):
    mesh = jax.make_mesh((1, 1), ("a", "b"), axis_types=(kind,) * 2, devices=jax.devices()[:1])
    tx, params = (
        ADAMW(implementation=KERNEL),
        {"w": normal((64, 512), 0, 0.02, BF16), "b": normal((40,), 1, 0.02, BF16)},
    )
    grads, state = grads_like(params, 0), tx.init(params)
    want = tx.step(grads, state, params)
    place = lambda x: jax.device_put(x, jax.NamedSharding(mesh, jax.P(*("a", "b")[: x.ndim])))  # noqa: E731
    placed = jax.tree.map(place, (grads, params))
    where = sr8.shardings(tx, placed[1])
    placed, cut = (placed[0], jax.device_put(state, where), placed[1]), jax.tree.map(lambda s: s.spec, where)
    with jax.set_mesh(mesh):
        compiled = jax.jit(tx.step).lower(*placed).compile()
        assert "triton" in compiled.as_text()
        assert_same_bits(compiled(*placed), want)
        specs = jax.tree.map(lambda x: x.sharding.spec, placed[2])
        inside = jax.shard_map(
            lambda *x: tx.step(*x, specs=specs), mesh=mesh, in_specs=(specs, cut, specs), out_specs=(specs, cut)
        )
        assert_same_bits(jax.jit(inside)(*placed), want)


def test_a_state_in_host_memory_is_stepped_by_the_kernel():
    mesh = jax.make_mesh((1,), ("a",), devices=jax.devices()[:1])
    tx = ADAMW(implementation=KERNEL)
    params = jax.device_put({"w": normal((64, 512), 0, 0.02, BF16)}, jax.NamedSharding(mesh, jax.P("a")))
    grads, state = jax.device_put(grads_like(params, 0), jax.NamedSharding(mesh, jax.P("a"))), tx.init(params)
    on_host = sr8.shardings(tx, params, memory_kind="pinned_host")
    kept = jax.device_put(state, on_host)
    out = (jax.tree.map(lambda p: p.sharding, params), on_host)
    compiled = jax.jit(tx.step, out_shardings=out).lower(grads, kept, params).compile()
    assert "triton" in compiled.as_text()
    got = compiled(grads, kept, params)
    assert got[1].mu["w"].sharding.memory_kind == "pinned_host"
    assert_same_bits(got, tx.step(grads, state, params))


@pytest.mark.parametrize("opt", **named((ADAMW, LION)))
def test_donated_arrays_are_stepped_in_place(opt):
    tx, params = opt(implementation=KERNEL), {"w": jnp.ones((4096, 4096), BF16), "b": jnp.ones((4096,), BF16)}
    state = tx.init(params)
    compiled = jax.jit(tx.step, donate_argnums=(1, 2)).lower(params, state, params).compile()
    kept = sum(x.nbytes for x in jax.tree.leaves((params, state)))
    analysis = compiled.memory_analysis()
    assert analysis.alias_size_in_bytes >= kept - 256  # all but a few scalars
    assert analysis.temp_size_in_bytes < 2**20
    assert not re.findall(r"^.*(?:bf16|u8)\[4096,4096\]\S* copy(?:-start)?\(.*$", compiled.as_text(), re.MULTILINE)


def test_a_schedule_compiles_nothing_again():
    tx = sr8.adamw(optax.cosine_decay_schedule(1e-3, 100), implementation=KERNEL)
    params = {"w": normal((64, 512), 0, 0.02, BF16)}
    jitted, state, counts = jax.jit(tx.step), tx.init(params), []
    eager_params, eager_state = params, state
    for i in range(4):
        grads = grads_like(params, i)
        params, state = jitted(grads, state, params)
        eager_params, eager_state = tx.step(grads, eager_state, eager_params)
        counts.append((jitted._cache_size(), leaf.step_group._cache_size()))
    assert counts[0][0] == 1
    assert len(set(counts)) == 1
    assert_same_bits(params, eager_params)


def test_an_ensemble_under_vmap_runs_on_xla():
    params = {"w": normal((3, 16, 512), 0, 0.02, BF16), "b": normal((3, 7), 1, 0.02, BF16)}
    results = []
    for implementation in (KERNEL, "xla"):
        tx = sr8.adamw(1e-2, implementation=implementation)
        results.append(jax.jit(jax.vmap(tx.step))(grads_like(params, 0), jax.vmap(tx.init)(params), params))
    assert_same_bits(*results)


def test_a_tree_of_all_kinds_of_leaves_is_close_to_xla():
    shapes = {
        "empty": (0, 512),
        "scalar": (),
        "small": (40,),
        "ragged": (64, 300),
        "wide": (256, 512),
        "last": (512, 256),
    }
    params = {name: normal(shape, i, 0.02, BF16) for i, (name, shape) in enumerate(shapes.items())}
    kernel, reference = (ADAMW(implementation=i) for i in (KERNEL, "xla"))
    state, wrong = reference.init(params), []
    for t in range(2):
        grads = grads_like(params, t)
        got, want = kernel.step(grads, state, params), reference.step(grads, state, params)
        for plan in plan_tree(params, kernel.options):
            rule, name = kernel.definition.rule, plan.name
            spec = leaf.LeafSpec(rule, rule.flags, plan.codec, plan.rounding, plan.block, plan.dtype, plan.dtype, None)
            one, other = (
                (p[name], [s.mu[name], s.nu[name]], [s.mu_scale[name], s.nu_scale[name]]) for p, s in (got, want)
            )
            found = differences(spec, ADAMW.learning_rate, params[name], one, other)
            wrong += [f"step {t}, {name}: {text}" for text in found]
        assert int(got[1].count) == t + 1
        params, state = want
    assert not wrong, "; ".join(wrong)
