"""A real `kvatlas serve` in a process of its own, for tests and benchmarks."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx


@dataclass
class Running:
    """The process and where it listens."""

    process: subprocess.Popen[str]
    url: str

    def metrics(self) -> dict[str, float]:
        """Samples of /metrics by name, labels included."""
        lines = httpx.get(f"{self.url}/metrics").text.splitlines()
        return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if line[0] != "#")}

    def memory(self) -> int:
        """Resident bytes of the process."""
        return int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]) * 4096


@contextmanager
def serving(*words: str) -> Iterator[Running]:
    """`kvatlas serve` with these arguments on a free port, ended with the block."""
    command = [sys.executable, "-m", "kvatlas", "serve", *words, "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    try:
        # Whatever else it says first, until it ends: a line that was not waited for must not make this wait for ever.
        said = []
        for line in process.stdout:
            said.append(line)
            if match_ := re.search(r"http://\S+?:\d+", line):
                break
        else:
            raise AssertionError("".join(said))
        yield Running(process, match_[0])
    finally:
        process.terminate()
        process.wait(60)
        process.stdout.close()
