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

DITHERED = {
    "offset-mu": (codecs.get("offset").signed, oracle.OFFSET_MU),
    "offset-nu": (codecs.get("offset").unsigned, oracle.OFFSET_NU),
    "offset_wide-mu": (codecs.get("offset_wide").signed, oracle.WIDE_MU),
    "offset_wide-nu": (codecs.get("offset_wide").unsigned, oracle.WIDE_NU),
}
DYNAMIC = {"dynamic-mu": codecs.get("dynamic").signed, "dynamic-nu": codecs.get("dynamic").unsigned}
MOMENTS = {**{k: v[0] for k, v in DITHERED.items()}, **DYNAMIC}
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
    scale = jnp.broadcast_to(moment.scale(largest), code.shape)
    return np.asarray(compiled(name)[1](code, scale))


def values_of(name):
    """The 256 values in units of absmax, float64, from the definition (for dynamic: the recorded float32 map)."""
    if name in DITHERED:
        return DITHERED[name][1].units() / DITHERED[name][1].top
    return np.load(GOLDEN)["signed.map" if signed(name) else "unsigned.map"].astype(np.float64)
