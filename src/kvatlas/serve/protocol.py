"""The form of OpenAI's API: the fields of requests, supported, ignored if neutral, or refused by name; and replies.

Replies are whole answers, pieces of streams, and errors.
"""

import json
import time
import uuid
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints, model_validator

from kvatlas.serve.service import RequestHandle

MAX_NEW_TOKENS = 1_000_000
MAX_CHOICES = 128

Count = Annotated[int, Field(ge=1, le=MAX_NEW_TOKENS)]
# Only the first fault of a list is reported.
FirstFault = Field(fail_fast=True)
Tokens = Annotated[list[int], FirstFault]
#: Prompts of one request, as in OpenAI's API.
AtMost2048 = Field(max_length=2048)
StopText = Annotated[str, StringConstraints(min_length=1, max_length=1000)]


class RequestPart(BaseModel):
    """An object of a request: its fields have their exact types, and no other names."""

    model_config = ConfigDict(extra="forbid", strict=True)


class StreamOptions(RequestPart):
    """The request for usage in the last piece of a stream. `include_obfuscation` has no effect."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class TextPart(RequestPart):
    """A text part of a message."""

    type: Literal["text"]
    text: str


class ChatMessage(RequestPart):
    """One message of a conversation; the thinking of earlier answers is ignored."""

    ignored: ClassVar[tuple[str, ...]] = ("name", "reasoning_content", "reasoning", "refusal", "annotations")

    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[TextPart], FirstFault]

    @model_validator(mode="before")
    @classmethod
    def _known(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        content = data.get("content")
        for block in content if isinstance(content, list) else ():
            if isinstance(block, dict) and block.get("type", "text") != "text":
                raise ValueError(f"messages have a part of type {block['type']!r}; only text is read")
        return {name: value for name, value in data.items() if value not in (None, []) and name not in cls.ignored}

    def for_template(self) -> dict[str, str]:
        """Return the message in the form of chat templates."""
        role = "system" if self.role == "developer" else self.role
        if isinstance(self.content, str):
            return {"role": role, "content": self.content}
        return {"role": role, "content": "".join(block.text for block in self.content)}


class Generating(RequestPart):
    """Fields of both endpoints; None and neutral values have no effect."""

    #: Unsupported fields of the API, with their neutral values.
    neutral: ClassVar[dict[str, tuple[Any, ...]]] = {
        "best_of": (1,),
        "frequency_penalty": (0, 0.0),
        "presence_penalty": (0, 0.0),
        "logit_bias": ({},),
        "min_p": (0, 0.0),
        "repetition_penalty": (1, 1.0),
        "ignore_eos": (False,),
        "echo": (False,),
        "logprobs": (False, 0),
        "top_logprobs": (0,),
        "suffix": ("",),
        "functions": ([],),
        "function_call": ("none", "auto"),
        "tools": ([],),
        "tool_choice": ("none", "auto"),
        "parallel_tool_calls": (True, False),
        "response_format": ({"type": "text"},),
        "modalities": (["text"],),
    }
    #: Fields that do not change an answer.
    ignored: ClassVar[tuple[str, ...]] = (
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "return_token_ids",
    )

    model: str | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    max_tokens: Count | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    #: Off is 0, and -1 as for vLLM and SGLang.
    top_k: Annotated[int, Field(ge=-1, lt=2**31), AfterValidator(lambda value: max(value, 0))] | None = None
    stop: StopText | Annotated[list[StopText], Field(max_length=16)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    @model_validator(mode="before")
    @classmethod
    def _known(cls, data: Any) -> Any:
        """Drop neutral and ignored fields; refuse unsupported ones."""
        if not isinstance(data, dict):
            return data
        try:
            json.dumps(data, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise ValueError("texts hold unpaired surrogates, which are no characters") from error
        for name, neutral in cls.neutral.items():
            value = data.get(name)
            # False equals 0 in Python, but not in JSON.
            if value is not None and not any(type(value) is type(default) and value == default for default in neutral):
                raise ValueError(f"{name} is not supported")
        return {name: value for name, value in data.items() if name not in {*cls.neutral, *cls.ignored}}

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop texts."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


class ChatRequest(Generating):
    """POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Field(min_length=1, fail_fast=True)]
    max_completion_tokens: Count | None = None
    #: Variables of the chat template; the second field takes any, such as `enable_thinking`.
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class CompletionRequest(Generating):
    """POST /v1/completions: one prompt or several, as texts or as token ids."""

    prompt: str | Annotated[list[str], FirstFault] | Tokens | Annotated[list[Tokens], FirstFault, AtMost2048]


