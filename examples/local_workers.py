"""Several processes of one script on this machine, which end together."""

import signal
import socket
import subprocess
import sys
import time


def run(script: str, argv: list[str] | None, processes: int, devices: int) -> int:
    """Run the script as all the processes of a run; return 0, or the exit status of the first that fails.

    One that fails, or is killed, takes the others with it.
    """
    arguments = sys.argv[1:] if argv is None else argv
    place = ["--coordinator", f"localhost:{free_port()}", "--devices", str(devices)]
    workers = []
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # as Ctrl-C does: by way of `finally`
    try:
        for index in range(processes):
            command = [sys.executable, script, *arguments, *place, "--process-id", str(index)]
            workers.append(subprocess.Popen(command))
        while True:
            states = [worker.poll() for worker in workers]
            failed = [state for state in states if state]
            if failed:
                print(f"a process has ended with status {failed[0]}: ending the others", file=sys.stderr)
                return failed[0] if failed[0] > 0 else 128 - failed[0]  # as a shell tells of a signal
            if None not in states:
                return 0
            time.sleep(0.1)
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()


def free_port() -> int:
    """Return a TCP port that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]
