"""The statistics: differences of runs that share a seed, tests of them, and one correction over all claims."""

import dataclasses
import math
from collections.abc import Iterable
from fractions import Fraction
from typing import Any

import numpy as np
from scipy.stats import quantile_test
from statsmodels.stats.multitest import multipletests
from statsmodels.stats.weightstats import DescrStatsW, ttost_paired

REFERENCE = "float32/float32"
FEWEST = 3
"""Seeds, for a claim to count as measured."""

Rows = list[dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A mean of paired differences, or of `median` their median.

    Attributes:
      n: pairs.
      mean: nan where a run of a pair diverged.
      low: lower end of the 95 % interval; nan with too few pairs for one, or where one diverged.
      high: its upper end.
      sd: standard deviation of the differences; nan as the ends.
      diverged: pairs with a run whose value is not finite.
    """

    n: int
    mean: float
    low: float = math.nan
    high: float = math.nan
    sd: float = math.nan
    diverged: int = 0


@dataclasses.dataclass(frozen=True)
class Judged:
    """A claim, what was measured of it, and the verdict: "shown", "not shown" or "not measured"."""

    claim: dict[str, Any]
    estimate: Estimate | None
    p: float | None
    adjusted: float | None
    verdict: str


@dataclasses.dataclass(frozen=True)
class Best:
    """An arm at the learning rate that is best for it.

    The rate was selected by the loss that is then reported, so the loss flatters every arm a little, more with more
    rates; the interval of `difference` does not account for that. It describes, and no claim rests on it.

    Attributes:
      arm: its name.
      rate: that of the least mean loss over the seeds that every rate of the arm has.
      rates: how many there were to select from.
      loss: mean.
      n: seeds in it: means over different seeds are not to be compared, `difference` is.
      edge: whether the best rate is the least or greatest that was tried, so that a better one may lie beyond.
      difference: from the reference at the reference's own best rate, paired by seed; None with no common seed.
    """

    arm: str
    rate: str
    rates: int
    loss: float
    n: int
    edge: bool
    difference: Estimate | None


def values(rows: Rows, arm: str, rate: str, metric: str = "loss") -> dict[tuple[str, int, str], float]:
    """By (optimizer, seed, CRC of the data): runs on other data, as another Python brings it, are no pair.

    Raises:
      ValueError: two rows for one cell, of which none is known to be the right one.
    """
    found: dict[tuple[str, int, str], float] = {}
    cells = set()
    for row in rows:
        cell = row["cell"]
        if cell["arm"] != arm or Fraction(cell["rate"]) != Fraction(rate) or row["result"].get(metric) is None:
            continue
        if (cell["optimizer"], cell["seed"]) in cells:
            raise ValueError(f"two rows for {cell}")
        cells.add((cell["optimizer"], cell["seed"]))
        found[cell["optimizer"], cell["seed"], str(row["result"].get("text"))] = float(row["result"][metric])
    return found


def paired(first: dict[Any, float], second: dict[Any, float]) -> np.ndarray:
    """`first - second` where both have a value, in the order of the keys."""
    return np.array([first[key] - second[key] for key in sorted(first.keys() & second.keys())])


def differences(rows: Rows, arm: str, reference: str, rate: str, metric: str = "loss") -> np.ndarray:
    """`arm - reference` at one learning rate, a value for each seed that both were run with."""
    return paired(values(rows, arm, rate, metric), values(rows, reference, rate, metric))


def estimate(difference: np.ndarray) -> Estimate | None:
    """The mean, with an interval of Student's t; None of nothing."""
    n, diverged = len(difference), int(np.sum(~np.isfinite(difference)))
    if n == 0:
        return None
    if diverged:
        return Estimate(n, math.nan, diverged=diverged)
    if n == 1:
        return Estimate(1, float(difference[0]))
    stats = DescrStatsW(difference)
    sd = float(np.std(difference, ddof=1))
    # statsmodels divides by a deviation of zero, with a warning, where all differences are one number.
    low, high = stats.tconfint_mean(0.05) if sd else (stats.mean, stats.mean)
    return Estimate(n, float(stats.mean), float(low), float(high), sd)


def median(difference: np.ndarray) -> Estimate:
    """With an interval from the order of the differences, which assumes nothing but that they are independent."""
    ends = quantile_test(difference, p=0.5).confidence_interval(0.95)
    return Estimate(len(difference), float(np.median(difference)), float(ends.low), float(ends.high))


def equivalence_p(difference: np.ndarray, margin: float) -> float:
    """Two one-sided t tests (TOST) of |mean| < margin: the larger p of the two."""
    if not testable(difference):
        return 1.0
    if np.ptp(difference) == 0:
        return float(abs(difference[0]) >= margin)
    return float(ttost_paired(difference, np.zeros_like(difference), -margin, margin)[0])


def superiority_p(difference: np.ndarray, margin: float) -> float:
    """One-sided t test of mean > margin."""
    if not testable(difference):
        return 1.0
    if np.ptp(difference) == 0:
        return float(difference[0] <= margin)
    return float(DescrStatsW(difference).ttest_mean(margin, alternative="larger")[1])


def testable(difference: np.ndarray) -> bool:
    """One pair has no deviation, and a run that diverged shows nothing of a mean."""
    return len(difference) > 1 and bool(np.all(np.isfinite(difference)))


def judged(claims: list[dict[str, Any]], records: dict[str, Rows], analysis: dict[str, Any]) -> list[Judged]:
    """Every claim, in their order.

    Holm's correction counts all registered claims, those that were not measured with p = 1: which runs were made cannot
    make it milder.
    """
    found = []
    for claim in claims:
        rows = records.get(claim["experiment"], [])
        found.append(differences(rows, claim["arm"], claim.get("reference", REFERENCE), claim["rate"]))
    measured = [len(difference) >= FEWEST for difference in found]
    raw = [_p(*pair, analysis) if known else 1.0 for *pair, known in zip(claims, found, measured, strict=True)]
    adjusted = multipletests(raw, alpha=analysis["level"], method=analysis["correction"])[1] if raw else []
    result = []
    for claim, difference, known, p, corrected in zip(claims, found, measured, raw, adjusted, strict=True):
        verdict = "not measured"
        if known:
            verdict = "shown" if corrected < analysis["level"] else "not shown"
        told = (p, float(corrected)) if known else (None, None)
        result.append(Judged(claim, estimate(difference), *told, verdict))
    return result


def _p(claim: dict[str, Any], difference: np.ndarray, analysis: dict[str, Any]) -> float:
    if claim["kind"] == "equivalent":
        return equivalence_p(difference, analysis["equivalence"])
    if claim["kind"] == "worse":
        return superiority_p(difference, analysis["superiority"])
    raise ValueError(f"{claim}: kind is neither 'equivalent' nor 'worse'")


def rates_of(rows: Rows, arm: str | None = None) -> list[str]:
    """That were run, falling."""
    found = {row["cell"]["rate"] for row in rows if arm is None or row["cell"]["arm"] == arm}
    return sorted(found, key=Fraction, reverse=True)


def best_rates(rows: Rows, arms: Iterable[str], reference: str = REFERENCE) -> list[Best]:
    """Each arm at its own best learning rate, those with one rate left out: there was nothing to select."""
    home = _best(rows, reference)
    result = []
    for arm in arms:
        found = _best(rows, arm)
        if found is None:
            continue
        rate, losses = found
        tried = rates_of(rows, arm)
        difference = estimate(paired(losses, home[1])) if home and arm != reference else None
        edge = rate in (tried[0], tried[-1])
        result.append(Best(arm, rate, len(tried), float(np.mean(list(losses.values()))), len(losses), edge, difference))
    return result


def _best(rows: Rows, arm: str) -> tuple[str, dict[Any, float]] | None:
    """The rate, and its losses by seed as in `values`; a rate at which a run diverged is not the best."""
    by_rate = {rate: values(rows, arm, rate) for rate in rates_of(rows, arm)}
    if len(by_rate) < 2:
        return None
    common = sorted(set.intersection(*(set(losses) for losses in by_rate.values())))
    means = {rate: np.mean([losses[key] for key in common]) for rate, losses in by_rate.items()} if common else {}
    finite = {rate: mean for rate, mean in means.items() if np.isfinite(mean)}
    if not finite:
        return None
    rate = min(finite, key=lambda rate: finite[rate])
    return rate, {key: by_rate[rate][key] for key in common}
