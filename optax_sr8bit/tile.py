"""The step of one tile in two tile functions, `advance` and `encode`. Every back end runs these very functions.

A back end loads, advances, finds the largest finite magnitude of each block, encodes and stores.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from optax_sr8bit import bits, rounding
from optax_sr8bit.codecs import Codec
from optax_sr8bit.rounding import Rounding
from optax_sr8bit.rule import Moment, Rule
from optax_sr8bit_kernels.names import (
    bits as pattern,
    e4m3,
    e5m2,
    f16,
    f32,
    maximum,
    minimum,
    static_range,
    u32,
    unfused,
    word,
)


@dataclasses.dataclass(frozen=True)
class Parts:
    """All that is static in the step of a tile; functions are tile functions.

    Attributes:
      advance: decodes, updates, rounds; see `advance`.
      encode: encodes the moments; see `encode`.
      measured: what the rule measures; see `measured`.
      rule: the `update` of a `Rule`.
      measure: its `measure`.
      flags: the rule's static switches.
      scaled: whether gradients are multiplied with a scalar.
      leaf_scalars: how many of the rule's scalars are a leaf's own; they are the last ones.
      draw: (words, place) -> the parameter's random bits.
      round_to: (float32, random bits) -> the bits stored of a parameter.
      corrected: whether something is kept beside the stored bits.
      kept_bits: how many bits that has.
      rest: (float32, stored bits) -> the bits of that.
      join: (stored bits, those kept beside them) -> float32.
      differs: whether the difference from the old parameter is handed back, instead of the new one.
      param_bits: of a stored parameter.
      widen: stored bits -> float32.
      narrow: (float32, None) -> the bits of the difference.
      decoders: per moment decode of its `MomentCode`; so floors, encoders, tops, tinies, zeros.
      floors: see decoders.
      dithers: per moment (words, place) -> dither word.
      turns: per moment what is added to that, so that two moments of one kind do not share their dither.
      encoders: see decoders.
      tops: see decoders.
      tinies: see decoders.
      zeros: see decoders.
      exponents: per moment the largest exponent of its scales, biased by 127, where these are powers of two.
      code_bits: of a code: 4, 8 or 32.
      blockwise: whether scales are computed; else they are handed back.
      power_of_two: whether scales are exponents.
    """

    advance: Callable
    encode: Callable
    measured: Callable
    rule: Callable
    measure: Callable | None
    flags: tuple[bool, ...]
    scaled: bool
    leaf_scalars: int
    draw: Callable
    round_to: Callable
    corrected: bool
    kept_bits: int
    rest: Callable | None
    join: Callable | None
    differs: bool
    param_bits: int
    widen: Callable
    narrow: Callable
    decoders: tuple[Callable, ...]
    floors: tuple[Callable, ...]
    dithers: tuple[Callable, ...]
    turns: tuple[int, ...]
    encoders: tuple[Callable, ...]
    tops: tuple[float, ...]
    tinies: tuple[float, ...]
    zeros: tuple[int, ...]
    exponents: tuple[int, ...]
    code_bits: int
    blockwise: bool
    power_of_two: bool


def advance(param, grad, codes, scales, kept, place, scalars, grad_scale, words, parts):
    """Decodes the moments of a tile, applies the rule and rounds the parameter.

    Args:
      param: old parameters, float32 [..., block].
      grad: gradients, float32 [..., block].
      codes: per moment its codes, bytes [..., block] (float32 moments where not blockwise).
      scales: per moment its scales, float32 [..., 1] (exponents where they are powers of two).
      kept: what is kept beside the parameters, uint32 patterns [..., block], if `parts.corrected`.
      place: the elements' global coordinates, see `optax_sr8bit_kernels.names`.
      scalars: the rule's hyperparameters of this step, float32 scalars, and those of the leaf.
      grad_scale: float32 scalar that multiplies the gradients, if `parts.scaled`.
      words: the address of the random bits, see `bits`.
      parts: the `Parts`.

    Returns:
      (the bits of the new parameters or of their differences, those kept beside, per moment its new float32 values).
    """
    zero = words[2] >> 31  # the step is an int32 count and never negative, which no compiler knows
    value, grad, moments, floors = read(param, grad, codes, scales, kept, grad_scale, zero, parts)
    value, moments = parts.rule(value, grad, moments, floors, scalars, zero, parts.flags)
    stored = parts.round_to(value, parts.draw(words, place))
    rest = parts.rest(value, stored)
    if parts.differs:
        stored = parts.narrow(parts.widen(stored) - param, None)
    return stored, rest, moments


def measured(param, grad, codes, scales, kept, scalars, grad_scale, zero, parts):
    """What a rule measures in a tile, a tuple of float32 tiles; see `advance`."""
    value, grad, moments, floors = read(param, grad, codes, scales, kept, grad_scale, zero, parts)
    return parts.measure(value, grad, moments, floors, scalars, zero, parts.flags)


def read(param, grad, codes, scales, kept, grad_scale, zero, parts):
    """What a rule is given of a tile: parameter, gradient, moments and their floors, all float32; see `advance`."""
    moments, floors = decode(codes, scales, parts)
    if parts.corrected:
        param = parts.join(pattern(param) >> 16, kept)
    if parts.scaled:
        grad = grad * grad_scale
    return unfused(param, zero), unfused(grad, zero), moments, floors


def decode(codes, scales, parts):
    """The moments of a tile and their floors, float32; see `advance`."""
    moments = ()
    floors = ()
    for i in static_range(len(codes)):
        scale = scales[i]
        if parts.power_of_two:
            scale = f32(word(scale) << 23)
        moments = moments + (parts.decoders[i](codes[i], scale),)
        floors = floors + (parts.floors[i](scale),)
    return moments, floors


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
        scale = largest * (1.0 / parts.tops[i])
        if parts.power_of_two:
            scale = minimum((pattern(scale) + 0x7FFFFF) >> 23, u32(parts.exponents[i]))
            largest = f32(scale << 23) * parts.tops[i]
        dither = parts.dithers[i](words, place)
        if parts.turns[i] != 0:
            dither = dither + u32(parts.turns[i])
        codes = codes + (parts.encoders[i](moments[i], largest, dither),)
        scales = scales + (scale,)
    return codes, scales


def unrounded(x, random):
    """What is stored of a float32: itself."""
    return x


def nothing(x, stored):
    """What is kept beside a parameter: nothing."""
    return stored


def from_float32(stored):
    """The float32 that was stored."""
    return stored


def from_bfloat16(stored):
    """The float32 value of a bfloat16 pattern."""
    return f32(stored << 16)


# By dtype, of the parameter and of the difference, which is rounded to nearest: the parameter's bits would bias it.
WIDEN = {
    "bfloat16": from_bfloat16,
    "float16": f16,
    "float32": from_float32,
    "float8_e4m3fn": e4m3,
    "float8_e5m2": e5m2,
}
NARROW = {"bfloat16": rounding.nearest_bfloat16, "float16": rounding.nearest_float16}


def parts(
    rule: Rule,
    flags: tuple[bool, ...],
    codec: Codec,
    how: Rounding,
    dtype: Any,
    delta_dtype: Any = None,
    scaled: bool = False,
    leaf_scalars: int = 0,
) -> Parts:
    """All that is static in `advance` and `encode`.

    Args:
      rule: the optimizer's rule.
      flags: its switches.
      codec: of the moments.
      how: the parameter is rounded.
      dtype: of the parameter.
      delta_dtype: of the difference to hand back, or None for the new parameter itself.
      scaled: whether gradients are multiplied with a scalar.
      leaf_scalars: how many scalars of the rule are a leaf's own.
    """
    codes = [codec.code(moment.signed) for moment in rule.moments]
    dithers = tuple(codec.dither_word(moment.signed) for moment in rule.moments)
    dtype = jnp.dtype(dtype)
    correction = how.correction_of(dtype)
    corrected = correction is not None
    return Parts(
        advance=advance,
        encode=encode,
        measured=measured,
        rule=rule.update,
        measure=rule.measure,
        flags=flags,
        scaled=scaled,
        leaf_scalars=leaf_scalars,
        draw=bits.parameter_bits if how.random and dtype != jnp.float32 else bits.half_code,
        round_to=unrounded if dtype == jnp.float32 else how.encoders[dtype.name],
        corrected=corrected,
        kept_bits=8 * jnp.dtype(correction).itemsize if corrected else 0,
        rest=how.rest if corrected else nothing,
        join=how.join if corrected else nothing,
        differs=delta_dtype is not None,
        param_bits=8 * dtype.itemsize,
        widen=WIDEN[dtype.name],
        narrow=unrounded if delta_dtype is None else NARROW.get(jnp.dtype(delta_dtype).name, unrounded),
        decoders=tuple(code.decode for code in codes),
        floors=tuple(code.floor for code in codes),
        dithers=dithers,
        turns=_turns(dithers),
        encoders=tuple(code.encode for code in codes),
        tops=tuple(code.top for code in codes),
        tinies=tuple(code.tiny for code in codes),
        zeros=tuple(code.zero for code in codes),
        exponents=tuple(254 - math.ceil(math.log2(code.top)) for code in codes),
        code_bits=codec.bits,
        blockwise=codec.blockwise and bool(codes),
        power_of_two=codec.power_of_two,
    )


def _turns(dithers: tuple[Callable, ...]) -> tuple[int, ...]:
    """Golden sections of a turn: of the words that round to nearest none, nor of the first of a kind."""
    before = [dithers[:i].count(dither) for i, dither in enumerate(dithers)]
    return tuple(0 if d is bits.half_code else k * 0x9E3779B9 % 2**32 for d, k in zip(dithers, before, strict=True))


def recoding(moments: tuple[Moment, ...], codec: Codec) -> Parts:
    """The `Parts` with which `encode` rounds moments to the nearest code, outside of a step."""
    no_rule = Rule("", moments, None, scalars=unrounded, update=unrounded)
    half = (bits.half_code,) * len(moments)
    return dataclasses.replace(
        parts(no_rule, (), codec, rounding.get("nearest"), jnp.float32), dithers=half, turns=(0,) * len(moments)
    )
