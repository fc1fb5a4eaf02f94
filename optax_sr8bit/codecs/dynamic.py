"""`dynamic`: the dynamic maps of bitsandbytes with the exact nearest code, to read, write and follow its checkpoints.

Seven decades, the e-th with 2**e (signed) or 2**(e+1) (unsigned) equal intervals, whose midpoints are the values;
beside them 0 and 1. The signed map is not symmetric: 1 is in it and -1 is not, so absmax itself is stored exactly only
when positive, and `step(-g)` does not mirror `step(g)`. Unlike `offset` it has no dither and no floor: slow averages
stall, and a second moment that decodes to zero beside a first one that does not gives a huge update.

References:
  Dettmers et al., 8-bit Optimizers via Block-wise Quantization, ICLR 2022; `create_dynamic_map` in
  bitsandbytes/functional.py.
"""

import dataclasses

import numpy as np

from optax_sr8bit.codecs.base import Codec, MomentCode, no_floor
from optax_sr8bit_kernels.names import absolute, as_int, as_uint, lookup, maximum, minimum, where


def encode_mu(x, absmax, word, table):
    """The code whose value is nearest to x/absmax; code 127 is zero."""
    y = x / absmax
    steps = _position(absolute(y), 1.0)
    return _nearest(y, where(y < 0.0, 127 - steps, 127 + steps), table)


def encode_nu(x, absmax, word, table):
    """The code whose value is nearest to x/absmax; code 0 is zero."""
    y = x / absmax
    return _nearest(y, _position(y, 2.0) - 1, table)


def decode(code, scale, table):
    """table[code] scale."""
    return lookup(table, as_int(code)) * scale


def scale(absmax):
    """The largest magnitude of the block."""
    return absmax


def _position(y, intervals):
    """Where y in [0, 1] lies on the map, give or take one; its first value is at `intervals`.

    The position is concave and piecewise linear in y: the least of seven straight lines.
    """
    p = intervals + (y * 1e6 - 0.1) * (intervals / 0.9)
    p = minimum(p, 2.0 * intervals + (y * 1e5 - 0.1) * (2.0 * intervals / 0.9))
    p = minimum(p, 4.0 * intervals + (y * 1e4 - 0.1) * (4.0 * intervals / 0.9))
    p = minimum(p, 8.0 * intervals + (y * 1e3 - 0.1) * (8.0 * intervals / 0.9))
    p = minimum(p, 16.0 * intervals + (y * 1e2 - 0.1) * (16.0 * intervals / 0.9))
    p = minimum(p, 32.0 * intervals + (y * 1e1 - 0.1) * (32.0 * intervals / 0.9))
    p = minimum(p, 64.0 * intervals + (y - 0.1) * (64.0 * intervals / 0.9))
    return as_int(p)


def _nearest(y, guess, table):
    """Moves a guess that is right to within one code to the nearest one."""
    code = minimum(maximum(guess, 1), 254)
    here = absolute(y - lookup(table, code))
    down = absolute(y - lookup(table, code - 1)) < here
    up = absolute(y - lookup(table, code + 1)) < here
    return as_uint(where(down, code - 1, where(up, code + 1, code)))


def dynamic_map(signed: bool) -> np.ndarray:
    """The 256 ascending values of the dynamic map, float32, with the very roundings of the published one.

    torch.linspace steps with one rounding (a fused multiply-add) from both ends; the midpoints and their product with
    the decade are float32.
    """
    first, last = np.float32(0.1), np.float32(1.0)
    values = [np.zeros(1, np.float32), np.ones(1, np.float32)]
    for decade in range(7):
        n = 2**decade * (1 if signed else 2)
        step = np.float64((last - first) / np.float32(n))
        i = np.arange(n + 1)
        edges = np.where(i < (n + 1) // 2, first + step * i, last - step * (n - i)).astype(np.float32)
        middles = (edges[:-1] + edges[1:]) / np.float32(2) * np.float32(10.0 ** (decade - 6))
        values += [middles, -middles] if signed else [middles]
    return np.sort(np.concatenate(values))


@dataclasses.dataclass(frozen=True)
class Dynamic(Codec):
    """bitsandbytes' dynamic maps, signed for mu and unsigned for nu, rounded to nearest."""

    name = "dynamic"
    number = 3
    bits = 8
    blockwise = True
    signed = MomentCode(encode_mu, decode, scale, no_floor, zero=127, tiny=2.0**-100, table=dynamic_map(signed=True))
    unsigned = MomentCode(encode_nu, decode, scale, no_floor, zero=0, tiny=2.0**-100, table=dynamic_map(signed=False))
