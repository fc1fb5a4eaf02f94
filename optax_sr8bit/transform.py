"""From a rule and its hyperparameters to an Optax transformation with three doors."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_sr8bit import hyperparameters, seeds
from optax_sr8bit import state as states
from optax_sr8bit.groups import group
from optax_sr8bit.implementation import select
from optax_sr8bit.in_place import InPlaceUpdate
from optax_sr8bit.leaf import LeafSpec, step_group
from optax_sr8bit.manual import all_manual, manual_axes, shards_of
from optax_sr8bit.options import Options
from optax_sr8bit.partition import cuts_a_block, pieces
from optax_sr8bit.placement import advice
from optax_sr8bit.plan import LeafPlan, differences, named_leaves, plan_tree, shown
from optax_sr8bit.rule import Definition, Rule
from optax_sr8bit_kernels.shard import Shard


@jax.tree_util.register_static
class Transformation(optax.GradientTransformationExtraArgs):
    """An `optax.GradientTransformationExtraArgs` that can also step the parameters itself.

    A 2-tuple as Optax wants it; to JAX a static value without leaves, so that `eqx.filter_jit` takes it as an argument.
    Not to be differentiated: derivatives through rounding and codes are zero on XLA, and an error in the kernel.

    Attributes:
      init: params -> state.
      update: (updates, state, params, **extra_args) -> (updates, state), as any Optax transformation. Inside a
        `shard_map`, `specs=` says how parameters are cut: their PartitionSpecs, a tree or a prefix of one.
      step: (grads, state, params, **extra_args) -> (new params, state): fused, exact, in place under a jit that donates
        parameters and state; `specs=` as in update.
      definition: rule and hyperparameters.
      options: the shared options.
    """

    step: Callable[..., tuple[Any, Any]]
    definition: Definition
    options: Options

    def __new__(cls, init: Callable, update: Callable, step: Callable, definition: Definition, options: Options):
        """Attaches what a 2-tuple has no room for."""
        self = super().__new__(cls, init, update)
        self.step, self.definition, self.options = step, definition, options
        return self

    def __getnewargs__(self) -> tuple[Any, ...]:
        """What copies are made from."""
        return (*self, self.step, self.definition, self.options)

    def _replace(self, **functions: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """A plain Optax transformation: another `update` no longer fits `step`."""
        return optax.GradientTransformationExtraArgs(*self)._replace(**functions)


def build(definition: Definition, options: Options) -> Transformation:
    """The transformation of an optimizer.

    Raises:
      ValueError: for hyperparameters that are concrete and out of range.
    """
    rule = definition.rule
    hyperparameters.check(definition.hyperparameters)

    def advance(door: str, grads: Any, state: Any, params: Any, specs: Any) -> tuple[Any, Any]:
        plans, shards = _check(rule, options, grads, state, params, specs)
        implementation, _ = select(options.implementation)
        if not all_manual() and manual_axes():  # what is left for XLA to partition cannot be a kernel
            implementation = "xla"
        hyper = hyperparameters.evaluate(definition.hyperparameters, state.count)
        control = _control(rule, hyper, state.seed, state.count)
        leaves, structure = jax.tree.flatten(params)
        leaves, gradients = list(map(jnp.asarray, leaves)), list(map(jnp.asarray, jax.tree.leaves(grads)))
        kinds = []
        for plan, decay, grad in zip(plans, _decays(definition.mask, params), gradients, strict=True):
            delta = None if door != "update" else jnp.dtype(options.delta_dtype or grad.dtype)
            how = (plan.codec, plan.rounding, plan.block, plan.dtype, grad.dtype, delta)
            kinds.append(LeafSpec(rule, rule.flags_for(decay), *how))
        if options.implementation == "triton":
            _check_kernel(plans, kinds, implementation)
        moments, scales = ([getattr(state, f) for f in fields] for fields in rule.fields)
        old = [[jax.tree.leaves(tree) for tree in trees] for trees in (moments, scales)]
        new = [[[None] * len(plans) for _ in trees] for trees in old]
        results: list[Any] = [None] * len(plans)
        for members in group(implementation, kinds, [plan.shape for plan in plans]):
            stepped, *stepped_state = step_group(
                tuple(leaves[i] for i in members),
                tuple(gradients[i] for i in members),
                *(tuple(tuple(tree[i] for i in members) for tree in trees) for trees in old),
                control,
                np.array([seeds.leaf_words(plans[i].name) for i in members], np.uint32),
                spec=kinds[members[0]],
                implementation=implementation,
                shards=shards and tuple(shards[i] for i in members),
            )
            for at, i in enumerate(members):
                results[i] = InPlaceUpdate(stepped[at]) if door == "in_place" else stepped[at]
                for trees, values in zip(new, stepped_state, strict=True):
                    for tree, value in zip(trees, values, strict=True):
                        tree[i] = value[at]
        replaced = {
            field: jax.tree.unflatten(jax.tree.structure(tree), value)
            for fields, trees, values in zip(rule.fields, (moments, scales), new, strict=True)
            for field, tree, value in zip(fields, trees, values, strict=True)
        }
        return jax.tree.unflatten(structure, results), state._replace(
            count=optax.safe_increment(state.count), **replaced
        )

    def init(params: Any) -> Any:
        return states.init(rule, options, params)

    def update(
        updates: Any, state: Any, params: Any = None, *, specs: Any = None, **extra_args: Any
    ) -> tuple[Any, Any]:
        del extra_args  # Optax hands every link of a chain those of all
        return advance("in_place" if options.in_place else "update", updates, state, params, specs)

    def step(grads: Any, state: Any, params: Any, *, specs: Any = None, **extra_args: Any) -> tuple[Any, Any]:
        del extra_args
        return advance("step", grads, state, params, specs)

    return Transformation(init, update, step, definition, options)


@functools.partial(jax.jit, static_argnums=0)
def _control(rule: Rule, hyper: dict[str, jax.Array], seed: jax.Array, count: jax.Array) -> jax.Array:
    """All that is new in a step: the rule's scalars, seed and count, in one uint32 array, for one small kernel."""
    scalars = jax.lax.bitcast_convert_type(jnp.stack(rule.scalars(hyper, count)), jnp.uint32)
    return jnp.concatenate([scalars, seed, count.astype(jnp.uint32)[None]])


