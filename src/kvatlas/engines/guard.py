"""The processes of a server, and the guard: a program that ends them when their driver is gone.

The guard imports nothing of ours, so that it starts at once. Its standard input is a pipe that the driver alone holds
open: a line of JSON (`group`, `stop_arguments`), and `done` once the server was stopped.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress

#: Seconds for a command that stops a server.
STOP_COMMAND_SECONDS = 60.0


def has_proc() -> bool:
    """Return whether this system shows its processes as files."""
    return os.path.exists("/proc/self/stat")


def members(group: int) -> dict[int, int]:
    """Return the living processes of a group, and of its session, with their start times in ticks since the boot."""
    if not has_proc():
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(group, 0)
            return {group: 0}
        return {}

    found = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/stat", encoding="utf-8", errors="replace") as file:
                # The name of a program may hold spaces and brackets.
                state, _, process_group, session, *rest = file.read().rpartition(")")[2].split()
        except OSError:
            continue
        if state not in "ZX" and str(group) in (process_group, session):
            found[int(name)] = int(rest[15])
    return found


def wait_until_empty(group: int, seconds: float) -> bool:
    """Return whether a group has no living process within so many seconds."""
    until = time.monotonic() + seconds
    while members(group):
        if time.monotonic() > until:
            return False
        time.sleep(0.05)
    return True


def end_group(group: int) -> bool:
    """End all processes of a group by SIGKILL, and return whether none is left."""
    for _ in range(50):
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)
        for process in members(group):
            with suppress(ProcessLookupError, PermissionError):
                os.kill(process, signal.SIGKILL)
        if wait_until_empty(group, 0.2):
            return True
    return False


def run_stop_command(arguments: list[str], environment: dict[str, str] | None = None) -> None:
    """Run the command that stops a server; its failure says little, since the server may have ended by itself."""
    nothing = subprocess.DEVNULL
    with suppress(OSError, subprocess.TimeoutExpired):
        subprocess.run(
            arguments, env=environment, stdin=nothing, stdout=nothing, stderr=nothing, timeout=STOP_COMMAND_SECONDS
        )


def main() -> None:
    """Wait until the driver is gone; end its server unless the driver said that it did."""
    driver = os.getppid()
    told = b""
    # A forked child of the driver may hold the pipe open, too: the parent's number tells as well.
    while os.getppid() == driver:
        readable, _, _ = select.select([0], [], [], 0.5)
        if readable:
            data = os.read(0, 1 << 16)
            told += data
            if not data:
                break

    server, _, word = told.partition(b"\n")
    if server and word.strip() != b"done":
        record = json.loads(server)
        if record["stop_arguments"]:
            run_stop_command(record["stop_arguments"])
        end_group(record["group"])


if __name__ == "__main__":
    sys.exit(main())
