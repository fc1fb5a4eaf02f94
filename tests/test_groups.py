"""Which leaves share a launch, how a launch covers them, and which back end is chosen, for every reason."""

import dataclasses
import importlib.metadata
import itertools
import math
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tables import ADAMW, BF16, F32, LION, small

import optax_sr8bit as sr8
from optax_sr8bit import codecs, groups, rounding
from optax_sr8bit.implementation import select
from optax_sr8bit.leaf import LeafSpec
from optax_sr8bit_kernels import launch, obstacle
from optax_sr8bit_kernels.launch import Launch


def spec(opt=ADAMW, codec="offset", block=256, dtype=BF16, decay=True):
    rule = opt().definition.rule
    return LeafSpec(
        rule, rule.flags_for((decay,)), codecs.get(codec), rounding.get("stochastic"), block, dtype, BF16, None
    )


def test_xla_steps_leaves_one_by_one():
    assert groups.group("xla", [spec()] * 3, [(4, 512)] * 3) == [[0], [1], [2]]


def test_leaves_alike_are_grouped_in_order():
    shapes = [(16, 512), (4, 300), (8, 512), (0, 512), (1, 1024), (0, 256)]
    assert groups.group("triton", [spec()] * 6, shapes) == [[0, 2, 4], [1], [3, 5]]
    assert groups.group("triton", [], []) == []


@pytest.mark.parametrize(
    "other",
    [dict(opt=LION), dict(codec="dynamic"), dict(block=128), dict(dtype=F32), dict(decay=False)],
    ids=lambda changed: next(iter(changed)),
)
def test_leaves_of_other_specs_are_not_mixed(other):
    specs = [spec(), spec(**other), spec(), spec(**other)]
    assert groups.group("triton", specs, [(4, 512)] * 4) == [[0, 2], [1, 3]]


