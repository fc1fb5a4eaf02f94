"""Tables of the experiments that do not train: closed forms, moments in few bits, what random bits cost."""

from collections.abc import Callable
from typing import Any

import numpy as np

import report_tables as tables
from pairs import Rows, median
from report_tables import markdown, place, text

ROUNDINGS = ("float32", "nearest", "stochastic", "kahan", "split24", "bits16", "bits8", "bits4", "bits2", "frozen")
STORES = (
    *("bfloat16", "dynamic", "dynamic_without_zero", "sqrt_linear", "companded", "fp8"),
    *("offset_nearest", "offset_weyl", "offset_philox", "offset_wrapped"),
)
CASES = ("stationary", "drop", "outlier")


def _of(rows: Rows, kind: str) -> Rows:
    return [row for row in rows if row["cell"]["kind"] == kind]


def _checked(rows: Rows, at: str, columns: list[tuple[str, str]], shown: Callable[[float], str] = text) -> str:
    """Rows by rounding and `at`, so titled, with these (title, key) of their results, and whether they are within."""
    lines = []
    for row in sorted(rows, key=lambda row: (place(ROUNDINGS, row["cell"]["rounding"]), row["cell"]["at"])):
        cell, found = row["cell"], row["result"]
        values = [shown(cell["at"]), *(text(found.get(key)) for _, key in columns)]
        lines.append([f"`{cell['rounding']}`", *values, "yes" if found["within"] else "no"])
    return markdown(["rounding", at, *(title for title, _ in columns), "within"], lines)


def accumulate_table(rows: Rows) -> str:
    """Controls have a wrong mean or variance on purpose."""
    columns = [("mean", "mean"), ("expected", "expected_mean")]
    columns += [("variance", "variance"), ("expected", "expected_variance")]
    return _checked(_of(rows, "accumulate"), "update / spacing", columns, lambda at: text(at / 65536, 2))


def decay_table(rows: Rows) -> str:
    return _checked(_of(rows, "decay"), "rate × decay", [("weight left", "mean"), ("expected", "expected")])


def dead_zone_table(rows: Rows) -> str:
    """Of SR the mean is known, of the others the largest distance."""
    told = []
    for row in _of(rows, "dead_zone"):
        largest = row["result"].get("expected_largest")
        limit = "mean 1/3" if largest is None else f"at most {text(largest)}"
        told.append(row | {"result": row["result"] | {"limit": limit}})
    columns = [("mean", "mean"), ("least", "least"), ("largest", "largest"), ("expected", "limit")]
    return _checked(told, "rate × curvature", columns)


def floor_table(rows: Rows) -> str:
    columns = [("mean square", "square"), ("expected", "expected"), ("Δ E|g| / 2h", "small_rate")]
    return _checked(_of(rows, "floor"), "rate", [*columns, ("plus SGD's noise", "sum")])


def _stores(rows: Rows, kind: str) -> list[str]:
    found = {row["cell"]["store"] for row in rows if row["cell"]["kind"] == kind}
    return sorted(found, key=lambda name: (place(STORES, name), name))


def averages_table(rows: Rows) -> str:
    """Mean of v / FP32's over elements and seeds."""
    found = {
        (row["cell"]["store"], row["cell"]["case"], row["cell"]["b2"]): row["result"] for row in _of(rows, "average")
    }
    columns = [(case, b2) for case in CASES for b2 in sorted({key[2] for key in found})]
    lines = [
        [f"`{store}`", *(text(found[store, *key]["mean"], 3) if (store, *key) in found else "" for key in columns)]
        for store in _stores(rows, "average")
    ]
    return markdown(["kept as", *(f"{case}, {b2}" for case, b2 in columns)], lines)


def largest_table(rows: Rows) -> str:
    """The largest |m| / √v over all steps, elements and b2; with v before and after it is stored; and zeros of v."""
    lines = []
    for store in _stores(rows, "average"):
        mine = [row for row in _of(rows, "average") if row["cell"]["store"] == store]
        cells = [f"`{store}`"]
        for case in CASES:
            found = [row["result"] for row in mine if row["cell"]["case"] == case]
            largest = [max((one[key] for one in found), default=None) for key in ("largest", "largest_stored")]
            cells.append(" / ".join(text(value, 3) for value in largest))
        zeros = max(row["result"]["zeros"] for row in mine)
        lines.append([*cells, f"{100 * zeros:.0f} %"])
    return markdown(["kept as", *CASES, "v stored as 0, at most"], lines)


def trajectory_table(rows: Rows) -> str:
    """Means over the seeds, with the least and the greatest."""
    lines = []
    for store in _stores(rows, "trajectory"):
        mine = [row["result"] for row in _of(rows, "trajectory") if row["cell"]["store"] == store]

        def spread(key: str, scale: float = 1.0, mine: list[dict[str, Any]] = mine) -> str:
            values = [scale * one[key] for one in mine]
            return f"{text(float(np.mean(values)), 3)} ({text(min(values), 3)} to {text(max(values), 3)})"

        shares = [spread("direction", 100), spread("last_direction", 100)]
        lines.append([f"`{store}`", *shares, spread("root_nu"), spread("largest"), spread("largest_float32")])
    header = ["kept as", "direction error, %", "at the last step, %", "√ν / FP32's", "largest update", "FP32's"]
    return markdown(header, lines)


def overhead_table(rows: Rows) -> str:
    """Medians over the rounds, and of the differences from the base in the same round, in microseconds."""
    lines = []
    for row in rows:
        times = {name: np.array(values) for name, values in row["result"]["ms"].items()}
        base = next(iter(times))
        for name, values in times.items():
            told = tables.gap(median(1e3 * (values - times[base])), 1) if name != base else ""
            lines.append([row["cell"]["kind"], f"`{name}`", text(float(np.median(values))), told])
    return markdown(["timed", "arm", "ms a step", "less the first, µs [95 % CI] (rounds)"], lines)


ISOLATED = ("adamw/nearest_rounding", "adamw", "adamw/nearest_dither", "adamw/no_random_bits")
"""The first is the base: all records have it."""


def isolated_table(record: dict[str, Any]) -> str:
    """The rows of a record of examples/benchmarks that differ in their random bits alone, beside the first of them."""
    measured = {row["contestant"]: row for row in record["rows"] if "error" not in row and row["shapes"] == "single"}
    rows = [measured[name] for name in ISOLATED if name in measured]
    lines = []
    for row in rows:
        more = tables.signed(100 * (row["ms"] / rows[0]["ms"] - 1), 1)
        rates = [text(row["ms"]), text(row["gparam_per_s"])]
        lines.append([f"`{row['contestant']}`", *rates, f"{more} %" if row is not rows[0] else ""])
    return markdown(["step", "ms", "Gparam/s", f"beside `{ISOLATED[0]}`"], lines)
