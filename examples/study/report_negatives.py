"""Tables of where stochastic rounding, or a first impression, does not hold; each of one experiment's rows."""

from fractions import Fraction

import numpy as np

import report_tables as tables
from pairs import REFERENCE, Rows, differences, estimate, paired, rates_of, values

MAIN_ARMS = ("nearest/float32", "stochastic/offset")


def high_table(rows: Rows) -> str:
    rates = [rate for rate in rates_of(rows) if Fraction(rate) >= 1]
    return tables.gap_table(rows, [arm for arm in tables.arms_of(rows) if arm in (REFERENCE, *MAIN_ARMS)], rates=rates)


def kept_table(rows: Rows) -> str:
    """FP32 weights, with moments in 8 bits."""
    arms = [arm for arm in tables.arms_of(rows) if arm.startswith("float32/")]
    return tables.gap_table(rows, arms) if len(arms) > 1 else ""


def corrected_table(rows: Rows) -> str:
    """BF16 weights with something beside them, and without, against FP32 weights with the same moments."""
    home = "float32/offset"
    arms = [arm for arm in tables.arms_of(rows) if arm.endswith("/offset") and arm not in (home, "nearest/offset")]
    rates = rates_of(rows, home)
    return tables.gap_table(rows, arms, home, rates) if rates and len(arms) > 1 else ""


def momentum_table(rows: Rows) -> str:
    lines = []
    for weights in tables.WEIGHTS:
        arms = [f"{weights}/bfloat16_{rounding}" for rounding in ("nearest", "stochastic")]
        for rate in rates_of(rows):
            between = estimate(differences(rows, arms[1], arms[0], rate))
            against = [estimate(differences(rows, arm, REFERENCE, rate)) for arm in arms]
            if any((between, *against)):
                lines.append([weights, rate, *(tables.gap(found) for found in (*against, between))])
    header = ["weights", "rate", "momentum to nearest − FP32", "stochastic momentum − FP32", "stochastic − nearest"]
    return tables.markdown(header, lines)


def dynamic_table(rows: Rows) -> str:
    """Against FP32 at the same rate, and against FP32 at the rate at which FP32 is best."""
    home = {rate: values(rows, REFERENCE, rate) for rate in rates_of(rows, REFERENCE)}
    means = {rate: float(np.mean(list(losses.values()))) for rate, losses in home.items() if losses}
    if not means:
        return ""
    best = min(means, key=lambda rate: means[rate])
    lines = []
    for arm in (arm for arm in tables.arms_of(rows) if arm.endswith("/dynamic")):
        for rate in rates_of(rows, arm):
            same = estimate(differences(rows, arm, REFERENCE, rate))
            tuned = estimate(paired(values(rows, arm, rate), home[best]))
            root = tables.probe_average(rows, arm, rate, "root_nu")
            lines.append([f"`{arm}`", rate, tables.gap(same), tables.gap(tuned), tables.text(root, 3)])
    header = ["arm", "rate", "− FP32 at this rate", f"− FP32 at its best (× {best})", "√ν / FP32's"]
    return tables.markdown(header, lines)
