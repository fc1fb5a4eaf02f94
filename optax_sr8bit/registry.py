"""Finds a named choice: a codec, a rounding."""

from collections.abc import Mapping
from typing import TypeVar

T = TypeVar("T")


def find(kind: str, choice: str | T, known: Mapping[str, T], base: type[T]) -> T:
    """The known object of that name, or the object itself.

    Args:
      kind: what is chosen, for the message.
      choice: a name, or an object of a concrete subclass of base.
      known: the named objects.
      base: what all of them are.

    Returns:
      The object.

    Raises:
      ValueError: for anything else.
    """
    if isinstance(choice, base) and hasattr(choice, "name"):
        return choice
    if isinstance(choice, str) and choice in known:
        return known[choice]
    hint = f"; did you mean {choice.__name__}()?" if isinstance(choice, type) else "."
    raise ValueError(f"unknown {kind} {choice!r}{hint} Pass one of {sorted(known)} or a {base.__name__} object")
