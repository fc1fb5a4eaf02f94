"""Markdown tables of the study, each a function of sorted rows; an empty string where nothing was measured."""

import math
from collections.abc import Callable, Iterable
from fractions import Fraction
from typing import Any

import numpy as np

from pairs import REFERENCE, Best, Estimate, Judged, Rows, best_rates, differences, estimate, rates_of, values

# In the order of arms.py, which is not imported: it needs JAX, and this needs records alone.
WEIGHTS = ("float32", "nearest", "stochastic", "kahan", "split24", "kahan_from_float32", "split24_from_float32")
MOMENTS = ("float32", "offset", "offset_nearest", "dynamic", "bfloat16_nearest", "bfloat16_stochastic")


def arm_key(name: str) -> tuple[int, int, str]:
    """The place of an arm in all tables; unknown ones last."""
    weights, _, moments = name.partition("/")
    return place(WEIGHTS, weights), place(MOMENTS, moments), name


def place(known: tuple[str, ...], name: str) -> int:
    """Of a name among those known, for sorting; others come after."""
    return known.index(name) if name in known else len(known)


def arms_of(rows: Rows) -> list[str]:
    """That were run, in the tables' order."""
    return sorted({row["cell"]["arm"] for row in rows}, key=arm_key)


def markdown(header: Iterable[str], lines: Iterable[Iterable[str]]) -> str:
    """A table, or nothing where there are no lines."""
    lines = [list(line) for line in lines]
    if not lines:
        return ""
    header = list(header)
    body = [header, ["---"] * len(header), *lines]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in body)


def text(value: Any, digits: int = 4) -> str:
    """Of a number, to significant digits; of nothing, nothing."""
    if value is None:
        return ""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.{digits}g}".replace("-", "−")


def signed(value: float, digits: int = 4) -> str:
    shown = f"{value:+.{digits}f}"
    return (shown if float(shown) else shown.replace("-", "+")).replace("-", "−")


def gap(found: Estimate | None, digits: int = 4) -> str:
    """ "+0.0123 [+0.0101, +0.0145] (5)"."""
    if found is None:
        return ""
    if found.diverged:
        return f"{found.diverged} of {found.n} diverged"
    ends = "" if math.isnan(found.low) else f" [{signed(found.low, digits)}, {signed(found.high, digits)}]"
    return f"{signed(found.mean, digits)}{ends} ({found.n})"


def p_value(p: float | None) -> str:
    if p is None:
        return ""
    return "< 0.0001" if p < 1e-4 else f"{p:.4f}"


def gap_table(
    rows: Rows, arms: Iterable[str] | None = None, reference: str = REFERENCE, rates: Iterable[str] | None = None
) -> str:
    """Arms by learning rates; in the line of the reference its own mean loss."""
    columns = list(rates if rates is not None else rates_of(rows))
    lines = []
    for arm in arms_of(rows) if arms is None else arms:
        if arm == reference:
            found = [values(rows, arm, rate) for rate in columns]
            cells = [f"loss {np.mean(list(losses.values())):.4f} ({len(losses)})" if losses else "" for losses in found]
        else:
            cells = [gap(estimate(differences(rows, arm, reference, rate))) for rate in columns]
        if any(cells):
            lines.append([f"`{arm}`", *cells])
    return markdown(["arm", *(f"rate × {rate}" for rate in columns)], lines)


def best_table(found: list[Best]) -> str:
    lines = (
        [
            f"`{b.arm}`",
            f"{b.rate}{' (edge)' if b.edge else ''} of {b.rates}",
            f"{b.loss:.4f} ({b.n})",
            gap(b.difference),
        ]
        for b in found
    )
    return markdown(["arm", "best rate", "mean loss (n)", "gap to FP32 at its best"], lines)


def is_early(judged: Judged, registered: int | None) -> bool:
    """Whether a verdict rests on fewer seeds than were registered: stopping early biases it."""
    return bool(registered and judged.p is not None and judged.estimate and judged.estimate.n < registered)


def claims_table(found: list[Judged], registered: list[int | None]) -> str:
    """With how many seeds of each were registered; early verdicts are marked."""
    lines = []
    for judged, seeds in zip(found, registered, strict=True):
        claim = judged.claim
        names = [claim["experiment"], f"`{claim['arm']}`", f"`{claim.get('reference', REFERENCE)}`", claim["rate"]]
        numbers = [gap(judged.estimate), p_value(judged.p), p_value(judged.adjusted)]
        mark = f" so far: {judged.estimate.n} of {seeds} seeds" if judged.estimate and is_early(judged, seeds) else ""
        lines.append([*names, claim["kind"], *numbers, judged.verdict + mark])
    header = ["experiment", "arm", "against", "rate", "claim", "gap [95 % CI] (n)", "p", "p, Holm", "verdict"]
    return markdown(header, lines)


