"""The keyword arguments that all optimizers share."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from optax_sr8bit import codecs, rounding, seeds
from optax_sr8bit.codecs import Codec
from optax_sr8bit.implementation import IMPLEMENTATIONS
from optax_sr8bit.rounding import Rounding

DELTA_DTYPES = (jnp.dtype("bfloat16"), jnp.dtype("float16"), jnp.dtype("float32"))

DOC = """
Shared keyword arguments:
  seed: of the random bits, an int or a JAX PRNG key. Runs that share it share their noise.
  rounding: of parameters below float32, "stochastic" or "nearest"; of bfloat16 also "kahan", "split24" and "split32",
    which keep more bits of each beside it.
  codec: of the moments, "offset", "offset_wide", "fp8", "companded", "dynamic", "four_bit" or "float32". Codec and
    rounding are a name, an object, a mapping from patterns of leaf paths (`fnmatch`, the first match counts, default
    where none does) to these, or a function of (path, leaf).
  block_size: how many elements along the last axis share a scale, a power of two from 32 to 2048.
  min_8bit_size: leaves with fewer elements keep float32 moments; so do scalars and last axes shorter than 32.
  implementation: "xla", "triton", or None for the best that runs here.
  in_place: `update` returns objects that only `optax.apply_updates` (or `p + u`) can use, and which give it the new
    parameters without a further pass; both in one jit.
  delta_dtype: dtype of the updates, by default that of the gradients; float32 where a rounding keeps more bits.
"""


@dataclasses.dataclass(frozen=True)
class Options:
    """The shared keyword arguments, checked. The fields are described in `DOC`."""

    seed: Any = 0
    rounding: str | Rounding | Mapping[str, Any] | Callable[..., Any] = "stochastic"
    codec: str | Codec | Mapping[str, Any] | Callable[..., Any] = "offset"
    block_size: int = 256
    min_8bit_size: int = 4096
    implementation: str | None = None
    in_place: bool = False
    delta_dtype: Any = None

    def __post_init__(self):
        """Raises a ValueError that names the argument and its legal values."""
        seeds.check_seed(self.seed)
        if not isinstance(self.in_place, bool):
            raise ValueError(f"in_place must be True or False, got {self.in_place!r}")
        _check_choice("codec", self.codec, codecs.get)
        _check_choice("rounding", self.rounding, rounding.get)
        for name in ("block_size", "min_8bit_size"):
            object.__setattr__(self, name, _static_int(name, getattr(self, name)))
        if not (32 <= self.block_size <= 2048 and self.block_size & (self.block_size - 1) == 0):
            raise ValueError(f"block_size must be a power of two from 32 to 2048, got {self.block_size}")
        if self.min_8bit_size < 0:
            raise ValueError(f"min_8bit_size must not be negative, got {self.min_8bit_size}")
        if self.implementation not in IMPLEMENTATIONS:
            raise ValueError(f"unknown implementation {self.implementation!r}; pass one of {IMPLEMENTATIONS}")
        if self.delta_dtype is not None:
            if not any(self.delta_dtype == dtype for dtype in DELTA_DTYPES):
                raise ValueError(f"delta_dtype must be bfloat16, float16 or float32, got {self.delta_dtype!r}")
            if self.in_place:
                raise ValueError("delta_dtype has no meaning with in_place=True, which returns no delta; drop one")

    @property
    def corrects(self) -> bool:
        """Whether any leaf may have a rounding that keeps something beside it."""
        choice: Any = self.rounding
        if isinstance(choice, Mapping):
            return any(rounding.get(value).correction is not None for value in choice.values())
        if isinstance(choice, str | Rounding):
            return rounding.get(choice).correction is not None
        return True  # a function, which may choose any


def _check_choice(argument: str, choice: Any, get: Callable[[Any], Any]) -> None:
    """A name or an object must be known; the values of a mapping too; what a function returns shows later."""
    if isinstance(choice, type) or not callable(choice):
        for value in choice.values() if isinstance(choice, Mapping) else [choice]:
            try:
                get(value)
            except ValueError as error:
                raise ValueError(f"{argument}: {error}") from None


def _static_int(argument: str, value: Any) -> int:
    if isinstance(value, jax.Array | np.ndarray):
        raise ValueError(
            f"{argument} arrived as an array, as optax.inject_hyperparams passes it; use sr8.inject_hyperparams, which "
            "keeps structural arguments static (name those of a factory of your own in static_args)"
        )
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise ValueError(f"{argument} must be an int, got {value!r}")
    return int(value)
