"""What the benchmarks of JAX and of PyTorch share: the command line, the loop over contestants, the printed table."""

import argparse
import fnmatch
import gc
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import record
import shapes

COLUMNS = {
    "ms": "ms",
    "Gparam/s": "gparam_per_s",
    "GB/s": "gb_per_s",
    "of copy": "share_of_copy",
    "dispatch ms": "dispatch_ms",
    "kept B": "kept_bytes_per_parameter",
    "temp. B": "temporary_bytes_per_parameter",
    "compile s": "compile_s",
}


def parse(description: str, names: Iterable[str], argv: list[str] | None) -> argparse.Namespace:
    """The command line; `only` becomes the list of the chosen contestants."""
    names = list(names)
    parser = argparse.ArgumentParser(
        description=description,
        epilog="contestants: " + " ".join(names),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--shapes", nargs="+", choices=shapes.SHAPES, default=["single", "llama1b"], metavar="NAME")
    parser.add_argument("--only", nargs="+", metavar="PATTERN", help="contestants, as names or patterns (fnmatch)")
    parser.add_argument("--rounds", type=int, default=9, help="timings of each, whose median counts")
    parser.add_argument("--steps", type=int, help="steps that are timed together; by default more for smaller trees")
    parser.add_argument("--json", metavar="FILE", help="write the record there, anew after each contestant")
    parser.add_argument("--commit", help="where git cannot tell")
    parser.add_argument("--small", action="store_true", help="shapes cut to some 1/256, for a try on a CPU")
    arguments = parser.parse_args(argv)
    if arguments.rounds < 1 or (arguments.steps is not None and arguments.steps < 1):
        parser.error("--rounds and --steps must be positive")
    for pattern in arguments.only or []:
        if not fnmatch.filter(names, pattern):
            parser.error(f"--only {pattern}: no such contestant; there are {', '.join(names)}")
    if arguments.only:
        arguments.only = [n for n in names if any(fnmatch.fnmatchcase(n, pattern) for pattern in arguments.only)]
    else:
        arguments.only = names
    return arguments


def steps_together(arguments: argparse.Namespace, tree: shapes.Shapes) -> int:
    """So many that a timing takes some 30 ms on a large GPU, beside which its start is small."""
    return arguments.steps or (2 if arguments.small else max(20, min(100, 2**33 // shapes.parameters(tree))))


def run(
    arguments: argparse.Namespace,
    contestants: Mapping[str, Any],
    measure: Callable[[Any, shapes.Shapes, int, int], dict[str, Any]],
    copy_gb_per_s: Callable[[bool], float],
    result: dict[str, Any],
) -> None:
    """Fills `result["rows"]`. A contestant that fails leaves its error there, and the next one runs."""
    result["commit"] = arguments.commit or result["commit"]
    result["small"] = arguments.small
    for name in arguments.shapes:
        tree = shapes.tree_of(name, arguments.small)
        size = {"shapes": name, "parameters": shapes.parameters(tree), "leaves": len(tree)}
        rows = []
        for contestant in arguments.only:
            print(f"{name}: {contestant}", flush=True)
            measured = _tried(measure, contestants[contestant], tree, steps_together(arguments, tree), arguments.rounds)
            rows.append({"contestant": contestant} | size | measured)
            gc.collect()  # arrays that a cycle holds would stand beside the next contestant's
            record.save(arguments.json, result | {"rows": result["rows"] + rows})
        # Last, so that its arrays do not set the peak of the contestants.
        copy = _tried(lambda: {"copy_gb_per_s": copy_gb_per_s(arguments.small)}).get("copy_gb_per_s")
        for row in rows:
            record.add_share(row, copy)
        result["rows"] += rows
        record.save(arguments.json, result)
        show(name, size, copy, rows)


def _tried(function: Callable[..., dict[str, Any]], *arguments: Any) -> dict[str, Any]:
    # The error becomes text here: as an object it would keep the arrays of the frames that it went through.
    try:
        return function(*arguments)
    except Exception as error:
        text = f"{type(error).__name__}: {error}"[:500]
        print(f"  failed: {text}", flush=True)
        return {"error": text}


def show(name: str, size: dict[str, Any], copy: float | None, rows: list[dict[str, Any]]) -> None:
    told = f"{copy:.4g} GB/s" if copy else "unknown"
    print(f"\n{name}: {size['parameters'] / 1e6:.4g} M parameters in {size['leaves']} leaves; a copy: {told}")
    width = max(len(row["contestant"]) for row in rows) + 2
    print(" " * width + "".join(f"{title:>13}" for title in COLUMNS))
    for row in rows:
        values = [row.get(key) for key in COLUMNS.values()]
        cells = "".join(f"{'' if value is None else format(value, '.4g'):>13}" for value in values)
        print(f"{row['contestant']:{width}}" + (f"  failed: {row['error']}" if "error" in row else cells))
    print(flush=True)
