"""What a codec is: a code for the signed moment, one for the unsigned, and where their dither comes from."""

import abc
import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import jax.numpy as jnp

from optax_sr8bit import bits

DITHERS: dict[str, tuple[Callable, Callable]] = {
    "weyl": (bits.weyl_mu, bits.weyl_nu),
    "philox": (bits.philox_mu, bits.philox_nu),
    "nearest": (bits.half_code, bits.half_code),
}


@dataclasses.dataclass(frozen=True)
class MomentCode:
    """How one moment is stored between steps. All functions are tile functions over float32 and uint32.

    Attributes:
      encode: (x, absmax, word) -> code, a byte in whatever the back end keeps it; word is the dither, a uniform uint32.
      decode: (code, scale) -> float32.
      top: the largest value of the code in units of the scale: scale = absmax / top.
      floor: scale -> the least value that the second moment may take in a denominator, in the units of x.
      zero: the code that decodes to 0.0 (for a code without zero, to the least value).
      tiny: absmax is clamped from below at this, so that reciprocals stay finite and zero blocks need no special case.
    """

    encode: Callable
    decode: Callable
    top: float
    floor: Callable
    zero: int
    tiny: float


SCALES = ("float32", "power_of_two")


@dataclasses.dataclass(frozen=True)
class Codec(abc.ABC):
    """How the moments of a leaf are stored.

    Attributes:
      name: what the `codec=` argument calls it.
      number: identifies the codec in a state's `format`, below 128.
      bits: of an element and moment, scales not counted: 4 (two codes a byte), 8 or 32.
      blockwise: whether elements are scaled by the largest magnitude of their block.
      signed: the code of signed moments (mu).
      unsigned: the code of non-negative moments (nu).
    """

    name: ClassVar[str]
    number: ClassVar[int]
    bits: ClassVar[int]
    blockwise: ClassVar[bool]
    signed: ClassVar[MomentCode]
    unsigned: ClassVar[MomentCode]

    def code(self, signed: bool) -> MomentCode:
        """The code of a signed or of a non-negative moment."""
        return self.signed if signed else self.unsigned

    def dither_word(self, signed: bool) -> Callable:
        """The tile function (words, place) -> uint32 that draws a moment's dither."""
        return bits.half_code

    @property
    def power_of_two(self) -> bool:
        """Whether scales are powers of two, kept as their exponents, one byte each."""
        return False

    @property
    def format(self) -> int:
        """The number that tells its bytes from other codecs' in a state's `format`."""
        return self.number + 128 * self.power_of_two

    @property
    def code_dtype(self) -> Any:
        """Of the array that keeps a moment."""
        return jnp.uint8 if self.blockwise else jnp.float32

    @property
    def scale_dtype(self) -> Any:
        """Of the array that keeps its scales."""
        return jnp.uint8 if self.power_of_two else jnp.float32

    def code_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Of the array that keeps a moment of a leaf of that shape; codes of 4 bits are packed along the last axis."""
        return (*shape[:-1], -(-shape[-1] // 2)) if self.bits == 4 else shape


@dataclasses.dataclass(frozen=True)
class BlockCodec(Codec):
    """A codec with a scale for each block.

    Attributes:
      scales: "float32" (default), or "power_of_two": rounded up to a power of two, whose exponent is kept in one byte.
    """

    scales: str = dataclasses.field(default="float32", kw_only=True)
    blockwise = True

    def __post_init__(self):
        """Checks the fields."""
        if self.scales not in SCALES:
            raise ValueError(f"unknown scales {self.scales!r} for codec {self.name!r}; pass one of {SCALES}")

    @property
    def power_of_two(self) -> bool:
        """Whether scales are powers of two, kept as their exponents, one byte each."""
        return self.scales == "power_of_two"


@dataclasses.dataclass(frozen=True)
class DitheredCodec(BlockCodec):
    """A codec that rounds to a code at random, so that slow averages move on average instead of stalling.

    Attributes:
      scales: "float32" (default) or "power_of_two", one byte a block.
      dither: "weyl" (default; a low-discrepancy sequence), "philox" (independent random bits), or "nearest" (none:
        averages stall once a step moves them by less than half a code).
    """

    dither: str = "weyl"

    def __post_init__(self):
        """Checks the fields."""
        super().__post_init__()
        if self.dither not in DITHERS:
            raise ValueError(f"unknown dither {self.dither!r} for codec {self.name!r}; pass one of {sorted(DITHERS)}")

    def dither_word(self, signed: bool) -> Callable:
        """The tile function (words, place) -> uint32 that draws a moment's dither."""
        return DITHERS[self.dither][0 if signed else 1]


def no_floor(scale):
    """No floor under the second moment."""
    return scale * 0.0
