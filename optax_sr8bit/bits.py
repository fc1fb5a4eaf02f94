"""Random bits, addressed by where they are used instead of drawn from a stream.

`words` is always `(seed0, seed1, step, leaf_lo, leaf_hi)`, five uint32 scalars; `place` begins with the *global* row
and column of each element, leading axes flattened into rows. The same address gives the same bits on every back end,
mesh and tile size. Tile functions: see `optax_sr8bit_kernels.names`.
"""

from optax_sr8bit_kernels.names import halves, quarters, static_range, u32, wide_product


def philox4x32(c0, c1, c2, c3, k0, k1):
    """Philox4x32-8: four uniform uint32 words for a 128-bit counter and a 64-bit key.

    The paper finds seven rounds to pass BigCrush and takes ten for safety; eight leave a margin of one, and cost a GPU
    one instruction a parameter less.

    Args:
      c0: counter words, uint32 arrays of one shape (so are c1, c2, c3).
      c1: as c0.
      c2: as c0.
      c3: as c0.
      k0: key words, uint32 scalars or arrays (so is k1).
      k1: as k0.

    Returns:
      Four uint32 arrays.

    References:
      Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3, SC 2011.
    """
    for _ in static_range(8):
        h0, l0 = wide_product(c0, u32(0xD2511F53))
        h1, l1 = wide_product(c2, u32(0xCD9E8D57))
        c0 = h1 ^ c1 ^ k0
        c1 = l1
        c2 = h0 ^ c3 ^ k1
        c3 = l0
        k0 = k0 + u32(0x9E3779B9)
        k1 = k1 + u32(0xBB67AE85)
    return c0, c1, c2, c3


def parameter_bits(words, place):
    """16 uniform bits per element for rounding the parameter, uint32 in [0, 65536).

    One Philox call serves eight neighbouring columns: counter (step, leaf_lo, row, col // 8), key (seed0,
    seed1 ^ leaf_hi); of column j = col % 8 the word is j // 2 and the half low for even, high for odd j.
    """
    return halves(_parameter_words, words, place)


def _parameter_words(words, row, group):
    seed0, seed1, step, leaf_lo, leaf_hi = words
    row = row + (group ^ group)
    zero = row ^ row
    return philox4x32(zero + step, zero + leaf_lo, row, group, seed0, seed1 ^ leaf_hi)


def weyl_mu(words, place):
    """A Weyl sequence in row, column and step as the signed moment's dither, a uint32 word per element.

    Equidistributed, so with less variance than random bits: an element's draws over the steps are 0.41 turns apart.
    """
    seed0, seed1, step, leaf_lo, leaf_hi = words
    row, col = place[0], place[1]
    return row * u32(0x27D4EB2F) + col * u32(0x9E3779B1) + (step * u32(0x6A09E667) + leaf_hi + seed1)


def weyl_nu(words, place):
    """As `weyl_mu` for the unsigned moment, with other constants (0.62 turns a step)."""
    seed0, seed1, step, leaf_lo, leaf_hi = words
    row, col = place[0], place[1]
    return row * u32(0xC2B2AE3D) + col * u32(0x85EBCA77) + (step * u32(0x9E3779B9) + leaf_lo + seed0)


def philox_mu(words, place):
    """Independent random bits as the signed moment's dither, a uint32 word per element.

    One Philox call serves four neighbouring columns. The key differs from the parameter's, and the other moment's.
    """
    return quarters(_mu_words, words, place)


def philox_nu(words, place):
    """As `philox_mu` for the unsigned moment."""
    return quarters(_nu_words, words, place)


def half_code(words, place):
    """The word that makes a dithered code round to nearest: half a code, whatever the address."""
    return (place[0] ^ place[0]) + u32(0x80000000)


def _mu_words(words, row, group):
    return _dither_words(words, row, group, u32(0x243F6A88))


def _nu_words(words, row, group):
    return _dither_words(words, row, group, u32(0x85A308D3))


def _dither_words(words, row, group, stream):
    seed0, seed1, step, leaf_lo, leaf_hi = words
    row = row + (group ^ group)
    zero = row ^ row
    return philox4x32(zero + step, zero + leaf_lo, row, group, seed0 ^ stream, seed1 ^ leaf_hi)
