"""Optimizers made of Optax's own: its transformation in float32, its moments in 8 bits, the sum rounded."""

from collections.abc import Callable, Mapping
from typing import Any

import optax

from optax_sr8bit.factory import with_options
from optax_sr8bit.options import Options
from optax_sr8bit.quantize import quantize_moments
from optax_sr8bit.terminal import stochastic_round
from optax_sr8bit.transform import Transformation
from optax_sr8bit.wrappers import chain


def composite(
    namesake: Callable[..., optax.GradientTransformation], select: Mapping[str, Any] | None = None
) -> Callable[..., Any]:
    """Makes the factory of an optimizer from the function that carries its signature and its docstring.

    Args:
      namesake: Optax's factory, which takes the same arguments.
      select: what is kept otherwise than `codec` says, by patterns of paths in its state; see `quantize_moments`.

    Returns:
      A decorator; the factory takes the function's arguments, then those of `Options`, keyword-only, and returns a
      `Transformation` with the state of `optax.chain`: a `QuantizedState` and a `StochasticRoundState`.
    """

    def decorate(define: Callable[..., Any]) -> Callable[..., Transformation]:
        return with_options(define, lambda arguments, options: _chained(namesake(**arguments), options, select))

    return decorate


def _chained(inner: optax.GradientTransformation, options: Options, select: Mapping[str, Any] | None) -> Transformation:
    """The chain of an inner transformation and the rounding, with the shared arguments where they belong."""
    moments = quantize_moments(
        inner,
        options.codec,
        select=select,
        block_size=options.block_size,
        min_8bit_size=options.min_8bit_size,
        seed=options.seed,
    )
    last = stochastic_round(
        options.seed,
        rounding=options.rounding,
        implementation=options.implementation,
        in_place=options.in_place,
        delta_dtype=options.delta_dtype,
    )
    return chain(moments, last)
