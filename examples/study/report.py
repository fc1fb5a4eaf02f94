"""The page of the study and its figures, from the records alone; the same records give the same bytes.

python examples/study/report.py [--records DIR] [--page docs/evidence.md]
"""

import argparse
import json
import math
import string
import tomllib
from pathlib import Path
from typing import Any

import numpy as np

import report_checks as checks
import report_figures as figures
import report_negatives as negatives
import report_tables as tables
from pairs import REFERENCE, Judged, Rows, differences, estimate, judged, rates_of, values

HERE = Path(__file__).resolve().parent
PAGE = HERE.parents[1] / "docs" / "evidence.md"
TRAINING = ("pretrain", "finetune", "restart", "start_on_grid", "digits", "h200_adamw", "h200_lion", "h200_large")
LANGUAGE = tuple(name for name in TRAINING if name not in ("restart", "start_on_grid", "digits"))
OTHERS = ("closed_form", "stale_moments", "h200_again", "h200_overhead")
BENCHMARKS = [HERE.parent / "benchmarks" / "records" / f"{name}.json" for name in ("h200_single", "h200_family")]
MISSING = "*Not measured yet.*"


class Names(dict[str, str]):
    """What `page.md` may name. A number that no record gives reads so; any other unknown name is an error."""

    NUMBERS = ("gap_", "loss_", "ratio_", "lost_", "moved_", "applied_")

    def __missing__(self, name: str) -> str:
        if name.startswith(self.NUMBERS):
            return "(not measured yet)"
        raise KeyError(name)


def load(folder: Path) -> dict[str, dict[str, Any]]:
    """The records that are there, by experiment in a fixed order, rows in the order of their cells."""
    found = {}
    for name in (*OTHERS, *TRAINING):
        path = folder / f"{name}.json"
        if path.exists():
            found[name] = json.loads(path.read_text(encoding="utf-8"))
            found[name]["rows"].sort(key=lambda row: json.dumps(row["cell"], sort_keys=True))
    return found


def environments(records: dict[str, dict[str, Any]]) -> str:
    """A line for each environment in which rows of an experiment were made."""
    lines = []
    for name, record in records.items():
        for number in sorted({row.get("environment", 0) for row in record["rows"]}):
            made = sum(row.get("environment", 0) == number for row in record["rows"])
            lines.append(f"- {name}, {made} {'run' if made == 1 else 'runs'}: {where(record['environments'][number])}")
    return "\n".join(lines)


def where(place: dict[str, Any]) -> str:
    """Device, processor, driver, versions and commit, as far as they are known."""
    told = [f"{place.get('device') or 'device unknown'}"]
    told += [str(place["processor"])] if place.get("processor") else []
    told += [f"driver {place['driver']}"] if place.get("driver") else []
    told.append(", ".join(f"{package} {version}" for package, version in place.get("versions", {}).items()))
    told.append(f"commit {place.get('commit') or 'unknown'}")
    return "; ".join(filter(None, told))


def verdicts(found: list[Judged], registered: list[int | None]) -> str:
    """How many claims of each kind came out how, of those with all registered seeds; by name those not shown."""
    claims = list(zip(found, registered, strict=True))
    lines = []
    for kind, meaning in (
        ("equivalent", "equivalent within the margin"),
        ("worse", "worse by more than the margin"),
    ):
        mine = [(one, seeds) for one, seeds in claims if one.claim["kind"] == kind]
        early = sum(tables.is_early(one, seeds) for one, seeds in mine)
        done = [one.verdict for one, seeds in mine if one.p is not None and not tables.is_early(one, seeds)]
        if mine:
            counts = f"{done.count('shown')} of {len(done)} measured claims shown, {len(mine)} registered"
            lines.append(f"- *{meaning}*: {counts}" + (f"; {early} more not with all seeds" if early else ""))
        for one in (one for one, _ in mine if one.verdict == "not shown"):
            place = f"`{one.claim['arm']}` in {one.claim['experiment']} at rate × {one.claim['rate']}"
            lines.append(f"  - not shown: {place}, {tables.gap(one.estimate)} nats")
    return "\n".join(lines)


def registered_seeds(claim: dict[str, Any], registration: dict[str, Any]) -> int | None:
    """That both arms of a claim were to be run with; None where no grid says."""
    grids = registration.get("experiments", {}).get(claim["experiment"], {}).get("grid", [])
    arms = claim["arm"], claim.get("reference", REFERENCE)
    seeds = [[g["seeds"] for g in grids if arm in g["arms"] and claim["rate"] in g["rates"]] for arm in arms]
    return min(map(max, seeds)) if all(seeds) else None


