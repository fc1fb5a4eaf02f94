"""Meshes of virtual devices, a table of shardings on them, and what to look for in a program over several devices."""

import contextlib
import functools
import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from tables import BF16, OPTIMIZERS, Optimizer, grads_like, normal, run

DEVICES = 8
SMALLEST = 2048  # min_8bit_size of these tests
KINDS = pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
COLLECTIVE = re.compile(
    r"= (.*?) (all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter|collective-broadcast)(?:-start)?\("
)


class Leaf(NamedTuple):
    """A parameter and how it is placed."""

    shape: tuple[int, ...]
    spec: P


class Case(NamedTuple):
    """A mesh and leaves on it."""

    mesh: tuple[int, ...]
    leaves: Mapping[str, Leaf]


# Nothing is exchanged for any of these.
CASES = {
    "1": Case((1,), {"first": Leaf((8, 512), P("a")), "bias": Leaf((64,), P("a"))}),
    "8": Case(
        (8,),
        {
            "first": Leaf((16, 512), P("a")),
            "last": Leaf((2, 2048), P(None, "a")),
            "ragged": Leaf((8, 700), P("a")),  # the last block of a row is short
            "bias": Leaf((64,), P("a")),  # float32 moments, whose lone scale cannot be cut
            "everywhere": Leaf((4, 512), P()),
            "scalar": Leaf((), P()),
        },
    ),
    "4x2": Case(
        (4, 2),
        {
            "both": Leaf((8, 512), P("a", "b")),
            "swapped": Leaf((4, 1024), P("b", "a")),
            "pair_first": Leaf((16, 300), P(("a", "b"))),
            "pair_last": Leaf((2, 2048), P(None, ("b", "a"))),
            "bias": Leaf((64,), P(("b", "a"))),
            "small": Leaf((8, 32), P("b", "a")),
        },
    ),
    "2x2x2": Case(
        (2, 2, 2),
        {
            "all": Leaf((2, 4, 512), P("a", "b", "c")),
            "middle": Leaf((3, 8, 300), P(None, ("c", "a"))),
            "middle_and_last": Leaf((2, 4, 1024), P(None, "b", ("a", "c"))),
            "two_behind": Leaf((2, 4, 4, 256), P(None, "a", "b")),  # rows in no runs of one stride
        },
    ),
}
# An edge cuts a block: the last axis is exchanged, and nothing else.
CUT = {
    "2": Case((2,), {"cut": Leaf((8, 768), P(None, "a"))}),
    "8": Case(
        (8,),
        {
            "scales_whole": Leaf((2, 11008), P(None, "a")),  # 43 scales
            "scales_cut": Leaf((2, 2000), P(None, "a")),  # 8 scales, the last of a short block
            "one_block": Leaf((16, 128), P(None, "a")),
        },
    ),
    "4x2": Case((4, 2), {"rows_cut_too": Leaf((8, 768), P("a", "b"))}),
}
EVERY_CASE = CASES | {f"cut_{name}": case for name, case in CUT.items()}


def mesh_of(sizes: tuple[int, ...], kind: Any) -> jax.sharding.Mesh:
    """A mesh with axes a, b, c of one kind over the first devices."""
    devices = jax.devices()[: math.prod(sizes)]
    return jax.make_mesh(sizes, ("a", "b", "c")[: len(sizes)], axis_types=(kind,) * len(sizes), devices=devices)


def within(mesh: jax.sharding.Mesh) -> Any:
    """Where types carry shardings, the mesh must be the current one; Auto axes need no such thing."""
    return jax.set_mesh(mesh) if AxisType.Explicit in mesh.axis_types else contextlib.nullcontext()


def params_of(case: Case, dtype: Any = BF16) -> dict[str, jax.Array]:
    """The leaves of a case on one device."""
    return {name: normal(leaf.shape, 100 + i, 0.02, dtype) for i, (name, leaf) in enumerate(case.leaves.items())}


def placed(tree: Any, case: Case, mesh: jax.sharding.Mesh) -> Any:
    """Parameters or gradients of a case, placed as its table says."""
    return {name: jax.device_put(x, NamedSharding(mesh, case.leaves[name].spec)) for name, x in tree.items()}


def collectives(compiled: Any) -> list[tuple[str, str]]:
    """The exchanges in a compiled program: (operation, type of the result)."""
    return [(operation, result) for result, operation in COLLECTIVE.findall(compiled.as_text())]


def bytes_held(tree: Any) -> int:
    """Bytes of a tree on one device."""
    return sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(tree))


def shardings_of(tree: Any) -> Any:
    return jax.tree.map(lambda x: x.sharding, tree)


def assert_placed_like(actual: Any, desired: Any) -> None:
    """Every array placed as its counterpart, an array or a sharding."""
    wrong = []
    for (path, x), other in zip(jax.tree_util.tree_flatten_with_path(actual)[0], jax.tree.leaves(desired), strict=True):
        wanted = getattr(other, "sharding", other)
        if not x.sharding.is_equivalent_to(wanted, x.ndim) or x.sharding.device_set != wanted.device_set:
            wrong.append(f"{jax.tree_util.keystr(path)}: {x.sharding}, not {wanted}")
    assert not wrong, "; ".join(wrong)


class Alone(NamedTuple):
    """A run on one device, in NumPy: donation spares it."""

    params: Any
    state: Any
    grads: list[Any]
    after: tuple[Any, Any]


def alone(opt: Optimizer, case: str, grad_dtype: Any) -> Alone:
    """Five steps of a case on one device."""
    return _alone(opt.name, case, grad_dtype)


@functools.cache
def _alone(opt_name: str, case: str, grad_dtype: Any, steps: int = 5) -> Alone:
    params = params_of(EVERY_CASE[case])
    (tx,) = (opt(min_8bit_size=SMALLEST, implementation="xla") for opt in OPTIMIZERS if opt.name == opt_name)
    state = tx.init(params)
    grads = [grads_like(params, i, dtype=grad_dtype) for i in range(steps)]
    return Alone(*jax.device_get((params, state, grads, run(tx.step, params, state, steps, dtype=grad_dtype))))
