"""Rendering chat templates within limits of time and size, in one process beside this one."""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvatlas.core import KvatlasError

#: Seconds after which a process is killed that did not end itself.
LATE = 120.0
_PROGRAM = Path(__file__).with_name("template_process.py")


class TemplateRefusedError(KvatlasError):
    """A template refused its messages or was over a limit; the text is the reason alone."""


class _Process:
    """The process that renders, which threads take in turn."""

    def __init__(self) -> None:
        self.owner, self.lock = os.getpid(), threading.Lock()
        self.process: subprocess.Popen[str] | None = None
        atexit.register(self.end)

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        with self.lock:
            if self.process is None or self.process.poll() is not None:
                self._start()
            return self._answer(request)

    def _start(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-P", str(_PROGRAM)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            encoding="ascii",
        )
        started = self._answer({"template": "", "values": {}, "date": "2000-01-01"})
        if "error" in started:
            raise KvatlasError(f"Chat templates cannot be rendered: {_PROGRAM.name} does not start.")

    def _answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        process = self.process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        late = threading.Timer(LATE, process.kill)
        late.start()
        try:
            process.stdin.write(json.dumps(request, default=str) + "\n")
            process.stdin.flush()
            return dict(json.loads(process.stdout.readline()))
        except (OSError, ValueError):
            self.end()
            return {"error": "it takes too long"}
        finally:
            late.cancel()

    def end(self) -> None:
        """End the process; a later text starts a new one. A forked child leaves its parent's alone."""
        process, self.process = self.process, None
        if process is not None and self.owner == os.getpid():
            process.kill()
            process.communicate()


_process = _Process()


def render(template: str, values: Mapping[str, Any], date: str) -> str:
    """What `template` writes with these values, `date` (YYYY-MM-DD) being today; TemplateRefusedError if nothing."""
    global _process
    if _process.owner != os.getpid():
        _process = _Process()
    answer = _process.ask({"template": template, "values": values, "date": date})
    if "error" in answer:
        raise TemplateRefusedError(answer["error"])
    return str(answer["text"])
