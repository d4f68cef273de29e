"""What clients may send, named as in OpenAI's API: honoured, passed over where it asks for nothing, or refused."""

from __future__ import annotations

import json
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints, model_validator

#: More new tokens than this nobody means.
MOST_TOKENS = 1_000_000
MOST_CHOICES = 128
#: Prompts of one request, as OpenAI has it.
MOST_PROMPTS = 2048

Seed = Annotated[int, Field(ge=-(2**63), lt=2**63)]
Count = Annotated[int, Field(ge=1, le=MOST_TOKENS)]
# Lists end at their first fault: a list of a million faults would be a million sentences.
FirstFault = Field(fail_fast=True)
Tokens = Annotated[list[int], FirstFault]
StopText = Annotated[str, StringConstraints(min_length=1, max_length=1000)]


class StreamOptions(BaseModel):
    """Whether the last piece of a stream carries the usage."""

    model_config = ConfigDict(extra="forbid", strict=True)

    include_usage: bool = False


class TextPart(BaseModel):
    """A part of a message; text is all that can be read."""

    model_config = ConfigDict(extra="forbid", strict=True)

    type: Literal["text"]
    text: str


class Message(BaseModel):
    """One message of a conversation; of answers that are sent back only the content is read, not the thinking."""

    model_config = ConfigDict(extra="forbid", strict=True)

    #: What may stand beside the content and is passed over.
    silent: ClassVar[tuple[str, ...]] = ("name", "reasoning_content", "reasoning", "refusal", "annotations")

    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[TextPart], FirstFault]

    @model_validator(mode="before")
    @classmethod
    def _known(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        return {name: value for name, value in data.items() if value not in (None, []) and name not in cls.silent}

    @property
    def text(self) -> str:
        """The content as one text."""
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class Generating(BaseModel):
    """What both endpoints share. None and the neutral value mean that nothing was asked for."""

    model_config = ConfigDict(extra="forbid", strict=True)

    #: Fields that are known and not honoured, with the values that ask for nothing; those without are never refused.
    neutral: ClassVar[dict[str, tuple[Any, ...]]] = {
        "frequency_penalty": (0, 0.0),
        "presence_penalty": (0, 0.0),
        "logit_bias": ({},),
        "logprobs": (False,),
        "top_logprobs": (),
        "best_of": (1,),
        "echo": (False,),
        "suffix": ("",),
        "tools": ([],),
        "tool_choice": ("none", "auto"),
        "functions": ([],),
        "function_call": ("none", "auto"),
        "parallel_tool_calls": (True, False),
        "response_format": ({"type": "text"},),
        "modalities": (["text"],),
        "reasoning_effort": (),
    }
    #: Words about the request that change no answer.
    silent: ClassVar[tuple[str, ...]] = (
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
    )

    model: str | None = None
    n: Annotated[int, Field(ge=1, le=MOST_CHOICES)] | None = None
    seed: Seed | None = None
    max_tokens: Count | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0, lt=2**31)] | None = None
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
            if value is not None and not any(type(value) is type(each) and value == each for each in neutral):
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

    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    max_completion_tokens: Count | None = None


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
