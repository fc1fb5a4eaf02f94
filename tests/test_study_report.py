"""The study's statistics against SciPy's, its verdicts on made-up records, and a page that repeats bit for bit."""

import importlib
import json
import math
import random
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

pytest.importorskip("statsmodels")
STUDY = Path(__file__).parents[1] / "examples" / "study"
sys.path.insert(0, str(STUDY))
pairs, report, report_checks, report_negatives, report_tables = map(
    importlib.import_module, ("pairs", "report", "report_checks", "report_negatives", "report_tables")
)

pytestmark = pytest.mark.slow

ANALYSIS = {"level": 0.05, "equivalence": 0.005, "superiority": 0.01, "correction": "holm"}
SAMPLES = [[0.001, 0.002, -0.001, 0.0005], [0.02, 0.031, 0.012], [-0.004, 0.006, 0.001, 0.002, 0.0], [0.3, -0.2, 0.1]]
GAPS = {"nearest/float32": 0.05, "stochastic/offset": 0.0005, "kahan/float32": 0.0, "stochastic/dynamic": -0.02}
CLAIMS = [
    {"experiment": "pretrain", "arm": "nearest/float32", "rate": "1/10", "kind": "worse"},
    {"experiment": "pretrain", "arm": "stochastic/offset", "rate": "1/10", "kind": "equivalent"},
    {"experiment": "pretrain", "arm": "nearest/float32", "rate": "1/10", "kind": "equivalent"},
    {"experiment": "pretrain", "arm": "stochastic/offset", "rate": "1/10", "kind": "worse"},
    {"experiment": "h200_lion", "arm": "stochastic/offset", "rate": "1", "kind": "equivalent"},
]


def rows_of(gaps, seeds=5, rates=("1", "1/10"), noise=0.001):
    """Made-up rows: a loss for each seed and rate, to which an arm adds its gap, wider at the lower rate, and noise."""
    noises, rows = random.Random(0), []
    for arm, gap in {pairs.REFERENCE: 0.0, **gaps}.items():
        for rate in rates:
            for seed in range(seeds):
                wide = 1.0 if rate == "1/10" else 0.1
                loss = (
                    2.0
                    + 0.1 * seed
                    + 0.5 * wide
                    + gap * wide
                    + noises.uniform(-noise, noise) * (arm != pairs.REFERENCE)
                )
                probe = {
                    "step": 1,
                    "ratio": 1 / wide,
                    "lost": 0.5,
                    "moved": 0.25,
                    "applied": 0.9,
                    "nu": 1.0,
                    "root_nu": 1.0,
                }
                result = {"loss": loss, "accuracy": 0.9 - gap, "ms": 1.5, "kept_bytes": 4.03, "temporary_bytes": None}
                result |= {
                    "probes": [] if "bfloat16" in arm else [probe],
                    "leaves": {"a|b": probe} if seed == 0 else {},
                }
                cell = {"optimizer": "adamw", "arm": arm, "rate": rate, "seed": seed}
                rows.append({"cell": cell, "environment": 0, "result": result})
    return rows


def write(folder, records):
    folder.mkdir(exist_ok=True)
    place = {"device": "CPU", "driver": None, "versions": {"jax": "0.10"}, "commit": "abc", "processor": "some"}
    for name, rows in records.items():
        text = json.dumps({"experiment": name, "environments": [place], "rows": rows})
        (folder / f"{name}.json").write_text(text, encoding="utf-8")
    return folder


def decay(rounding, at, mean, within):
    cell = {"kind": "decay", "rounding": rounding, "at": at}
    return {"cell": cell, "environment": 0, "result": {"mean": mean, "expected": 0.5, "within": within}}


def registration(claims):
    """As TOML; JSON's strings and numbers are TOML's."""
    lines = ["[analysis]", *(f"{key} = {json.dumps(value)}" for key, value in ANALYSIS.items())]
    for claim in claims:
        lines += ["[[claims]]", *(f"{key} = {json.dumps(value)}" for key, value in claim.items())]
    return "\n".join(lines)


def verdicts(claims, rows):
    return [one.verdict for one in pairs.judged(claims, {"pretrain": rows}, ANALYSIS)]


