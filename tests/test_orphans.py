from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

CODE = """
import subprocess, time
from kvatlas.orphans import ended_with_us
with ended_with_us():
    # A child that leaves the session, and what the child leaves behind.
    child = subprocess.Popen(["sh", "-c", "sleep 98 & sleep 99"], start_new_session=True)
    time.sleep({seconds})
    print(child.pid, flush=True)
    if {ends}:
        raise SystemExit
    time.sleep(99)
"""


def alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def started(seconds: float, ends: bool) -> tuple[subprocess.Popen[str], list[int]]:
    code = CODE.format(seconds=seconds, ends=ends)
    driver = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert driver.stdout is not None
    child = int(driver.stdout.readline())
    below = Path(f"/proc/{child}/task/{child}/children").read_text().split()
    return driver, [child, *map(int, below)]


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
def test_what_a_killed_driver_leaves_behind_ends_with_it() -> None:
    driver, below = started(3, False)
    assert len(below) >= 2
    driver.kill()
    driver.wait()
    deadline = time.monotonic() + 10
    while any(map(alive, below)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(map(alive, below))


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
def test_a_driver_that_ends_leaves_what_it_wants() -> None:
    driver, below = started(0, True)
    driver.wait()
    assert alive(below[0])
    os.killpg(below[0], signal.SIGKILL)
