"""What an optimizer is: its rule on a tile, its state, the scalars of a step."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple


class Moment(NamedTuple):
    """A moment of a rule.

    Attributes:
      name: the state's field.
      signed: False for averages of squares, which are never negative.
    """

    name: str
    signed: bool


@dataclasses.dataclass(frozen=True)
class Rule:
    """An optimizer without its hyperparameters.

    Attributes:
      name: the factory's name.
      moments: what it remembers of the gradients, in the order of `update`.
      state: the NamedTuple of its state: `count`, a field per moment, a `_scale` field per moment, `seed`, `format`.
      scalars: (hyperparameters, count) -> tuple of float32 scalars, computed once a step.
      update: tile function (param, grad, moments, floors, scalars, zero, flags) -> (new param, new moments), all
        float32. Every product that is added to something passes `unfused(product, zero)`, so that the bits do not
        depend on the program around.
      flags: static switches of `update`; the first is whether weight decay applies.
    """

    name: str
    moments: tuple[Moment, ...]
    state: Any
    scalars: Callable
    update: Callable
    flags: tuple[bool, ...]

    @property
    def fields(self) -> tuple[list[str], list[str]]:
        """The state's fields of the moments and of their scales."""
        names = [moment.name for moment in self.moments]
        return names, [name + "_scale" for name in names]

    def flags_for(self, decay: bool) -> tuple[bool, ...]:
        """The switches for a leaf that weight decay reaches or not."""
        return (self.flags[0] and decay, *self.flags[1:])


@dataclasses.dataclass(frozen=True)
class Definition:
    """An optimizer with its hyperparameters, as its factory gives it.

    Attributes:
      rule: the rule.
      hyperparameters: by name: numbers, arrays, or schedules of the count.
      mask: which leaves weight decay reaches: a tree of booleans (or a prefix of one), a function of the parameters
        that returns it, or None for all.
    """

    rule: Rule
    hyperparameters: dict[str, Any]
    mask: Any = None