# -- replies -----------------------------------------------------------------------------------------------------------


class AnswerFormat:
    """The bodies of one answer, as a chat completion or a completion.

    Each prompt has `choices` answers, which follow each other.
    """

    #: The last event of a stream.
    done = b"data: [DONE]\n\n"

    def __init__(self, chat: bool, model: str, choices: int) -> None:
        self.chat = chat
        self.choices = choices
        prefix = "chatcmpl" if chat else "cmpl"
        self.head = {"id": f"{prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}

    def whole(self, handles: Sequence[RequestHandle]) -> dict[str, Any]:
        """Return the body of a whole answer."""
        kind = "chat.completion" if self.chat else "text_completion"
        choices = [self._choice(index, handle) for index, handle in enumerate(handles)]
        return {**self.head, "object": kind, "choices": choices, "usage": self.usage(handles)}

    def _choice(self, index: int, handle: RequestHandle) -> dict[str, Any]:
        thinking, answer = handle.text()
        about = {"finish_reason": handle.reason(), "logprobs": None, "kvatlas": _cache_usage(handle)}
        message = {"role": "assistant", "content": answer, "reasoning_content": thinking or None, "refusal": None}
        content: dict[str, Any] = {"message": message} if self.chat else {"text": answer}
        return {"index": index, **content, **about}

    def piece(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        """Return one event of a stream."""
        kind = "chat.completion.chunk" if self.chat else "text_completion"
        return event_bytes({**self.head, "object": kind, "choices": choices, **more})

    def begin_event(self, index: int) -> bytes:
        """Return the first event of a choice of a chat."""
        delta = {"role": "assistant", "content": ""}
        return self.piece([{"index": index, "delta": delta, "finish_reason": None}])

    def end_event(self, index: int, handle: RequestHandle) -> bytes:
        """Return the last event of a choice."""
        return self.delta_event(index, "", "", finish_reason=handle.reason(), kvatlas=_cache_usage(handle))

    def delta_event(self, index: int, thinking: str, answer: str, **about: Any) -> bytes:
        """Return the event for new text of a choice."""
        named = {"reasoning_content": thinking, "content": answer}
        delta = {name: text for name, text in named.items() if text}
        content: dict[str, Any] = {"delta": delta} if self.chat else {"text": answer}
        return self.piece([{"index": index, **content, **about}])

    def usage(self, handles: Sequence[RequestHandle]) -> dict[str, Any]:
        """Return the numbers of tokens of all choices; a prompt with several choices counts once."""
        prompt_tokens = sum(len(handle.ask.prompt) for handle in handles[:: self.choices])
        output_tokens = 0
        reasoning_tokens = 0
        for handle in handles:
            usage = handle.generation.result().usage
            output_tokens += usage.output_tokens
            # The engine does not know if a text is split, nor if the prompt closes thinking.
            if handle.text()[0]:
                reasoning_tokens += usage.thinking_tokens

        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": output_tokens,
            "total_tokens": prompt_tokens + output_tokens,
            "completion_tokens_details": {"reasoning_tokens": reasoning_tokens},
        }


def event_bytes(data: dict[str, Any]) -> bytes:
    """Return a server-sent event."""
    return f"data: {json.dumps(data, separators=(',', ':'))}\n\n".encode()


def _cache_usage(handle: RequestHandle) -> dict[str, Any]:
    """Return the numbers of cached tokens, an addition of kvatlas to a choice."""
    usage = handle.generation.result().usage
    return {
        "peak_kv_tokens": usage.peak_kv_tokens,
        "mean_kv_tokens": round(usage.mean_kv_tokens, 1),
        "compressions": usage.compressions,
    }


def error_body(
    message: str, kind: str = "invalid_request_error", param: str | None = None, code: str | None = None
) -> Any:
    """Return the body of an error; unpaired surrogates of the request are replaced."""
    body = {"message": message, "type": kind, "param": param, "code": code}
    return {"error": {name: text and text.encode("utf-8", "replace").decode() for name, text in body.items()}}