def probe_average(rows: Rows, arm: str, rate: str, key: str) -> float | None:
    """Over all probes of all seeds; of `applied` the median.

    Where a schedule ends at zero nearly nothing is intended at the last step, and what share of that arrives is chance.
    """
    found = [
        probe[key]
        for row in rows
        if row["cell"]["arm"] == arm and Fraction(row["cell"]["rate"]) == Fraction(rate)
        for probe in row["result"].get("probes") or []
        if probe.get(key) is not None
    ]
    middle = np.median if key == "applied" else np.mean
    return float(middle(found)) if found else None


MECHANISM = {
    "ratio": ("update / spacing", lambda x: text(x, 3)),
    "lost": ("below half", lambda x: f"{100 * x:.1f} %"),
    "moved": ("moved", lambda x: f"{100 * x:.1f} %"),
    "applied": ("applied", lambda x: f"{x:.3f}".replace("-", "−")),
    "root_nu": ("√ν / FP32's", lambda x: f"{x:.3f}"),
}


def mechanism_table(rows: Rows) -> str:
    """Arms and rates, over the probes of all seeds."""
    lines = []
    for arm in arms_of(rows):
        for rate in rates_of(rows, arm):
            found = {key: probe_average(rows, arm, rate, key) for key in MECHANISM}
            if found["ratio"] is not None:
                lines.append([f"`{arm}`", rate, *_mechanism(found)])
    return markdown(["arm", "rate", *(title for title, _ in MECHANISM.values())], lines)


def leaf_table(rows: Rows, arms: Iterable[str]) -> str:
    """Leaves of seed 0, at the greatest and at the least rate of an arm."""
    lines = []
    for arm in arms:
        rates = rates_of(rows, arm)
        for rate in dict.fromkeys(rates[:1] + rates[-1:]):
            for row in rows:
                if (row["cell"]["arm"], row["cell"]["rate"], row["cell"]["seed"]) == (arm, rate, 0):
                    leaves = row["result"].get("leaves") or {}
                    lines.extend([f"`{arm}`", rate, f"`{leaf}`", *_mechanism(leaves[leaf])] for leaf in sorted(leaves))
    return markdown(["arm", "rate", "leaf", *(title for title, _ in MECHANISM.values())], lines)


def _mechanism(probe: dict[str, Any]) -> list[str]:
    return ["" if probe.get(key) is None else shown(probe[key]) for key, (_, shown) in MECHANISM.items()]


ORDERED = {
    "FP32": REFERENCE,
    "SR": "stochastic/float32",
    "Kahan": "kahan/float32",
    "nearest": "nearest/float32",
}


def ordering_table(records: dict[str, Rows], metric: str = "loss", digits: int = 4) -> str:
    """FP32, SR, Kahan and nearest with FP32 moments; the order is that of the means, best first."""
    lines = []
    for experiment, rows in records.items():
        for rate in rates_of(rows):
            home = values(rows, REFERENCE, rate, metric)
            gaps = {name: estimate(differences(rows, arm, REFERENCE, rate, metric)) for name, arm in ORDERED.items()}
            if not home or sum(found is not None for found in gaps.values()) < 2:
                continue
            known = {name: found.mean for name, found in gaps.items() if found and not found.diverged}
            order = sorted(known, key=lambda name: known[name], reverse=metric == "accuracy")
            cells = [gap(found, digits) for name, found in gaps.items() if name != "FP32"]
            mean = f"{np.mean(list(home.values())):.{digits}f}"
            lines.append([experiment, rate, mean, *cells, ", ".join(order)])
    return markdown(["experiment", "rate", metric, *(name for name in ORDERED if name != "FP32"), "order"], lines)


def cost_table(records: dict[str, Rows]) -> str:
    """Time and memory of a step by arm: medians over all runs."""
    lines = []
    for experiment, rows in records.items():
        for arm in arms_of(rows):
            found = [_median(rows, arm, key) for key in ("ms", "kept_bytes", "temporary_bytes")]
            if any(value is not None for value in found):
                lines.append([experiment, f"`{arm}`", text(found[0], 3), text(found[1], 3), text(found[2], 3)])
    return markdown(["experiment", "arm", "ms a step", "bytes kept", "temporary bytes"], lines)


def _median(rows: Rows, arm: str, key: str) -> float | None:
    found = [row["result"][key] for row in rows if row["cell"]["arm"] == arm and row["result"].get(key) is not None]
    return float(np.median(found)) if found else None


def each(records: dict[str, Rows], table: Callable[[Rows], str]) -> str:
    """The same table of several experiments, each under its name."""
    made = {name: table(rows) for name, rows in records.items()}
    return "\n\n".join(f"**{name}**\n\n{shown}" for name, shown in made.items() if shown)


def best_table_of(rows: Rows) -> str:
    return best_table(best_rates(rows, arms_of(rows)))
