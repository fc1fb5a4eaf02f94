"""The state of any rule: built, checked, taken apart and put together."""

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer

from optax_sr8bit import codecs, seeds, tile
from optax_sr8bit.codecs import Codec
from optax_sr8bit.options import Options
from optax_sr8bit.placement import cut_blocks, filled_like, held_everywhere, kept_with, on_device
from optax_sr8bit.plan import LeafPlan, differences, named_leaves, plan_tree, shown
from optax_sr8bit.rule import Moment, Rule

VERSION = 1


def init(rule: Rule, options: Options, params: Any) -> Any:
    """A fresh state: moments and scales zero, count zero.

    Args:
      rule: the optimizer's rule.
      options: its options.
      params: any tree of arrays or ShapeDtypeStructs, or one of Optax's placeholders.

    Returns:
      `rule.state`, with per moment codes (or float32 moments) and scales as each leaf's codec keeps them; `seed`
      uint32[2], `format` uint32[2 + leaves], and `correction` where a rounding keeps one.
    """
    plans = plan_tree(params, options)
    leaves, structure = jax.tree.flatten(params)
    if cut := cut_blocks(plans, leaves):
        told = "; ".join(f"{name} has {why}" for name, why in cut.items())
        warnings.warn(
            f"edges of shards cut blocks, so that the last axes of these leaves are exchanged in every step: {told}",
            stacklevel=3,
        )
    fields = {}
    for moment in rule.moments:
        codes, scales = [], []
        for plan, leaf in zip(plans, leaves, strict=True):
            code, scale = _first(moment, plan.codec)
            codes.append(filled_like(leaf, plan.code_shape, code, plan.codec.code_dtype))
            scales.append(filled_like(leaf, plan.scale_shape, scale, plan.codec.scale_dtype))
        fields[moment.name] = jax.tree.unflatten(structure, codes)
        fields[moment.name + "_scale"] = jax.tree.unflatten(structure, scales)
    if options.corrects:  # whatever the parameters: Optax's placeholder of them has no leaves
        pairs = zip(plans, leaves, strict=True)
        beside = [filled_like(leaf, plan.correction_shape, 0, plan.correction_dtype) for plan, leaf in pairs]
        fields["correction"] = jax.tree.unflatten(structure, beside)
    words = [jnp.zeros([], jnp.int32), seeds.seed_words(options.seed), jnp.asarray(format_of(plans, options))]
    count, seed, fmt = (held_everywhere(x, leaves) for x in words)
    return rule.state(count=count, seed=seed, format=fmt, **fields)


def _first(moment: Moment, codec: Codec) -> tuple[int | float, int | float]:
    """The code and the scale, as they are stored, of what a moment begins with."""
    code = codec.code(moment.signed)
    if not codec.blockwise:
        return moment.initial, 0
    first, scale = code.zero, 0
    if moment.initial:
        with jax.ensure_compile_time_eval():
            x = jnp.full((1, 1), moment.initial, jnp.float32)
            place = (jnp.zeros((1, 1), jnp.uint32),) * 2
            encoded: Any = tile.encode((x,), (x,), place, (), tile.recoding((moment,), codec))
            (codes,), (scales,) = encoded
            first, scale = int(codes[0, 0]), scales[0, 0].item()
    return first | first << 4 if codec.bits == 4 else first, scale


def arrays(rule: Rule, state: Any) -> tuple[tuple[tuple[Any, ...], ...], ...]:
    """Per moment, per leaf its codes and its scales, in the memory of the device.

    Behind the codes, where the state has corrections, per leaf its own.
    """
    of_codes, of_scales = _fields(rule, state)
    return tuple(
        tuple(tuple(on_device(x) for x in jax.tree.leaves(getattr(state, field))) for field in fields)
        for fields in (of_codes, of_scales)
    )


def _fields(rule: Rule, state: Any) -> tuple[list[str], list[str]]:
    """The state's fields of codes, with the corrections if there are any, and of scales."""
    of_codes, of_scales = rule.fields
    return of_codes if state.correction is None else [*of_codes, "correction"], of_scales


def stepped(rule: Rule, state: Any, codes: Any, scales: Any) -> Any:
    """The state after a step: codes and scales as `arrays` gave them, in the memory where the old ones are."""
    new = {}
    for fields, moments in zip(_fields(rule, state), (codes, scales), strict=True):
        for field, leaves in zip(fields, moments, strict=True):
            old, structure = jax.tree.flatten(getattr(state, field))
            new[field] = jax.tree.unflatten(structure, [kept_with(x, y) for x, y in zip(leaves, old, strict=True)])
    count = kept_with(optax.safe_increment(on_device(state.count)), state.count)
    return state._replace(count=count, **new)


