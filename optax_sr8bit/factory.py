"""Turns the function that defines an optimizer into its public factory."""

import functools
import inspect
from collections.abc import Callable
from dataclasses import fields

from optax_sr8bit.options import DOC, Options
from optax_sr8bit.rule import Definition
from optax_sr8bit.transform import Transformation, build


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
    signature = own.replace(parameters=[*own.parameters.values(), *shared], return_annotation=Transformation)

    @functools.wraps(define)
    def factory(*args, **kwargs):
        try:
            arguments = signature.bind(*args, **kwargs).arguments
        except TypeError as error:
            raise TypeError(f"{define.__name__}(): {error}") from None
        if arguments.get("mu_dtype") is not None:
            raise ValueError(
                f"mu_dtype={arguments['mu_dtype']!r}: moments are kept as codec= says; pass codec='float32' for float32"
            )
        options = Options(**{f.name: arguments.pop(f.name) for f in fields(Options) if f.name in arguments})
        return build(define(**arguments), options)

    factory.__signature__ = signature  # type: ignore[attr-defined]
    factory.__annotations__ = {p.name: p.annotation for p in signature.parameters.values()} | {"return": Transformation}
    factory.__doc__ = inspect.cleandoc(define.__doc__ or "") + "\n" + DOC
    return factory
