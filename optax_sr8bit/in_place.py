"""Updates that hand the kernel's own output to `optax.apply_updates`, without a second pass over memory."""

from typing import Any, NoReturn

import jax

HELP = (
    "an update of in_place=True only supports `p + update` (optax.apply_updates): it carries the new parameter, not a "
    "difference. With transformations or wrappers around the optimizer (optax.MultiSteps, optax.apply_if_finite, a "
    "scale) use in_place=False; to step without updates use tx.step"
)


class InPlaceUpdate:
    """The new value of one parameter, in the place of an update.

    Deliberately not a pytree node: a wrapper that maps over its leaves (MultiSteps) would scale or zero the parameter
    without a word. It also cannot leave a jit: apply it inside.
    """

    __array_ufunc__ = None  # else NumPy would try p + update element by element
    __slots__ = ("_value",)

    def __init__(self, value: jax.Array):
        """Keeps the new parameter."""
        self._value = value

    def __radd__(self, param: Any) -> jax.Array:
        """The new parameter, whatever the old one holds."""
        if getattr(param, "shape", None) != self._value.shape or getattr(param, "dtype", None) != self._value.dtype:
            raise TypeError(HELP)
        return self._value

    def __repr__(self) -> str:
        """Shape and dtype."""
        return f"InPlaceUpdate({self._value.dtype}{list(self._value.shape)})"

    def __getattr__(self, name: str) -> NoReturn:
        """What an array would have, an update has not."""
        raise AttributeError(f"no {name!r}: {HELP}")

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise TypeError(HELP)

    __add__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = __matmul__ = __rmatmul__ = _refuse
    __pow__ = __rpow__ = __mod__ = __rmod__ = __floordiv__ = __rfloordiv__ = __neg__ = __pos__ = __abs__ = _refuse
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse  # type: ignore[assignment]
    __array__ = __float__ = __int__ = __bool__ = __len__ = __iter__ = __getitem__ = _refuse
    __hash__ = None  # type: ignore[assignment]
