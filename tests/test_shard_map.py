"""Inside a `shard_map` a device sees its pieces alone: with `specs=` the bits are those of the whole all the same."""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from meshes import EVERY_CASE, KINDS, SMALLEST, alone, assert_placed_like, collectives, mesh_of, placed, within
from tables import ADAMW, BF16, F32, LION, assert_same_bits, grads_like, normal

import optax_sr8bit as sr8
from optax_sr8bit import leaf, transform
from optax_sr8bit_kernels.shard import Shard

AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
ROWS = P("a")


def specs_of(tree):
    return jax.tree.map(lambda sharding: sharding.spec, tree)


def mapped(advance, mesh, specs, state_specs, **kwargs):
    """`advance(grads, state, params)` on the pieces of each device."""
    out = (specs, state_specs)
    return jax.shard_map(advance, mesh=mesh, in_specs=(specs, state_specs, specs), out_specs=out, **kwargs)


@pytest.mark.parametrize(
    ("name", "opt", "grad_dtype", "kind", "check_vma"),
    [
        ("4x2", ADAMW, BF16, AUTO, True),
        ("4x2", LION, F32, EXPLICIT, False),
        ("2x2x2", LION, F32, AUTO, True),
    ],
)
def test_pieces_are_stepped_to_the_bits_of_the_whole(name, opt, grad_dtype, kind, check_vma):
    case, want, tx = EVERY_CASE[name], alone(opt, name, grad_dtype), opt(min_8bit_size=SMALLEST)
    mesh = mesh_of(case.mesh, kind)
    with within(mesh):
        params = placed(want.params, case, mesh)
        shardings = sr8.shardings(tx, params)
        state = jax.device_put(want.state, shardings)
        grads = [placed(g, case, mesh) for g in want.grads]
        specs = {key: leaf.spec for key, leaf in case.leaves.items()}
        inside = mapped(functools.partial(tx.step, specs=specs), mesh, specs, specs_of(shardings), check_vma=check_vma)
        step = jax.jit(inside, donate_argnums=(1, 2)).lower(grads[0], state, params).compile()
        assert collectives(step) == []
        for g in grads:
            params, state = step(g, state, params)
    assert_same_bits((params, state), want.after)
    assert_placed_like(state, shardings)


def rows(opt, **kwargs):
    """A transformation, parameters that are cut along their rows, their state and gradients, and one step of them."""
    params = {"w": normal((16, 512), 0, 0.02, BF16), "layer": {"v": normal((8, 2, 300), 1, 0.02, BF16)}}
    params["layer"]["bias"] = normal((16,), 2, 0.02, BF16)
    tx = opt(min_8bit_size=SMALLEST, **kwargs)
    return tx, grads_like(params, 0), tx.init(params), params


def cut(state, spec=ROWS):
    """The specs of a state whose moments and scales are cut along their rows."""
    placed = jax.tree.map(lambda x: P() if x.shape in ((), (1,)) else spec, state)
    return placed._replace(seed=P(), format=P())


def placed_by(specs, tree, mesh):
    """A tree on a mesh, by a tree of specs."""
    return jax.tree.map(lambda x, spec: jax.device_put(np.asarray(x), NamedSharding(mesh, spec)), tree, specs)


def test_prefix_of_specs_and_axes_that_others_partition():
    tx, grads, state, params = rows(LION)
    want = tx.step(grads, state, params)
    step = functools.partial(tx.step, specs=P("a"))
    for kind, axes in ((AUTO, {"a"}), (EXPLICIT, {"a"}), (AUTO, {"a", "b"})):
        mesh = mesh_of((4, 2), kind)
        with within(mesh):
            inside = jax.jit(mapped(step, mesh, P("a"), cut(state), axis_names=axes))
            everywhere = jax.tree.map(lambda _: P("a"), params)
            operands = placed_by((everywhere, cut(state), everywhere), (grads, state, params), mesh)
            assert_same_bits(inside(*operands), want)
    # Where XLA cuts the pieces further.
    mesh, by_both = mesh_of((4, 2), AUTO), {"w": P("a", "b"), "layer": {"v": P("a", "b"), "bias": P("a")}}
    operands = (placed_by(by_both, grads, mesh), state, placed_by(by_both, params, mesh))
    inside = mapped(step, mesh, P("a"), cut(state), axis_names={"a"})
    assert_same_bits(jax.jit(inside)(*operands), want)