def tasks_table(experiments: dict[str, Any]) -> str:
    """The settings of training experiments, and how often each was registered to be run."""
    lines = []
    for name, settings in experiments.items():
        if name in TRAINING:
            keys = ("optimizer", "tuned", "width", "layers", "length", "batch", "steps")
            grid = settings.get("grid", [])
            runs = {
                (arm, rate, seed)
                for g in grid
                for arm in g["arms"]
                for rate in g["rates"]
                for seed in range(g["seeds"])
            }
            lines.append([name, *(tables.text(settings.get(key)) for key in keys), str(len(runs) or "")])
    header = ["experiment", "optimizer", "tuned rate", "width", "layers", "length", "batch", "steps", "runs registered"]
    return tables.markdown(header, lines)


def link(entry: dict[str, Any], name: str) -> str:
    return f"[{entry[name]}]({entry['source']})"


def points_table(points: list[dict[str, Any]]) -> str:
    lines = []
    for number, point in enumerate(points, 1):
        low, high = point["ratio"]
        ratio = tables.text(low, 3) if low == high else f"{tables.text(low, 3)} to {tables.text(high, 3)}"
        ratio = f"at most {ratio}" if point.get("at_most") else ratio
        setting = f"{point['model']}; {point['optimizer']}" + (f"; {point['remark']}" if point["remark"] else "")
        rate = tables.text(point["learning_rate"])
        lines.append([str(number), link(point, "label"), setting, rate, ratio, point["loss"], _published_gap(point)])
    return tables.markdown(["", "point", "setting", "learning rate", "ratio", "loss", "gap of nearest, nats"], lines)


def _published_gap(point: dict[str, Any]) -> str:
    return f"{tables.signed(point['gap'], 3)} to {'FP32' if point['against'] == 'FP32' else 'SR'}"


def reports_table(reports: list[dict[str, Any]]) -> str:
    lines = (
        [
            link(one, "report"),
            one["setting"],
            tables.text(one["learning_rate"]),
            one["said"],
            one["finding"],
            one["ratio"],
        ]
        for one in reports
    )
    return tables.markdown(["report", "setting", "learning rate", "what it says", "finding", "update / spacing"], lines)


def again_table(rows: Rows, again: Rows) -> str:
    """Runs made twice: what the second differs from the first by; one run scatters by that / √2."""
    lines = []
    for arm in tables.arms_of(again):
        for rate in rates_of(again, arm):
            first, second = values(rows, arm, rate), values(again, arm, rate)
            found = {key[1]: second[key] - first[key] for key in sorted(first.keys() & second.keys())}
            if found:
                each = ", ".join(f"{seed}: {tables.signed(value)}" for seed, value in found.items())
                scatter = math.sqrt(np.mean(np.square(list(found.values()))) / 2)
                lines.append([f"`{arm}`", rate, each, tables.text(scatter, 2)])
    return tables.markdown(["arm", "rate", "second − first, seed: nats", "deviation of one run"], lines)


def isolated() -> str:
    """Tables of committed benchmarks, and where each was measured."""
    parts = []
    for path in BENCHMARKS:
        record = json.loads(path.read_text(encoding="utf-8"))
        parts += [checks.isolated_table(record), where(record) + "."]
    return "\n\n".join(parts)


def numbers(rows_of: dict[str, Rows]) -> dict[str, str]:
    """`gap_pretrain_nearest_float32_1_10`, and so on: means, for sentences."""
    found = {}
    for experiment, rows in rows_of.items():
        for arm in tables.arms_of(rows):
            for rate in rates_of(rows, arm):
                end = f"{experiment}_{arm}_{rate}".replace("/", "_")
                difference = estimate(differences(rows, arm, REFERENCE, rate))
                if difference:
                    found[f"gap_{end}"] = tables.signed(difference.mean)
                found[f"loss_{end}"] = f"{np.mean(list(values(rows, arm, rate).values())):.4f}"
                for key in ("ratio", "lost", "moved", "applied"):
                    mean = tables.probe_average(rows, arm, rate, key)
                    if mean is not None:
                        found[f"{key}_{end}"] = tables.text(mean, 3)
    return found


