"""Any Optax transformation with its moments in 8 bits between steps."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer

from optax_sr8bit import codecs, seeds
from optax_sr8bit.clipping import refuse_scale
from optax_sr8bit.codecs import Codec
from optax_sr8bit.manual import manual_axes, shards_of
from optax_sr8bit.options import Options
from optax_sr8bit.placement import kept_with, on_device
from optax_sr8bit.slots import Choice, Slot, differing
from optax_sr8bit.state import VERSION
from optax_sr8bit.stored import BFLOAT16, decode, encode, following, placed, words_of
from optax_sr8bit.transform import Transformation
from optax_sr8bit_kernels.names import finite
from optax_sr8bit_kernels.xla import load


class QuantizedState(NamedTuple):
    """State of `quantize_moments`.

    Attributes:
      count: int32 scalar, the steps taken.
      inner: the state of the inner transformation, with codes in place of arrays of the parameters' shapes.
      scale: of the structure of `inner`: [..., ceil(n / block)] for arrays that belong to parameters (one unused a row
        where they are not quantised), MaskedNode elsewhere.
      seed: uint32[2].
      format: uint32[2 + arrays that belong to parameters]: version, log2 of the block size, how each is kept.
    """

    count: Any
    inner: Any
    scale: Any
    seed: Any
    format: Any


def quantize_moments(
    inner: optax.GradientTransformation,
    codec: str | Codec | Mapping[str, Any] | Callable[..., Any] = "offset",
    *,
    select: Mapping[str, Any] | Callable[..., Any] | None = None,
    unsigned: str | Sequence[str] | None = None,
    block_size: int = 256,
    min_8bit_size: int = 4096,
    seed: Any = 0,
) -> optax.GradientTransformationExtraArgs:
    r"""Keeps the moments of any Optax transformation in 8 bits between steps.

    .. math::

      s &= \text{decode}(c) \\
      u, s' &= \text{inner}(g, s, p) \\
      c &\leftarrow \text{encode}(s')

    The inner transformation sees float32 gradients, state and parameters, and its updates are float32: for
    `stochastic_round` as the last link of the chain. Quantised are floating arrays that Optax's `tree.map_params` finds
    to belong to parameters, if they have the parameter's shape, at least `min_8bit_size` elements and a last axis of at
    least 32; all others stay float32. Random bits are addressed by seed, step, and path in the state, so the noise of
    an array depends on no other.

    A list by Optax's own states and fields says what is never negative, `nu` of Adam for one; the rest has a sign.
    What is never negative decodes to the floor of its codec at least, since denominators are out of reach here, while
    this library's own optimizers put that floor into the denominator alone. Arrays of one state and parameter that are
    to be kept as codes become zero together where any of them is not finite. Unless `select` says otherwise, what
    is a copy or an average of parameters (z of schedule-free optimizers) is kept in bfloat16 in place of codes, and the
    averages of centered RMSProp and the memory of L-BFGS, of which differences are taken, stay float32.

    Args:
      inner: any transformation of Optax but this library's optimizers.
      codec: of the moments: a name, an object, a mapping from patterns of the parameters' paths to these, or a function
        of (path of the parameter, leaf).
      select: other codecs by array: a mapping from patterns of paths in the state ("*/nu/*", "mu/embed"; `fnmatch`
        over the path and over "/path/", the first match counts, `codec` where none does), or a function of (path,
        leaf); to a codec, "bfloat16" (rounded stochastically: for averages of parameters), or None for float32.
      unsigned: patterns of paths in the state of further arrays that are never negative.
      block_size: how many elements along the last axis share a scale, a power of two from 32 to 2048.
      min_8bit_size: arrays with fewer elements stay float32.
      seed: of the random bits, an int or a JAX PRNG key.

    Returns:
      An `optax.GradientTransformationExtraArgs` whose state is a `QuantizedState`.

    Raises:
      ValueError: for arguments out of range, patterns that match nothing, and states of other arguments.

    Example:
      >>> import jax.numpy as jnp, optax, optax_sr8bit as sr8
      >>> params = {"w": jnp.ones((64, 128), jnp.bfloat16)}
      >>> moments = sr8.quantize_moments(optax.scale_by_adam(), select={"mu/*": "bfloat16"})
      >>> tx = sr8.chain(moments, optax.scale_by_learning_rate(1e-3), sr8.stochastic_round(0))
      >>> state = tx.init(params)
      >>> params, state = tx.step(params, state, params)
      >>> str(state[0].inner.mu["w"].dtype), str(state[0].inner.nu["w"].dtype)
      ('bfloat16', 'uint8')
    """
    if isinstance(inner, Transformation):
        raise ValueError("quantize_moments: inner is an optimizer of optax_sr8bit, whose moments are in 8 bits already")
    inner = optax.with_extra_args_support(inner)
    options = Options(seed=seed, codec=codec, block_size=block_size, min_8bit_size=min_8bit_size)
    patterns = (unsigned,) if isinstance(unsigned, str) else tuple(unsigned or ())
    choice = Choice(options, select, patterns)

    @jax.jit  # not to hold all moments in float32 at once
    def begin(params: Any, seed: jax.Array) -> QuantizedState:
        first = inner.init(_float32(params))
        slots = choice.slots(inner, first, params)
        by_name = _by_name(params)
        arrays, structure = jax.tree.flatten(first)
        pairs = []
        for slot, x in zip(slots, arrays, strict=True):
            pair = (x, optax.MaskedNode())
            if slot.how is not None:
                x, leaf = load(x), by_name[slot.param]
                pair = encode(following(x, leaf) if x.shape == leaf.shape else x, None, how=slot.how)
            pairs.append(pair)
        codes, scales = (jax.tree.unflatten(structure, [pair[i] for pair in pairs]) for i in (0, 1))
        return QuantizedState(jnp.zeros([], jnp.int32), codes, scales, seed, jnp.asarray(_format(slots, options)))

    def init(params: Any) -> QuantizedState:
        seed = seeds.seed_words(options.seed)
        if jax.tree.leaves(params):
            return begin(params, seed)
        first = inner.init(params)  # Optax's placeholder, or a tree without arrays
        scale = jax.tree.map(lambda _: optax.MaskedNode(), first)
        return QuantizedState(jnp.zeros([], jnp.int32), first, scale, seed, jnp.asarray(_format([], options)))

    def update(updates: Any, state: Any, params: Any = None, **extra_args: Any) -> tuple[Any, Any]:
        if not isinstance(state, QuantizedState):
            raise ValueError(f"quantize_moments keeps a QuantizedState, got {type(state).__name__}; build it with init")
        refuse_scale(extra_args)
        like = updates if params is None else params
        _refuse_pieces(like, extra_args.get("specs"), state.seed)
        slots = choice.slots(inner, jax.eval_shape(lambda p: inner.init(_float32(p)), like), like)
        arrays, structure = jax.tree.flatten(state.inner)
        scales = jax.tree.leaves(state.scale)
        _check(state, slots, arrays, scales, options)
        pairs = _pairs(slots, arrays, scales)
        count, kept = on_device(state.count), []
        values = [
            x if slot.how is None else decode(on_device(x), on_device(scale), count, how=slot.how)
            for slot, (x, scale) in zip(slots, pairs, strict=True)
        ]
        values = jax.tree.unflatten(structure, values)
        new, values = inner.update(_float32(updates), values, _float32(params), **extra_args)
        if (found := jax.tree.structure(values)) != structure:
            raise ValueError(f"quantize_moments: the structure of the inner state changes in a step, to {found}")
        for slot, x, old in zip(slots, _finite(slots, jax.tree.leaves(values)), pairs, strict=True):
            if slot.how is None:
                kept.append((x, None))
                continue
            words = words_of(on_device(state.seed), count, slot.name)
            pair = encode(x, words, how=slot.how)
            kept.append(
                [kept_with(placed(y, on_device(z), slot.how, words), z) for y, z in zip(pair, old, strict=True)]
            )
        inner_state = jax.tree.unflatten(structure, [x for x, _ in kept])
        scale = jax.tree.unflatten(jax.tree.structure(state.scale), [scale for _, scale in kept if scale is not None])
        count = kept_with(optax.safe_increment(count), state.count)
        return _float32(new), state._replace(count=count, inner=inner_state, scale=scale)

    return optax.GradientTransformationExtraArgs(init, update)


def _float32(tree: Any) -> Any:
    """The tree with floating arrays in float32."""
    return jax.tree.map(lambda x: load(jnp.asarray(x)) if jnp.issubdtype(x.dtype, jnp.floating) else x, tree)


def _by_name(params: Any) -> dict[str, Any]:
    return {seeds.path_name(path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]}


def _pairs(slots: list[Slot], arrays: list[Any], scales: list[Any]) -> list[tuple[Any, Any]]:
    """Per array itself and its scale, or None."""
    rest = iter(scales)
    return [(x, None if slot.how is None else next(rest)) for slot, x in zip(slots, arrays, strict=True)]


def _finite(slots: list[Slot], values: list[Any]) -> list[Any]:
    """The arrays in float32, those to be quantised zero where one of their group is not finite."""
    groups: dict[str, list[int]] = {}
    for i, slot in enumerate(slots):
        if slot.how is not None:
            values[i] = load(jnp.asarray(values[i]))
            if not slot.how.exact and not slot.how.bfloat16:
                groups.setdefault(slot.group, []).append(i)
    for members in groups.values():
        for i, x in zip(members, finite(tuple(values[i] for i in members)), strict=True):
            values[i] = x
    return values


def _format(slots: list[Slot], options: Options) -> np.ndarray:
    """uint32: the state's version, log2 of the block size, how each array is kept."""
    numbers = [slot.how.format for slot in slots if slot.how is not None]
    return np.array([VERSION, options.block_size.bit_length() - 1, *numbers], np.uint32)


def _refuse_pieces(params: Any, specs: Any, seed: Any) -> None:
    """Raises a ValueError inside a `shard_map` over pieces: norms and random bits are those of whole arrays."""
    if manual_axes() and any(not shard.whole for shard in shards_of(params, specs, seed) or ()):
        raise ValueError("quantize_moments cannot step pieces of arrays inside a shard_map; step under jit instead")


def _check(state: QuantizedState, slots: list[Slot], arrays: list[Any], scales: list[Any], options: Options) -> None:
    """Raises a ValueError where a state is not as these arguments keep it; under jit there is no `format` to read."""
    wrong = []
    if not isinstance(state.format, Tracer | jax.ShapeDtypeStruct):
        found, expected = np.asarray(state.format), _format(slots, options)
        found = found[0] if found.ndim == 2 else found  # an ensemble made by vmap
        if found.shape == expected.shape and found[0] == VERSION:
            if found[1] != expected[1]:
                wrong.append(f"block_size {2 ** int(found[1])}, not {2 ** int(expected[1])}")
            kept = [slot for slot in slots if slot.how is not None]
            for slot, was, now in zip(kept, found[2:], expected[2:], strict=True):
                if was != now:
                    wrong.append(f"{slot.name}: {_named(was)}, not {_named(now)}")
        else:
            wrong.append(f"format {found.tolist()}, not {expected.tolist()}")
    wrong = wrong or differing(slots, arrays, scales)
    if wrong:
        raise ValueError(
            "quantize_moments: the state was built for other parameters or with other arguments: "
            + "; ".join(wrong)
            + ". Pass the arguments that it was built with, or build it with init(params)"
        )


def _named(number: Any) -> str:
    return "bfloat16" if number == BFLOAT16 else codecs.by_format(int(number))
