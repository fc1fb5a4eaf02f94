"""Turns the function that defines an optimizer into its public factory."""

import functools
import inspect
import typing
from collections.abc import Callable
from dataclasses import fields

import jax

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
      The factory: same arguments, then those of `Options`, keyword-only; its docstring ends with theirs.
    """
    own = inspect.signature(define)
    shared = [
        inspect.Parameter(f.name, inspect.Parameter.KEYWORD_ONLY, default=f.default, annotation=f.type)
        for f in fields(Options)
    ]
    # ArrayLike and ScalarOrSchedule, with None or without.
    numeric = {name for name, p in own.parameters.items() if jax.Array in typing.get_args(p.annotation)}
    STRUCTURAL.update(set(own.parameters) - numeric)
    signature = own.replace(parameters=[*own.parameters.values(), *shared], return_annotation=Transformation)

    @functools.wraps(define)
    def factory(*args, **kwargs):
        try:
            arguments = signature.bind(*args, **kwargs).arguments
        except TypeError as error:
            raise TypeError(f"{define.__name__}(): {error}") from None
        dtypes = {
            name: value for name, value in arguments.items() if name in own.parameters and name.endswith("_dtype")
        }
        for name, value in dtypes.items():
            if value is not None:
                raise ValueError(f"{name}={value!r}: moments are kept as codec= says; pass codec='float32' for float32")
        for name in (name for name, p in own.parameters.items() if p.annotation is bool):
            if not isinstance(arguments.get(name, False), bool):
                raise ValueError(f"{name} must be True or False, got {arguments[name]!r}")
        for name in (name for name, p in own.parameters.items() if p.annotation is float and name in arguments):
            arguments[name] = hyperparameters.number(name, arguments[name])
        options = Options(**{f.name: arguments.pop(f.name) for f in fields(Options) if f.name in arguments})
        return build(define(**arguments), options)

    factory.__signature__ = signature  # type: ignore[attr-defined]
    factory.__annotations__ = {p.name: p.annotation for p in signature.parameters.values()} | {"return": Transformation}
    factory.__doc__ = inspect.cleandoc(define.__doc__ or "") + "\n" + DOC
    return factory
