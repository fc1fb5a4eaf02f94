"""The roundings of the parameters, one or two a file."""

from optax_sr8bit.registry import find
from optax_sr8bit.rounding.base import Rounding as Rounding
from optax_sr8bit.rounding.kahan import Kahan as Kahan
from optax_sr8bit.rounding.nearest import Nearest as Nearest
from optax_sr8bit.rounding.sixteen_bits import nearest_bfloat16 as nearest_bfloat16, nearest_float16 as nearest_float16
from optax_sr8bit.rounding.split import Split24 as Split24, Split32 as Split32
from optax_sr8bit.rounding.stochastic import Stochastic as Stochastic

ROUNDINGS: dict[str, Rounding] = {r.name: r for r in (Stochastic(), Nearest(), Kahan(), Split24(), Split32())}


def get(rounding: str | Rounding) -> Rounding:
    """Returns the rounding of that name, or the object itself.

    Raises:
      ValueError: for an unknown name.
    """
    return find("rounding", rounding, ROUNDINGS, Rounding)
