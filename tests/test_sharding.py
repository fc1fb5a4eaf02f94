"""Whatever the sharding, the same bits as on one device; nothing exchanged but what must be; states placed like params.

The paths of XLA and of the GPU kernel are both run here: on the second one XLA stands in for the kernel, where the
kernel would be launched, on the pieces that it would be given.
"""

import functools
import re
import sys
import types
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn, nnx
from flax.training.train_state import TrainState
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from meshes import (
    CASES,
    CUT,
    EVERY_CASE,
    KINDS,
    SMALLEST,
    alone,
    assert_placed_like,
    bytes_held,
    collectives,
    mesh_of,
    params_of,
    placed,
    shardings_of,
    within,
)
from tables import ADAMW, BF16, F32, LION, assert_same_bits, door_1, grads_like, nnx_leaves, normal

import optax_sr8bit as sr8
import optax_sr8bit_kernels
from optax_sr8bit import leaf, transform
from optax_sr8bit_kernels import xla

AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
RUNS = {
    "adamw-bf16-auto": (ADAMW, BF16, AUTO),
    "adamw-bf16-explicit": (ADAMW, BF16, EXPLICIT),
    "lion-f32-auto": (LION, F32, AUTO),
    "lion-f32-explicit": (LION, F32, EXPLICIT),
}
FIRST, SECOND = list(RUNS)[:2], list(RUNS)[2:]


def runs(**ids):
    """Which cases are run how; compiling takes the time, so not everything meets everything."""
    rows = [pytest.param(name, *RUNS[one], id=f"{name}-{one}") for name, some in ids.items() for one in some]
    return pytest.mark.parametrize(("name", "opt", "grad_dtype", "kind"), rows)


def elements(result):
    """Of the largest array in the type of a result."""
    return max(int(np.prod([int(n) for n in dims.split(",") if n])) for dims in re.findall(r"\[([\d,]*)\]", result))


def steps_like_alone(opt, name, grad_dtype, kind, replicated=False, **kwargs):
    """Steps a case on its mesh, under a jit that donates; returns the compiled step.

    Args:
      opt: the optimizer.
      name: of the case.
      grad_dtype: of the gradients.
      kind: of the mesh's axes.
      replicated: whether all devices hold the parameters, while the state is cut (ZeRO-1).
      **kwargs: of the optimizer.
    """
    case, want, tx = EVERY_CASE[name], alone(opt, name, grad_dtype), opt(min_8bit_size=SMALLEST, **kwargs)
    mesh = mesh_of(case.mesh, kind)
    with within(mesh):
        params = placed(want.params, case, mesh)
        state = jax.device_put(want.state, sr8.shardings(tx, params))
        if replicated:
            params = jax.device_put(want.params, NamedSharding(mesh, P()))
        before, held = shardings_of((params, state)), bytes_held((params, state))
        grads = [placed(g, case, mesh) for g in want.grads]
        # Left to itself, XLA would keep new parameters in pieces, as it made them.
        out = before if replicated and kind is AUTO else None
        step = jax.jit(tx.step, donate_argnums=(1, 2), out_shardings=out).lower(grads[0], state, params).compile()
        for g in grads:
            params, state = step(g, state, params)
    assert_same_bits((params, state), want.after)
    assert_placed_like((params, state), before)
    assert step.memory_analysis().alias_size_in_bytes >= held
    return step


@runs(**{"1": FIRST[:1], "8": FIRST, "4x2": RUNS, "2x2x2": SECOND})
def test_every_sharding_gives_the_bits_of_one_device_and_exchanges_nothing(name, opt, grad_dtype, kind):
    assert collectives(steps_like_alone(opt, name, grad_dtype, kind)) == []


