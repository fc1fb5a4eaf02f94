"""`stochastic`: up or down at random, right on average."""

import dataclasses

from optax_sr8bit.rounding.base import Rounding
from optax_sr8bit.rounding.eight_bits import stochastic_e4m3, stochastic_e5m2
from optax_sr8bit.rounding.sixteen_bits import stochastic_bfloat16, stochastic_float16


@dataclasses.dataclass(frozen=True)
class Stochastic(Rounding):
    """Up or down at random, right on average."""

    name = "stochastic"
    random = True
    encoders = {  # noqa: RUF012
        "bfloat16": stochastic_bfloat16,
        "float16": stochastic_float16,
        "float8_e4m3fn": stochastic_e4m3,
        "float8_e5m2": stochastic_e5m2,
    }
