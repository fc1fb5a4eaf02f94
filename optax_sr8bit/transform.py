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
from optax_sr8bit.in_place import InPlaceUpdate
from optax_sr8bit.leaf import LeafSpec, step_leaf
from optax_sr8bit.options import Options
from optax_sr8bit.plan import LeafPlan, differences, named_leaves, plan_tree, shown
from optax_sr8bit.rule import Definition, Rule


@jax.tree_util.register_static
class Transformation(optax.GradientTransformationExtraArgs):
    """An `optax.GradientTransformationExtraArgs` that can also step the parameters itself.

    A 2-tuple as Optax wants it; to JAX a static value without leaves, so that `eqx.filter_jit` takes it as an argument.
    Not to be differentiated: derivatives through rounding and codes are zero.

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
        hyper = hyperparameters.evaluate(definition.hyperparameters, state.count)
        scalars = _scalars(rule, hyper, state.count)
        decays = _decays(definition.mask, params)
        grad_leaves, leaves = jax.tree.leaves(grads), jax.tree.leaves(params)
        fields = [(m.name, m.name + "_scale") for m in rule.moments]
        old = {f: jax.tree.leaves(getattr(state, f)) for pair in fields for f in pair}
        new: dict[str, list[Any]] = {f: [] for f in old}
        results = []
        for i, plan in enumerate(plans):
            delta = None if door != "update" else jnp.dtype(options.delta_dtype or grad_leaves[i].dtype)
            spec = LeafSpec(rule, rule.flags_for(decays[i]), plan.codec, plan.rounding, plan.block, delta)
            result, codes, scales = step_leaf(
                jnp.asarray(leaves[i]),
                jnp.asarray(grad_leaves[i]),
                tuple(old[f][i] for f, _ in fields),
                tuple(old[f][i] for _, f in fields),
                scalars,
                state.count,
                state.seed,
                np.array(seeds.leaf_words(plan.name), np.uint32),
                spec=spec,
            )
            results.append(InPlaceUpdate(result) if door == "in_place" else result)
            for (code_field, scale_field), c, s in zip(fields, codes, scales, strict=True):
                new[code_field].append(c)
                new[scale_field].append(s)
        replaced = {f: jax.tree.unflatten(jax.tree.structure(getattr(state, f)), v) for f, v in new.items()}
        state = state._replace(count=optax.safe_increment(state.count), **replaced)
        return jax.tree.unflatten(jax.tree.structure(params), results), state

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
def _scalars(rule: Rule, hyper: dict[str, jax.Array], count: jax.Array) -> tuple[jax.Array, ...]:
    return rule.scalars(hyper, count)


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
