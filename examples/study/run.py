"""Measure what registration.toml says, into records/: cells that are there already are not measured again.

python examples/study/run.py smoke            # a part of the CPU grid anew, compared with the records
python examples/study/run.py cpu --jobs 2     # the whole CPU grid
python examples/study/run.py gpu --minutes 9  # the GPU's, as far as that time allows; again to go on
python examples/study/run.py pilot pretrain   # how `tuned` was chosen: FP32 alone, at several rates
"""

import argparse
import concurrent.futures
import importlib
import itertools
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from records import RECORDS, Records, environment
from registration import load

Row = tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]
COMMANDS = ("smoke", "cpu", "gpu", "pilot")


def module_of(settings: dict[str, Any]) -> Any:
    return importlib.import_module(settings["module"])


def group(cell: dict[str, Any]) -> str:
    """What cells share a compiled program: those of a group are measured by one process."""
    return str(cell.get("arm", cell))


def measure(name: str, cells: list[dict[str, Any]], commit: str | None) -> list[Row]:
    """Measure cells of an experiment, in this process."""
    settings = load()["experiments"][name]
    where = environment(commit)
    return [(name, cell, module_of(settings).measure(settings, cell), where) for cell in cells]


def rows(work: dict[str, list[dict[str, Any]]], jobs: int, commit: str | None) -> Iterator[Row]:
    """Measure all, in processes of their own if there are to be several; as they come."""
    if jobs == 1:
        for name, cells in work.items():
            for cell in cells:
                yield from measure(name, [cell], commit)
        return
    groups = [(name, list(part)) for name, cells in work.items() for _, part in itertools.groupby(cells, key=group)]
    with concurrent.futures.ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        for done in concurrent.futures.as_completed([pool.submit(measure, *part, commit) for part in groups]):
            yield from done.result()


def registered(where: str, only: list[str]) -> dict[str, list[dict[str, Any]]]:
    """The cells of each experiment of the CPU's or GPU's part."""
    found = {name: settings for name, settings in load()["experiments"].items() if settings["where"] == where}
    if unknown := set(only) - set(found):
        raise SystemExit(
            f"no such experiments for the {where}: {', '.join(sorted(unknown))}; there are {', '.join(found)}"
        )
    return {name: module_of(found[name]).cells(found[name]) for name in found if not only or name in only}


def fill(arguments: argparse.Namespace) -> int:
    """Measure what the records lack."""
    files = {name: Records(arguments.records, name) for name in registered(arguments.command, arguments.only)}
    work = {
        name: [cell for cell in cells if files[name].find(cell) is None]
        for name, cells in registered(arguments.command, arguments.only).items()
    }
    started = time.monotonic()
    with tqdm(total=sum(map(len, work.values())), unit="cells") as bar:
        for name, cell, result, where in rows(work, arguments.jobs, arguments.commit):
            files[name].add(cell, result, where)
            bar.set_postfix_str(f"{name} {'/'.join(map(str, cell.values()))}")
            bar.update()
            if arguments.minutes and time.monotonic() - started > 60 * arguments.minutes:
                bar.write(f"{bar.total - bar.n} cells are left: run the same command again")
                break
    return 0


def smoke(arguments: argparse.Namespace) -> int:
    """Measure the smoke subset anew, and compare it with the records to four digits after the point."""
    experiments = load()["experiments"]
    work = {
        name: [cell for cell in cells if any(part.items() <= cell.items() for part in experiments[name]["smoke"])]
        for name, cells in registered("cpu", arguments.only).items()
    }
    files = {name: Records(arguments.records, name) for name in work}
    equal, other, missing = 0, [], 0
    for name, cell, result, where in rows(work, arguments.jobs, arguments.commit):
        row = files[name].find(cell)
        label = f"{name} {' '.join(map(str, cell.values()))}"
        if row is None:
            missing += 1
            print(f"{label}: not in the records")
            continue
        known = files[name].content["environments"][row["environment"]]
        if known["versions"] != where["versions"] or known["processor"] != where["processor"]:
            label += f" (recorded with {known['versions']} on {known['processor']})"
        if differing := differences(row["result"], result):
            other.append(label)
            print(f"{label}: " + ", ".join(f"{key} {old} is now {new}" for key, old, new in differing))
        else:
            equal += 1
            print(f"{label}: as recorded")
    print(f"{equal} as recorded, {len(other)} otherwise, {missing} not in the records")
    return 1 if other or missing else 0


def differences(old: Any, new: Any, key: str = "") -> list[tuple[str, Any, Any]]:
    """Numbers that differ in their first four digits after the point; times do not count."""
    if isinstance(old, dict) and isinstance(new, dict):
        keys = [name for name in old.keys() | new.keys() if name not in ("ms", "seconds", "temporary_bytes")]
        return list(
            itertools.chain(*(differences(old.get(k), new.get(k), f"{key}.{k}".strip(".")) for k in sorted(keys)))
        )
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        return list(
            itertools.chain(*(differences(a, b, f"{key}.{i}") for i, (a, b) in enumerate(zip(old, new, strict=True))))
        )
    if isinstance(old, float) and isinstance(new, float):
        return [] if f"{old:.4f}" == f"{new:.4f}" else [(key, old, new)]
    return [] if old == new else [(key, old, new)]


def pilot(arguments: argparse.Namespace) -> int:
    """Print FP32's loss at the pilot's rates and seed."""
    experiments = load()["experiments"]
    for name in arguments.only or [name for name in experiments if "pilot" in experiments[name]]:
        settings = experiments[name]
        for rate in settings["pilot"]["rates"]:
            factor = str(Fraction(str(rate)) / Fraction(str(settings["tuned"])))
            cell = {"optimizer": settings["optimizer"], "arm": "float32/float32", "rate": factor}
            result = module_of(settings).measure(settings, cell | {"seed": settings["pilot"]["seed"]})
            print(f"{name}: rate {rate:g}, loss {result['loss']:.4f}, {result['ms']:.1f} ms a step", flush=True)
    return 0


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=COMMANDS)
    parser.add_argument("only", nargs="*", metavar="EXPERIMENT", help="by default all")
    parser.add_argument("--records", type=Path, default=RECORDS, metavar="DIR")
    parser.add_argument("--jobs", type=int, help="processes; by default 2 on the CPU, 1 on a GPU")
    parser.add_argument("--minutes", type=float, help="begin nothing new after that time")
    parser.add_argument("--commit", help="where git cannot tell")
    arguments = parser.parse_args(argv)
    arguments.jobs = arguments.jobs or (1 if arguments.command in ("gpu", "pilot") else 2)
    experiments = load()["experiments"]
    places = {experiments[name]["where"] for name in arguments.only if name in experiments}
    if arguments.command != "gpu" and places != {"gpu"}:
        # One thread a process: the same sums in the same order whatever the number of cores.
        os.environ["JAX_PLATFORMS"] = "cpu"
        os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false " + os.environ.get("XLA_FLAGS", "")
    else:
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    return {"smoke": smoke, "pilot": pilot}.get(arguments.command, fill)(arguments)


if __name__ == "__main__":
    sys.exit(main())
