"""`float32`: no quantisation. The fallback of small leaves, so that it is not a second code path."""

import dataclasses

from optax_sr8bit.codecs.base import Codec, MomentCode, no_floor


def encode(x, absmax, word):
    """x itself."""
    return x


def decode(code, scale):
    """The code itself."""
    return code


@dataclasses.dataclass(frozen=True)
class Float32(Codec):
    """Full-precision moments, whatever the parameter's dtype."""

    name = "float32"
    number = 0
    bits = 32
    blockwise = False
    signed = MomentCode(encode, decode, 1.0, no_floor, zero=0, tiny=0.0)
    unsigned = signed