@pytest.mark.parametrize("sample", SAMPLES)
@pytest.mark.parametrize("margin", [0.005, 0.05])
def test_tests_are_those_of_scipy(sample, margin):
    sample = np.array(sample)
    above = stats.ttest_1samp(sample, -margin, alternative="greater").pvalue
    below = stats.ttest_1samp(sample, margin, alternative="less").pvalue
    assert pairs.equivalence_p(sample, margin) == pytest.approx(max(above, below), rel=1e-9)
    worse = stats.ttest_1samp(sample, margin, alternative="greater").pvalue
    assert pairs.superiority_p(sample, margin) == pytest.approx(worse, rel=1e-9)


@pytest.mark.parametrize("sample", SAMPLES)
def test_the_interval_is_students(sample):
    found = pairs.estimate(np.array(sample))
    half = stats.t.ppf(0.975, len(sample) - 1) * np.std(sample, ddof=1) / math.sqrt(len(sample))
    expected = (len(sample), np.mean(sample), np.mean(sample) - half, np.mean(sample) + half, np.std(sample, ddof=1))
    assert (found.n, found.mean, found.low, found.high, found.sd) == pytest.approx(expected, rel=1e-9)


def test_holm_by_hand(monkeypatch):
    # Sorted 0.01, 0.02, 0.03, 0.04 times 4, 3, 2, 1 are 0.04, 0.06, 0.06, 0.04; none may be less than one before it.
    raw = iter([0.03, 0.01, 0.04, 0.02])
    monkeypatch.setattr(pairs, "superiority_p", lambda *_: next(raw))
    found = pairs.judged([CLAIMS[0]] * 4, {"pretrain": rows_of(GAPS)}, ANALYSIS)
    assert [one.adjusted for one in found] == pytest.approx([0.06, 0.04, 0.06, 0.06])
    assert [one.verdict for one in found] == ["not shown", "shown", "not shown", "not shown"]


def test_claims_not_measured_still_count(monkeypatch):
    monkeypatch.setattr(pairs, "superiority_p", lambda *_: 0.02)
    rows = {"pretrain": rows_of(GAPS)}
    assert pairs.judged([CLAIMS[0]], rows, ANALYSIS)[0].verdict == "shown"
    found = pairs.judged([CLAIMS[0], CLAIMS[4], CLAIMS[4]], rows, ANALYSIS)
    assert (found[0].adjusted, found[0].verdict) == (pytest.approx(0.06), "not shown")
    assert (found[1].p, found[1].adjusted, found[1].verdict) == (None, None, "not measured")


def test_verdicts():
    assert verdicts(CLAIMS, rows_of(GAPS)) == ["shown", "shown", "not shown", "not shown", "not measured"]


def test_noise_or_few_seeds_show_nothing():
    assert verdicts(CLAIMS[:2], rows_of(GAPS, noise=0.5)) == ["not shown"] * 2
    assert verdicts(CLAIMS[:2], rows_of(GAPS, seeds=2)) == ["not measured"] * 2


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_run_that_diverged_shows_nothing(value):
    rows = rows_of(GAPS)
    for row in rows:
        if row["cell"]["arm"] == "nearest/float32":
            row["result"]["loss"] = value
    assert verdicts([CLAIMS[0], CLAIMS[2]], rows) == ["not shown"] * 2
    assert "5 of 5 diverged" in report_tables.gap_table(rows)
    assert "nearest" not in report_tables.best_table_of(rows)


def test_pairs_are_of_one_seed_optimizer_and_text():
    rows = rows_of({"nearest/float32": 0.5}, noise=0)
    rows = [row for row in rows if (row["cell"]["arm"], row["cell"]["seed"]) != (pairs.REFERENCE, 1)]
    rows[-1]["cell"]["optimizer"] = "lion"
    assert pairs.differences(rows, "nearest/float32", pairs.REFERENCE, "1/10") == pytest.approx([0.5] * 3)
    rows[-2]["result"]["text"] = 7
    assert len(pairs.differences(rows, "nearest/float32", pairs.REFERENCE, "1/10")) == 2
    with pytest.raises(ValueError, match="two rows"):
        pairs.differences(rows + rows[:1], "nearest/float32", pairs.REFERENCE, "1")


