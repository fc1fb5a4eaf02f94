"""Optimizers made of Optax's own: its transformation in float32, its moments in 8 bits, the sum rounded."""

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax
import optax
from jax.core import Tracer

from optax_sr8bit import hyperparameters
from optax_sr8bit.factory import is_number, with_options
from optax_sr8bit.options import Options
from optax_sr8bit.quantize import quantize_moments
from optax_sr8bit.terminal import stochastic_round
from optax_sr8bit.transform import Transformation
from optax_sr8bit.wrappers import chain


def composite(
    namesake: Callable[..., optax.GradientTransformation],
    select: Mapping[str, Any] | None = None,
    rates: tuple[str, ...] = (),
) -> Callable[..., Any]:
    """Makes the factory of an optimizer from the function that carries its signature and its docstring.

    Args:
      namesake: Optax's factory, which takes the same arguments.
      select: what is kept otherwise than `codec` says, by patterns of paths in its state; see `quantize_moments`.
      rates: which arguments must be in [0, 1).

    Returns:
      A decorator; the factory takes the function's arguments, then those of `Options`, keyword-only, and returns a
      `Transformation` with the state of `optax.chain`: a `QuantizedState` and a `StochasticRoundState`.
    """

    def decorate(define: Callable[..., Any]) -> Callable[..., Transformation]:
        own = inspect.signature(define)

        def make(arguments: dict[str, Any], options: Options) -> Transformation:
            for name, value in arguments.items():
                given = is_number(own.parameters[name]) and value is not None and not isinstance(value, Tracer)
                if given and not callable(value):
                    hyperparameters.number(name, value, below=1.0 if name in rates else float("inf"))
            return _chained(define.__name__, namesake(**arguments), options, select)

        return with_options(define, make)

    return decorate


def _chained(
    name: str, inner: optax.GradientTransformation, options: Options, select: Mapping[str, Any] | None
) -> Transformation:
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
    whole = chain(moments, last)

    def update(updates: Any, state: Any, params: Any = None, **extra_args: Any) -> tuple[Any, Any]:
        new, state = whole.update(updates, state, params, **extra_args)
        if options.in_place or options.delta_dtype or last.options.corrects:
            return new, state
        return jax.tree.map(lambda u, g: u.astype(g.dtype), new, updates), state  # as `Options.delta_dtype` says

    named = dataclasses.replace(last.definition, rule=dataclasses.replace(last.definition.rule, name=name))
    return Transformation(whole.init, update, whole.step, named, last.options)