def of_the_last_axis_alone(step, case):
    """Whether there are exchanges, none of more than the rows that a device holds."""
    mesh = dict(zip("abc", case.mesh, strict=False))
    most = max(int(np.prod(one.shape)) // (mesh[one.spec[0]] if one.spec[0] else 1) for one in case.leaves.values())
    found = collectives(step)
    return bool(found) and all(elements(result) <= most for _, result in found)


@runs(**{"2": SECOND, "8": FIRST, "4x2": SECOND})
def test_cut_blocks_give_the_same_bits_and_exchange_the_last_axis_alone(name, opt, grad_dtype, kind):
    step = steps_like_alone(opt, f"cut_{name}", grad_dtype, kind)
    assert of_the_last_axis_alone(step, CUT[name])


def gathers_parameters_alone(step, case):
    """Whether all-gathers are the only exchanges, and bring each parameter together once."""
    found = collectives(step)
    gathered = sum(elements(result) for operation, result in found)
    cut = [one.shape for one in case.leaves.values() if any(one.spec)]
    # One array cut over two axes is gathered over one after the other.
    return {operation for operation, _ in found} == {"all-gather"} and gathered <= 2 * sum(map(np.prod, cut))


@KINDS
def test_zero_1_gathers_new_parameters_alone(kind):
    step = steps_like_alone(ADAMW, "4x2", BF16, kind, replicated=True)
    assert gathers_parameters_alone(step, CASES["4x2"])


@pytest.mark.parametrize(
    ("kind", "kwargs"),
    [(AUTO, {"in_place": True}), (EXPLICIT, {"in_place": True}), (EXPLICIT, {"delta_dtype": F32})],
    ids=["in_place-auto", "in_place-explicit", "update-explicit"],
)
def test_other_doors(kind, kwargs):
    case, want, tx = CASES["8"], alone(ADAMW, "8", BF16), ADAMW(min_8bit_size=SMALLEST, **kwargs)
    mesh = mesh_of(case.mesh, kind)
    with within(mesh):
        params, grads = some(placed(want.params, case, mesh)), [some(placed(g, case, mesh)) for g in want.grads]
        state = tx.init(params)
        before, held = shardings_of((params, state)), bytes_held((params, state))
        advance = jax.jit(door_1(tx), donate_argnums=(1, 2)).lower(grads[0], state, params).compile()
        for g in grads:
            params, state = advance(g, state, params)
    assert collectives(advance) == []
    assert advance.memory_analysis().alias_size_in_bytes >= held
    assert_placed_like((params, state), before)
    assert_same_bits((params, *moments(state)), (some(want.after[0]), *map(some, moments(want.after[1]))))


@KINDS
def test_eager_steps(kind):
    case, want, tx = CASES["8"], alone(ADAMW, "8", BF16), ADAMW(min_8bit_size=SMALLEST)
    mesh = mesh_of(case.mesh, kind)
    with within(mesh):
        params = some(placed(want.params, case, mesh))
        state = tx.init(params)
        before = shardings_of((params, state))
        for g in want.grads:
            params, state = tx.step(some(placed(g, case, mesh)), state, params)
    assert_placed_like((params, state), before)
    assert_same_bits((params, *moments(state)), (some(want.after[0]), *map(some, moments(want.after[1]))))


def pick(names, tree):
    """A few of the leaves."""
    return {name: tree[name] for name in names}


some = functools.partial(pick, ("first", "last", "bias"))


def moments(state):
    return state.mu, state.nu, state.mu_scale, state.nu_scale


def test_mesh_with_axes_of_both_kinds():
    case, want, tx = CASES["4x2"], alone(LION, "4x2", F32), LION(min_8bit_size=SMALLEST)
    few = functools.partial(pick, ("both", "swapped"))
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(EXPLICIT, AUTO))
    with within(mesh):
        params, grads = few(placed(want.params, case, mesh)), [few(placed(g, case, mesh)) for g in want.grads]
        state = tx.init(params)
        before = shardings_of((params, state))
        step = jax.jit(tx.step, donate_argnums=(1, 2)).lower(grads[0], state, params).compile()
        for g in grads:
            params, state = step(g, state, params)
    assert collectives(step) == []
    assert_placed_like((params, state), before)
    desired = (want.after[0], want.after[1].mu, want.after[1].mu_scale)
    assert_same_bits((params, state.mu, state.mu_scale), tuple(map(few, desired)))


