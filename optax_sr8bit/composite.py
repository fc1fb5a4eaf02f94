"""Optimizers made of Optax's own: its transformation in float32, its moments in 8 bits, the sum rounded."""

import functools
import inspect
import typing
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

import jax
import jax.numpy as jnp
import optax

from optax_sr8bit import codecs
from optax_sr8bit.factory import STRUCTURAL
from optax_sr8bit.options import DOC, Options
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
      select: what is kept otherwise than `codec` says, by patterns of paths in its state; see `quantize_moments`. With
        codec="float32" all is float32.

    Returns:
      A decorator; the factory takes the function's arguments, then those of `Options`, keyword-only, and returns a
      `Transformation` with the state of `optax.chain`: a `QuantizedState` and a `StochasticRoundState`.
    """

    def decorate(define: Callable[..., Any]) -> Callable[..., Transformation]:
        own = inspect.signature(define)
        shared = [
            inspect.Parameter(f.name, inspect.Parameter.KEYWORD_ONLY, default=f.default, annotation=f.type)
            for f in fields(Options)
        ]
        STRUCTURAL.update(n for n, p in own.parameters.items() if jax.Array not in typing.get_args(p.annotation))
        signature = own.replace(parameters=[*own.parameters.values(), *shared], return_annotation=Transformation)

        @functools.wraps(define)
        def factory(*args, **kwargs):
            try:
                arguments = signature.bind(*args, **kwargs).arguments
            except TypeError as error:
                raise TypeError(f"{define.__name__}(): {error}") from None
            _check(own, arguments)
            options = Options(**{f.name: arguments.pop(f.name) for f in fields(Options) if f.name in arguments})
            return _chained(namesake(**arguments), options, select)

        factory.__signature__ = signature  # type: ignore[attr-defined]
        factory.__annotations__ = {p.name: p.annotation for p in signature.parameters.values()}
        factory.__annotations__["return"] = Transformation
        factory.__doc__ = inspect.cleandoc(define.__doc__ or "") + "\n" + DOC
        return factory

    return decorate


def _chained(inner: optax.GradientTransformation, options: Options, select: Mapping[str, Any] | None) -> Transformation:
    """The chain of an inner transformation and the rounding, with the shared arguments where they belong."""
    all_float32 = not isinstance(options.codec, Mapping) and options.codec in ("float32", codecs.Float32())
    moments = quantize_moments(
        inner,
        options.codec,
        select=None if all_float32 else select,
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


def _check(own: inspect.Signature, arguments: dict[str, Any]) -> None:
    """Raises a ValueError for switches that are none, and for dtypes of moments, which have their codec."""
    for name, parameter in own.parameters.items():
        value = arguments.get(name, parameter.default)
        if "dtype" in name and value is not parameter.default and not _same_dtype(value, parameter.default):
            raise ValueError(f"{name}={value!r}: moments are kept as codec= says; pass codec='float32' for float32")
        if parameter.annotation is bool and not isinstance(value, bool):
            raise ValueError(f"{name} must be True or False, got {value!r}")


def _same_dtype(value: Any, default: Any) -> bool:
    return None not in (value, default) and jnp.dtype(value) == jnp.dtype(default)
