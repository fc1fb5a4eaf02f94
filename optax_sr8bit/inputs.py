"""What a step is given, checked before anything is computed."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from optax_sr8bit import state as states
from optax_sr8bit.leaf import LeafSpec
from optax_sr8bit.manual import manual_axes, shards_of, varying
from optax_sr8bit.options import Options
from optax_sr8bit.partition import cuts_a_block, pieces
from optax_sr8bit.placement import advice, cut_blocks
from optax_sr8bit.plan import LeafPlan, differences, named_leaves, plan_tree, shown
from optax_sr8bit.rule import Rule
from optax_sr8bit_kernels.shard import Shard


def check(
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
            "tx.init(params), or continue an Optax state with sr8.checkpoint.convert"
        )
    shards = shards_of(params, specs, state.seed)
    on_host = [shown(n) for n, p in named_leaves(params) if jax.typeof(p).memory_space == jax.memory.Space.Host]
    if on_host:
        raise ValueError(f"parameters, unlike states, must be in the memory of the device; on the host: {on_host}")
    plans = plan_tree(params, options) if shards is None else _plan_pieces(params, shards, options)
    _check_grads(grads, plans, params)
    try:
        states.check(rule, state, plans, options)
    except ValueError as error:
        if not manual_axes():
            raise
        raise ValueError(f"{error}. If it was built inside the shard_map or pmap: call tx.init outside of it") from None
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
    local = [dataclasses.replace(plan, shape=tuple(leaf.shape)) for plan, leaf in zip(plans, leaves, strict=True)]
    cut |= cut_blocks(local, leaves)  # over further axes, which are Explicit
    if cut:
        raise ValueError(
            "inside a shard_map nothing can be exchanged, but edges of shards cut blocks: "
            + "; ".join(f"{name} has {why}" for name, why in cut.items())
        )
    return local


def _check_grads(grads: Any, plans: list[LeafPlan], params: Any) -> None:
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
    apart = [
        f"{shown(plan.name)}: over {sorted(varying(g) - varying(param))}"
        for (plan, g), (_, param) in zip(pairs, named_leaves(params), strict=True)
        if varying(g) - varying(param)
    ]
    if apart:
        raise ValueError(
            "inside a shard_map, gradients differ where their parameters do not; sum them before the step, by "
            "jax.lax.psum or pmean. " + "; ".join(apart)
        )
    shapes = [
        f"{shown(plan.name)}: gradient {list(g.shape)}, parameter {list(plan.shape)}"
        for plan, g in pairs
        if tuple(g.shape) != plan.shape
    ]
    if shapes:
        raise ValueError("gradients and parameters differ in shape; " + "; ".join(shapes))


def scale(grad_scale: Any) -> jax.Array | None:
    """The scalar that multiplies gradients, as float32; None where there is none.

    Raises:
      ValueError: where it is no real scalar.
    """
    if grad_scale is None:
        return None
    try:
        dtype = jnp.result_type(grad_scale)
    except (TypeError, ValueError):
        raise ValueError(f"grad_scale must be a real scalar, is {grad_scale!r}") from None
    if jnp.ndim(grad_scale) or not (jnp.issubdtype(dtype, jnp.floating) or jnp.issubdtype(dtype, jnp.integer)):
        raise ValueError(f"grad_scale must be a real scalar, is {dtype}{list(jnp.shape(grad_scale))}")
    return jnp.asarray(grad_scale).astype(jnp.float32)


def check_deltas(plans: list[LeafPlan]) -> None:
    """Raises a ValueError where the difference of two parameters is nothing that could be added to one."""
    eight = [f"{shown(plan.name)}: {plan.dtype}" for plan in plans if plan.dtype.itemsize == 1]
    if eight:
        raise ValueError(
            "8-bit parameters have no updates that could be added to them; use tx.step, or in_place=True. "
            + "; ".join(eight)
        )


def check_kernel(plans: list[LeafPlan], kinds: list[LeafSpec], implementation: str) -> None:
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


def reached(mask: Any, params: Any) -> list[bool]:
    """Per leaf whether a mask, of weight decay for one, reaches it."""
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
