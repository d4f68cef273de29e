"""Tools of a chat: offered to templates that know them, called in `<tool_call>` blocks (Hermes, Qwen), read here."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from kvatlas.core import KvatlasError
from kvatlas.models import ModelHandle

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_BLOCK = re.compile(rf"{_OPEN}\s*(.*?)\s*(?:{_CLOSE}\s*|$)", re.S)
Name = Annotated[str, StringConstraints(pattern=r"^[\w.-]{1,64}$")]


class Function(BaseModel):
    """A function that the model may call; `parameters` is the JSON schema of its arguments."""

    model_config = ConfigDict(extra="forbid", strict=True)

    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(BaseModel):
    """A tool; functions are all there are."""

    model_config = ConfigDict(extra="forbid", strict=True)

    type: Literal["function"]
    function: Function


class FunctionName(BaseModel):
    """Which function."""

    model_config = ConfigDict(extra="forbid", strict=True)

    name: str


class NamedTool(BaseModel):
    """The tool that has to be called."""

    model_config = ConfigDict(extra="forbid", strict=True)

    type: Literal["function"]
    function: FunctionName


class CalledFunction(BaseModel):
    """A function with its arguments, a JSON text."""

    model_config = ConfigDict(extra="forbid", strict=True)

    name: str
    arguments: Annotated[str, Field(max_length=2**20)]


class ToolCall(BaseModel):
    """A call that the model made earlier in the conversation."""

    model_config = ConfigDict(extra="ignore", strict=True)

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction

    def for_template(self) -> dict[str, Any]:
        """As chat templates want it: the arguments as an object."""
        try:
            arguments = json.loads(self.function.arguments or "{}")
        except ValueError as error:
            raise KvatlasError(f"The arguments of the tool call {self.id!r} are no JSON ({error}).") from error
        return {"type": "function", "id": self.id, "function": {"name": self.function.name, "arguments": arguments}}


def template_reads(model: ModelHandle, name: str) -> bool:
    """Whether the word stands in the model's chat template."""
    template = str(model.tokenizer.chat_template or "")
    return re.search(rf"(?<!\w){re.escape(name)}(?!\w)", template) is not None


def check_template(model: ModelHandle) -> None:
    """Raise KvatlasError where the chat template does not know tools, or has them called in a way not read here."""
    if not template_reads(model, "tools"):
        raise KvatlasError("tools is not supported: the model's chat template does not read it.")
    template = str(model.tokenizer.chat_template)
    # Some have calls written as XML within the same tag.
    if _OPEN not in template or "<function=" in template:
        raise KvatlasError(f"tools is not supported: the model's chat template has no {_OPEN} blocks of JSON.")


def forced(tools: Sequence[Tool], choice: str | NamedTool | None) -> str:
    """The grammar (Lark, as llguidance reads it) of an answer that has to be a call; "" where it need not be."""
    if choice is None or choice in ("auto", "none"):
        return ""
    wanted = [tool.function for tool in tools]
    if isinstance(choice, NamedTool):
        wanted = [function for function in wanted if function.name == choice.function.name]
        if not wanted:
            names = ", ".join(tool.function.name for tool in tools)
            raise KvatlasError(f"tool_choice names {choice.function.name!r}; valid are the tools: {names}.")
    rules = []
    for number, function in enumerate(wanted):
        head = json.dumps(f'{_OPEN}\n{{"name": "{function.name}", "arguments": ')
        tail = json.dumps(f"}}\n{_CLOSE}")
        rules.append(f"call_{number}: {head} arguments_{number} {tail}")
        rules.append(f"arguments_{number}: %json {json.dumps(function.parameters or {'type': 'object'})}")
    calls = " | ".join(f"call_{number}" for number in range(len(wanted)))
    return "\n".join([f"start: {calls}", *rules])


def split_calls(answer: str) -> tuple[str, list[dict[str, Any]]]:
    """(what is no call, the calls as OpenAI's API shapes them); what cannot be read as a call stays text."""
    calls: list[dict[str, Any]] = []

    def taken(block: re.Match[str]) -> str:
        try:
            call = json.loads(block[1])
            function = {"name": call["name"], "arguments": json.dumps(call.get("arguments") or {})}
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return block[0]
        calls.append({"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function})
        return ""

    text = _BLOCK.sub(taken, answer)
    return (text.strip() if calls else text), calls


class CallText:
    """An answer that comes in pieces: its text goes on, what may be a call is held back to the end."""

    def __init__(self) -> None:
        self._held = ""

    def push(self, text: str) -> str:
        """What is certainly no call."""
        self._held += text
        at = self._held.find("<")
        while at >= 0 and not (self._held.startswith(_OPEN, at) or _OPEN.startswith(self._held[at:])):
            at = self._held.find("<", at + 1)
        at = len(self._held) if at < 0 else at
        told, self._held = self._held[:at], self._held[at:]
        return told

    def end(self) -> tuple[str, list[dict[str, Any]]]:
        """What was held back: text and calls."""
        return split_calls(self._held)
