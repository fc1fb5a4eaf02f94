"""Gives a tile function another back end's names: the code stays, its globals are swapped."""

import dataclasses
import functools
import types
from collections.abc import Callable
from typing import Any


class Namespace:
    """The fields of a dataclass of tile functions and constants, as a Triton kernel takes them: one `constexpr`.

    Equal where the fields are, and hashable: kernels are compiled once for each.
    """

    def __init__(self, fields: dict[str, Any]):
        """Keeps the fields as attributes."""
        self.__dict__.update(fields)

    def __eq__(self, other: Any) -> bool:
        return isinstance(other, Namespace) and self.__dict__ == other.__dict__

    def __hash__(self) -> int:
        return hash(tuple(self.__dict__.items()))

    @property
    def cache_key(self) -> str:
        """What Triton's cache on disk tells kernels apart by: the source of every function, not its name."""
        return repr({name: _key(value) for name, value in self.__dict__.items()})


def _key(value: Any) -> Any:
    return tuple(map(_key, value)) if isinstance(value, tuple) else getattr(value, "cache_key", value)


def to_triton(part: Any) -> Any:
    """A static part of a kernel as Triton takes it.

    Args:
      part: a tile function (a plain function over `names`, constants and other tile functions), a constant, or a tuple
        or dataclass of these.

    Returns:
      A `triton.JITFunction` for a function, a `Namespace` for a dataclass, else the same as `part`.

    Raises:
      ImportError: without Triton.
      TypeError: for a function with defaults or a closure, which Triton would not see.
    """
    if isinstance(part, tuple):
        if any(map(callable, part)):
            return tuple(map(to_triton, part))
        import triton

        return triton.language.constexpr(part)  # Triton 3.6 does not hand on a bare tuple of constants
    if dataclasses.is_dataclass(part):
        return Namespace({f.name: to_triton(getattr(part, f.name)) for f in dataclasses.fields(part)})
    return _function(part) if callable(part) else part


@functools.cache  # by identity: one device function for each, as the kernels' caches expect
def _function(function: Callable) -> Any:
    import triton

    from optax_sr8bit_kernels import names, triton_names

    if function.__module__ == names.__name__:
        return getattr(triton_names, function.__name__)
    if function.__closure__ or function.__defaults__ or function.__kwdefaults__:
        raise TypeError(
            f"{function.__qualname__} is no tile function: it has defaults or a closure, which a Triton kernel does "
            "not see. Make them arguments or constants of its module, or pass implementation='xla'"
        )
    # Triton's interpreter patches the `triton.language` that it finds among the globals.
    swapped: dict[str, Any] = {"__name__": function.__module__, "tl": triton.language}
    for name in function.__code__.co_names:
        if name in function.__globals__:
            value = function.__globals__[name]
            if value is getattr(names, name, None):
                swapped[name] = getattr(triton_names, name)
            else:
                swapped[name] = to_triton(value) if callable(value) else triton.language.constexpr(value)
    return triton.jit(types.FunctionType(function.__code__, swapped, function.__name__))