def test_other_doors_and_wrappers_inside():
    mesh = mesh_of((8,), AUTO)

    def check(tx, advance):
        _, grads, _, params = rows(LION)
        state = tx.init(params)
        spec_of = lambda x: P("a") if x.ndim and x.shape[0] % 8 == 0 else P()  # noqa: E731
        specs = jax.tree.map(spec_of, state)
        inside = jax.jit(mapped(lambda *operands: advance(*operands, specs=P("a")), mesh, P("a"), specs))
        assert_same_bits(inside(grads, state, params), advance(grads, state, params))

    def applied(tx):
        def advance(grads, state, params, **specs):
            updates, state = tx.update(grads, state, params, **specs)
            return optax.apply_updates(params, updates), state

        return advance

    plain, in_place = LION(min_8bit_size=SMALLEST), LION(min_8bit_size=SMALLEST, in_place=True)
    check(plain, applied(plain))
    check(in_place, applied(in_place))
    chained = sr8.chain(optax.clip(1e-3), plain)
    check(chained, chained.step)
    injected = sr8.inject_hyperparams(sr8.lion)(1e-3, min_8bit_size=SMALLEST)
    check(injected, injected.step)


def test_replicas_need_no_specs_where_types_show_them():
    tx, grads, state, params = rows(LION)
    want, mesh = tx.step(grads, state, params), mesh_of((4, 2), AUTO)
    everywhere = functools.partial(mapped, mesh=mesh, specs=P(), state_specs=P())
    assert_same_bits(jax.jit(everywhere(tx.step))(grads, state, params), want)
    said = functools.partial(tx.step, specs=P())
    assert_same_bits(jax.jit(everywhere(said, check_vma=False))(grads, state, params), want)
    copies = jax.tree.map(lambda x: jnp.stack([x] * 2), (grads, state, params))
    replicas = jax.pmap(said, axis_name="a", devices=jax.devices()[:2])(*copies)
    for i in range(2):
        assert_same_bits(jax.tree.map(lambda x, i=i: x[i], replicas), want)


def test_what_a_leaf_gets_depends_on_the_whole():
    """Pieces of 1,024 elements with blocks of 256: the whole has 8,192, one row of it a block."""
    params = {"w": normal((16, 512), 0, 0.02, BF16)}
    mesh = mesh_of((8,), AUTO)
    for smallest, kept in ((8192, jnp.uint8), (8193, F32)):
        tx = ADAMW(min_8bit_size=smallest)
        state, grads = tx.init(params), grads_like(params, 0)
        assert state.mu["w"].dtype == kept
        inside = mapped(functools.partial(tx.step, specs=P("a")), mesh, P("a"), cut(state))
        assert_same_bits(jax.jit(inside)(grads, state, params), tx.step(grads, state, params))


# What is refused.


def attempt(specs, *, spec=ROWS, sizes=(4, 2), shape=(16, 512), **kwargs):
    """Traces a step inside a shard_map over parameters cut by `spec`."""
    params = {"w": jnp.ones(shape, BF16)}
    tx = LION(min_8bit_size=SMALLEST)
    state = tx.init(params)
    step = functools.partial(tx.step, specs=specs)
    inside = mapped(step, mesh_of(sizes, AUTO), spec, cut(state, spec if shape[-1] == 512 else P()), **kwargs)
    return jax.eval_shape(inside, params, state, params)


WAY_OUT = r"pass specs=, the parameters' PartitionSpecs .*specs=jax.P\(\) says that every device holds"
REFUSED = {
    "varying": (dict(specs=None), rf"parameters differ over its axes \({{'w': \['a'\]}}\): {WAY_OUT}"),
    "varying_over_two": (dict(specs=None, spec=P("a", "b")), r"{'w': \['a', 'b'\]}"),
    "unseen": (
        dict(specs=None, check_vma=False),
        rf"check_vma=False.* over the axes \['a', 'b'\].*{WAY_OUT}",
    ),
    "unseen_replicas": (dict(specs=None, spec=P(), check_vma=False), "cannot be seen"),
    "unknown_axis": (dict(specs=P("z")), r"the spec .* of w has axes that are not manual here: \['z'\]"),
    "not_manual": (dict(specs=P("a", "b"), axis_names={"a"}), r"of w has axes that are not manual here: \['b'\]"),
    "too_many_axes": (dict(specs=P("a", None, None)), "of w has more axes than its 2"),
    "no_spec": (dict(specs={"w": "a"}), "specs must hold PartitionSpecs, at w it has a str"),
    "none": (dict(specs={"w": None}), "specs must be a tree of PartitionSpecs like the parameters, or a prefix"),
    "sharding": (dict(specs={"w": ("a",)}), "specs must"),
    "other_tree": (
        dict(specs={"v": P("a")}),
        "specs must be a tree of PartitionSpecs like the parameters, or a prefix",
    ),
    "deeper": (dict(specs={"w": {"x": P("a")}}), "specs must be a tree of PartitionSpecs"),
    "unnamed": (dict(specs=P()), r"w differs over the axes \['a'\], which its spec P\w*\(\) does not name"),
    "unnamed_one_of_two": (dict(specs=P("a"), spec=P("a", "b")), r"w differs over the axes \['b'\]"),
    "cut_block": (
        dict(specs=P(None, "b"), spec=P(None, "b"), shape=(8, 768)),
        r"edges of shards cut blocks: w has 768 columns in 2 pieces and in blocks of 256; block_size=128 avoids it",
    ),
}