def format_of(plans: list[LeafPlan], options: Options) -> np.ndarray:
    """uint32: the state's version, log2 of the block size, and the number of each leaf's codec."""
    return np.array([VERSION, options.block_size.bit_length() - 1, *(p.codec.format for p in plans)], np.uint32)


def check(rule: Rule, state: Any, plans: list[LeafPlan], options: Options) -> None:
    """Checks a state against what the optimizer would build: format first, which says most.

    Raises:
      ValueError: says what differs, leaf by leaf.
    """
    if tuple(state.seed.shape[-1:]) != (2,) or state.seed.dtype != jnp.uint32:
        raise ValueError(
            f"state.seed must be uint32[2], is {state.seed.dtype}{list(state.seed.shape)}; a key goes to the factory"
        )
    if state.count.dtype != jnp.int32 or state.count.ndim != state.seed.ndim - 1:
        raise ValueError(f"state.count must be an int32 scalar, is {state.count.dtype}{list(state.count.shape)}")
    if not isinstance(state.count, Tracer | jax.ShapeDtypeStruct) and np.any(np.asarray(state.count) < 0):
        raise ValueError(f"state.count must not be negative, is {state.count}")
    check_format(state, plans, options)
    check_leaves(rule, state, plans)


def check_format(state: Any, plans: list[LeafPlan], options: Options) -> None:
    """Compares the state's `format`, where it is concrete, with what the optimizer would write.

    Raises:
      ValueError: says what differs, leaf by leaf.
    """
    if isinstance(state.format, Tracer | jax.ShapeDtypeStruct):
        return
    found, expected = np.asarray(state.format), format_of(plans, options)
    if found.ndim == 2 and (found == found[:1]).all():  # an ensemble made by vmap
        found = found[0]
    if found.shape != expected.shape:
        raise ValueError(f"the state's format is {list(found.shape)}, expected {list(expected.shape)}: of another tree")
    if found[0] != VERSION:
        raise ValueError(f"the state has format version {found[0]}, this library reads version {VERSION}")
    wrong = []
    if found[1] != expected[1]:
        wrong.append(f"block_size {2 ** int(found[1])}, not {2 ** int(expected[1])}")
    for plan, number in zip(plans, found[2:], strict=True):
        if number != plan.codec.format:
            wrong.append(
                f"{shown(plan.name)}: codec {codecs.by_format(int(number))}, not {codecs.by_format(plan.codec.format)}"
            )
    if wrong:
        raise ValueError(
            "the state was built with other options than this optimizer's: "
            + "; ".join(wrong)
            + ". Convert it with sr8.checkpoint.convert(state, tx, params), or build the optimizer with its options"
        )


def check_leaves(rule: Rule, state: Any, plans: list[LeafPlan]) -> None:
    """Checks shapes and dtypes of all moments and scales against the plan; works under jit too.

    Raises:
      ValueError: names every array that differs.
    """
    wrong = []
    arrays = []
    for moment in rule.moments:
        arrays.append((moment.name, lambda p: p.code_shape, lambda p: p.codec.code_dtype))
        arrays.append((moment.name + "_scale", lambda p: p.scale_shape, lambda p: p.codec.scale_dtype))
    if state.correction is not None:
        arrays.append(("correction", lambda p: p.correction_shape, lambda p: p.correction_dtype))
    elif kept := [f"{shown(p.name)}: {p.rounding.name}" for p in plans if p.correction is not None]:
        wrong.append(f"state.correction is None, but roundings keep something beside {', '.join(kept)}")
    for field, shape, dtype in arrays:
        leaves = named_leaves(getattr(state, field))
        if other := differences(leaves, plans):
            raise ValueError(
                f"state.{field} is of another tree than the parameters; {other}. Build it with tx.init(params)"
            )
        for plan, (name, leaf) in zip(plans, leaves, strict=True):
            if tuple(leaf.shape) != shape(plan) or leaf.dtype != dtype(plan):
                expected = f"{jnp.dtype(dtype(plan))}{list(shape(plan))}"
                at = f"{field}/{name}".rstrip("/")
                wrong.append(f"{at} is {leaf.dtype}{list(leaf.shape)}, expected {expected}")
    if wrong:
        raise ValueError(
            "the state does not belong to these parameters and options: "
            + "; ".join(wrong)
            + ". If codec, block_size, min_8bit_size, rounding changed, sr8.checkpoint.convert(state, tx, params) "
            "continues it; else give the optimizer the options it was built with, or build it with tx.init(params)"
        )
