"""Which arrays of Optax's states are never negative, and which had better stay in float32."""

from typing import Any

# By the type of a state its fields that hold squares, magnitudes, or sums and averages of these. Novograd's `nu` and
# SM3's `mu` are not of the parameters' shapes; SM3's `nu` is a momentum, Sophia's may be negative.
NEVER_NEGATIVE = {
    "COCOBState": ("scale", "subgradients", "reward"),
    "DAdaptAdamWState": ("exp_avg_sq",),
    "FactoredState": ("v",),
    "MadgradState": ("grad_sum_sq",),
    "MomoAdamState": ("exp_avg_sq",),
    "ProdigyState": ("exp_avg_sq",),
    "ScaleByAdaDeltaState": ("e_g", "e_x"),
    "ScaleByAdamState": ("nu",),
    "ScaleByAdanState": ("n",),
    "ScaleByAdemamixState": ("nu",),
    "ScaleByAmsgradState": ("nu", "nu_max"),
    "ScaleByBeliefState": ("nu",),
    "ScaleByRStdDevState": ("nu",),
    "ScaleByRStdDevWithCountState": ("nu",),
    "ScaleByRmsState": ("nu",),
    "ScaleByRmsWithCountState": ("nu",),
    "ScaleByRpropState": ("step_sizes",),
    "ScaleByRssState": ("sum_of_squares",),
    "ScaleBySimplifiedAdEMAMixState": ("n",),
}

# A variance as the difference of two averages is negative as soon as either is off, and its root not a number.
EXACT = {
    "ScaleByRStdDevState": ("mu", "nu"),
    "ScaleByRStdDevWithCountState": ("mu", "nu"),
}


def listed(table: dict[str, tuple[str, ...]], parent: Any, field: str) -> bool:
    """Whether a table has that field of a state; of states of that name, only Optax's own are meant."""
    kind = type(parent)
    return kind.__module__.partition(".")[0] == "optax" and field in table.get(kind.__name__, ())
