"""Which arrays of Optax's states are never negative, and which had better not be kept as codes."""

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

# Parameters in all but name, whose blocks are too wide for codes: kept in bfloat16, as the parameters are.
PARAMETERS = {
    "COCOBState": ("init_particles",),
    "DoGState": ("init_params",),
    "DoWGState": ("init_params",),
    "MadgradState": ("x0",),
    "ProdigyState": ("params0",),
    "ScaleByDistanceOverGradientsState": ("init_params",),
    "ScheduleFreeState": ("z",),
}

# A variance as the difference of two averages is negative as soon as either is off, and its root not a number; the
# difference of two steps' gradients is a curvature.
EXACT = {
    "ScaleByLBFGSState": ("params", "updates"),
    "ScaleByRStdDevState": ("mu", "nu"),
    "ScaleByRStdDevWithCountState": ("mu", "nu"),
}


def listed(table: dict[str, tuple[str, ...]], parent: Any, field: str) -> bool:
    """Whether a table has that field of a state; of states of that name, only Optax's own are meant."""
    kind = type(parent)
    return kind.__module__.partition(".")[0] == "optax" and field in table.get(kind.__name__, ())
