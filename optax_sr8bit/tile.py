"""The step of one tile in two tile functions, `advance` and `encode`. Every back end runs these very functions.

A back end loads, advances, finds the largest finite magnitude of each block, encodes and stores.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from optax_sr8bit import bits, rounding
from optax_sr8bit.codecs import Codec
from optax_sr8bit.rounding import Rounding
from optax_sr8bit.rule import Rule
from optax_sr8bit_kernels.names import f16, f32, maximum, static_range, unfused


@dataclasses.dataclass(frozen=True)
class Parts:
    """All that is static in the step of a tile; functions are tile functions.

    Attributes:
      advance: decodes, updates, rounds; see `advance`.
      encode: encodes the moments; see `encode`.
      rule: the `update` of a `Rule`.
      flags: the rule's static switches.
      draw: (words, place) -> the parameter's random bits.
      round_to: (float32, random bits) -> the bits stored of a parameter.
      differs: whether the difference from the old parameter is handed back, instead of the new one.
      widen: stored bits -> float32.
      narrow: (float32, None) -> the bits of the difference.
      decoders: per moment decode of its `MomentCode`; so floors, encoders, tops, tinies, zeros.
      floors: see decoders.
      dithers: per moment (words, place) -> dither word.
      encoders: see decoders.
      tops: see decoders.
      tinies: see decoders.
      zeros: see decoders.
      blockwise: whether scales are computed; else they are handed back.
    """

    advance: Callable
    encode: Callable
    rule: Callable
    flags: tuple[bool, ...]
    draw: Callable
    round_to: Callable
    differs: bool
    widen: Callable
    narrow: Callable
    decoders: tuple[Callable, ...]
    floors: tuple[Callable, ...]
    dithers: tuple[Callable, ...]
    encoders: tuple[Callable, ...]
    tops: tuple[float, ...]
    tinies: tuple[float, ...]
    zeros: tuple[int, ...]
    blockwise: bool


def advance(param, grad, codes, scales, place, scalars, words, parts):
    """Decodes the moments of a tile, applies the rule and rounds the parameter.

    Args:
      param: old parameters, float32 [..., block].
      grad: gradients, float32 [..., block].
      codes: per moment its codes, bytes [..., block] (float32 moments where not blockwise).
      scales: per moment its scales, float32 [..., 1].
      place: the elements' global coordinates, see `optax_sr8bit_kernels.names`.
      scalars: the rule's hyperparameters of this step, float32 scalars.
      words: the address of the random bits, see `bits`.
      parts: the `Parts`.

    Returns:
      (the bits of the new parameters or of their differences, per moment its new values in float32).
    """
    moments = ()
    floors = ()
    for i in static_range(len(codes)):
        moments = moments + (parts.decoders[i](codes[i], scales[i]),)
        floors = floors + (parts.floors[i](scales[i]),)
    zero = words[2] >> 31  # the step is an int32 count and never negative, which no compiler knows
    new_param, moments = parts.rule(
        unfused(param, zero), unfused(grad, zero), moments, floors, scalars, zero, parts.flags
    )
    stored = parts.round_to(new_param, parts.draw(words, place))
    if parts.differs:
        stored = parts.narrow(parts.widen(stored) - param, None)
    return stored, moments


def encode(moments, absmax, place, words, parts):
    """Encodes the moments of a tile whose last axis is one block (or several, one after another, in leading axes).

    Args:
      moments: per moment float32 [..., block], finite.
      absmax: per moment the largest magnitude of each block, float32 [..., 1].
      place: as in `advance`.
      words: as in `advance`.
      parts: the `Parts`.

    Returns:
      (per moment its codes, per moment its scales).
    """
    codes = ()
    scales = ()
    for i in static_range(len(moments)):
        largest = maximum(absmax[i], parts.tinies[i])
        codes = codes + (parts.encoders[i](moments[i], largest, parts.dithers[i](words, place)),)
        scales = scales + (parts.rescalers[i](largest),)
    return codes, scales


def unrounded(x, random):
    """What is stored of a float32: itself."""
    return x


def from_float32(stored):
    """The float32 that was stored."""
    return stored


def from_bfloat16(stored):
    """The float32 value of a bfloat16 pattern."""
    return f32(stored << 16)


# By dtype, of the parameter and of the difference, which is rounded to nearest: the parameter's bits would bias it.
WIDEN = {"bfloat16": from_bfloat16, "float16": f16, "float32": from_float32}
NARROW = {"bfloat16": rounding.nearest_bfloat16, "float16": rounding.nearest_float16}


def parts(
    rule: Rule, flags: tuple[bool, ...], codec: Codec, how: Rounding, dtype: Any, delta_dtype: Any = None
) -> Parts:
    """All that is static in `advance` and `encode`.

    Args:
      rule: the optimizer's rule.
      flags: its switches.
      codec: of the moments.
      how: the parameter is rounded.
      dtype: of the parameter.
      delta_dtype: of the difference to hand back, or None for the new parameter itself.
    """
    codes = [codec.code(moment.signed) for moment in rule.moments]
    if dtype == jnp.float32:
        draw, round_to = bits.half_code, unrounded
    else:
        draw = bits.parameter_bits if how.random else bits.half_code
        round_to = how.bfloat16 if dtype == jnp.bfloat16 else how.float16
    return Parts(
        advance=advance,
        encode=encode,
        rule=rule.update,
        flags=flags,
        draw=draw,
        round_to=round_to,
        differs=delta_dtype is not None,
        widen=WIDEN[jnp.dtype(dtype).name],
        narrow=unrounded if delta_dtype is None else NARROW.get(jnp.dtype(delta_dtype).name, unrounded),
        decoders=tuple(code.decode for code in codes),
        floors=tuple(code.floor for code in codes),
        dithers=tuple(codec.dither_word(moment.signed) for moment in rule.moments),
        encoders=tuple(code.encode for code in codes),
        tops=tuple(code.top for code in codes),
        tinies=tuple(code.tiny for code in codes),
        zeros=tuple(code.zero for code in codes),
        blockwise=codec.blockwise,
    )