def test_best_rates_are_each_arms_own():
    rows = rows_of({"nearest/float32": -0.9})  # so that the lower rate, 0.45 worse for FP32, is 0.36 better
    home, found = pairs.best_rates(rows, report_tables.arms_of(rows))
    assert (home.rate, home.difference, home.edge) == ("1", None, True)
    assert (found.rate, found.rates) == ("1/10", 2)
    assert found.difference.mean == pytest.approx(0.45 - 0.9, abs=0.001)
    # A seed that one rate lacks counts at none.
    rows = [row for row in rows if (row["cell"]["rate"], row["cell"]["seed"]) != ("1", 4)]
    assert pairs.best_rates(rows, [pairs.REFERENCE])[0].loss == pytest.approx(2.0 + 0.1 * 1.5 + 0.05)


def test_the_page_repeats_whatever_the_order_of_rows(tmp_path):
    arms = GAPS | {"float32/offset": 0.0, "nearest/bfloat16_nearest": 0.03, "nearest/bfloat16_stochastic": 0.02}
    records = {name: rows_of(arms | {"stochastic/float32": 0.0}) for name in report.TRAINING}
    records["closed_form"] = [decay("stochastic", 1e-2, 0.1, True), decay("nearest", 1e-3, 1.0, False)]
    first, second = write(tmp_path / "a", records), tmp_path / "b"
    mixed = {name: random.Random(1).sample(rows, len(rows)) for name, rows in records.items()}
    pages = [tmp_path / f"{run}" / "page.md" for run in range(3)]
    (tmp_path / "claims.toml").write_text(registration(CLAIMS), encoding="utf-8")
    for folder, page in zip((first, first, write(second, mixed)), pages, strict=True):
        report.make(folder, page, tmp_path / "claims.toml")
    for name in ("page.md", "page_gap.svg", "page_rates.svg"):
        made = {page.with_name(name).read_bytes() for page in pages}
        assert len(made) == 1, name
    text = pages[0].read_text(encoding="utf-8")
    assert "$" not in text
    assert text.index("| `nearest` | 0.001 | 1 | 0.5 | no |") < text.index("| `stochastic` | 0.01 | 0.1 | 0.5 | yes |")
    # Other closed forms, three tables of stale moments, runs made twice, overhead, weights with something beside them,
    # and the tasks: not in these records.
    assert text.count(report.MISSING) == 3 + 3 + 2 + 1 + 1
    assert [line.count("not shown") for line in text.splitlines() if line.startswith("| pretrain |")][:4] == [
        0,
        0,
        1,
        1,
    ]


def test_the_page_names_numbers_and_refuses_unknown_names(tmp_path):
    folder = write(tmp_path, {"pretrain": rows_of(GAPS, noise=0)})
    names = report.names_of(folder, {"analysis": ANALYSIS}, {"points": [], "reports": [], "ratio": ""}, "page")
    assert names["gap_pretrain_nearest_float32_1_10"] == "+0.0500"
    assert names["ratio_pretrain_nearest_float32_1"] == "10"
    assert names["gap_finetune_nearest_float32_1"] == "(not measured yet)"
    with pytest.raises(KeyError):
        names["gaps_of_nothing"]
    claims = {"analysis": ANALYSIS, "claims": [CLAIMS[0] | {"experiment": "pretrained"}]}
    with pytest.raises(ValueError, match="none"):
        report.names_of(folder, claims, {"points": [], "reports": [], "ratio": ""}, "page")


def test_a_claim_with_fewer_seeds_than_registered_says_so():
    rows = {"pretrain": rows_of(GAPS)}
    grid = [{"arms": [pairs.REFERENCE, "nearest/float32"], "rates": ["1/10"], "seeds": seeds} for seeds in (3, 8)]
    seeds = report.registered_seeds(CLAIMS[0], {"experiments": {"pretrain": {"grid": grid}}})
    assert seeds == 8
    found = pairs.judged(CLAIMS[:1], rows, ANALYSIS)
    assert "shown so far: 5 of 8 seeds |" in report_tables.claims_table(found, [seeds])
    assert "shown |" in report_tables.claims_table(found, [5])
    assert "0 of 0 measured claims shown, 1 registered; 1 more not with all seeds" in report.verdicts(found, [seeds])
    assert "1 of 1 measured claims shown, 1 registered" in report.verdicts(found, [5])
    assert report.registered_seeds(CLAIMS[0], {}) is None


