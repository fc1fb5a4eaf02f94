"""What will happen to each leaf and why, and whether a state is what its optimizer expects."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import optax

from optax_sr8bit import codecs, state as states
from optax_sr8bit.codecs import Codec
from optax_sr8bit.implementation import select
from optax_sr8bit.placement import cut_blocks
from optax_sr8bit.plan import LeafPlan, plan_tree, shown
from optax_sr8bit.rule import Rule
from optax_sr8bit.seeds import path_name
from optax_sr8bit.transform import Transformation

# Parameters and each moment in float32, as the FP32 optimizer of the same name keeps them.
FLOAT32_BYTES = 4


@dataclasses.dataclass(frozen=True)
class LeafReport:
    """One leaf of a `Report`.

    Attributes:
      plan: what happens to it.
      param_bytes: of the parameter.
      state_bytes: of all that the state keeps for it: moments, scales, corrections, arrays of other links of a chain.
      others: the dtypes of that, where the optimizer itself has no moments.
      cut: what it costs that edges of shards cut its blocks, or "".
    """

    plan: LeafPlan
    param_bytes: int
    state_bytes: int
    others: str
    cut: str

    @property
    def size(self) -> int:
        """Its elements."""
        return math.prod(self.plan.shape)


@dataclasses.dataclass(frozen=True, repr=False)
class Report:
    """What an optimizer keeps for a tree of parameters; prints as a table.

    Attributes:
      rule: the optimizer's rule.
      implementation: the back end, and why.
      leaves: one entry a leaf.
    """

    rule: Rule
    implementation: str
    leaves: tuple[LeafReport, ...]

    @property
    def size(self) -> int:
        """All elements."""
        return sum(leaf.size for leaf in self.leaves)

    @property
    def bytes(self) -> int:
        """Parameters, moments and scales, without the few bytes of count, seed and format."""
        return sum(leaf.param_bytes + leaf.state_bytes for leaf in self.leaves)

    @property
    def bytes_per_parameter(self) -> float:
        """`bytes` over `size`."""
        return self.bytes / max(self.size, 1)

    @property
    def float32_bytes_per_parameter(self) -> float:
        """The same for float32 parameters and moments."""
        return FLOAT32_BYTES * (1.0 + len(self.rule.moments))

    @property
    def _comparison(self) -> str:
        if not self.rule.moments:
            return f"{3 * FLOAT32_BYTES:.3f} as float32 adamw"
        own = f"{self.float32_bytes_per_parameter:.3f} as float32 {self.rule.name}"
        return own if len(self.rule.moments) == 2 else f"{own}, {3 * FLOAT32_BYTES:.3f} as float32 adamw"

    def __repr__(self) -> str:
        """In short; `str` is the table."""
        return f"Report({self.rule.name}, {self.size:,} parameters, {self.bytes_per_parameter:.3f} bytes each)"

    def __str__(self) -> str:
        """The table."""
        head = ("leaf", "shape", "dtype", "rounding", "codec", "block", "B/param", "why")
        rows = [head, *(_row(leaf) for leaf in self.leaves)]
        widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
        lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]
        total = (
            f"{self.rule.name} on {self.implementation}: {self.size:,} parameters in {len(self.leaves)} leaves, "
            f"{self.bytes:,} bytes, {self.bytes_per_parameter:.3f} a parameter; "
            f"{self._comparison}"
        )
        return "\n".join([*lines, total])


def explain(tx: Transformation, params: Any) -> Report:
    """Prints what will happen to each leaf and why, and the memory beside that of float32.

    Args:
      tx: an optimizer of this library, also within `sr8.chain` or `sr8.inject_hyperparams`.
      params: a tree of arrays or ShapeDtypeStructs; where they have shardings, what these cost is told.

    Returns:
      The `Report` that was printed.

    Raises:
      TypeError: for another transformation, or leaves that cannot be stepped.
    """
    require(tx)
    rule = tx.definition.rule
    leaves, plans = [], plan_tree(params, tx.options)
    cut = cut_blocks(plans, jax.tree.leaves(params))
    kept = _kept(tx, params)
    for plan in plans:
        param = math.prod(plan.shape) * plan.dtype.itemsize
        arrays = kept.get(plan.name, [])
        size = sum(math.prod(x.shape) * x.dtype.itemsize for x in arrays)
        others = "" if rule.moments else ", ".join(sorted({x.dtype.name for x in arrays}))
        leaves.append(LeafReport(plan, param, size, others, cut.get(shown(plan.name), "")))
    report = Report(rule, "{} ({})".format(*select(tx.options.implementation)), tuple(leaves))
    print(report)
    return report


def check(state: Any, tx: Transformation, params: Any = None) -> None:
    """Checks that a state, a restored one say, is what the optimizer expects.

    Args:
      state: the optimizer's state, also within those of `sr8.chain`, `optax.chain` or wrappers.
      tx: the optimizer.
      params: its parameters; without them their dtypes are taken to be bfloat16.

    Raises:
      ValueError: says what differs, leaf by leaf.
      TypeError: where tx is no optimizer of this library.
    """
    require(tx)
    rule = tx.definition.rule
    found = states_in(state, rule)
    if not found:
        raise ValueError(f"{rule.name} keeps a {rule.state.__name__}, which this {type(state).__name__} does not hold")
    for one in found:
        tree = params
        if tree is None and not rule.moments:
            raise ValueError(f"{rule.name} has no moments that tell of the parameters' shapes: pass params=")
        if tree is None:
            codes = getattr(one, rule.moments[0].name)
            tree = jax.tree.map(lambda code: jax.ShapeDtypeStruct(code.shape, jnp.bfloat16), codes)
        plans = plan_tree(tree, tx.options)
        if params is None and tx.options.corrects:
            raise ValueError("what a rounding keeps beside parameters depends on their dtypes: pass params=")
        if params is None and (pairs := [shown(plan.name) for plan in plans if plan.codec.bits == 4]):
            raise ValueError(f"codes of 4 bits do not tell how long rows are: pass params=, for {', '.join(pairs)}")
        states.check(rule, one, plans, tx.options)


def _kept(tx: Transformation, params: Any) -> dict[str, list[Any]]:
    """By parameter the arrays that belong to it in all of a state, of chains and wrappers too."""
    kept: dict[str, list[Any]] = {}
    abstract = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, p.dtype), params)
    names = jax.tree_util.tree_map_with_path(lambda path, _: path_name(path), abstract)

    def note(array: Any, name: str) -> Any:
        if not isinstance(array, optax.MaskedNode):
            kept.setdefault(name, []).append(array)
        return array

    state = jax.eval_shape(tx.init, abstract)
    optax.tree.map_params(tx, note, state, names, is_leaf=lambda x: isinstance(x, optax.MaskedNode))
    return kept


def states_in(tree: Any, rule: Rule) -> list[Any]:
    """All states of the rule within a state."""
    leaves = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, rule.state))
    return [leaf for leaf in leaves if isinstance(leaf, rule.state)]


def _row(leaf: LeafReport) -> tuple[str, ...]:
    plan = leaf.plan
    how = plan.rounding.name if plan.dtype != jnp.float32 else "-"
    per = f"{(leaf.param_bytes + leaf.state_bytes) / leaf.size:.3f}" if leaf.size else "-"
    why = plan.reason + ("; rare updates may be huge" if plan.codec.name == "dynamic" else "")
    why += leaf.cut and f"; its last axis is exchanged: {leaf.cut}"
    block = "-" if plan.block is None else str(plan.block)
    codec = leaf.others or _codec(plan.codec)
    why = "kept by other links" if leaf.others else why
    return (shown(plan.name), str(list(plan.shape)), str(plan.dtype), how, codec, block, per, why)


def _codec(codec: Codec) -> str:
    return codecs.by_format(codec.format) if codec.power_of_two else codec.name


def require(tx: Any) -> None:
    """Raises a TypeError for what is no optimizer of this library."""
    if not isinstance(tx, Transformation):
        raise TypeError(
            f"expected an optimizer of optax_sr8bit, got {type(tx).__name__}; optax.chain and Optax's wrappers hide "
            "it: pass the optimizer itself, or build with sr8.chain and sr8.inject_hyperparams"
        )
