"""Command lines, each in a forked process that has its libraries already: what was said, and how long it took."""

from __future__ import annotations

import importlib
import os
import resource
import signal
import sys
import tempfile
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

#: CPU seconds in which wrong input is to be refused, and after which a command counts as one without end.
SOON, END = 3.0, 10
#: Bytes that a command may take.
MEMORY = 8 * 2**30


@dataclass(frozen=True)
class Outcome:
    """How a command ended: its exit code (below 0: the signal), its CPU seconds, what it wrote, what it executed."""

    code: int
    seconds: float
    said: str
    executed: bool

    def fault(self, *codes: int) -> str:
        """What is wrong with it, where one of these codes and a sentence were to come soon; "" where nothing is."""
        if self.executed:
            return "executed"
        if "Traceback" in self.said:
            return f"traceback: {self.said.strip().splitlines()[-1][:120]}"
        if self.code < 0:
            return f"killed after {self.seconds:.1f} s"
        if self.code not in codes:
            return f"exit code {self.code}: {(self.said.strip().splitlines() or [''])[-1][:120]}"
        return f"{self.seconds:.1f} s" if self.seconds > SOON else ""


def preload() -> None:
    """Import once what commands need, so that a fork has it."""
    for name in ("report.map_figure", "report.page", "report.summary", "results.export", "sweeps.run"):
        importlib.import_module(f"kvatlas.{name}")
    from kvatlas import models

    benchmark = models.find("embedded:tiny-llama")
    benchmark.check()
    benchmark.tokens("a")


def call(words: tuple[str, ...], files: Mapping[str, str | bytes] = {}, folder: Path | None = None) -> Outcome:
    """Run `kvatlas WORDS` in a folder of its own with these files, or in `folder`; `{out}` is a path in it."""
    with tempfile.TemporaryDirectory() as scratch:
        here = folder or Path(scratch)
        for name, text in files.items():
            (here / name).write_bytes(text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text)
        said = Path(scratch) / "said"
        child = os.fork()
        if not child:
            _command([word.replace("{out}", str(Path(scratch) / "out")) for word in words], here, said)
        signal.signal(signal.SIGALRM, lambda *_: os.kill(child, signal.SIGKILL))
        # A command that waits for something takes no CPU: an end for it, too.
        signal.alarm(20 * END)
        _, status, used = os.wait4(child, 0)
        signal.alarm(0)
        executed = any(position.joinpath("executed").exists() for position in (here, Path(scratch)))
        text = said.read_text(errors="replace") if said.exists() else ""
        return Outcome(os.waitstatus_to_exitcode(status), used.ru_utime + used.ru_stime, text, executed)


def _command(words: list[str], here: Path, said: Path) -> None:
    code: object = 0
    try:
        os.chdir(here)
        resource.setrlimit(resource.RLIMIT_CPU, (END, END + 1))
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        out = os.open(said, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        for stream in (1, 2):
            os.dup2(out, stream)
        sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w", errors="backslashreplace")
        sys.argv = ["kvatlas", *words]
        from kvatlas.cli import main

        main()
    except SystemExit as ended:
        code = ended.code or 0
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else 1)