@pytest.mark.parametrize(("how", "told"), REFUSED.values(), ids=REFUSED)
def test_refusals_say_why_and_what_to_do(how, told):
    with pytest.raises(ValueError, match=told):
        attempt(**how)


def test_an_ensemble_over_devices():
    """Members differ over the axis, and so do their seeds; what a `vmap` has taken away is no axis of a spec."""
    tx, params = LION(min_8bit_size=SMALLEST), {"w": normal((8, 8, 512), 0, 0.02, BF16)}
    grads, state = grads_like(params, 0), jax.vmap(tx.init)(params)
    state = state._replace(seed=jnp.arange(16, dtype=jnp.uint32).reshape(8, 2))
    want = jax.vmap(tx.step)(grads, state, params)
    mesh = mesh_of((8,), AUTO)
    for specs in (None, P()):
        inside = mapped(jax.vmap(functools.partial(tx.step, specs=specs)), mesh, ROWS, ROWS)
        assert_same_bits(jax.jit(inside)(grads, state, params), want)
    with pytest.raises(ValueError, match="cuts it"):
        attempt(P("a"), spec=P())


def test_gradients_that_were_not_summed_are_refused():
    tx, grads, state, params = rows(LION)
    inside = jax.shard_map(tx.step, mesh=mesh_of((4,), AUTO), in_specs=(P("a"), P(), P()), out_specs=P("a"))
    local = jax.tree.map(lambda g: jnp.concatenate([g] * 4), grads)
    with pytest.raises(ValueError, match=r"gradients differ where .*psum.* w: over \['a'\]"):
        jax.eval_shape(inside, local, state, params)


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("door", ["step", "update", "in_place"])
def test_the_kernel_traces_inside(monkeypatch, door, check_vma):
    pytest.importorskip("jax_triton", reason="jax-triton cannot be installed here")
    monkeypatch.setattr(transform, "select", lambda asked: ("triton", "test"))
    tx, grads, state, params = rows(ADAMW, in_place=door == "in_place")

    def advance(grads, state, params):
        if door == "step":
            return tx.step(grads, state, params, specs=ROWS)
        updates, state = tx.update(grads, state, params, specs=ROWS)
        return optax.apply_updates(params, updates), state

    inside = mapped(advance, mesh_of((4,), AUTO), ROWS, cut(state), check_vma=check_vma)
    assert "triton_kernel_call" in str(jax.make_jaxpr(inside)(grads, state, params))
    leaf.step_group.clear_cache()


def test_what_is_refused_otherwise_works():
    attempt(P("a"))
    attempt({"w": P("a")}, check_vma=False)
    attempt(None, spec=P())


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
def test_specs_are_for_the_inside(jit):
    tx, grads, state, params = rows(LION)
    step = functools.partial(tx.step, specs=P("a"))
    with pytest.raises(ValueError, match=r"specs= is for steps inside a shard_map; outside, .* drop it"):
        (jax.jit(step) if jit else step)(grads, state, params)
    with pytest.raises(ValueError, match="specs= is for steps inside a shard_map"):
        tx.update(grads, state, params, specs=P())


def test_pmap_needs_specs():
    tx, grads, state, params = rows(LION)
    copies = jax.tree.map(lambda x: jnp.stack([x] * 2), (grads, state, params))
    with pytest.raises(ValueError, match=rf"or a pmap, over the axes \['i'\].*{WAY_OUT}"):
        jax.pmap(tx.step, axis_name="i", devices=jax.devices()[:2])(*copies)


# Where a piece lies.

AXES = ("a", "b", "c")  # of two devices each


def cuts(shape):
    """All ways to cut the axes of an array over three axes of a mesh, each by a different one, or one by two."""
    for names in itertools.product([(), ("a",), ("b",), ("c",), ("b", "a"), ("a", "c")], repeat=len(shape)):
        used = [n for some in names for n in some]
        if len(set(used)) == len(used) and all(n % 2 ** len(some) == 0 for n, some in zip(shape, names, strict=True)):
            yield names


def at_every_position(function):
    """By position along a, b, c: the function's results on that device."""
    for name in reversed(AXES):
        function = jax.vmap(function, axis_name=name, axis_size=2, in_axes=(), out_axes=0)
    return jax.device_get(function())


def positions(names):
    """By position along a, b, c: which piece of an axis cut by those names."""
    for place in itertools.product(range(2), repeat=3):
        index = 0
        for name in names:
            index = 2 * index + place[AXES.index(name)]
        yield place, index