@pytest.mark.parametrize(
    ("kind", "spec"),
    [
        (AUTO, P("a")),
        (AUTO, P(None, "a")),
        (EXPLICIT, P(None, "a")),
        (EXPLICIT, P("a")),
    ],
    ids=["members-auto", "rows-auto", "rows-explicit", "members-explicit"],
)
def test_ensembles(kind, spec):
    tx, mesh = LION(min_8bit_size=SMALLEST), mesh_of((4,), kind)
    params = normal((4, 8, 512), 0, 0.02, BF16)
    grads, state = grads_like(params, 0), jax.vmap(tx.init)(params)
    want = jax.vmap(tx.step)(grads, state, params)

    def put(x):
        return jax.device_put(np.asarray(x), NamedSharding(mesh, spec if x.ndim == 3 or len(spec) == 1 else P()))

    with within(mesh):
        step = jax.jit(jax.vmap(tx.step)).lower(*jax.tree.map(put, (grads, state, params))).compile()
        assert_same_bits(step(*jax.tree.map(put, (grads, state, params))), want)
    assert collectives(step) == []


@KINDS
def test_ensembles_with_schedules_that_are_cut_by_members(kind):
    tx, mesh = ADAMW(optax.cosine_decay_schedule(1e-2, 9), min_8bit_size=SMALLEST), mesh_of((4,), kind)
    params = normal((4, 8, 512), 0, 0.02, BF16)
    grads = grads_like(params, 0)
    want = jax.vmap(tx.step)(grads, jax.vmap(tx.init)(params), params)
    members = NamedSharding(mesh, P("a"))
    with within(mesh):
        placed = jax.device_put((grads, params), members)
        state = jax.device_put(jax.vmap(tx.init)(params), members)
        assert_same_bits(jax.jit(jax.vmap(tx.step))(placed[0], state, placed[1]), want)


@pytest.mark.filterwarnings("ignore:edges of shards")
@pytest.mark.parametrize("kinds", [(EXPLICIT,) * 2, (AUTO, EXPLICIT), (EXPLICIT, AUTO)], ids=str)
def test_init_under_jit_needs_no_mesh_around(kinds):
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=kinds)
    params = {
        "w": jax.device_put(normal((8, 1024), 0, 0.02, BF16), NamedSharding(mesh, P("a", "b"))),
        "cut": jax.device_put(normal((8, 768), 1, 0.02, BF16), NamedSharding(mesh, P("a", "b"))),
        "small": jax.device_put(normal((8, 32), 2, 0.02, BF16), NamedSharding(mesh, P("a"))),
    }
    tx = ADAMW(min_8bit_size=SMALLEST)
    state, eager = jax.jit(tx.init)(params), tx.init(params)
    assert_same_bits(state, eager)
    for field in ("mu", "nu", "mu_scale", "nu_scale"):
        got, want = getattr(state, field), getattr(eager, field)
        names = ("w", "small") if AUTO in kinds else params
        assert_placed_like({n: got[n] for n in names}, {n: want[n] for n in names})


def test_a_mesh_of_some_devices_keeps_cut_leaves_in_pieces():
    """Whatever the number of devices that the host has: here 8, of which 4 step 6 blocks."""
    mesh = jax.make_mesh((4,), ("a",), axis_types=(AUTO,), devices=jax.devices()[:4])
    tx, columns = LION(), NamedSharding(mesh, P(None, "a"))
    params = {"w": jax.device_put(normal((48, 1536), 0, 0.02, BF16), columns)}
    with pytest.warns(UserWarning, match="edges of shards"):
        state = tx.init(params)
    new, new_state = jax.jit(tx.step)(params, state, params)
    assert_placed_like((new, new_state.mu), (params, state.mu))


def test_parameters_in_host_memory_are_refused():
    mesh = mesh_of((2,), AUTO)
    params = {"w": jax.device_put(normal((8, 512), 0, 0.02, BF16), NamedSharding(mesh, P("a")))}
    tx = LION()
    state = tx.init(params)
    on_host = {"w": jax.device_put(params["w"], params["w"].sharding.with_memory_kind("pinned_host"))}
    with pytest.raises(ValueError, match=r"must be in the memory of the device; on the host: \['w'\]"):
        tx.step(params, state, on_host)


