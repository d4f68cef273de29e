"""What clients get, as OpenAI's API shapes it: whole answers, pieces of streams, errors."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvatlas.server.logprobs import as_chat, as_completion, noted
from kvatlas.server.tools import CallText, split_calls
from kvatlas.service import RequestHandle

if TYPE_CHECKING:
    from kvatlas.engine import Generation


class Shape:
    """The bodies of one endpoint's answer `number`: `chat` or not, about the model of that name."""

    #: The last event of a stream.
    done = b"data: [DONE]\n\n"

    def __init__(self, chat: bool, number: str, created: int, model: str, calls: bool = False) -> None:
        self.chat, self.calls = chat, calls
        self._written: dict[int, CallText] = defaultdict(CallText)
        self.head = {"id": number, "created": created, "model": model}

    def choice(self, index: int, handle: RequestHandle) -> dict[str, Any]:
        """A finished answer."""
        generation = handle.generation.result()
        thinking, answer = handle.written()
        about: dict[str, Any] = {
            "finish_reason": handle.reason(),
            "logprobs": self._logprobs(handle, generation.tokens, 0, 0, bool(answer)),
            "kvatlas": cache_of(generation),
        }
        if not self.chat:
            return {"index": index, "text": answer, **about}
        message: dict[str, Any] = {"role": "assistant", "content": answer, "reasoning_content": thinking or None}
        if self.calls:
            text, calls = split_calls(answer)
            if calls:
                message |= {"content": text or None, "tool_calls": calls}
                about["finish_reason"] = "tool_calls"
        return {"index": index, "message": {**message, "refusal": None}, **about}

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

    def news(
        self, index: int, handle: RequestHandle, texts: tuple[str, str], tokens: Sequence[int], told: int, offset: int
    ) -> bytes:
        """What was written since: (thinking, answer), of all new `tokens` those behind the first `told`.

        The answer goes on at character `offset`.
        """
        thinking, answer = texts
        about = {"finish_reason": None, "logprobs": self._logprobs(handle, tokens, told, offset, bool(answer))}
        if not self.chat:
            return self.piece([{"index": index, "text": answer, **about}])
        if self.calls:
            answer = self._written[index].push(answer)
        named = {"reasoning_content": thinking, "content": answer}
        delta = {name: text for name, text in named.items() if text}
        return self.piece([{"index": index, "delta": delta, **about}])

    def _logprobs(
        self, handle: RequestHandle, tokens: Sequence[int], told: int, offset: int, answered: bool
    ) -> dict[str, Any] | None:
        if handle.ask.steering.top_logprobs is None:
            return None
        logprobs = noted(handle, tokens, told, answered)
        return as_chat(handle, logprobs) if self.chat else as_completion(handle, logprobs, offset)

    def end(self, index: int, handle: RequestHandle) -> bytes:
        """The last event of a choice."""
        about: dict[str, Any] = {"finish_reason": handle.reason(), "kvatlas": cache_of(handle.generation.result())}
        if self.calls:
            text, calls = self._written[index].end()
            numbered = [{"index": number, **call} for number, call in enumerate(calls)]
            delta = {name: value for name, value in (("content", text), ("tool_calls", numbered)) if value}
            about["finish_reason"] = "tool_calls" if calls else handle.reason()
            return self.piece([{"index": index, "delta": delta, **about}])
        return self.piece([{"index": index, **({"delta": {}} if self.chat else {"text": ""}), **about}])


def event(data: dict[str, Any]) -> bytes:
    """A server-sent event."""
    return f"data: {json.dumps(data, separators=(',', ':'))}\n\n".encode()


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
        "completion_tokens_details": {"reasoning_tokens": sum(map(_reasoning_tokens, handles))},
    }


def _reasoning_tokens(handle: RequestHandle) -> int:
    """Of a prompt that closes thinking the engine knows nothing: what was written says whether there was any."""
    closed = handle.ask.opened is False and not handle.written()[0]
    return 0 if closed else handle.generation.result().usage.thinking_tokens


def error(message: str, kind: str = "invalid_request_error", param: str | None = None, code: str | None = None) -> Any:
    """The body of an error; half characters of the request, which JSON can spell and UTF-8 cannot, are replaced."""
    name = None if param is None else _whole(param)
    return {"error": {"message": _whole(message), "type": kind, "param": name, "code": code}}


def _whole(text: str) -> str:
    return text.encode("utf-8", "replace").decode()
