"""The codecs of the moments, one a file."""

from optax_sr8bit.codecs.base import (
    BlockCodec as BlockCodec,
    Codec as Codec,
    DitheredCodec as DitheredCodec,
    MomentCode as MomentCode,
)
from optax_sr8bit.codecs.companded import Companded as Companded
from optax_sr8bit.codecs.dynamic import Dynamic as Dynamic
from optax_sr8bit.codecs.float32 import Float32 as Float32
from optax_sr8bit.codecs.four_bit import FourBit as FourBit
from optax_sr8bit.codecs.fp8 import Fp8 as Fp8
from optax_sr8bit.codecs.offset import Offset as Offset
from optax_sr8bit.codecs.offset_wide import OffsetWide as OffsetWide
from optax_sr8bit.registry import find

CODECS: dict[str, Codec] = {
    codec.name: codec for codec in (Offset(), OffsetWide(), Dynamic(), Float32(), Companded(), Fp8(), FourBit())
}


def get(codec: str | Codec) -> Codec:
    """Returns the codec of that name, or the object itself.

    Raises:
      ValueError: for an unknown name, or an object with the number of another codec.
    """
    found = find("codec", codec, CODECS, Codec)
    owner = next((c for c in CODECS.values() if c.number == found.number and not isinstance(found, type(c))), None)
    if owner is not None:
        raise ValueError(f"codec {found.name!r} has the number of {owner.name!r}, {found.number}; give it its own")
    return found


def by_format(number: int) -> str:
    """The name of the codec with that number in a state's `format`."""
    name = next((c.name for c in CODECS.values() if c.number == number % 128), f"unknown codec number {number}")
    return name + (" with power-of-two scales" if number >= 128 else "")
