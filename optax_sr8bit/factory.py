"""Turns the function that defines an optimizer into its public factory."""

import functools
import inspect
import typing
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import jax
import jax.numpy as jnp

from optax_sr8bit import hyperparameters
from optax_sr8bit.options import DOC, Options
from optax_sr8bit.rule import Definition
from optax_sr8bit.transform import Transformation, build

# The arguments of any optimizer that are no numbers: they decide what is compiled.
STRUCTURAL = {field.name for field in fields(Options)}


def optimizer(define: Callable[..., Definition]) -> Callable[..., Transformation]:
    """Adds the shared keyword arguments to the definition of an optimizer.

    Args:
      define: takes the arguments of the Optax namesake, in its order and with its defaults, and returns the definition.

    Returns:
      The factory, see `with_options`.
    """
    return with_options(define, lambda arguments, options: build(define(**arguments), options))


def with_options(
    define: Callable[..., Any], make: Callable[[dict[str, Any], Options], Transformation]
) -> Callable[..., Transformation]:
    """A factory from the function that carries its name, arguments and docstring.

    Args:
      define: takes the arguments of the Optax namesake, in its order and with its defaults.
      make: (those arguments that were given, the shared ones) -> the optimizer.

    Returns:
      The factory: same arguments, then those of `Options`, keyword-only; its docstring ends with theirs.
    """
    own = inspect.signature(define)
    shared = [
        inspect.Parameter(f.name, inspect.Parameter.KEYWORD_ONLY, default=f.default, annotation=f.type)
        for f in fields(Options)
    ]
    STRUCTURAL.update(name for name, parameter in own.parameters.items() if not is_number(parameter))
    signature = own.replace(parameters=[*own.parameters.values(), *shared], return_annotation=Transformation)

    @functools.wraps(define)
    def factory(*args, **kwargs):
        try:
            arguments = signature.bind(*args, **kwargs).arguments
        except TypeError as error:
            raise TypeError(f"{define.__name__}(): {error}") from None
        options = {f.name: arguments.pop(f.name) for f in fields(Options) if f.name in arguments}
        given = {name: _checked(own.parameters[name], value) for name, value in arguments.items()}
        return make(given, Options(**options))

    factory.__signature__ = signature  # type: ignore[attr-defined]
    factory.__annotations__ = {p.name: p.annotation for p in signature.parameters.values()} | {"return": Transformation}
    factory.__doc__ = inspect.cleandoc(define.__doc__ or "") + "\n" + DOC
    return factory


def is_number(parameter: inspect.Parameter) -> bool:
    """Whether it is annotated as ArrayLike or ScalarOrSchedule, with None or without."""
    return jax.Array in typing.get_args(parameter.annotation)


def _checked(parameter: inspect.Parameter, value: Any) -> Any:
    """An argument as its annotation wants it.

    Raises:
      ValueError: for switches that are none, numbers that are none, and dtypes of moments, which have their codec.
    """
    name, default = parameter.name, parameter.default
    if (
        "dtype" in name
        and value is not default
        and (None in (value, default) or jnp.dtype(value) != jnp.dtype(default))
    ):
        raise ValueError(f"{name}={value!r}: moments are kept as codec= says; pass codec='float32' for float32")
    if parameter.annotation is bool and not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False, got {value!r}")
    return hyperparameters.number(name, value) if parameter.annotation is float else value
