"""`examples/train_lm.py`, killed at any moment, goes on from its last complete checkpoint to the same bits."""

import os
import random
import signal
import time

import pytest
from example_runs import Runs, saved_bits, told, until

pytestmark = pytest.mark.slow
STEPS = 30


@pytest.fixture
def runs(tmp_path):
    runs = Runs(tmp_path)
    runs.environment["XLA_FLAGS"] = "--xla_backend_optimization_level=0"  # compiles sooner, and is not what is tested
    yield runs
    runs.end()


def complete(folder):
    return sorted(int(path.name) for path in folder.glob("*") if path.name.isdigit())


def being_written(folder, since):
    """The half-written steps of the running process; those of one that was killed before it are older."""
    found = []
    for path in folder.glob("*.orbax-checkpoint-tmp*"):
        try:
            if path.stat().st_ctime > since:
                found.append(path)
        except FileNotFoundError:  # complete by now
            continue
    return found


def kill_while(condition, process):
    """Kill the process at a moment when the condition holds: it is stopped before the second look."""

    def caught():
        if not condition():
            return False
        os.kill(process.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
        if condition():
            return True
        os.kill(process.pid, signal.SIGCONT)
        return False

    until(caught, process, 0.0005)
    process.kill()
    assert process.wait() == -signal.SIGKILL


def test_killed_at_any_moment(runs, tmp_path):
    draw = random.Random(0)
    folder = tmp_path / "killed"
    options = ["--steps", str(STEPS), "--checkpoint-every", "1", "--checkpoint", str(folder)]
    half_written = 0

    def begin():
        """Start again, as the user would: with --resume where there is a checkpoint, as after an interruption."""
        done = complete(folder)
        process = runs.start("train_lm.py", *options, *(["--resume"] if done else []))
        return process, done[-1] if done else 0, time.time()

    # In the first save; in a later one, when one of its two items is complete and the whole is not.
    for item in ("", "settings"):
        process, done, since = begin()
        kill_while(
            lambda since=since, item=item: any((p / item).exists() for p in being_written(folder, since)), process
        )
        half_written += len(being_written(folder, since))
        assert not done or f"resumed after {done} of {STEPS} steps" in told(process)
    assert half_written == 2
    # At random, from the first new checkpoint on.
    for _ in range(2):
        process, done, _ = begin()
        until(lambda done=done: max(complete(folder), default=0) > done, process, 0.002)
        time.sleep(draw.uniform(0, 0.3))
        process.kill()
        assert process.wait() == -signal.SIGKILL, "it had ended: more steps are needed"
        assert not done or f"resumed after {done} of {STEPS} steps" in told(process)

    done = complete(folder)[-1]
    assert 0 < done < STEPS
    assert f"resumed after {done} of {STEPS} steps" in runs.finish("train_lm.py", *options, "--resume")
    assert complete(folder) == list(range(1, STEPS + 1))

    whole = tmp_path / "whole"
    runs.finish("train_lm.py", "--steps", str(STEPS), "--checkpoint-every", "1", "--checkpoint", str(whole))
    for step in (1, done, done + 1, STEPS):
        assert saved_bits(folder / str(step)) == saved_bits(whole / str(step)), step
