"""The program behind `templates`: renders chat templates in a process of its own, sandboxed and within its memory.

A template comes with a model and may do anything: loop without end, recurse, fill the memory.
"""

from __future__ import annotations

import json
from datetime import date
from functools import lru_cache
from typing import Any

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from kvatlas.killable import serve

#: Bytes of address space, characters of one rendered text, and seconds of processor time for it.
MEMORY, CHARACTERS, SECONDS = 512 * 2**20, 16 * 2**20, 2.0


class Generation(Extension):
    """`{% generation %}`, with which templates mark answers for training, changes nothing here."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        """The body of the block as it is."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    """The text, or why there is none."""
    try:
        today = date.fromisoformat(request["date"])
        values = {**request["values"], "strftime_now": today.strftime}
        return {"text": _written(_compiled(request["template"]), values)}
    except MemoryError:
        return {"error": f"it needs more than {MEMORY >> 20} MiB"}
    except Exception as error:
        reason = (str(error).splitlines() or [""])[0][:300]
        return {"error": reason if isinstance(error, TemplateError) else f"{type(error).__name__}: {reason}"}


def _written(template: Template, values: dict[str, Any]) -> str:
    pieces, length = [], 0
    for piece in template.generate(**values):
        pieces.append(piece)
        length += len(piece)
        if length > CHARACTERS:
            raise TemplateError(f"it writes more than {CHARACTERS:,} characters")
    return "".join(pieces)


@lru_cache(maxsize=8)
def _compiled(template: str) -> Template:
    """The template in the environment that transformers gives it."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _refuse
    # The same messages are to be the same prompt every time.
    del environment.filters["random"], environment.globals["lipsum"]
    return environment.from_string(template)


def _refuse(message: str) -> None:
    raise TemplateError(message)


def _tojson(value: Any, ensure_ascii: bool = False, **how: Any) -> str:
    # Without the escapes of HTML that Jinja's own filter writes.
    return json.dumps(value, ensure_ascii=ensure_ascii, **how)


if __name__ == "__main__":
    serve(_answer, MEMORY, "ITIMER_PROF", SECONDS)