# The path of the kernel.


@pytest.fixture
def launches(monkeypatch):
    """XLA in the kernel's place; per launch the shapes, and how the leaves are cut: None where none is."""
    found = []

    def step_group(parts, params, grads, codes, scales, control, names, *, result_dtype, block, shards):
        found.append([(p.shape, shards and shards[i]) for i, p in enumerate(params)])
        stepped = [
            xla.step_leaf(
                parts,
                params[i],
                grads[i],
                [moment[i] for moment in codes],
                [moment[i] for moment in scales],
                tuple(jax.lax.bitcast_convert_type(control[:-3], F32)),
                1.0,
                (*control[-3:], *names[i]),
                result_dtype=result_dtype,
                block=block,
                shard=shards and shards[i],
            )
            for i in range(len(params))
        ]
        results, new_codes, new_scales = zip(*stepped, strict=True)
        return results, tuple(zip(*new_codes, strict=True)), tuple(zip(*new_scales, strict=True))

    fake = types.SimpleNamespace(step_group=step_group)
    monkeypatch.setattr(optax_sr8bit_kernels, "triton_call", fake, raising=False)
    monkeypatch.setitem(sys.modules, "optax_sr8bit_kernels.triton_call", fake)
    monkeypatch.setattr(jax.lax, "platform_dependent", lambda *operands, cuda, default: cuda(*operands))
    monkeypatch.setattr(transform, "select", lambda asked: (asked or "triton", "test"))
    leaf.step_group.clear_cache()
    yield found
    leaf.step_group.clear_cache()


def assert_launched(launches, wanted):
    """Launches on pieces of a group's leaves, of these shapes and no others."""
    cut = [piece for launch in launches for piece in launch if piece[1] is not None]
    assert {shape for shape, shard in cut if shape != shard.shape} == wanted
    assert all(shard.fits_kernel(shape) for shape, shard in cut)


def pieces_of(name, *left_out):
    """The shapes that a device holds of those leaves that are cut."""
    case = EVERY_CASE[name]
    mesh = mesh_of(case.mesh, AUTO)
    leaves = [one for key, one in case.leaves.items() if any(one.spec) and key not in left_out]
    return {NamedSharding(mesh, one.spec).shard_shape(one.shape) for one in leaves}


@runs(**{"8": FIRST[:1], "4x2": SECOND[1:], "2x2x2": SECOND})
def test_kernels_run_on_the_pieces_that_devices_hold(name, opt, grad_dtype, kind, launches):
    assert collectives(steps_like_alone(opt, name, grad_dtype, kind)) == []
    assert_launched(launches, pieces_of(name, "two_behind"))  # XLA steps that one


@runs(**{"8": FIRST, "4x2": SECOND})
def test_kernels_are_given_whole_blocks(name, opt, grad_dtype, kind, launches):
    step = steps_like_alone(opt, f"cut_{name}", grad_dtype, kind)
    assert of_the_last_axis_alone(step, CUT[name])
    assert_launched(launches, {(2, 768)} if name == "4x2" else set())
    assert {shape[-1] for launch in launches for shape, _ in launch} == {x.shape[-1] for x in CUT[name].leaves.values()}


@KINDS
def test_kernels_and_zero_1(kind, launches):
    step = steps_like_alone(ADAMW, "8", BF16, kind, replicated=True)
    assert gathers_parameters_alone(step, CASES["8"])
    assert_launched(launches, pieces_of("8"))


# Where states are placed.


def expected_spec(param, array):
    """Of an array that belongs to a parameter: the parameter's spec, less a last axis that does not divide."""
    spec = tuple(param.sharding.spec) + (None,) * (param.ndim - len(param.sharding.spec))
    names = spec[-1] if spec else None
    count = np.prod([param.sharding.mesh.shape[n] for n in ([names] if isinstance(names, str) else names or [])])
    if array.ndim and array.shape[-1] % count:
        spec = (*spec[:-1], None)
    return NamedSharding(param.sharding.mesh, P(*spec))


