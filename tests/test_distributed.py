"""`examples/train_distributed.py`: the bits of two processes are those of one; a lost process ends the other."""

import importlib
import re
import shutil
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
from example_runs import EXAMPLES, Runs, saved_bits, told, until

pytestmark = pytest.mark.slow
STATED_SECONDS = 20
"""What examples/README.md promises from the death of a process to the error in the others."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """One for the module: the programs of two processes are compiled once."""
    runs = Runs(tmp_path_factory.mktemp("distributed"))
    yield runs
    runs.end()


@pytest.fixture(scope="module")
def local_workers():
    sys.path.insert(0, str(EXAMPLES))
    yield importlib.import_module("local_workers")
    sys.path.remove(str(EXAMPLES))


def checksum(output):
    return re.findall(r"checksum of parameters and optimizer state: (\w{8})", output)


def test_two_processes_have_the_bits_of_one(runs, tmp_path):
    options = ["--steps", "4", "--checkpoint-every", "2"]

    def run(name, *more):
        return runs.finish("train_distributed.py", *options, "--checkpoint", str(tmp_path / name), *more)

    one = run("one", "--devices", "2")
    two = run("two", "--processes", "2")
    shutil.copytree(tmp_path / "two" / "2", tmp_path / "part" / "2")  # what a run leaves that ended after two steps
    resumed = run("part", "--devices", "2", "--resume")  # and that one process goes on with

    desired = saved_bits(tmp_path / "one" / "4")
    assert np.dtype(np.uint8) in {dtype for dtype, _, _ in desired.values()}
    assert saved_bits(tmp_path / "two" / "2") == saved_bits(tmp_path / "one" / "2") != desired
    assert saved_bits(tmp_path / "two" / "4") == desired
    assert "resumed after 2 of 4 steps" in resumed
    assert saved_bits(tmp_path / "part" / "4") == desired
    assert checksum(one) == checksum(two) == checksum(resumed)
    assert len(checksum(two)) == 1  # one process prints


def test_a_killed_process_ends_the_other(runs, local_workers):
    place = ["--processes", "2", "--devices", "1", "--coordinator", f"localhost:{local_workers.free_port()}"]
    options = ["--optimizer", "lion", "--steps", "1000000", *place, "--process-id"]
    survivor, victim = (runs.start("train_distributed.py", *options, index) for index in "01")
    until(lambda: "step=" in told(survivor), survivor, 0.1)
    assert victim.poll() is None

    victim.kill()
    started = time.monotonic()
    assert survivor.wait(STATED_SECONDS) != 0
    assert time.monotonic() - started < STATED_SECONDS
    assert "another task died" in told(survivor) or "Error" in told(survivor)


@pytest.mark.parametrize(
    ("ending", "status"), [("sys.exit(3)", 3), ("os.kill(os.getpid(), 9)", 137), ("sys.exit(0)", 0)]
)
def test_local_workers_end_together(ending, status, local_workers, tmp_path):
    """Where one fails, the other, which would sleep for long, is ended."""
    script = tmp_path / "worker.py"
    other = "sys.exit(0)" if status == 0 else "time.sleep(600)"
    script.write_text(f"import os, sys, time\n{ending} if sys.argv[-1] == '1' else {other}\n")
    call = f"import local_workers, sys; sys.exit(local_workers.run({str(script)!r}, [], 2, 1))"
    assert subprocess.run([sys.executable, "-c", call], cwd=EXAMPLES, timeout=60).returncode == status


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--batch", "3"], f"--batch must be a multiple of the {jax.device_count()} devices"),
        (["--coordinator", "localhost:1"], "--coordinator needs --processes and --process-id"),
        (["--coordinator", "localhost:1", "--processes", "2", "--process-id", "2"], "--process-id must be from 0 to 1"),
        (["--process-id", "0"], "--process-id needs --coordinator"),
        (["--processes", "0"], "--processes must be at least 1"),
    ],
)
def test_bad_command_lines_are_refused(options, message, runs, local_workers, capsys, monkeypatch):
    train_distributed = importlib.import_module("train_distributed")
    monkeypatch.setattr(train_distributed, "connect", lambda args: None)  # the test's own devices do
    with pytest.raises(SystemExit) as refused:
        train_distributed.main([*runs.options, *options])
    assert refused.value.code == 2
    assert message in capsys.readouterr().err
