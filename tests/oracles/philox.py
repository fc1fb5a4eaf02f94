"""Philox4x32-8 and the addressing of random bits, in 64-bit integers.

References:
  Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3, SC 2011 (algorithm and constants; the known-answer
  vectors are those of Random123's kat_vectors).
"""

import numpy as np

MASK = 0xFFFFFFFF
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)

# (rounds, counter, key, output) of Random123: all zero, all ones, the digits of pi. There are none for eight rounds.
PI = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0)
KNOWN_ANSWERS = (
    (7, (0, 0, 0, 0), (0, 0), (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48)),
    (7, (MASK,) * 4, (MASK,) * 2, (0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662)),
    (7, *PI, (0x4DFCCABA, 0x190A87F0, 0xC47362BA, 0xB6B5242A)),
    (10, (0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    (10, (MASK,) * 4, (MASK,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (10, *PI, (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
)


def philox4x32(counter, key, rounds=8):
    """Four uint64 arrays below 2**32 for four counter and two key words (integers or arrays that broadcast)."""
    mask = np.uint64(MASK)
    x0, x1, x2, x3 = (np.asarray(w, np.uint64) for w in counter)
    k0, k1 = (np.asarray(w, np.uint64) for w in key)
    for _ in range(rounds):
        product0 = np.uint64(MULTIPLIERS[0]) * x0
        product1 = np.uint64(MULTIPLIERS[1]) * x2
        high0, low0 = product0 >> np.uint64(32), product0 & mask
        high1, low1 = product1 >> np.uint64(32), product1 & mask
        x0, x1, x2, x3 = high1 ^ x1 ^ k0, low1, high0 ^ x3 ^ k1, low0
        k0, k1 = (k0 + np.uint64(WEYL[0])) & mask, (k1 + np.uint64(WEYL[1])) & mask
    return x0, x1, x2, x3


def parameter_bits(words, row, col):
    """The 16 bits of element (row, col): `words` is (seed0, seed1, step, leaf_lo, leaf_hi), Python integers."""
    seed0, seed1, step, leaf_lo, leaf_hi = words
    row, col = np.broadcast_arrays(np.asarray(row, np.uint64), np.asarray(col, np.uint64))
    outputs = np.stack(np.broadcast_arrays(*philox4x32((step, leaf_lo, row, col // 8), (seed0, seed1 ^ leaf_hi))))
    position = (col % 8).astype(np.int64)
    word = np.take_along_axis(outputs, (position // 2)[None], axis=0)[0]
    return np.where(position % 2 == 0, word & np.uint64(0xFFFF), word >> np.uint64(16)).astype(np.uint32)


def weyl_nu(words, row, col):
    """The dither word of the second moment, an integer, for Python integers."""
    seed0, _, step, leaf_lo, _ = words
    return (row * 0xC2B2AE3D + col * 0x85EBCA77 + step * 0x9E3779B9 + leaf_lo + seed0) % 2**32


def weyl_mu(words, row, col):
    """The dither word of the first moment, an integer, for Python integers."""
    _, seed1, step, _, leaf_hi = words
    return (row * 0x27D4EB2F + col * 0x9E3779B1 + step * 0x6A09E667 + leaf_hi + seed1) % 2**32