def assert_state_placed(state, params, fields, everywhere=True):
    for field in fields:
        for scales in ("", "_scale"):
            arrays = getattr(state, field + scales)
            assert_placed_like(arrays, jax.tree.map(lambda p, a: expected_spec(p, a), params, arrays))
    if everywhere:
        mesh = jax.tree.leaves(params)[0].sharding.mesh
        for x in (state.count, state.seed, state.format):
            assert x.sharding.is_fully_replicated
            assert x.sharding.device_set == set(mesh.devices.flat)


def sharded(name, kind):
    case = EVERY_CASE[name]
    mesh = mesh_of(case.mesh, kind)
    return mesh, placed(params_of(case), case, mesh)


@KINDS
def test_init_places_states_like_parameters_and_warns_of_cut_blocks_alone(kind):
    tx = LION(min_8bit_size=SMALLEST)
    for name in ("8", "4x2", "cut_2", "cut_8"):
        mesh, params = sharded(name, kind)
        with within(mesh), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            state = tx.init(params)
            assert len(caught) == name.startswith("cut")
            jitted = jax.jit(tx.init).lower(params).compile()
        assert_state_placed(state, params, LION.moments)
        assert_placed_like(state, sr8.shardings(tx, params))
        assert_state_placed(jitted(params), params, LION.moments, everywhere=False)
        for _, result in collectives(jitted):  # for the lone scales of a row that is cut
            assert name.startswith("cut") or elements(result) < SMALLEST
        desired = tx.init(params_of(EVERY_CASE[name]))
        assert_same_bits(state, desired)
        assert_same_bits(jitted(params), desired)


def test_float32_moments_have_no_blocks_to_cut():
    _, params = sharded("cut_8", AUTO)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jax.eval_shape(LION(codec="float32").init, params)
        LION(codec="float32").init(params)


@KINDS
def test_shardings_as_out_shardings_and_of_abstract_parameters(kind):
    tx = LION(min_8bit_size=SMALLEST)
    for name in ("4x2", "cut_8"):
        mesh, params = sharded(name, kind)
        wanted = sr8.shardings(tx, params)
        abstract = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, p.dtype, sharding=p.sharding), params)
        assert sr8.shardings(tx, abstract) == wanted
        with within(mesh):
            state = jax.jit(tx.init, out_shardings=wanted)(params)
        assert_state_placed(state, params, LION.moments)
        assert_placed_like(state, wanted)


@KINDS
@pytest.mark.parametrize(
    "wrap",
    [
        lambda tx: sr8.chain(optax.clip_by_global_norm(1.0), tx),
        lambda tx: optax.chain(optax.trace(0.9), tx),
        lambda tx: sr8.inject_hyperparams(sr8.lion)(1e-3, min_8bit_size=SMALLEST),
        lambda tx: optax.masked(tx, {name: name != "small" for name in CASES["4x2"].leaves}),
    ],
    ids=["sr8.chain", "optax.chain", "inject_hyperparams", "masked"],
)
def test_shardings_of_wrapped_states(kind, wrap):
    tx = wrap(LION(min_8bit_size=SMALLEST))
    mesh, params = sharded("4x2", kind)
    wanted = sr8.shardings(tx, params)
    with within(mesh):
        assert jax.tree.structure(wanted) == jax.tree.structure(tx.init(params))
        state = jax.jit(tx.init, out_shardings=wanted)(params)
    assert_placed_like(state, wanted)
    (own,) = (s for s in jax.tree.leaves(state, is_leaf=is_lion) if is_lion(s))
    there = {name: p for name, p in params.items() if isinstance(own.mu[name], jax.Array)}
    for field in ("mu", "mu_scale"):
        arrays = {name: getattr(own, field)[name] for name in there}
        assert_placed_like(arrays, jax.tree.map(expected_spec, there, arrays))
    if isinstance(state[0], optax.TraceState):
        assert_placed_like(state[0].trace, params)