def names_of(folder: Path, registration: dict[str, Any], published: dict[str, Any], stem: str) -> Names:
    """All that the page may name but the figures, which are files."""
    records = load(folder)
    rows_of = {name: records[name]["rows"] for name in TRAINING if name in records}
    language = {name: rows for name, rows in rows_of.items() if name in LANGUAGE}
    h200 = {name: rows for name, rows in rows_of.items() if name.startswith("h200")}
    known = (*OTHERS, *TRAINING)
    claims = registration.get("claims", [])
    if unknown := [claim["experiment"] for claim in claims if claim["experiment"] not in known]:
        raise ValueError(f"claims about experiments that are none: {unknown}")
    found = judged(claims, rows_of, registration["analysis"])
    seeds = [registered_seeds(claim, registration) for claim in claims]
    made = {
        "tasks": tasks_table(registration.get("experiments", {})),
        "environments": environments(records),
        "short_answer": verdicts(found, seeds),
        "claims": tables.claims_table(found, seeds),
        "best": tables.each(language, tables.best_table_of),
        "ordering": tables.ordering_table({name: rows for name, rows in rows_of.items() if name != "restart"}),
        "ordering_accuracy": tables.ordering_table({n: r for n, r in rows_of.items() if n == "digits"}, "accuracy"),
        "leaves": tables.leaf_table(rows_of.get("pretrain", []), negatives.MAIN_ARMS),
        "gaps_h200": tables.each(h200, tables.gap_table),
        "corrected": tables.each({n: r for n, r in rows_of.items() if n != "digits"}, negatives.corrected_table),
        "cost": tables.cost_table(h200),
        "points": points_table(published["points"]),
        "reports": reports_table(published["reports"]),
        "high": tables.each(language, negatives.high_table),
        "kept": tables.each(rows_of, negatives.kept_table),
        "momentum": tables.each(rows_of, negatives.momentum_table),
        "dynamic": tables.each(rows_of, negatives.dynamic_table),
        "mechanism": tables.mechanism_table(rows_of.get("pretrain", [])),
        "mechanism_others": tables.each({n: r for n, r in rows_of.items() if n != "pretrain"}, tables.mechanism_table),
    }
    made |= {f"gaps_{name}": tables.gap_table(rows_of.get(name, [])) for name in ("pretrain", "finetune", "restart")}
    other = {name: records[name]["rows"] if name in records else [] for name in OTHERS}
    closed, stale = other["closed_form"], other["stale_moments"]
    made |= {
        "accumulate": checks.accumulate_table(closed),
        "decay": checks.decay_table(closed),
        "dead_zone": checks.dead_zone_table(closed),
        "floor": checks.floor_table(closed),
        "averages": checks.averages_table(stale),
        "largest": checks.largest_table(stale),
        "trajectories": checks.trajectory_table(stale),
        "again": again_table(rows_of.get("h200_adamw", []), other["h200_again"]),
        "overhead": checks.overhead_table(other["h200_overhead"]),
        "isolated": isolated(),
    }
    settled = {key: tables.text(registration["analysis"][key]) for key in ("level", "equivalence", "superiority")}
    plain = {"how_ratio": published["ratio"], "figure_gap": f"{stem}_gap.svg", "figure_rates": f"{stem}_rates.svg"}
    return Names({name: text or MISSING for name, text in made.items()} | settled | plain | numbers(rows_of))


def make(folder: Path, page: Path, registration: Path = HERE / "registration.toml") -> None:
    """Write the page, and its figures beside it."""
    settings = tomllib.loads(registration.read_text(encoding="utf-8"))
    published = json.loads((HERE / "published.json").read_text(encoding="utf-8"))
    names = names_of(folder, settings, published, page.stem)
    prose = string.Template((HERE / "page.md").read_text(encoding="utf-8")).substitute(names)
    rows_of = {name: record["rows"] for name, record in load(folder).items() if name in TRAINING}
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(prose, encoding="utf-8")
    figures.draw_gaps(rows_of, published["points"], page.with_name(names["figure_gap"]))
    figures.draw_rates(rows_of, page.with_name(names["figure_rates"]))


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=Path, default=HERE / "records", metavar="DIR")
    parser.add_argument("--page", type=Path, default=PAGE, metavar="MARKDOWN", help="its figures go beside it")
    arguments = parser.parse_args(argv)
    make(arguments.records, arguments.page)


if __name__ == "__main__":
    main()
