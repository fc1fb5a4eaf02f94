"""What a benchmark's JSON holds: where it ran, of what, and a row for each contestant and tree of shapes.

The rows of JAX and of PyTorch have the same keys, so `table.py` takes both.
"""

import importlib.metadata
import json
import math
import platform
import subprocess
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def environment(device: str, packages: tuple[str, ...], **more: Any) -> dict[str, Any]:
    """Device, driver, versions and commit; what cannot be known is None or left out."""
    versions = {"python": platform.python_version()}
    for package in packages:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {"device": device, "driver": driver(), "versions": versions, "commit": commit(), **more, "rows": []}


def driver() -> str | None:
    """The version of the NVIDIA driver."""
    answer = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return answer.splitlines()[0] if answer else None


def commit() -> str | None:
    """Of this checkout, with `-dirty` where tracked files differ; None outside git."""
    head = _output("git", "-C", str(ROOT), "rev-parse", "--short=12", "HEAD")
    changed = _output("git", "-C", str(ROOT), "status", "--porcelain", "--untracked-files=no")
    return head and head + ("-dirty" if changed else "")


def _output(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None


def moved_bytes(params: int, grads: int, state: int) -> int:
    """What a step must move at least, from bytes kept: parameters and state read and written, gradients read.

    8-bit AdamW in BF16: 4 + 2 + 2 codes twice + 2 float32 scales a block twice = 10 + 16 / block bytes per parameter.
    """
    return 2 * params + grads + 2 * state


def rates(seconds: float, parameters: int, moved: int) -> dict[str, float]:
    """Of one step on that many parameters, which moves that many bytes."""
    return {
        "ms": digits(seconds * 1e3),
        "gparam_per_s": digits(parameters / seconds / 1e9),
        "gb_per_s": digits(moved / seconds / 1e9),
        "moved_bytes_per_parameter": digits(moved / parameters, 5),
    }


def add_share(row: dict[str, Any], copy_gb_per_s: float | None) -> None:
    """Beside the bandwidth of a plain copy in the same process, which no step can beat by much."""
    if copy_gb_per_s and "gb_per_s" in row:
        row["copy_gb_per_s"] = digits(copy_gb_per_s)
        row["share_of_copy"] = digits(row["gb_per_s"] / copy_gb_per_s, 3)


def digits(value: float, count: int = 4) -> float:
    return float(f"{value:.{count}g}") if math.isfinite(value) else value


def save(path: str | None, record: dict[str, Any]) -> None:
    if path:
        Path(path).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