def test_runs_made_twice_are_compared_by_seed():
    rows, again = rows_of({}, seeds=4), rows_of({}, seeds=3)
    for row in again:
        row["result"]["loss"] += 0.003 if row["cell"]["seed"] else -0.004
    table = report.again_table(rows, again)
    assert table.count("| 0: −0.0040, 1: +0.0030, 2: +0.0030 | 0.0024 |") == 2
    assert report.again_table(rows, []) == ""


def test_corrected_weights_are_compared_with_float32_ones_of_the_same_moments():
    gaps = {"float32/offset": 0.5, "kahan/offset": 0.6, "kahan/float32": 0.7}
    assert report_negatives.corrected_table(rows_of(gaps, noise=0)) == ""  # one arm is no comparison
    gaps |= {"stochastic/offset": 0.4, "nearest/offset": 0.9}
    lines = report_negatives.corrected_table(rows_of(gaps, noise=0)).splitlines()[2:]
    assert [line.split(" | ")[0] for line in lines] == ["| `stochastic/offset`", "| `kahan/offset`"]
    assert "+0.0100" in lines[1]
    assert "+0.1000" in lines[1]


def test_overhead_is_that_of_the_same_round():
    """By medians: where the machine halts in one round, the mean of the others is lost in it."""
    base = np.arange(1.0, 8.0)
    again = base + np.array([-3, -2, -1, 0, 1, 1, 2]) / 1e3
    ms = {"base": [*base], "other": [*base[:-1] + 0.5, 99.0], "again": [*again]}
    rows = [{"cell": {"kind": "training"}, "result": {"parameters": 7, "ms": ms}}]
    lines = report_checks.overhead_table(rows).splitlines()[2:]
    assert lines[0] == "| training | `base` | 4 |  |"
    assert lines[1] == "| training | `other` | 4.5 | +500.0 [+500.0, +92000.0] (7) |"
    assert lines[2] == "| training | `again` | 4 | +0.0 [−3.0, +2.0] (7) |"


def test_averages_and_largest_updates_are_laid_out_by_case():
    found = [("drop", 0.9, 5.0, 2.0), ("drop", 0.99, 7.0, 3.0), ("stationary", 0.9, 1.0, 1.5)]
    rows = [
        {
            "cell": {"kind": "average", "store": "fp8", "case": case, "b2": b2},
            "result": {"mean": mean, "largest": largest, "largest_stored": 2 * largest, "zeros": mean / 100},
        }
        for case, b2, mean, largest in found
    ]
    header, _, line = report_checks.averages_table(rows).splitlines()
    assert dict(zip(header.split(" | "), line.split(" | "), strict=True))["drop, 0.99"] == "7"
    assert report_checks.largest_table(rows).splitlines()[2] == "| `fp8` | 1.5 / 3 | 3 / 6 |  /  | 7 % |"


def test_the_page_needs_no_record(tmp_path):
    report.main(["--records", str(tmp_path / "none"), "--page", str(tmp_path / "page.md")])
    text = (tmp_path / "page.md").read_text(encoding="utf-8")
    assert text.count(report.MISSING) > 15
    assert "nan" not in text


def test_the_committed_page_is_that_of_the_committed_records(tmp_path):
    if not report.PAGE.exists():
        pytest.skip("no page yet")
    page = tmp_path / report.PAGE.name
    report.main(["--page", str(page)])
    assert page.read_text(encoding="utf-8") == report.PAGE.read_text(encoding="utf-8")


def test_tables_know_the_arms():
    arms = pytest.importorskip("arms")
    assert (report_tables.WEIGHTS, report_tables.MOMENTS) == (arms.WEIGHTS, arms.MOMENTS)


def test_claims_are_about_registered_runs():
    settings = tomllib.loads((STUDY / "registration.toml").read_text(encoding="utf-8"))
    for claim in settings.get("claims", []):
        for arm in (claim["arm"], claim.get("reference", pairs.REFERENCE)):
            grids = settings["experiments"][claim["experiment"]]["grid"]
            seeds = [grid["seeds"] for grid in grids if arm in grid["arms"] and claim["rate"] in grid["rates"]]
            assert max(seeds, default=0) >= pairs.FEWEST, (claim, arm)


def test_published_points_are_complete():
    published = json.loads((STUDY / "published.json").read_text(encoding="utf-8"))
    for point in published["points"]:
        low, high = point["ratio"]
        assert 0 < low <= high
        assert point["source"].startswith("https://")
        assert point["against"] in ("FP32", "stochastic")
