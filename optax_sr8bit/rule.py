"""What an optimizer is: its rule on a tile, its state, the scalars of a step."""

import collections
import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple


class Moment(NamedTuple):
    """A moment of a rule.

    Attributes:
      name: the state's field.
      signed: False for averages and sums of squares, which are never negative.
      initial: what it begins with, everywhere; 0 or positive.
    """

    name: str
    signed: bool
    initial: float = 0.0


def state_type(module: str, name: str, *moments: Moment, optax: Any = None) -> Any:
    """The NamedTuple of an optimizer's state.

    Args:
      module: where it is a name, so that it can be pickled.
      name: its own.
      *moments: all that the rule may have; the fields of those that it does without are None.
      optax: the state of Optax with a `count` and fields of the same names, from and to which it can be converted.

    Returns:
      The type; it keeps the last two arguments as `moments` and `optax`.
    """
    names = [moment.name for moment in moments]
    fields = ["count", *names, *(moment + "_scale" for moment in names), "seed", "format", "correction"]
    new: Any = collections.namedtuple(name, fields, defaults=[None] * (len(fields) - 1), module=module)
    new.__doc__ = "\n".join(
        [
            "State of an optimizer; trees have the structure of the parameters.",
            "",
            "Attributes:",
            "  count: int32 scalar, the steps taken.",
            *(f"  {moment}: codes as the codec keeps them, float32 in small leaves." for moment in names),
            *(f"  {moment}_scale: [..., ceil(n / block)], as the codec keeps scales." for moment in names),
            "  seed: uint32[2].",
            "  format: uint32[2 + leaves]: version, log2 of the block size, the codec of each leaf.",
            "  correction: what roundings keep beside parameters (an unused byte a row where nothing), or None.",
        ]
    )
    new.moments, new.optax = moments, optax
    return new


@dataclasses.dataclass(frozen=True)
class Rule:
    """An optimizer without its hyperparameters.

    Attributes:
      name: the factory's name.
      moments: what it remembers of the gradients, in the order of `update`; may be none.
      state: its `state_type`.
      scalars: (hyperparameters, count) -> tuple of float32 scalars, computed once a step.
      update: tile function (param, grad, moments, floors, scalars, zero, flags) -> (new param, new moments), all
        float32. Every product that is added to something passes `unfused(product, zero)`, so that the bits do not
        depend on the program around.
      flags: static switches of `update`.
      measure: for rules that need norms of whole leaves: tile function like `update`, which returns a tuple of float32
        tiles. Their L2 norms over the leaf are computed in a pass before the step.
      adapt: (norms, scalars, flags) -> tuple of float32 scalars of the leaf, which `update` finds behind `scalars`.
    """

    name: str
    moments: tuple[Moment, ...]
    state: Any
    scalars: Callable
    update: Callable
    flags: tuple[bool, ...] = ()
    measure: Callable | None = None
    adapt: Callable | None = None

    @property
    def fields(self) -> tuple[list[str], list[str]]:
        """The state's fields of the moments and of their scales."""
        names = [moment.name for moment in self.moments]
        return names, [name + "_scale" for name in names]

    def flags_for(self, reached: tuple[bool, ...]) -> tuple[bool, ...]:
        """The switches for a leaf: the first ones only where their masks reach it."""
        first = tuple(flag and here for flag, here in zip(self.flags, reached, strict=False))
        return first + self.flags[len(first) :]


@dataclasses.dataclass(frozen=True)
class Definition:
    """An optimizer with its hyperparameters, as its factory gives it.

    Attributes:
      rule: the rule.
      hyperparameters: by name: numbers, arrays, or schedules of the count.
      masks: of the first flags, one for each, which leaves they reach: a tree of booleans (or a prefix of one), a
        function of the parameters that returns it, or None for all.
      rates: which hyperparameters must be in [0, 1).
      schedules: which may be schedules.
    """

    rule: Rule
    hyperparameters: dict[str, Any]
    masks: tuple[Any, ...] = ()
    rates: tuple[str, ...] = ("b1", "b2")
    schedules: tuple[str, ...] = ("learning_rate", "weight_decay")
