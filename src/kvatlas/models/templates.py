"""Rendering chat templates within limits of time and size, in one process beside this one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvatlas.core import KvatlasError
from kvatlas.killable import Programs

#: Messages of `role`, `content` and what else a chat template reads; further values for it.
Messages = Sequence[Mapping[str, Any]]
Values = Mapping[str, Any]

#: Seconds after which a process is killed that did not end itself.
LATE = 120.0


class TemplateRefusedError(KvatlasError):
    """A template refused its messages or was over a limit; the text is the reason alone."""


_process: Programs | None = None


def render(template: str, values: Mapping[str, Any], date: str) -> str:
    """What `template` writes with these values, `date` (YYYY-MM-DD) being today; TemplateRefusedError if nothing."""
    global _process
    if _process is None or not _process.owned:
        _process = Programs(
            "kvatlas.models.template_process",
            size=1,
            seconds=LATE,
            probe={"template": "", "values": {}, "date": date},
            missing="Chat templates cannot be rendered: the process that renders them does not start.",
        )
    try:
        answer = _process.ask({"template": template, "values": values, "date": date})
    except TimeoutError:
        raise TemplateRefusedError("it takes too long") from None
    if "error" in answer:
        raise TemplateRefusedError(answer["error"])
    return str(answer["text"])
