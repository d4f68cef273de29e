"""What clients may send, named as in OpenAI's API: honoured, passed over where it asks for nothing, or refused."""

from __future__ import annotations

import json
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints, model_validator

from kvatlas.server.tools import NamedTool, Tool, ToolCall

#: More new tokens than this nobody means.
MOST_TOKENS = 1_000_000
MOST_CHOICES = 128
#: Prompts of one request, as OpenAI has it.
MOST_PROMPTS = 2048

Seed = Annotated[int, Field(ge=-(2**63), lt=2**63)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Count = Annotated[int, Field(ge=1, le=MOST_TOKENS)]
# Lists end at their first fault: a list of a million faults would be a million sentences.
FirstFault = Field(fail_fast=True)
Tokens = Annotated[list[int], FirstFault]
StopText = Annotated[str, StringConstraints(min_length=1, max_length=1000)]


#: What of tools asks for nothing; only chats have them.
_TOOLS: dict[str, tuple[Any, ...]] = {
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
}


class StreamOptions(BaseModel):
    """Whether the last piece of a stream carries the usage. Pieces are never padded, as obfuscation would."""

    model_config = ConfigDict(extra="forbid", strict=True)

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class TextPart(BaseModel):
    """A part of a message; text is all that can be read."""

    model_config = ConfigDict(extra="forbid", strict=True)

    type: Literal["text"]
    text: str


class JsonSchema(BaseModel):
    """A JSON schema that an answer is to follow; it does so whether `strict` is asked for or not."""

    model_config = ConfigDict(extra="forbid", strict=True)

    name: str = ""
    description: str | None = None
    schema_: Annotated[dict[str, Any], Field(alias="schema")] = {"type": "object"}
    strict: bool | None = None


class ResponseFormat(BaseModel):
    """What an answer is to be: text, any JSON object, or JSON that follows a schema."""

    model_config = ConfigDict(extra="forbid", strict=True)

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _fits(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("response_format has a json_schema exactly where its type is json_schema")
        return self

    @property
    def schema_of_answer(self) -> dict[str, Any] | None:
        """The schema of the answer; None for text."""
        if self.json_schema is not None:
            return self.json_schema.schema_
        return {"type": "object"} if self.type == "json_object" else None


class Message(BaseModel):
    """One message of a conversation; of answers that are sent back only the content is read, not the thinking."""

    model_config = ConfigDict(extra="forbid", strict=True)

    #: What may stand beside the content and is passed over.
    silent: ClassVar[tuple[str, ...]] = ("name", "reasoning_content", "reasoning", "refusal", "annotations")

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[TextPart], FirstFault] = ""
    tool_calls: Annotated[list[ToolCall], Field(max_length=1024, fail_fast=True)] | None = None
    tool_call_id: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _known(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        return {name: value for name, value in data.items() if value not in (None, []) and name not in cls.silent}

    @model_validator(mode="after")
    def _says_something(self) -> Message:
        if "content" not in self.model_fields_set and not self.tool_calls:
            raise ValueError("content is missing in a message")
        if self.tool_calls and self.role != "assistant":
            raise ValueError("tool_calls stand in a message that is not the assistant's")
        return self

    def for_template(self) -> dict[str, Any]:
        """The message as chat templates read it."""
        role = "system" if self.role == "developer" else self.role
        calls = {"tool_calls": [call.for_template() for call in self.tool_calls]} if self.tool_calls else {}
        answers = {"tool_call_id": self.tool_call_id} if self.tool_call_id is not None else {}
        return {"role": role, "content": self.text, **calls, **answers}

    @property
    def text(self) -> str:
        """The content as one text."""
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class Generating(BaseModel):
    """What both endpoints share. None and the neutral value mean that nothing was asked for."""

    model_config = ConfigDict(extra="forbid", strict=True)

    #: Fields that are known and not honoured, with the values that ask for nothing; those without are never refused.
    neutral: ClassVar[dict[str, tuple[Any, ...]]] = {
        "best_of": (1,),
        "min_p": (0, 0.0),
        "repetition_penalty": (1, 1.0),
        "ignore_eos": (False,),
        "truncation": ("disabled",),
        "background": (False,),
        "echo": (False,),
        "suffix": ("",),
        "functions": ([],),
        "function_call": ("none", "auto"),
        **_TOOLS,
        "modalities": (["text"],),
    }
    #: Words about the request that change no answer.
    silent: ClassVar[tuple[str, ...]] = (
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
    )

    model: str | None = None
    n: Annotated[int, Field(ge=1, le=MOST_CHOICES)] | None = None
    seed: Seed | None = None
    max_tokens: Count | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    logit_bias: Annotated[dict[str, Annotated[float, Field(ge=-100, le=100)]], Field(max_length=1024)] | None = None
    stop: StopText | Annotated[list[StopText], Field(max_length=16)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    @model_validator(mode="before")
    @classmethod
    def _known(cls, data: Any) -> Any:
        """Leave out what asks for nothing; refuse what is known and not honoured."""
        if not isinstance(data, dict):
            return data
        try:
            json.dumps(data, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise ValueError("texts hold half characters, which JSON can spell and no text can hold") from error
        for name, neutral in cls.neutral.items():
            value = data.get(name)
            # False equals 0 in Python, and means something else here.
            if value is not None and not any(type(value) is type(default) and value == default for default in neutral):
                raise ValueError(f"{name} is not supported")
        left_out = {*cls.neutral, *cls.silent}
        return {name: value for name, value in data.items() if name not in left_out}

    @model_validator(mode="after")
    def _fits(self) -> Generating:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is given without stream")
        return self

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop texts."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


class ChatRequest(Generating):
    """POST /v1/chat/completions."""

    neutral: ClassVar[dict[str, tuple[Any, ...]]] = {
        name: values for name, values in Generating.neutral.items() if name not in _TOOLS
    }

    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    response_format: ResponseFormat | None = None
    #: A value for the chat template.
    reasoning_effort: str | None = None
    #: Further ones, such as `enable_thinking`.
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Annotated[list[Tool], Field(max_length=128, fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    #: The model calls as many as it likes, unless it has to call one.
    parallel_tool_calls: bool | None = None

    @model_validator(mode="after")
    def _likeliest(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs is given without logprobs")
        if not self.tools and self.tool_choice not in (None, "none", "auto"):
            raise ValueError("tool_choice is given without tools")
        if self.tools and self.tool_choice != "none" and self.wanted_schema is not None:
            raise ValueError("response_format is given with tools, of which a call would not keep to it")
        return self

    @property
    def wanted_schema(self) -> dict[str, Any] | None:
        """The schema of the answer; None for text."""
        return self.response_format.schema_of_answer if self.response_format else None

    @property
    def offered(self) -> list[Tool]:
        """The tools that may be called."""
        return [] if self.tool_choice == "none" else self.tools or []

    @property
    def wanted_logprobs(self) -> int | None:
        """How many of the likeliest tokens are told beside the drawn one; None for no log-probabilities."""
        return (self.top_logprobs or 0) if self.logprobs else None


def _not_too_many(value: Any) -> Any:
    if isinstance(value, list) and len(value) > MOST_PROMPTS and not isinstance(value[0], int):
        raise ValueError(f"prompt has {len(value):,} prompts; valid are up to {MOST_PROMPTS:,}")
    return value


class CompletionRequest(Generating):
    """POST /v1/completions: one prompt or several, as texts or as token ids."""

    prompt: Annotated[
        str | Annotated[list[str], FirstFault] | Tokens | Annotated[list[Tokens], FirstFault],
        BeforeValidator(_not_too_many),
    ]
    logprobs: Annotated[int, Field(ge=0, le=5)] | None = None
