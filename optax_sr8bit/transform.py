"""From a rule and its hyperparameters to an Optax transformation with three doors."""

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
from optax_sr8bit.options import Options
from optax_sr8bit.plan import LeafPlan, differences, named_leaves, plan_tree, shown
from optax_sr8bit.rule import Definition, Rule


@jax.tree_util.register_static
class Transformation(optax.GradientTransformationExtraArgs):
    """An `optax.GradientTransformationExtraArgs` that can also step the parameters itself.

    A 2-tuple as Optax wants it; to JAX a static value without leaves, so that `eqx.filter_jit` takes it as an argument.
    Not to be differentiated: derivatives through rounding and codes are zero on XLA, and an error in the kernel.

    Attributes:
      init: params -> state.
      update: (updates, state, params, **extra_args) -> (updates, state), as any Optax transformation.
      step: (grads, state, params, **extra_args) -> (new params, state): fused, exact, in place under a jit that donates
        parameters and state.
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

    def advance(door: str, grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
        plans = _check(rule, options, grads, state, params)
        implementation, _ = select(options.implementation)
        hyper = hyperparameters.evaluate(definition.hyperparameters, state.count)
        control = _control(rule, hyper, state.seed, state.count)
        leaves, structure = jax.tree.flatten(params)
        leaves, gradients = list(map(jnp.asarray, leaves)), list(map(jnp.asarray, jax.tree.leaves(grads)))
        specs = []
        for plan, decay, grad in zip(plans, _decays(definition.mask, params), gradients, strict=True):
            delta = None if door != "update" else jnp.dtype(options.delta_dtype or grad.dtype)
            how = (plan.codec, plan.rounding, plan.block, plan.dtype, grad.dtype, delta)
            specs.append(LeafSpec(rule, rule.flags_for(decay), *how))
        if options.implementation == "triton":
            _check_kernel(plans, specs, leaves)
        moments, scales = ([getattr(state, f) for f in fields] for fields in rule.fields)
        old = [[jax.tree.leaves(tree) for tree in trees] for trees in (moments, scales)]
        new = [[[None] * len(plans) for _ in trees] for trees in old]
        results: list[Any] = [None] * len(plans)
        for members in group(implementation, specs, [plan.shape for plan in plans]):
            stepped, *stepped_state = step_group(
                tuple(leaves[i] for i in members),
                tuple(gradients[i] for i in members),
                *(tuple(tuple(tree[i] for i in members) for tree in trees) for trees in old),
                control,
                np.array([seeds.leaf_words(plans[i].name) for i in members], np.uint32),
                spec=specs[members[0]],
                implementation=implementation,
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

    def update(updates: Any, state: Any, params: Any = None, **extra_args: Any) -> tuple[Any, Any]:
        del extra_args
        return advance("in_place" if options.in_place else "update", updates, state, params)

    def step(grads: Any, state: Any, params: Any, **extra_args: Any) -> tuple[Any, Any]:
        del extra_args
        return advance("step", grads, state, params)

    return Transformation(init, update, step, definition, options)


@functools.partial(jax.jit, static_argnums=0)
def _control(rule: Rule, hyper: dict[str, jax.Array], seed: jax.Array, count: jax.Array) -> jax.Array:
    """All that is new in a step: the rule's scalars, seed and count, in one uint32 array, for one small kernel."""
    scalars = jax.lax.bitcast_convert_type(jnp.stack(rule.scalars(hyper, count)), jnp.uint32)
    return jnp.concatenate([scalars, seed, count.astype(jnp.uint32)[None]])


def _check(rule: Rule, options: Options, grads: Any, state: Any, params: Any) -> list[LeafPlan]:
    """Checks all inputs of a step before anything is computed, and plans the leaves."""
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
    plans = plan_tree(params, options)
    _check_grads(grads, plans)
    _check_manual(params)
    states.check(rule, state, plans, options)
    return plans


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


def _check_kernel(plans: list[LeafPlan], specs: list[LeafSpec], leaves: list[jax.Array]) -> None:
    """Raises a NotImplementedError where the kernel was asked for and cannot step a leaf, as far as can be seen."""
    for plan, spec, leaf in zip(plans, specs, leaves, strict=True):
        if not spec.fits_kernel:
            raise NotImplementedError(
                f"implementation='triton': {shown(plan.name)} has a gradient in {spec.grad_dtype}; cast it to float32, "
                "or pass implementation='xla' or None"
            )
        sharding = getattr(leaf, "sharding", None) or getattr(jax.typeof(leaf), "sharding", None)
        if isinstance(sharding, jax.sharding.Sharding) and not sharding.is_fully_replicated:
            raise NotImplementedError(
                f"implementation='triton': {shown(plan.name)} is sharded, and XLA cannot partition the kernel; pass "
                "implementation='xla' or None"
            )


def _check_manual(params: Any) -> None:
    """Inside `shard_map` a shard does not know its global coordinates, and all shards would draw the same bits."""
    for name, leaf in named_leaves(params):
        axes = getattr(getattr(jax.typeof(leaf), "manual_axis_type", None), "varying", ())
        if axes:
            raise NotImplementedError(
                f"{shown(name)} differs over the axes {sorted(axes)} of a shard_map, inside of which the coordinates "
                "that address the random bits are not known; step outside of it, under jit"
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
