"""From a rule and its hyperparameters to an Optax transformation with three doors."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_sr8bit import hyperparameters, inputs, seeds, state as states
from optax_sr8bit.groups import group
from optax_sr8bit.implementation import select
from optax_sr8bit.in_place import InPlaceUpdate
from optax_sr8bit.leaf import LeafSpec, step_group, step_parts
from optax_sr8bit.manual import all_manual, manual_axes, refuse_pieces
from optax_sr8bit.options import Options
from optax_sr8bit.placement import on_device
from optax_sr8bit.rule import Definition, Rule


@jax.tree_util.register_static
class Transformation(optax.GradientTransformationExtraArgs):
    """An `optax.GradientTransformationExtraArgs` that can also step the parameters itself.

    A 2-tuple as Optax wants it; to JAX a static value without leaves, so that `eqx.filter_jit` takes it as an argument.
    Not to be differentiated: derivatives through rounding and codes are zero on XLA, and an error in the kernel.

    Attributes:
      init: params -> state.
      update: (updates, state, params, **extra_args) -> (updates, state), as any Optax transformation. `grad_scale=`, a
        real scalar, multiplies the gradients on their way, without a pass of its own. Inside a `shard_map`, `specs=`
        says how parameters are cut: their PartitionSpecs, a tree or a prefix of one.
      step: (grads, state, params, **extra_args) -> (new params, state): fused, exact, in place under a jit that donates
        parameters and state; `grad_scale=` and `specs=` as in update.
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
    hyperparameters.check(definition)
    if not rule.moments:
        if options.codec != Options.codec:
            raise ValueError(
                f"{rule.name} keeps no moments as it is set up here, so codec={options.codec!r} means nothing: drop it"
            )
        options = dataclasses.replace(options, codec="float32")

    def advance(
        door: str, grads: Any, state: Any, params: Any, *, specs: Any = None, grad_scale: Any = None, **extra_args: Any
    ) -> tuple[Any, Any]:
        del extra_args  # Optax hands every link of a chain those of all
        plans, shards = inputs.check(rule, options, grads, state, params, specs)
        implementation, _ = select(options.implementation)
        if not all_manual() and manual_axes():  # what is left for XLA to partition cannot be a kernel
            implementation = "xla"
        count, seed = on_device(state.count), on_device(state.seed)
        hyper = hyperparameters.evaluate(definition.hyperparameters, count)
        control = _control(rule, hyper, inputs.scale(grad_scale), seed, count)
        leaves, structure = jax.tree.flatten(params)
        leaves, gradients = tuple(map(jnp.asarray, leaves)), tuple(map(jnp.asarray, jax.tree.leaves(grads)))
        kinds = []
        masks = [inputs.reached(mask, params) for mask in definition.masks]
        for plan, grad, *here in zip(plans, gradients, *masks, strict=True):
            # What is kept beside a parameter belongs to the rounded one: a difference must lead there exactly.
            default = grad.dtype if plan.correction is None else jnp.float32
            delta = None if door != "update" else jnp.dtype(options.delta_dtype or default)
            how = (plan.codec, plan.rounding, plan.block, plan.dtype, grad.dtype, delta, grad_scale is not None)
            kinds.append(LeafSpec(rule, rule.flags_for(tuple(here)), *how))
        if options.implementation == "triton":
            inputs.check_kernel(plans, kinds, implementation)
        names = np.array([seeds.leaf_words(plan.name) for plan in plans], np.uint32).reshape(-1, 2)
        if door == "update":
            inputs.check_deltas(plans)

        def step(part: Any, members: Any) -> Any:
            spec = kinds[members[0]]
            params, grads, codes, scales, *rest = part
            beside = codes[len(rule.moments) :]  # where a rounding keeps something beside some parameters
            results, codes, scales = step_group(
                params,
                grads,
                codes if spec.corrected else codes[: len(rule.moments)],
                scales,
                *rest,
                spec=spec,
                implementation=implementation,
                shards=shards and tuple(shards[i] for i in members),
            )
            return results, codes if spec.corrected else (*codes, *beside), scales

        operands = (leaves, gradients, *states.arrays(rule, state), control, names)
        groups = group(implementation, kinds, [plan.shape for plan in plans])
        results, codes, scales = step_parts(operands, groups, step)
        if door == "in_place":
            results = tuple(map(InPlaceUpdate, results))
        return jax.tree.unflatten(structure, results), states.stepped(rule, state, codes, scales)

    def init(params: Any) -> Any:
        refuse_pieces(params)
        return states.init(rule, options, params)

    def update(updates: Any, state: Any, params: Any = None, **extra_args: Any) -> tuple[Any, Any]:
        return advance("in_place" if options.in_place else "update", updates, state, params, **extra_args)

    def step(grads: Any, state: Any, params: Any, **extra_args: Any) -> tuple[Any, Any]:
        return advance("step", grads, state, params, **extra_args)

    return Transformation(init, update, step, definition, options)


@functools.partial(jax.jit, static_argnums=0)
def _control(
    rule: Rule, hyper: dict[str, jax.Array], scale: jax.Array | None, seed: jax.Array, count: jax.Array
) -> jax.Array:
    """All that is new in a step: the rule's scalars, that of gradients, seed and count, in one uint32 array.

    So they cost one small kernel.
    """
    values = (*rule.scalars(hyper, count), *(() if scale is None else (scale,)))
    scalars = [jax.lax.bitcast_convert_type(x, jnp.uint32) for x in values]
    words = [*scalars, seed[0], seed[1], count.astype(jnp.uint32)]
    # Members of an ensemble may be cut over a mesh, and their learning rate is not: what is stacked must be alike.
    zero = (seed[0] ^ seed[0]) | (words[-1] ^ words[-1])
    return jnp.stack([word | zero for word in words])
