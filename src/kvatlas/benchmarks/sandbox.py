"""Programs that a model wrote, run where they can do no harm: namespaces of the Linux kernel and limits, by util-linux.

A program sees Python, the system's libraries and an empty /tmp in memory; no network, no other process, no file of the
user. Processes, memory, time, files and output are limited. When it ends or is out of time the kernel kills all that it
started; its files were in memory, and its folders are gone with their namespace.
"""

from __future__ import annotations

import functools
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from kvatlas.core import KvatlasError

#: Seconds of a run and of its processor, bytes of a process's memory, of all files and of the output, processes.
SECONDS, MEMORY, FILES, OUTPUT, PROCESSES = 10, 512 * 2**20, 16 * 2**20, 2**20, 8
#: Nobody, on most systems.
_USER = "65534"
_TOOLS = ("unshare", "mount", "umount", "pivot_root", "setpriv", "prlimit", "timeout", "env", "sh")
#: Builds the root in the new namespaces, goes there, gives all rights away and becomes the program.
_SCRIPT = r"""
set -e
PATH=/usr/sbin:/usr/bin:/sbin:/bin
mount --make-rprivate /
mount -t tmpfs -o size=64k,mode=755 none "$ROOT"
for place in $PLACES; do
    if [ -L "$place" ]; then ln -s "$(readlink "$place")" "$ROOT$place"; continue; fi
    mkdir -p "$ROOT$place"
    mount --bind "$place" "$ROOT$place"
    mount -o remount,bind,ro,nosuid "$ROOT$place"
done
mkdir -p "$ROOT/tmp" "$ROOT/dev" "$ROOT/proc" "$ROOT/old"
mount -t tmpfs -o "size=$FILES,nr_inodes=2k,mode=1777,nosuid,nodev" none "$ROOT/tmp"
: > "$ROOT/dev/null"
mount --bind /dev/null "$ROOT/dev/null"
# umount looks there.
mount -t proc none "$ROOT/proc"
cd "$ROOT"
pivot_root . old
umount -l /old
umount -l /proc
cd /tmp
exec timeout -s KILL "$LONGEST" $DROP prlimit --nproc="$PROCESSES" --as="$MEMORY" --cpu="$SECONDS" --fsize="$FILES" \
    --nofile=64 --core=0 env -i PATH=/usr/bin:/bin HOME=/tmp "$PYTHON" -I -S -c "$PROGRAM"
"""


class End(Enum):
    """How a program ended."""

    DONE = "done"
    FAILED = "failed"
    TIME = "out of time"
    OUTPUT = "too much output"


@dataclass(frozen=True)
class Result:
    """How a program ended and what it wrote to standard output, at most `OUTPUT` bytes."""

    end: End
    output: str


def run(program: str, given: str, seconds: float = SECONDS) -> Result:
    """Run a Python program with `given` as standard input; KvatlasError where programs cannot be contained."""
    reason = why_not()
    if reason:
        raise KvatlasError(reason)
    return _contained(program, given, seconds)


@functools.cache
def why_not() -> str:
    """Why this machine cannot contain programs, as a sentence; "" where it can."""
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if sys.platform != "linux" or missing:
        what = f"{missing[0]} of util-linux is missing" if missing else "there are no namespaces of the Linux kernel"
        return f"Programs that a model writes cannot be contained on this machine: {what}."
    printed = _contained("import os; print(os.getpid(), os.path.exists('/home'), os.path.exists('/proc/self'))", "", 60)
    if printed.end is not End.DONE or printed.output.split()[1:] != ["False", "False"]:
        return (
            "Programs that a model writes cannot be contained on this machine: its kernel, or the container that this "
            "runs in, allows no new namespaces and mounts (unshare --user --map-root-user --mount)."
        )
    return ""


def _contained(program: str, given: str, seconds: float) -> Result:
    """One run. Whatever the program does, all of its processes are gone when this returns."""
    as_root = os.geteuid() == 0
    user = [] if as_root else ["--user", "--map-root-user"]
    # Limits on processes do not hold for root, so it becomes nobody; others keep their own id and lose all rights to
    # mount in one more namespace.
    drop = (
        f"setpriv --reuid {_USER} --regid {_USER} --clear-groups --bounding-set=-all" if as_root else "unshare --user"
    )
    with tempfile.TemporaryDirectory(prefix="kvatlas-sandbox-") as root, tempfile.TemporaryFile() as stdin:
        stdin.write(given.encode())
        stdin.seek(0)
        process = subprocess.Popen(
            [
                "unshare",
                *user,
                "--mount",
                "--pid",
                "--net",
                "--ipc",
                "--uts",
                "--fork",
                "--kill-child",
                "sh",
                "-c",
                _SCRIPT,
            ],
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            env={
                "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
                "ROOT": root,
                "PLACES": " ".join(_places()),
                "DROP": f"{drop} setpriv --no-new-privs",
                "PYTHON": os.path.realpath(sys.executable),
                "PROGRAM": program,
                "LONGEST": str(seconds + 5),
                **{name: str(globals()[name]) for name in ("SECONDS", "MEMORY", "FILES", "PROCESSES")},
            },
        )
        try:
            output, end = _read(process, seconds)
        finally:
            process.kill()
            process.wait()
    return Result(end, output.decode(errors="replace"))


def _places() -> list[str]:
    """What a program may read: Python and the system's libraries."""
    places = [path for path in ("/usr", "/lib", "/lib64", "/bin") if Path(path).exists()]
    prefix = os.path.realpath(sys.base_prefix)
    return places if prefix.startswith("/usr/") else [*places, prefix]


def _read(process: subprocess.Popen[bytes], seconds: float) -> tuple[bytes, End]:
    """What a process writes, until it ends, writes too much or is out of time."""
    assert process.stdout is not None
    stdout, pieces = process.stdout, queue.SimpleQueue[bytes]()

    def pump() -> None:
        while piece := os.read(stdout.fileno(), 2**16):
            pieces.put(piece)
        pieces.put(b"")

    thread = threading.Thread(target=pump, daemon=True)
    thread.start()
    output, deadline = b"", time.monotonic() + seconds
    try:
        while len(output) <= OUTPUT:
            piece = pieces.get(timeout=max(0.0, deadline - time.monotonic()))
            if not piece:
                code = process.wait(timeout=max(0.1, deadline - time.monotonic()))
                return output, End.DONE if code == 0 else End.FAILED
            output += piece
        return output[:OUTPUT], End.OUTPUT
    except (queue.Empty, subprocess.TimeoutExpired):
        return output, End.TIME
    finally:
        process.kill()
        thread.join(timeout=10)
        stdout.close()
