"""The figures, as SVG whose bytes depend on the records and on matplotlib alone."""

import math
from fractions import Fraction
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

from pairs import REFERENCE, Rows, differences, estimate, rates_of, values
from report_tables import arm_key, probe_average

STYLE = {
    "svg.hashsalt": "optax_sr8bit study",  # else the names of clip paths are drawn at random
    "svg.fonttype": "path",  # else the look depends on the fonts of the reader
    "font.family": "DejaVu Sans",  # that matplotlib ships, whatever is installed
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
}
ARMS = {
    "nearest/float32": ("tab:red", "to nearest, FP32 moments"),
    "stochastic/float32": ("tab:cyan", "stochastic, FP32 moments"),
    "stochastic/offset": ("tab:blue", "stochastic, 8-bit moments"),
}
PUBLISHED = {
    "FP32": ("tab:red", "published: nearest − FP32"),
    "stochastic": ("0.1", "published: nearest − stochastic"),
}
MARKERS = "osD^vP*X"
LINEAR = 0.005
"""Nats, on either side of zero: the margin of equivalence."""


def gap_points(records: dict[str, Rows]) -> list[dict[str, Any]]:
    """One for each experiment, arm of `ARMS` and learning rate, beside the ratio of the FP32 arm."""
    points = []
    for experiment, rows in records.items():
        for rate in rates_of(rows):
            ratio = probe_average(rows, REFERENCE, rate, "ratio")
            for arm in ARMS:
                found = estimate(differences(rows, arm, REFERENCE, rate))
                if found and ratio and not found.diverged:
                    points.append(dict(experiment=experiment, arm=arm, rate=rate, ratio=ratio, estimate=found))
    return points


def draw_gaps(records: dict[str, Rows], published: list[dict[str, Any]], path: Path) -> None:
    """Loss gap against update beside spacing, with the published points."""
    points = gap_points(records)
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(8.5, 5.2), layout="constrained")
        axes.axhspan(-LINEAR, LINEAR, color="0.92", zorder=0)
        axes.axvline(0.5, color="0.6", linestyle=":", linewidth=1)
        axes.text(0.5, 0.985, " half a spacing", color="0.4", va="top", transform=axes.get_xaxis_transform())
        markers = dict(zip(records, MARKERS * len(records), strict=False))
        for point in points:
            found, (color, _) = point["estimate"], ARMS[point["arm"]]
            if not math.isnan(found.low):
                axes.plot([point["ratio"]] * 2, [found.low, found.high], color=color, linewidth=0.8, alpha=0.6)
            axes.plot(point["ratio"], found.mean, markers[point["experiment"]], color=color, markersize=5, alpha=0.85)
        for number, point in enumerate(published, 1):
            low, high = point["ratio"]
            middle, edge = math.sqrt(low * high), PUBLISHED[point["against"]][0]
            axes.plot([low, high], [point["gap"]] * 2, color=edge, linewidth=0.8)
            axes.plot(middle, point["gap"], "h", color="white", markeredgecolor=edge, markersize=7)
            # Points with the same setting share their place, but for the number beside them.
            axes.annotate(str(number), (middle, point["gap"]), (5, 4), textcoords="offset points", fontsize=8)
            if point.get("at_most"):
                arrow = dict(arrowstyle="->", color=edge)
                axes.annotate("", (middle / 2, point["gap"]), (middle, point["gap"]), arrowprops=arrow)
        handles = [_key("o", color, label) for color, label in ARMS.values()]
        drawn = [name for name in records if any(point["experiment"] == name for point in points)]
        handles += [_key(markers[name], "0.5", name) for name in drawn]
        handles += [_key("h", "white", label, markeredgecolor=edge) for edge, label in PUBLISHED.values()]
        axes.legend(handles=handles, loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
        axes.set_xscale("log")
        axes.set_yscale("symlog", linthresh=LINEAR)
        gaps = [-2 * LINEAR, 2 * LINEAR, *(p["gap"] for p in published), *(p["estimate"].mean for p in points)]
        axes.set_ylim(min(gaps) * 2, max(gaps) * 2)
        axes.set_xlabel("median |update| of FP32 training / spacing of BF16 at the weight")
        axes.set_ylabel("loss − loss of FP32, nats")
        _save(figure, path)


def draw_rates(records: dict[str, Rows], path: Path) -> None:
    """Validation loss of each arm against the learning rate, a panel for each experiment."""
    shown = {name: rows for name, rows in records.items() if len(rates_of(rows)) > 1}
    columns = max(1, min(3, len(shown)))
    lines = max(1, math.ceil(len(shown) / columns))
    with plt.rc_context(STYLE):
        size = (3.4 * columns, 3.0 * lines)
        figure, grid = plt.subplots(lines, columns, figsize=size, layout="constrained", squeeze=False)
        for axes in grid.flat[len(shown) :]:
            axes.set_axis_off()
        for axes, (name, rows) in zip(grid.flat, shown.items(), strict=False):
            for arm in sorted([*ARMS, REFERENCE], key=arm_key):
                line = []
                for rate in rates_of(rows, arm):
                    losses = [value for value in values(rows, arm, rate).values() if math.isfinite(value)]
                    if losses:
                        line.append((float(Fraction(rate)), sum(losses) / len(losses)))
                # Wide and below the others, which may lie on it.
                style = dict(color=ARMS[arm][0]) if arm in ARMS else dict(color="0.75", linewidth=4)
                if line:
                    axes.plot(*zip(*line, strict=True), "o-", markersize=3, label=arm, **style)
            axes.set(xscale="log", title=name, xlabel="rate / tuned rate", ylabel="validation loss, nats")
        if shown:
            grid[0, 0].legend(frameon=False, fontsize=7)
        _save(figure, path)


def _key(marker: str, color: str, label: str, **more: Any) -> Any:
    """An entry of a legend."""
    return plt.Line2D([], [], marker=marker, linestyle="", color=color, label=label, **more)


def _save(figure: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="svg", metadata={"Date": None})
    plt.close(figure)
