"""What a rounding is: how a float32 result becomes a stored parameter, and what is kept beside it."""

import abc
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Rounding(abc.ABC):
    """How a float32 result becomes a parameter of 8 or 16 bits; float32 parameters are stored as they are.

    Patterns of bits are uint32; all functions are tile functions.

    Attributes:
      name: what the `rounding=` argument calls it.
      random: whether it consumes the parameter's random bits.
      encoders: by dtype of the parameter (x, r) -> pattern, where r is uint32 in [0, 65536).
      correction: dtype of what is kept beside each parameter, of its shape; or None.
      rest: (x, pattern) -> pattern of the correction.
      join: (pattern, pattern of the correction) -> float32, which the optimizer takes the parameter to be.
    """

    name: ClassVar[str]
    random: ClassVar[bool]
    encoders: ClassVar[Mapping[str, Callable]]
    correction: ClassVar[Any] = None
    rest: ClassVar[Callable | None] = None
    join: ClassVar[Callable | None] = None

    def correction_of(self, dtype: Any) -> Any:
        """The dtype of what is kept beside a parameter of that dtype, or None: float32 is stored as it is."""
        return None if dtype == jnp.float32 else self.correction