def test_groups_are_limited_in_elements_and_in_leaves():
    one = (groups.LARGEST // 2, 1)
    assert groups.group("triton", [spec(block=8)] * 5, [one] * 5) == [[0, 1], [2, 3], [4]]
    huge = [(8, 512), (2 * groups.LARGEST // 512, 512), (8, 512), (8, 512)]
    assert groups.group("triton", [spec()] * 4, huge) == [[0], [1], [2, 3]]
    many = groups.group("triton", [spec()] * 600, [(1, 512)] * 600)
    assert [len(members) for members in many] == [launch.MOST_LEAVES, launch.MOST_LEAVES, 600 - 2 * launch.MOST_LEAVES]
    assert launch.MOST_LEAVES < 2**8  # the kernel's search for a program's leaf has eight steps


def test_groups_hold_every_leaf_once_and_one_layout_each():
    rng = np.random.default_rng(0)
    axes = (1, 3, 8, 31, 32, 33, 100, 256, 257, 512, 768, 4096)
    shapes = [(int(rng.integers(0, 9)), int(rng.choice(axes))) for _ in range(500)] + [(), (5,), (0,)]
    specs = [spec(opt, block=min(256, s[-1] if s else 1)) for s, opt in zip(shapes, itertools.cycle((ADAMW, LION)))]
    found = groups.group("triton", specs, shapes)
    assert sorted(itertools.chain(*found)) == list(range(len(shapes)))
    assert [members[0] for members in found] == sorted(members[0] for members in found)
    for members in found:
        assert members == sorted(members)
        assert len({specs[i] for i in members}) == 1
        sizes = {math.prod(shapes[i]) > 0 for i in members}
        assert len(sizes) == 1
        if sizes == {True}:
            assert len({launch.layout(shapes[i], specs[i].block) for i in members}) == 1


@pytest.mark.parametrize(
    ("shape", "block", "width", "whole", "wide", "unit"),
    [
        ((), None, 8, False, False, 1),
        ((5,), None, 8, False, False, 1),
        ((8,), None, 8, True, False, 8),
        ((4, 33), 33, 64, False, False, 1),
        ((4, 100), None, 128, False, False, 4),
        ((4, 200), 200, 256, False, False, 8),
        ((4, 256), 256, 256, True, False, 16),
        ((4, 257), 256, 256, False, True, 1),
        ((4, 512), 256, 256, True, True, 16),
        ((2, 3, 1000), None, 256, False, True, 8),
        ((4, 1024), 1024, 1024, True, True, 16),
    ],
)
def test_layout(shape, block, width, whole, wide, unit):
    assert launch.layout(shape, block) == launch.Layout(width, whole, wide, unit)


def test_the_default_launch_grows_with_the_work():
    assert launch.default_launch(256, 1000) == Launch(2, 1, 1)
    assert launch.default_launch(256, 2**30) == Launch(2, 4, 1)
    assert launch.default_launch(8, 1) == Launch(64, 1, 1)
    assert launch.default_launch(1024, 2**30) == Launch(1, 4, 2)


HOWS = [None, *(Launch(*how) for how in itertools.product((1, 2, 4), (1, 2, 3, 8), (1, 4)))]


@pytest.mark.parametrize("seed", range(5))
def test_programs_cover_every_block_once(seed):
    """As the kernel reads the grid: its program's leaf, the leaf's length and rows, the program's tiles."""
    rng = np.random.default_rng(seed)
    for how in HOWS:
        block = int(rng.choice((32, 128, 256)))
        lengths = rng.integers(block // 2 + 1, 4 * block, 6)
        lengths -= lengths % rng.choice((1, 4, 16, block)) * (lengths > block)
        lead = [tuple(map(int, rng.integers(1, 6, rng.integers(0, 3)))) for _ in lengths]
        shapes = [(*rows, int(n)) for rows, n in zip(lead, lengths, strict=True)]
        over = launch.grid(shapes, block, how)
        tiling = over.tiling
        assert tiling.block == block
        seen = []
        for program in range(over.programs):
            leaf = max(k for k, first in enumerate(over.firsts) if first <= program)
            row_blocks = -(-over.lengths[leaf] * tiling.unit // block)
            total = over.rows[leaf] * row_blocks
            each = tiling.blocks * tiling.tiles
            first = (program - over.firsts[leaf]) * each
            if tiling.exact:
                assert first + each <= total
            seen += [(leaf, b) for b in range(first, min(first + each, total))]
        blocks = [math.prod(s[:-1]) * -(-s[-1] // block) for s in shapes]
        assert seen == [(leaf, b) for leaf, count in enumerate(blocks) for b in range(count)]
        assert [n * tiling.unit for n in over.lengths] == [s[-1] for s in shapes]
        assert tiling.whole == all(s[-1] % block == 0 for s in shapes)
        assert tiling.wide == all(-(-s[-1] // block) >= tiling.blocks for s in shapes)


@pytest.fixture
def machine(monkeypatch):
    """Sets what a machine has: the version of jax-triton, the GPUs' compute capabilities."""

    def has(version="0.4.1", capabilities=((9, 0),), importable=True):
        def version_of(name):
            if version is None:
                raise importlib.metadata.PackageNotFoundError(name)
            return version

        monkeypatch.setattr(importlib.metadata, "version", version_of)
        monkeypatch.setattr(obstacle, "capabilities", lambda: list(capabilities))
        # An import of None fails, of any module that is there already succeeds.
        monkeypatch.setitem(sys.modules, "jax_triton", math if importable else None)
        obstacle.triton_obstacle.cache_clear()

    yield has
    obstacle.triton_obstacle.cache_clear()


OBSTACLES = {
    "jax-triton is not installed" if sys.version_info >= (3, 12) else "needs Python 3.12": dict(version=None),
    "jax-triton 0.3.1 is older than": dict(version="0.3.1"),
    "no CUDA GPU": dict(capabilities=()),
    "compute capability 7.5": dict(capabilities=((7, 5), (9, 0))),
    "cannot be imported": dict(importable=False),
}


@pytest.mark.parametrize("reason", OBSTACLES)
def test_an_obstacle_leads_to_xla_and_is_named(reason, machine, capsys):
    machine(**OBSTACLES[reason])
    chosen, why = select(None)
    assert chosen == "xla"
    assert reason in why
    sr8.explain(ADAMW(), small())
    assert reason in capsys.readouterr().out
    assert select("xla") == ("xla", "asked for")
    with pytest.raises(NotImplementedError, match=reason):
        select("triton")


def test_a_gpu_leads_to_triton(machine):
    machine()
    assert select(None) == ("triton", "the fused kernel")
    assert select("triton") == ("triton", "asked for")
    assert select("xla") == ("xla", "asked for")


def test_triton_that_cannot_run_is_refused_where_it_is_used(machine):
    """The factory and `init` need no GPU: a state may be made elsewhere."""
    machine(capabilities=())
    tx, params = ADAMW(implementation="triton"), small()
    state = tx.init(params)
    for use in (lambda: tx.step(params, state, params), lambda: tx.update(params, state, params)):
        with pytest.raises(NotImplementedError, match="no CUDA GPU"):
            use()
    with pytest.raises(NotImplementedError, match="no CUDA GPU"):
        sr8.explain(tx, params)


def test_the_kernel_refuses_what_it_cannot_step(machine):
    machine()
    tx, params = ADAMW(implementation="triton"), {"w": jnp.ones((16, 512), BF16)}
    state = tx.init(params)
    with pytest.raises(NotImplementedError, match=r"w has a gradient in float8_e4m3fn.*float32"):
        tx.step({"w": params["w"].astype(jnp.float8_e4m3fn)}, state, params)
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    partly = jax.shard_map(tx.step, mesh=mesh, in_specs=jax.P(), out_specs=jax.P(), axis_names={"a"})
    with pytest.raises(NotImplementedError, match=r"make all axes manual"):
        jax.jit(partly)(params, state, params)


def test_gradients_that_the_kernel_does_not_know_go_to_xla():
    fits = {dtype: dataclasses.replace(spec(), grad_dtype=dtype).fits_kernel for dtype in (BF16, F32, np.float64)}
    assert fits == {BF16: True, F32: True, np.float64: False}
    assert not dataclasses.replace(spec(), delta_dtype=np.float64).fits_kernel


def test_an_unknown_implementation_is_refused_by_the_factory():
    with pytest.raises(ValueError, match="bogus"):
        ADAMW(implementation="bogus")