def is_lion(x):
    return isinstance(x, sr8.LionState)


def test_moments_in_host_memory():
    if "pinned_host" not in {memory.kind for memory in jax.devices()[0].addressable_memories()}:
        pytest.skip("no pinned_host memory here")
    tx = ADAMW(min_8bit_size=SMALLEST)
    mesh, params = sharded("4x2", AUTO)
    wanted = sr8.shardings(tx, params, memory_kind="pinned_host")
    state = jax.device_put(tx.init(params), wanted)
    assert_state_placed(state, params, [])
    for x in jax.tree.leaves((state.mu, state.nu, state.mu_scale, state.nu_scale)):
        assert x.sharding.memory_kind == "pinned_host"
    for x in (state.count, state.seed, state.format):
        assert x.sharding.memory_kind == jax.tree.leaves(params)[0].sharding.memory_kind
    want = alone(ADAMW, "4x2", BF16)
    params = placed(want.params, CASES["4x2"], mesh)
    few = functools.partial(pick, ("both", "bias"))
    state = jax.device_put(tx.init(few(params)), sr8.shardings(tx, few(params), memory_kind="pinned_host"))
    step, params = jax.jit(tx.step), few(params)
    for g in want.grads:
        params, state = step(few(placed(g, CASES["4x2"], mesh)), state, params)
    assert_same_bits((params, *moments(state)), (few(want.after[0]), *map(few, moments(want.after[1]))))
    assert {x.sharding.memory_kind for x in jax.tree.leaves(moments(state))} == {"pinned_host"}


def test_shardings_names_parameters_without_one():
    _, params = sharded("4x2", AUTO)
    params["lost"] = jnp.ones((8, 512), BF16)
    params["unknown"] = jax.ShapeDtypeStruct((8, 512), BF16)
    with pytest.raises(
        ValueError, match=r"NamedSharding each; without are \['lost', 'unknown'\]: .*device_put.*sharding="
    ):
        sr8.shardings(ADAMW(), params)
    with pytest.raises(ValueError, match="the tree is empty"):
        sr8.shardings(ADAMW(), {})


@KINDS
@pytest.mark.parametrize("name", CUT)
def test_warning_of_cut_blocks_names_the_way_out(kind, name):
    mesh, params = sharded(f"cut_{name}", kind)
    with within(mesh), pytest.warns(UserWarning, match="edges of shards cut blocks") as caught:
        ADAMW(min_8bit_size=SMALLEST).init(params)
    (warning,) = caught
    assert warning.filename == __file__
    told = str(warning.message)
    # By leaf the block that the arithmetic of the table allows: the largest power of two in a piece, 32 at least.
    wanted = {"cut": 128, "rows_cut_too": 128, "scales_whole": 32, "scales_cut": None, "one_block": None}
    for leaf_name in CUT[name].leaves:
        (own,) = re.findall(rf"{leaf_name} has ([^;]*;[^;]*)", told)
        assert ("no block_size avoids it" in own) == (wanted[leaf_name] is None)
        found = re.search(r"block_size=(\d+) avoids", own)
        assert (found and int(found[1])) == wanted[leaf_name]
    possible = {key: params[key] for key in params if wanted[key]}
    tx = ADAMW(min_8bit_size=SMALLEST, block_size=min(wanted[key] for key in possible))
    with within(mesh), warnings.catch_warnings():
        warnings.simplefilter("error")
        state = tx.init(possible)
        compiled = jax.jit(tx.step).lower(possible, state, possible).compile()
    assert collectives(compiled) == []


# What Flax and Optax make of it.


class Model(nn.Module):
    """Two layers whose kernels name the axes of a mesh."""

    @nn.compact
    def __call__(self, x):
        part = nn.with_partitioning
        x = nn.Dense(1024, param_dtype=BF16, kernel_init=part(nn.initializers.lecun_normal(), ("a", "b")))(x)
        return nn.Dense(64, param_dtype=BF16, kernel_init=part(nn.initializers.lecun_normal(), ("b", None)))(x)


