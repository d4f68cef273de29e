"""Bodies of answers in the form of OpenAI's API: whole answers, pieces of streams, errors."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from kvatlas.serve.service import RequestHandle


class AnswerFormat:
    """The bodies of one answer, as a chat completion or a completion; `answer_id` is its id for the client.

    Each prompt has `choices` answers, which follow each other.
    """

    #: The last event of a stream.
    done = b"data: [DONE]\n\n"

    def __init__(self, chat: bool, answer_id: str, created: int, model: str, choices: int) -> None:
        self.chat = chat
        self.choices = choices
        self.head = {"id": answer_id, "created": created, "model": model}

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
