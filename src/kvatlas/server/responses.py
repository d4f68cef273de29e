"""POST /v1/responses: the same answers in the shape of OpenAI's newer API; nothing is stored, so none goes on."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from kvatlas.server.answers import usage_of
from kvatlas.server.protocol import ChatRequest, Count, FirstFault, Generating
from kvatlas.service import RequestHandle


class InputPart(BaseModel):
    """A part of an input item; text is all that can be read."""

    model_config = ConfigDict(extra="ignore", strict=True)

    type: Literal["input_text", "output_text", "text"]
    text: str


class InputItem(BaseModel):
    """A message of the conversation."""

    model_config = ConfigDict(extra="ignore", strict=True)

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[InputPart], FirstFault]


class TextFormat(BaseModel):
    """What the text is to be, as `response_format` of the chat says it."""

    model_config = ConfigDict(extra="forbid", strict=True)

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None


class Text(BaseModel):
    """How the text is to be written."""

    model_config = ConfigDict(extra="forbid", strict=True)

    format: TextFormat | None = None


class Reasoning(BaseModel):
    """How much is to be thought; summaries are not written."""

    model_config = ConfigDict(extra="ignore", strict=True)

    effort: str | None = None


class ResponsesRequest(Generating):
    """POST /v1/responses."""

    silent: ClassVar[tuple[str, ...]] = (*Generating.silent, "include", "stream_options", "max_tool_calls")
    neutral: ClassVar[dict[str, tuple[Any, ...]]] = {**Generating.neutral, "n": (1,)}

    input: str | Annotated[list[InputItem], Field(min_length=1, fail_fast=True)]
    instructions: str | None = None
    max_output_tokens: Count | None = None
    text: Text | None = None
    reasoning: Reasoning | None = None

    @model_validator(mode="before")
    @classmethod
    def _messages_alone(cls, data: Any) -> Any:
        """Leave out the thinking of earlier answers, which clients send back; no chat template wants it."""
        if isinstance(data, dict) and isinstance(data.get("input"), list):
            items = [item for item in data["input"] if not (isinstance(item, dict) and item.get("type") == "reasoning")]
            return {**data, "input": items}
        return data

    def chat(self) -> ChatRequest:
        """The same as a chat."""
        items = [InputItem(role="user", content=self.input)] if isinstance(self.input, str) else self.input
        messages = [
            {
                "role": item.role,
                "content": item.content if isinstance(item.content, str) else "".join(p.text for p in item.content),
            }
            for item in items
        ]
        if self.instructions:
            messages.insert(0, {"role": "system", "content": self.instructions})
        asked: dict[str, Any] = {
            "messages": messages,
            "max_completion_tokens": self.max_output_tokens,
            "reasoning_effort": self.reasoning.effort if self.reasoning else None,
        }
        wanted = self.text.format if self.text else None
        if wanted is not None:
            schema = {"name": wanted.name or "", "schema": wanted.schema_ or {"type": "object"}}
            asked["response_format"] = {"type": wanted.type} | (
                {"json_schema": schema} if wanted.type == "json_schema" else {}
            )
        for name in Generating.model_fields:
            if name in self.model_fields_set and name != "stream_options":
                asked[name] = getattr(self, name)
        return ChatRequest(**asked)


class ResponsesShape:
    """The bodies of one response: whole, or as the events of a stream, of which each has a name and a number."""

    chat = True
    done = b""

    def __init__(self, number: str, created: int, model: str, asked: ResponsesRequest) -> None:
        self.number, self.count, self.asked = number, 0, asked
        self.head = {
            "id": f"resp_{number}",
            "object": "response",
            "created_at": created,
            "model": model,
            "error": None,
            "instructions": asked.instructions,
            "metadata": {},
            "parallel_tool_calls": False,
            "previous_response_id": None,
            "temperature": asked.temperature,
            "text": asked.text.model_dump(by_alias=True) if asked.text else {"format": {"type": "text"}},
            "tool_choice": "auto",
            "tools": [],
            "top_p": asked.top_p,
        }
        self.items: list[dict[str, Any]] = []

    def whole(self, handles: Sequence[RequestHandle]) -> dict[str, Any]:
        """The finished response."""
        (handle,) = handles
        thinking, answer = handle.written()
        cut = handle.reason() == "length"
        status = "incomplete" if cut else "completed"
        output = [self._reasoning(thinking, status)] if thinking else []
        if answer or not cut:
            output.append(self._message(answer, status))
        used = usage_of(handles)
        return {
            **self.head,
            "status": status,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "output": output,
            "usage": {
                "input_tokens": used["prompt_tokens"],
                "input_tokens_details": {"cached_tokens": 0},
                "output_tokens": used["completion_tokens"],
                "output_tokens_details": used["completion_tokens_details"],
                "total_tokens": used["total_tokens"],
            },
        }

    def begin(self, _: int) -> bytes:
        """The first events of a stream."""
        body = {**self.head, "status": "in_progress", "incomplete_details": None, "output": [], "usage": None}
        return self._event("response.created", response=body) + self._event("response.in_progress", response=body)

    def news(self, _: int, handle: RequestHandle, texts: tuple[str, str], *__: object) -> bytes:
        """What was written since: (thinking, answer)."""
        pieces = zip(("reasoning", "message"), texts, strict=True)
        return b"".join(self._delta(kind, text) for kind, text in pieces if text)

    def end(self, _: int, handle: RequestHandle) -> bytes:
        """The last events of a stream."""
        body = self.whole([handle])
        closed = self._close()
        name = "response.completed" if body["status"] == "completed" else "response.incomplete"
        return closed + self._event(name, response=body)

    def _delta(self, kind: str, text: str) -> bytes:
        events = b""
        if not self.items or self.items[-1]["type"] != kind:
            events = self._close()
            item = self._reasoning("", "in_progress") if kind == "reasoning" else self._message("", "in_progress")
            self.items.append(item)
            empty = {**item, "content": []}
            events += self._event("response.output_item.added", output_index=len(self.items) - 1, item=empty)
            events += self._event("response.content_part.added", part=item["content"][0], **self._place())
        part = self.items[-1]["content"][0]
        part["text"] += text
        name = f"response.{part['type']}.delta"
        more: dict[str, Any] = {"logprobs": []} if kind == "message" else {}
        return events + self._event(name, delta=text, **self._place(), **more)

    def _close(self) -> bytes:
        if not self.items:
            return b""
        item = self.items[-1]
        item["status"] = "completed"
        part = item["content"][0]
        more: dict[str, Any] = {"logprobs": []} if item["type"] == "message" else {}
        return (
            self._event(f"response.{part['type']}.done", text=part["text"], **self._place(), **more)
            + self._event("response.content_part.done", part=part, **self._place())
            + self._event("response.output_item.done", output_index=len(self.items) - 1, item=item)
        )

    def _place(self) -> dict[str, Any]:
        return {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1, "content_index": 0}

    def _event(self, name: str, **data: Any) -> bytes:
        body = {"type": name, "sequence_number": self.count, **data}
        self.count += 1
        return f"event: {name}\ndata: {json.dumps(body, separators=(',', ':'))}\n\n".encode()

    def _reasoning(self, text: str, status: str) -> dict[str, Any]:
        content = [{"type": "reasoning_text", "text": text}]
        return {"type": "reasoning", "id": f"rs_{self.number}", "summary": [], "content": content, "status": status}

    def _message(self, text: str, status: str) -> dict[str, Any]:
        content = [{"type": "output_text", "text": text, "annotations": [], "logprobs": []}]
        return {
            "type": "message", "id": f"msg_{self.number}", "role": "assistant", "status": status, "content": content
        }  # fmt: skip
