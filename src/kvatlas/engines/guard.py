"""The processes of a server, and the guard: a program that ends them once their driver is gone.

The guard imports nothing of ours, so that it starts at once. Its standard input is a pipe that the driver holds open:
a line of JSON (`group`, `stop_arguments`), and `done` once the server was stopped.
"""

import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

#: The variable with the name of a start, by which its processes are found.
START = "KVATLAS_START"
#: Seconds for a command that stops a server.
STOP_COMMAND_SECONDS = 60.0
#: Systems without it have no check of start times and sockets.
HAS_PROC = Path("/proc/self/stat").exists()


def members(group: int) -> set[int]:
    """Return the living processes of a group, and of its session."""
    if not HAS_PROC:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(group, 0)
            return {group}
        return set()
    processes = (int(folder.name) for folder in Path("/proc").glob("[0-9]*"))
    return {process for process in processes if str(group) in _groups_and_start(process)[0]}


def start_time(process: int) -> int:
    """Return the start time of a living process in ticks since the boot, 0 if it does not live or is not known."""
    return _groups_and_start(process)[1]


def _groups_and_start(process: int) -> tuple[list[str], int]:
    """Return the group, the session and the start time of a living process."""
    try:
        # The name of the program may hold spaces and brackets.
        fields = Path(f"/proc/{process}/stat").read_text("utf-8", "replace").rpartition(")")[2].split()
    except OSError:
        return [], 0
    is_dead = fields[0] in "ZX"
    return ([], 0) if is_dead else (fields[2:4], int(fields[19]))


def groups_of_start(name: str) -> set[int]:
    """Return the groups of the living processes that have the name of a start in their environment."""
    found: set[int] = set()
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            variables = (folder / "environ").read_bytes().split(b"\0")
            if f"{START}={name}".encode() in variables:
                found.update(map(int, _groups_and_start(int(folder.name))[0][:1]))
    return found


def wait_until_empty(group: int, seconds: float) -> bool:
    """Return whether a group has no living process within so many seconds."""
    until = time.monotonic() + seconds
    while members(group):
        if time.monotonic() > until:
            return False
        time.sleep(0.05)
    return True


def terminate_group(group: int) -> None:
    """Ask each process of a group, and of its session, to end, by one SIGTERM."""
    if not HAS_PROC:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGTERM)
        return
    for process in members(group):
        with suppress(ProcessLookupError, PermissionError):
            os.kill(process, signal.SIGTERM)


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


def run_stop_command(arguments: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
    """Run the command that stops a server, if there is one; it may fail, as where the server ended by itself."""
    nothing = subprocess.DEVNULL
    with suppress(OSError, subprocess.TimeoutExpired):
        if arguments:
            seconds = STOP_COMMAND_SECONDS
            subprocess.run(arguments, env=environment, stdin=nothing, stdout=nothing, stderr=nothing, timeout=seconds)


def main() -> None:
    """Wait until the driver is gone, and end its server unless the driver has done so."""
    driver = os.getppid()
    told = b""
    # A process that the driver forked may hold the pipe open, too, so its end is not the only sign.
    while os.getppid() == driver:
        readable, _, _ = select.select([0], [], [], 0.5)
        if readable:
            data = os.read(0, 1 << 16)
            told += data
            if not data:
                break

    record, _, word = told.partition(b"\n")
    if not record:
        # The driver was killed while it started the server.
        for group in groups_of_start(os.environ.get(START, "")) - {os.getpgrp()}:
            end_group(group)
    elif word.strip() != b"done":
        server = json.loads(record)
        run_stop_command(server["stop_arguments"])
        end_group(server["group"])


if __name__ == "__main__":
    main()