def brute_force(rows):
    """(inner, stride) such that row r of a piece lies at r // inner * stride + r % inner, if there is one."""
    offsets = rows - rows[0]
    r = np.arange(len(rows))
    for inner in range(1, len(rows) + 1):
        stride = offsets[inner] if inner < len(rows) else 0
        if np.array_equal(r // inner * stride + r % inner, offsets):
            return True
    return False


SMALL = [(8,), *itertools.product([1, 2, 4], [8]), *itertools.product([1, 2, 4], [2, 3, 4], [8])]
DEEP = [*itertools.product([1, 2, 4], [2, 3], [2, 4], [8]), (2, 2, 3, 2, 8), (2, 1, 2, 3, 8)]


@pytest.mark.parametrize("shape", SMALL + DEEP, ids=str)
def test_shard_tells_where_pieces_lie(shape):
    whole = np.arange(math.prod(shape[:-1])).reshape(shape[:-1])
    every = list(cuts(shape))
    if len(shape) > 3:  # those that differ along one axis of the mesh say no more
        every = [names for names in every if all(len(some) < 2 for some in names)][::3]

    def local(names):
        return tuple(n // 2 ** len(some) for n, some in zip(shape, names, strict=True))

    shards = [Shard(shape, names) for names in every]
    found = at_every_position(
        lambda: [(s.start(local(names)), s.origin(local(names))) for s, names in zip(shards, every, strict=True)]
    )
    for shard, names, (starts, (row, column)) in zip(shards, every, found, strict=True):
        piece = local(names)
        assert shard.whole == (piece == shape)
        can = True
        for place in itertools.product(range(2), repeat=3):
            begin = [n * dict(positions(some))[place] for n, some in zip(piece, names, strict=True)]
            at = lambda x, place=place: int(np.broadcast_to(x, (2, 2, 2))[place])  # noqa: E731
            assert [at(x) for x in starts] == begin
            assert at(column) == begin[-1]
            held = whole[tuple(slice(b, b + n) for b, n in zip(begin[:-1], piece[:-1], strict=True))].ravel()
            assert at(row) == held[0]
            can = brute_force(held)
            if can:
                inner, stride = shard.runs(piece)
                r = np.arange(len(held))
                np.testing.assert_array_equal(held[0] + r // inner * stride + r % inner, held)
        if not can:
            with pytest.raises(ValueError, match="no runs of one length and stride"):
                shard.runs(piece)
        assert shard.fits_kernel(piece) == (can and (not names[-1] or piece[-1] % 8 == 0))


def test_rows_are_counted_modulo_2_to_the_32():
    shape, piece = (4, 65538, 131071, 8), (1, 32769, 131071, 8)
    shard = Shard(shape, (("a", "b"), ("c",), (), ()))
    row, column = at_every_position(lambda: shard.origin(piece))
    for place in itertools.product(range(2), repeat=3):
        first = ((2 * place[0] + place[1]) * 65538 + place[2] * 32769) * 131071
        assert int(row[place]) == first % 2**32
    assert not np.any(column)
    assert shard.runs(piece) == (32769 * 131071, 0)
    with pytest.raises(ValueError, match="no runs"):
        Shard((2, 2**20, 2**12, 8), ((), ("a",), ("b",), ())).runs((2, 2**19, 2**11, 8))


@KINDS
def test_positions_come_from_the_mesh(kind):
    """As above, on eight devices instead of eight positions of `vmap`."""
    mesh, shape = mesh_of((2, 2, 2), kind), (4, 4, 2048)
    shard = Shard(shape, (("c", "a"), (), ("b",)))
    rows = jnp.arange(16, dtype=jnp.uint32).reshape(4, 4, 1) + jnp.zeros(shape, jnp.uint32)
    columns = jnp.arange(2048, dtype=jnp.uint32) + jnp.zeros(shape, jnp.uint32)
    spec = P(("c", "a"), None, "b")

    def inside(rows, columns):
        row, column = shard.origin(rows.shape)
        inner, stride = shard.runs(rows.shape)
        r = jnp.arange(4, dtype=jnp.uint32).reshape(1, 4, 1)
        ours = row + r // inner * np.uint32(stride) + r % inner
        return rows - ours, columns - column - jnp.arange(1024, dtype=jnp.uint32)

    with within(mesh):
        operands = [jax.device_put(np.asarray(x), NamedSharding(mesh, spec)) for x in (rows, columns)]
        wrong = jax.jit(jax.shard_map(inside, mesh=mesh, in_specs=(spec, spec), out_specs=(spec, spec)))(*operands)
    assert not np.any(jax.device_get(wrong[0]))
    assert not np.any(jax.device_get(wrong[1]))
