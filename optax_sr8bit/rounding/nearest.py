"""`nearest`: loses every update below half a spacing."""

import dataclasses

from optax_sr8bit.rounding.base import Rounding
from optax_sr8bit.rounding.eight_bits import nearest_e4m3, nearest_e5m2
from optax_sr8bit.rounding.sixteen_bits import nearest_bfloat16, nearest_float16


@dataclasses.dataclass(frozen=True)
class Nearest(Rounding):
    """To the nearest, ties to even: loses every update below half a spacing."""

    name = "nearest"
    random = False
    encoders = {  # noqa: RUF012
        "bfloat16": nearest_bfloat16,
        "float16": nearest_float16,
        "float8_e4m3fn": nearest_e4m3,
        "float8_e5m2": nearest_e5m2,
    }
