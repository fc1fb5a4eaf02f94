"""Reads registration.toml: experiments with their settings, and the claims."""

import tomllib
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("registration.toml")


def load(path: Path = FILE) -> dict[str, Any]:
    """The registration; an experiment that starts from another's end holds that one's settings as `start`."""
    registration = tomllib.loads(path.read_text(encoding="utf-8"))
    experiments = registration["experiments"]
    for settings in experiments.values():
        if "start" in settings:
            changes = dict(settings["start"])
            settings["start"] = experiments[changes.pop("experiment")] | changes
    return registration
