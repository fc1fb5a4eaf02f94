"""Gives a tile function another back end's names: the code stays, its globals are swapped."""

import functools
import types
from collections.abc import Callable
from typing import Any


@functools.cache
def to_triton(function: Callable) -> Any:
    """The tile function as a Triton device function.

    Args:
      function: a plain function over `names`, constants and other tile functions.

    Returns:
      A `triton.JITFunction`, to be passed to a kernel as a `constexpr`.

    Raises:
      ImportError: without Triton.
    """
    import triton

    from optax_sr8bit_kernels import triton_names

    swapped: dict[str, Any] = {"__name__": function.__module__}
    for name in function.__code__.co_names:
        if hasattr(triton_names, name):
            swapped[name] = getattr(triton_names, name)
        elif name in function.__globals__:
            value = function.__globals__[name]
            swapped[name] = to_triton(value) if callable(value) else triton.language.constexpr(value)
    return triton.jit(types.FunctionType(function.__code__, swapped, function.__name__))
