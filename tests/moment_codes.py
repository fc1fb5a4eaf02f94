"""The codes under test beside their definitions, and how the tests call them: shared by the tests of codecs."""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles import codes as oracle

from optax_sr8bit import codecs

GOLDEN = Path(__file__).parent / "golden" / "bitsandbytes_quantize.npz"
HALF = 0x80000000
LARGEST = float(np.finfo(np.float32).max)
TINY = (1e-45, 1e-43, 1e-40, 1.2e-38, 2.0**-101, 2.0**-100, 2.0**-90)
ABSMAX = (*TINY, 1e-20, 1e-8, 0.7, 1.0, 3.0, 1e10, 1e30, 2.0**127, LARGEST)

ORACLES = {
    "offset-mu": oracle.OFFSET_MU,
    "offset-nu": oracle.OFFSET_NU,
    "offset_wide-mu": oracle.WIDE_MU,
    "offset_wide-nu": oracle.WIDE_NU,
    "companded-mu": oracle.CompandedCode(signed=True),
    "companded-nu": oracle.CompandedCode(signed=False),
    "fp8-mu": oracle.E4m3Code(signed=True),
    "fp8-nu": oracle.E4m3Code(signed=False),
    "four_bit-mu": oracle.FOUR_BIT_MU,
    "four_bit-nu": oracle.FOUR_BIT_NU,
}
DITHERED = {name: code for name, code in ORACLES.items() if code.dithered}
DYNAMIC = {"dynamic-mu": codecs.get("dynamic").signed, "dynamic-nu": codecs.get("dynamic").unsigned}
MOMENTS = {name: codecs.get(name[:-3]).code(name.endswith("mu")) for name in [*ORACLES, *DYNAMIC]}
defined = pytest.mark.parametrize("name", ORACLES)
dithered = pytest.mark.parametrize("name", DITHERED)
moments = pytest.mark.parametrize("name", MOMENTS)


def signed(name):
    return name.endswith("mu")


@functools.cache
def compiled(name):
    moment = MOMENTS[name]
    return jax.jit(moment.encode), jax.jit(moment.decode)


def encode(name, x, absmax, word=HALF):
    """Codes of float32 values for a block's largest magnitude, clamped as the optimizer does."""
    moment = MOMENTS[name]
    x = jnp.asarray(np.asarray(x, np.float32))
    largest = jnp.asarray(np.maximum(np.asarray(absmax, np.float32), np.float32(moment.tiny)))
    word = jnp.broadcast_to(jnp.asarray(np.asarray(word, np.uint32)), x.shape)
    return np.asarray(compiled(name)[0](x, jnp.broadcast_to(largest, x.shape), word))


def decode(name, code, absmax):
    moment = MOMENTS[name]
    code = jnp.asarray(np.asarray(code, np.uint32))
    largest = jnp.asarray(np.maximum(np.asarray(absmax, np.float32), np.float32(moment.tiny)))
    scale = jnp.broadcast_to(largest * (1.0 / moment.top), code.shape)
    return np.asarray(compiled(name)[1](code, scale))


def values_of(name):
    """The values of all codes in units of absmax, float64, from the definition (of dynamic: the recorded map)."""
    if name in ORACLES:
        return ORACLES[name].units() / ORACLES[name].top
    return np.load(GOLDEN)["signed.map" if signed(name) else "unsigned.map"].astype(np.float64)


def compand(name, y):
    """Multiples of absmax where codes are equally good: as they are, but for `companded`."""
    return ORACLES[name].compand(y) if name.startswith("companded") else y


def expand(name, z):
    """The inverse of `compand`."""
    return ORACLES[name].expand(z) if name.startswith("companded") else z


def used(name):
    """The codes that mean something."""
    return np.flatnonzero(~np.isnan(values_of(name)))
