"""What clients get, as OpenAI's API shapes it: whole answers, pieces of streams, errors."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvatlas.service import RequestHandle, written

if TYPE_CHECKING:
    from kvatlas.engine import Generation


class Shape:
    """The bodies of one endpoint's answer `number`: `chat` or not, about the model of that name."""

    def __init__(self, chat: bool, number: str, created: int, model: str) -> None:
        self.chat = chat
        self.head = {"id": number, "created": created, "model": model}

    def choice(self, index: int, handle: RequestHandle) -> dict[str, Any]:
        """A finished answer."""
        generation = handle.generation.result()
        thinking, answer = written(handle.model, generation.tokens, handle.ask.stop, handle.ask.split)
        about = {"finish_reason": handle.reason(), "logprobs": None, "kvatlas": cache_of(generation)}
        if not self.chat:
            return {"index": index, "text": answer, **about}
        message = {"role": "assistant", "content": answer, "reasoning_content": thinking or None, "refusal": None}
        return {"index": index, "message": message, **about}

    def whole(self, handles: Sequence[RequestHandle]) -> dict[str, Any]:
        """The body of a whole answer."""
        kind = "chat.completion" if self.chat else "text_completion"
        choices = [self.choice(index, handle) for index, handle in enumerate(handles)]
        return {**self.head, "object": kind, "choices": choices, "usage": usage_of(handles)}

    def piece(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        """One event of a stream."""
        kind = "chat.completion.chunk" if self.chat else "text_completion"
        return event({**self.head, "object": kind, "choices": choices, **more})

    def begin(self, index: int) -> bytes:
        """The first event of a chat's choice; completions have none."""
        if not self.chat:
            return b""
        delta = {"role": "assistant", "content": ""}
        return self.piece([{"index": index, "delta": delta, "finish_reason": None}])

    def news(self, index: int, thinking: str, answer: str) -> bytes:
        """What was written since."""
        if not self.chat:
            return self.piece([{"index": index, "text": answer, "finish_reason": None}])
        texts = {"reasoning_content": thinking, "content": answer}
        delta = {name: text for name, text in texts.items() if text}
        return self.piece([{"index": index, "delta": delta, "finish_reason": None}])

    def end(self, index: int, handle: RequestHandle) -> bytes:
        """The last event of a choice."""
        about = {"finish_reason": handle.reason(), "kvatlas": cache_of(handle.generation.result())}
        return self.piece([{"index": index, **({"delta": {}} if self.chat else {"text": ""}), **about}])


def event(data: dict[str, Any]) -> bytes:
    """A server-sent event."""
    return f"data: {json.dumps(data, separators=(',', ':'))}\n\n".encode()


#: The last event of every stream.
DONE = b"data: [DONE]\n\n"


def cache_of(generation: Generation[Any]) -> dict[str, Any]:
    """What the answer's cache held: our addition to a choice."""
    usage = generation.usage
    return {
        "peak_kv_tokens": usage.peak_kv_tokens,
        "mean_kv_tokens": round(usage.mean_kv_tokens, 1),
        "compressions": usage.compressions,
    }


def usage_of(handles: Sequence[RequestHandle]) -> dict[str, Any]:
    """Tokens of all choices; a prompt that several answer counts once."""
    usages = [handle.generation.result().usage for handle in handles]
    prompts = sum(len(prompt) for prompt in dict.fromkeys(handle.ask.prompt for handle in handles))
    written_tokens = sum(usage.output_tokens for usage in usages)
    return {
        "prompt_tokens": prompts,
        "completion_tokens": written_tokens,
        "total_tokens": prompts + written_tokens,
        "completion_tokens_details": {"reasoning_tokens": sum(usage.thinking_tokens for usage in usages)},
    }


def error(message: str, kind: str = "invalid_request_error", param: str | None = None, code: str | None = None) -> Any:
    """The body of an error; half characters of the request, which JSON can spell and UTF-8 cannot, are replaced."""
    name = None if param is None else _whole(param)
    return {"error": {"message": _whole(message), "type": kind, "param": name, "code": code}}


def _whole(text: str) -> str:
    return text.encode("utf-8", "replace").decode()