def _check(
    rule: Rule, options: Options, grads: Any, state: Any, params: Any, specs: Any
) -> tuple[list[LeafPlan], list[Shard] | None]:
    """Checks all inputs of a step before anything is computed; plans the leaves, and says how they are cut, if here."""
    if params is None:
        raise ValueError(
            f"{rule.name} rounds the parameters itself and needs them: call update(grads, state, params), or "
            "step(grads, state, params)"
        )
    if not isinstance(state, rule.state):
        raise ValueError(
            f"{rule.name} keeps a state of type {rule.state.__name__}, got {type(state).__name__}; build it with "
            "tx.init(params) (an Optax state, or a restored dict, is not continued)"
        )
    shards = shards_of(params, specs)
    plans = plan_tree(params, options) if shards is None else _plan_pieces(params, shards, options)
    _check_grads(grads, plans)
    states.check(rule, state, plans, options)
    return plans, shards


def _plan_pieces(params: Any, shards: list[Shard], options: Options) -> list[LeafPlan]:
    """The plans of whole leaves, with the shapes of the pieces."""
    leaves, structure = jax.tree.flatten(params)
    whole = [jax.ShapeDtypeStruct(shard.shape, leaf.dtype) for shard, leaf in zip(shards, leaves, strict=True)]
    plans = plan_tree(jax.tree.unflatten(structure, whole), options)
    sizes = manual_axes()
    cut = {
        shown(plan.name): advice(plan, pieces(shard.axes[-1:], sizes))
        for plan, shard in zip(plans, shards, strict=True)
        if plan.block is not None and cuts_a_block(shard.shape, shard.axes, sizes, plan.block)
    }
    if cut:
        raise ValueError(
            "inside a shard_map nothing is exchanged, but shards cut blocks: "
            + "; ".join(f"{name} has {why}" for name, why in cut.items())
        )
    return [dataclasses.replace(plan, shape=tuple(leaf.shape)) for plan, leaf in zip(plans, leaves, strict=True)]


def _check_grads(grads: Any, plans: list[LeafPlan]) -> None:
    """Raises a ValueError or TypeError that names every gradient that does not fit its parameter."""
    leaves = named_leaves(grads)
    if wrong := differences(leaves, plans):
        raise ValueError(f"gradients and parameters differ in their trees; {wrong}")
    pairs = [(plan, g) for plan, (_, g) in zip(plans, leaves, strict=True)]
    dtypes = [
        f"{shown(plan.name)}: {getattr(g, 'dtype', type(g).__name__)}"
        for plan, g in pairs
        if not (hasattr(g, "dtype") and jnp.issubdtype(g.dtype, jnp.floating))
    ]
    if dtypes:
        raise TypeError("gradients must be floating arrays; take integer inputs out of jax.grad. " + "; ".join(dtypes))
    shapes = [
        f"{shown(plan.name)}: gradient {list(g.shape)}, parameter {list(plan.shape)}"
        for plan, g in pairs
        if tuple(g.shape) != plan.shape
    ]
    if shapes:
        raise ValueError("gradients and parameters differ in shape; " + "; ".join(shapes))


def _check_kernel(plans: list[LeafPlan], kinds: list[LeafSpec], implementation: str) -> None:
    """Raises a NotImplementedError where the kernel was asked for and cannot step a leaf."""
    for plan, kind in zip(plans, kinds, strict=True):
        if not kind.fits_kernel:
            raise NotImplementedError(
                f"implementation='triton': {shown(plan.name)} has a gradient in {kind.grad_dtype}; cast it to float32, "
                "or pass implementation='xla' or None"
            )
    if implementation != "triton":
        raise NotImplementedError(
            "implementation='triton': inside a shard_map over some of the mesh's axes XLA would have to partition the "
            "kernel over the others; make all axes manual, or pass implementation='xla' or None"
        )


def _decays(mask: Any, params: Any) -> list[bool]:
    """Per leaf whether weight decay reaches it."""
    if mask is None:
        return [True] * len(jax.tree.leaves(params))
    tree = mask(params) if callable(mask) else mask
    try:
        full = jax.tree.map(lambda m, sub: jax.tree.map(lambda _: m, sub), tree, params)
    except (ValueError, TypeError) as error:
        raise ValueError(f"mask must be a tree of booleans like the parameters, or a prefix of it: {error}") from None
    try:
        flags = [np.asarray(flag) for flag in jax.tree.leaves(full)]
    except jax.errors.TracerArrayConversionError:
        raise ValueError("mask must hold concrete booleans, not traced ones: it decides what is compiled") from None
    kinds = sorted({str(flag.dtype) + str(list(flag.shape)) for flag in flags if flag.dtype != bool or flag.ndim})
    if kinds:
        raise ValueError(f"mask must hold one boolean for a leaf or subtree, got {kinds}")
    return [bool(flag) for flag in flags]
