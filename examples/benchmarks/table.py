"""The Markdown table of one or several records of step.py and torch_step.py.

python examples/benchmarks/table.py step.json torch_step.json --write README.md
"""

import argparse
import json
from pathlib import Path
from typing import Any

BEGIN, END = "<!-- benchmark table -->", "<!-- /benchmark table -->"


def table(records: list[dict[str, Any]]) -> str:
    """Contestants by shapes: Gparam/s, and the share of the speed of a copy; below it, where each was measured.

    The copy is the fastest on that device in any of the records: not every way to copy reaches what the memory can do.
    """
    copies: dict[str, float] = {}
    for record in records:
        for row in record["rows"]:
            copies[record["device"]] = max(copies.get(record["device"], 0.0), row.get("copy_gb_per_s", 0.0))
    sizes, cells = {}, {}
    for record in records:
        for row in record["rows"]:
            size = (row["shapes"], record.get("small", False))
            sizes.setdefault(size, row)
            cells.setdefault(row["contestant"], {})[size] = cell(row, copies[record["device"]]), row
    titles = [f"{name}{' (cut down)' * small}, {amount(row)}" for (name, small), row in sizes.items()]
    lines = ["| Gparam/s (share of copy) | B moved | " + " | ".join(titles) + " |", "|---" * (len(sizes) + 2) + "|"]
    for contestant, rows in cells.items():
        moved = next(
            (r["moved_bytes_per_parameter"] for _, r in rows.values() if "moved_bytes_per_parameter" in r), None
        )
        values = ["" if moved is None else f"{moved:.4g}", *(rows[size][0] if size in rows else "" for size in sizes)]
        lines.append(f"| `{contestant}` | " + " | ".join(values) + " |")
    return "\n".join([*lines, "", *(f"- {conditions(record)}" for record in records)])


def amount(row: dict[str, Any]) -> str:
    count = row["parameters"]
    value = f"{count / 1e9:.3g} G" if count >= 1e9 else f"{count / 1e6:.3g} M"
    return f"{value} in {row['leaves']} {'leaf' if row['leaves'] == 1 else 'leaves'}"


def cell(row: dict[str, Any], copy_gb_per_s: float) -> str:
    if "error" in row:
        return "failed"
    share = f" ({100 * row['gb_per_s'] / copy_gb_per_s:.3g} %)" if copy_gb_per_s else ""
    return f"{row['gparam_per_s']:.3g}{share}"


def conditions(record: dict[str, Any]) -> str:
    """Device, versions, commit and copy of one record, in a line."""
    versions = dict(record["versions"])
    if record.get("optax_sr8bit"):
        versions["optax_sr8bit"] = record["optax_sr8bit"]
    copies = [row["copy_gb_per_s"] for row in record["rows"] if "copy_gb_per_s" in row]
    names = ", ".join(dict.fromkeys(row["shapes"] for row in record["rows"]))
    told = [f"{names}: {record['device']}" + (f", driver {record['driver']}" if record.get("driver") else "")]
    told.append(", ".join(f"{name} {version}" for name, version in versions.items()))
    told.append(f"commit {record['commit'] or 'unknown'}")
    if copies:
        low, high = f"{min(copies) / 1e3:.3g}", f"{max(copies) / 1e3:.3g}"
        told.append(f"a copy ran at {low if low == high else f'{low} to {high}'} TB/s")
    return "; ".join(told)


def written(document: str, text: str) -> str:
    """The document with the text between its two markers."""
    if document.count(BEGIN) != 1 or document.count(END) != 1 or document.index(BEGIN) > document.index(END):
        raise ValueError(f"needs one line {BEGIN}, and after it one line {END}")
    before, rest = document.split(BEGIN)
    return f"{before}{BEGIN}\n{text}\n{END}{rest.split(END)[1]}"


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("records", nargs="+", type=Path, metavar="JSON")
    parser.add_argument("--write", type=Path, metavar="DOCUMENT", help=f"replace what stands between {BEGIN} and {END}")
    arguments = parser.parse_args(argv)
    text = table([json.loads(path.read_text(encoding="utf-8")) for path in arguments.records])
    if not arguments.write:
        print(text)
        return
    try:
        document = written(arguments.write.read_text(encoding="utf-8"), text)
    except ValueError as error:
        parser.error(f"{arguments.write} {error}")
    arguments.write.write_text(document, encoding="utf-8")


if __name__ == "__main__":
    main()
