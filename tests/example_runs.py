"""Runs of the examples as processes of their own, and the bits that they leave in checkpoints."""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp

EXAMPLES = Path(__file__).parent.parent / "examples"
SMALL = ["--width", "32", "--layers", "1", "--seq", "16", "--batch", "4"]
SECONDS = 240
"""No wait is longer, on however busy a machine."""


class Runs:
    """Starts scripts, and ends those that still run when the test does."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.running: list[subprocess.Popen] = []
        text = folder / "text.txt"
        text.write_bytes(b"".join(file.read_bytes() for file in sorted(EXAMPLES.glob("*.py"))))
        self.options = [*SMALL, "--data", str(text)]
        # All runs of a test are of few programs: compiled once.
        cache = {"JAX_COMPILATION_CACHE_DIR": str(folder / "cache"), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
        self.environment = {**os.environ, **cache, "JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(sys.path)}

    def start(self, script: str, *options: str) -> subprocess.Popen:
        """Start an example; its output is in the file `process.log`."""
        log = self.folder / f"{len(self.running)}.log"
        command = [sys.executable, str(EXAMPLES / script), *self.options, *options]
        with log.open("w") as file:
            process = subprocess.Popen(
                command, env=self.environment, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
            )
        process.log = log  # pyright: ignore[reportAttributeAccessIssue]
        self.running.append(process)
        return process

    def finish(self, script: str, *options: str) -> str:
        """Run an example to its end; return what it printed."""
        process = self.start(script, *options)
        assert process.wait(SECONDS) == 0, told(process)
        return told(process)

    def end(self) -> None:
        for process in self.running:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, 9)  # its own workers too
            process.wait()


def told(process: subprocess.Popen) -> str:
    return process.log.read_text(errors="replace")  # pyright: ignore[reportAttributeAccessIssue]


def until(condition: Callable[[], bool], process: subprocess.Popen, pause: float) -> None:
    """Wait for a condition that a running process will bring about."""
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert process.poll() is None, told(process)
        assert time.monotonic() < deadline, told(process)
        time.sleep(pause)


def saved_bits(checkpoint: Path) -> dict[str, tuple]:
    """Return dtype, shape and bytes of each array of a checkpoint, whichever devices wrote it."""
    with ocp.PyTreeCheckpointer() as reader:
        arrays = reader.metadata(checkpoint / "train").item_metadata.tree
        as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), arrays)
        tree = reader.restore(checkpoint / "train", restore_args=as_numpy)
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path): (leaf.dtype, leaf.shape, leaf.tobytes()) for path, leaf in leaves}
