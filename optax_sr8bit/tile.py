"""The fused step of one tile: decode, update, round, encode. Every back end runs this very function."""

from typing import Any

import jax.numpy as jnp

from optax_sr8bit import bits
from optax_sr8bit.codecs import Codec
from optax_sr8bit.rounding import Rounding
from optax_sr8bit.rule import Rule
from optax_sr8bit_kernels.names import absolute, block_max, maximum, static_range, unfused, where


def fused_step(
    param,
    grad,
    codes,
    scales,
    again,
    row,
    col,
    tables,
    scalars,
    words,
    rule,
    flags,
    draw,
    round_to,
    decoders,
    floors,
    dithers,
    encoders,
    rescalers,
    tinies,
    blockwise,
):
    """One optimizer step of a tile whose last axis is one block (or several, one after another, in leading axes).

    Args:
      param: old parameters, float32 [..., block].
      grad: gradients, float32 [..., block].
      codes: per moment its codes, uint32 [..., block] (float32 moments where not blockwise).
      scales: per moment its scales, float32 [..., 1].
      again: the same (grad, codes, scales), to compute the moments once more for absmax, or None to use those at hand.
      row: global row of each element, uint32, of the tile's shape.
      col: global column of each element, uint32, of the tile's shape.
      tables: per moment its table of decoded values, or None.
      scalars: the rule's hyperparameters of this step, float32 scalars.
      words: the address of the random bits, see `bits`.
      rule: the `update` of a `Rule`.
      flags: the rule's static switches.
      draw: tile function (words, row, col) -> the parameter's random bits.
      round_to: tile function (float32, random bits) -> what is stored of a parameter.
      decoders: per moment decode of its `MomentCode`; so floors, encoders, rescalers (`scale`), tinies.
      floors: see decoders.
      dithers: per moment the tile function (words, row, col) -> dither word.
      encoders: see decoders.
      rescalers: see decoders.
      tinies: see decoders.
      blockwise: whether scales are computed; else they are handed back.

    Returns:
      (what is stored of the new parameters, new codes, new scales).
    """
    zero = words[2] >> 31  # the step is an int32 count and never negative, which no compiler knows
    new_param, moments = advance(param, grad, codes, scales, tables, scalars, zero, rule, flags, decoders, floors)
    stored = round_to(new_param, draw(words, row, col))
    moments = finite_or_zero(moments)
    new_codes = moments
    new_scales = scales
    if blockwise:
        measured = moments
        if again is not None:
            grad, codes, scales = again
            _, measured = advance(param, grad, codes, scales, tables, scalars, zero, rule, flags, decoders, floors)
            measured = finite_or_zero(measured)
        absmax = block_max(measured)
        new_codes = ()
        new_scales = ()
        for i in static_range(len(codes)):
            largest = maximum(absmax[i], tinies[i])
            word = dithers[i](words, row, col)
            new_codes = new_codes + (encoders[i](moments[i], largest, word, tables[i]),)
            new_scales = new_scales + (rescalers[i](largest),)
    return stored, new_codes, new_scales


def advance(param, grad, codes, scales, tables, scalars, zero, rule, flags, decoders, floors):
    """Decodes the moments and applies the rule: (new param, new moments), all float32."""
    moments = ()
    least = ()
    for i in static_range(len(codes)):
        moments = moments + (decoders[i](codes[i], scales[i], tables[i]),)
        least = least + (floors[i](scales[i]),)
    return rule(unfused(param, zero), unfused(grad, zero), moments, least, scalars, zero, flags)


LARGEST = 3.4028234663852886e38  # of float32


def finite_or_zero(moments):
    """All moments of an element become 0 where any of them is not finite: its neighbours step as if it were absent."""
    finite = absolute(moments[0]) <= LARGEST
    for i in static_range(1, len(moments)):
        finite = finite & (absolute(moments[i]) <= LARGEST)
    cleaned = ()
    for i in static_range(len(moments)):
        cleaned = cleaned + (where(finite, moments[i], 0.0),)
    return cleaned


def unrounded(x, random):
    """What is stored of a float32 parameter: itself."""
    return x


def parts(rule: Rule, flags: tuple[bool, ...], codec: Codec, rounding: Rounding, dtype: Any) -> dict[str, Any]:
    """The arguments of `fused_step` from `rule` on, for parameters of that dtype: all static."""
    codes = [codec.code(moment.signed) for moment in rule.moments]
    if dtype == jnp.float32:
        draw, round_to = bits.half_code, unrounded
    else:
        draw = bits.parameter_bits if rounding.random else bits.half_code
        round_to = rounding.bfloat16 if dtype == jnp.bfloat16 else rounding.float16
    return {
        "rule": rule.update,
        "flags": flags,
        "draw": draw,
        "round_to": round_to,
        "decoders": tuple(code.decode for code in codes),
        "floors": tuple(code.floor for code in codes),
        "dithers": tuple(codec.dither_word(moment.signed) for moment in rule.moments),
        "encoders": tuple(code.encode for code in codes),
        "rescalers": tuple(code.scale for code in codes),
        "tinies": tuple(code.tiny for code in codes),
        "blockwise": codec.blockwise,
    }
