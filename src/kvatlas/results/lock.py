"""One writer for a run: a lock of the system that ends with its process, and names it to the next one."""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path
from typing import IO

from kvatlas.core import KvatlasError


def lock(path: Path) -> IO[str] | None:
    """The open file that holds the lock until it is closed; None where the system has no such locks.

    Raises KvatlasError that names the process that has it.
    """
    try:
        import fcntl
    except ImportError:
        return None
    file = path.open("a+", encoding="utf-8")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        owner = file.read(200).strip() or "another process"
        file.close()
        raise KvatlasError(
            f"The run {str(path.parent)!r} is being written by {owner}; wait for its end, or name another folder."
        ) from None
    except OSError:  # a file system without locks
        file.close()
        return None
    with contextlib.suppress(OSError):
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
    return file
