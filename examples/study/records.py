"""The files of results: one an experiment, a row a cell, written anew after each so that a run may stop anywhere."""

import importlib.metadata
import json
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
RECORDS = HERE / "records"
PACKAGES = ("jax", "jaxlib", "jax-cuda13-plugin", "optax", "flax", "numpy", "scikit-learn", "triton", "jax-triton")


class Records:
    """The rows of one experiment.

    Args:
      folder: of the files.
      experiment: its name.
    """

    def __init__(self, folder: Path, experiment: str):
        self.path = folder / f"{experiment}.json"
        self.content: dict[str, Any] = {"experiment": experiment, "environments": [], "rows": []}
        if self.path.exists():
            self.content = json.loads(self.path.read_text(encoding="utf-8"))

    def find(self, cell: dict[str, Any]) -> dict[str, Any] | None:
        """The row of that cell, if it was measured."""
        return next((row for row in self.content["rows"] if row["cell"] == cell), None)

    def add(self, cell: dict[str, Any], result: dict[str, Any], environment: dict[str, Any]) -> None:
        """Keep a result. The file is replaced as a whole, so that it is never half written."""
        environments = self.content["environments"]
        if environment not in environments:
            environments.append(environment)
        row = {"cell": cell, "environment": environments.index(environment), "result": result}
        self.content["rows"].append(row)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        parts = {
            "experiment": json.dumps(self.content["experiment"]),
            "environments": "[\n  " + ",\n  ".join(map(json.dumps, environments)) + "]",
            "rows": "[\n  " + ",\n  ".join(map(json.dumps, self.content["rows"])) + "]",
        }
        text = "{" + ",\n ".join(f'"{key}": {value}' for key, value in parts.items()) + "}\n"
        partial = self.path.with_suffix(".partial")
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, self.path)


def environment(commit: str | None) -> dict[str, Any]:
    """Device, driver, processor, versions and commit; what cannot be known is None or left out."""
    import jax

    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    driver = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return {
        "device": jax.local_devices()[0].device_kind,
        "driver": driver and driver.splitlines()[0],
        "processor": _processor(),
        "versions": versions,
        "commit": commit or head(),
    }


def head() -> str | None:
    """Of this checkout, with `-dirty` where tracked files other than records differ; None outside git."""
    commit = _output("git", "-C", str(HERE), "rev-parse", "--short=12", "HEAD")
    changed = _output(
        "git", "-C", str(HERE), "status", "--porcelain", "--untracked-files=no", "--", ":/", ":(exclude)records"
    )
    return commit and commit + ("-dirty" if changed else "")


def _processor() -> str | None:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or None
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), None)


def _output(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None