def test_linen_partition_specs_place_the_state():
    opt = LION
    model, x = Model(), normal((4, 16), 0, dtype=BF16)
    tx = opt(min_8bit_size=SMALLEST)

    def create(key):
        return TrainState.create(apply_fn=model.apply, params=model.init(key, x)["params"], tx=tx)

    mesh = mesh_of((4, 2), AUTO)
    specs = nn.get_partition_spec(jax.eval_shape(create, jax.random.key(0)))
    for field in opt.moments:
        for scales in ("", "_scale"):
            assert getattr(specs.opt_state, field + scales) == specs.params
    assert specs.opt_state.count == specs.opt_state.seed == specs.opt_state.format == P()
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs, is_leaf=lambda s: isinstance(s, P))
    cut = jax.jit(create, out_shardings=shardings)(jax.random.key(0))
    whole = create(jax.random.key(0))
    assert_same_bits((cut.params, cut.opt_state), (whole.params, whole.opt_state))
    assert_placed_like(nn.unbox(cut.opt_state), nn.unbox(shardings.opt_state))
    grads = grads_like(whole.params, 0)
    advance = lambda s, g: tx.step(g, s.opt_state, s.params)  # noqa: E731
    compiled = jax.jit(advance).lower(cut, jax.device_put(jax.device_get(grads), shardings.params)).compile()
    assert collectives(compiled) == []
    assert_same_bits(compiled(cut, jax.device_put(jax.device_get(grads), shardings.params)), advance(whole, grads))


@KINDS
def test_nnx_optimizer_on_a_mesh(kind):
    mesh, tx = mesh_of((4, 2), kind), ADAMW(min_8bit_size=SMALLEST, in_place=True)
    specs = {"kernel": P("a", "b"), "bias": P("b")}
    grads = {"kernel": normal((16, 1024), 5, 1e-3, BF16), "bias": normal((1024,), 6, 1e-3, BF16)}

    @nnx.jit
    def update(model, optimizer, grads):
        optimizer.update(model, grads)

    def stepped(put):
        """An optimizer of a model before and after a step."""
        model = nnx.Linear(16, 1024, param_dtype=BF16, rngs=nnx.Rngs(0))
        nnx.update(model, nnx.State({name: nnx.Param(put(getattr(model, name)[...], name)) for name in specs}))
        optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
        before = nnx_leaves(model) + nnx_leaves(optimizer)
        update(model, optimizer, nnx.State({name: nnx.Param(put(g, name)) for name, g in grads.items()}))
        return before, nnx_leaves(model) + nnx_leaves(optimizer)

    _, whole = stepped(lambda x, _: x)
    with within(mesh):
        before, cut = stepped(lambda x, name: jax.device_put(np.asarray(x), NamedSharding(mesh, specs[name])))
    assert_same_bits(cut, whole)
    ours = [i for i, x in enumerate(before) if isinstance(x.sharding, NamedSharding)]  # not NNX's own count of steps
    assert len(ours) >= len(specs) * (1 + 2 * len(ADAMW.moments)) + 3
    assert_placed_like([cut[i] for i in ours], [before[i] for i in ours])


@KINDS
def test_map_params_with_specs(kind):
    tx = ADAMW(min_8bit_size=SMALLEST)
    mesh, params = sharded("4x2", kind)
    params = {name: params[name] for name in ("both", "swapped", "pair_last")}
    state = jax.eval_shape(tx.init, params)
    specs = jax.tree.map(lambda p: p.sharding.spec, params)
    place = lambda _, spec: NamedSharding(mesh, spec)  # noqa: E731
    everywhere = NamedSharding(mesh, P())
    wanted = optax.tree.map_params(tx, place, state, specs, transform_non_params=lambda _: everywhere)
    assert wanted.mu == wanted.nu == wanted.mu_scale == wanted.nu_scale
    with within(mesh):
        made = jax.jit(tx.init, out_shardings=wanted)(params)
    assert_state_placed(made, params, ADAMW.moments)
    assert_placed_like(made, sr8.shardings(tx, params))
