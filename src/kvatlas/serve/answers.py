"""Bodies of answers as OpenAI's API shapes them: whole answers, pieces of streams, errors."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from kvatlas.serve.service import RequestHandle


class AnswerFormat:
    """The bodies of one endpoint's answer `number`: `chat` or not, about the model of that name."""

    #: The last event of a stream.
    done = b"data: [DONE]\n\n"

    def __init__(self, chat: bool, number: str, created: int, model: str) -> None:
        self.chat = chat
        self.head = {"id": number, "created": created, "model": model}

    def whole(self, handles: Sequence[RequestHandle]) -> dict[str, Any]:
        """The body of a whole answer."""
        kind = "chat.completion" if self.chat else "text_completion"
        choices = [self._choice(index, handle) for index, handle in enumerate(handles)]
        return {**self.head, "object": kind, "choices": choices, "usage": usage_of(handles)}

    def _choice(self, index: int, handle: RequestHandle) -> dict[str, Any]:
        thinking, answer = handle.text()
        logprobs = self._logprobs(handle, handle.generation.result().tokens, 0, 0, bool(answer))
        about = {"finish_reason": handle.reason(), "logprobs": logprobs, "kvatlas": _cache_usage(handle)}
        if not self.chat:
            return {"index": index, "text": answer, **about}
        message = {"role": "assistant", "content": answer, "reasoning_content": thinking or None, "refusal": None}
        return {"index": index, "message": message, **about}

    def piece(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        """One event of a stream."""
        kind = "chat.completion.chunk" if self.chat else "text_completion"
        return event({**self.head, "object": kind, "choices": choices, **more})

    def begin(self, index: int) -> bytes:
        """The first event of a chat's choice."""
        delta = {"role": "assistant", "content": ""}
        return self.piece([{"index": index, "delta": delta, "finish_reason": None}])

    def news(
        self, index: int, handle: RequestHandle, texts: tuple[str, str], tokens: Sequence[int], sent: int, offset: int
    ) -> bytes:
        """The event of a choice for its new (thinking, answer), of all new `tokens` those behind the first `sent`.

        The answer goes on at character `offset`.
        """
        thinking, answer = texts
        about = {"finish_reason": None, "logprobs": self._logprobs(handle, tokens, sent, offset, bool(answer))}
        if not self.chat:
            return self.piece([{"index": index, "text": answer, **about}])
        named = {"reasoning_content": thinking, "content": answer}
        delta = {name: text for name, text in named.items() if text}
        return self.piece([{"index": index, "delta": delta, **about}])

    def end(self, index: int, handle: RequestHandle) -> bytes:
        """The last event of a choice."""
        about = {"finish_reason": handle.reason(), "kvatlas": _cache_usage(handle)}
        return self.piece([{"index": index, **({"delta": {}} if self.chat else {"text": ""}), **about}])

    def _logprobs(
        self, handle: RequestHandle, tokens: Sequence[int], sent: int, offset: int, answered: bool
    ) -> dict[str, Any] | None:
        """Log-probabilities of the answer's new tokens behind the first `sent`, without thinking and the end token."""
        steerer, model = handle.steerer, handle.model
        if steerer is None or handle.ask.steering.top_logprobs is None:
            return None
        end = len(tokens) - int(bool(tokens) and tokens[-1] in model.stops)
        noted = steerer.logprobs[max(sent, _answer_start(handle, tokens)) : end] if answered else []

        def text(token: int) -> str:
            return str(model.tokenizer.decode([token], skip_special_tokens=False))

        def entry(token: int, logprob: float) -> dict[str, Any]:
            return {"token": text(token), "logprob": logprob, "bytes": list(text(token).encode())}

        if self.chat:
            content = [
                {**entry(token.token, token.logprob), "top_logprobs": [entry(*likely) for likely in token.top]}
                for token in noted
            ]
            return {"content": content, "refusal": None}
        texts = [text(token.token) for token in noted]
        return {
            "tokens": texts,
            "token_logprobs": [token.logprob for token in noted],
            "top_logprobs": [{text(token): value for token, value in likely.top} for likely in noted],
            "text_offset": [offset + sum(map(len, texts[:number])) for number in range(len(texts))],
        }


def _answer_start(handle: RequestHandle, tokens: Sequence[int]) -> int:
    """The first new token of the answer."""
    tags = handle.model.thinking
    if not (handle.ask.split and tags.close):
        return 0
    if tags.token is not None:
        return tokens.index(tags.token) + 1 if tags.token in tokens else 0
    parts = tags.split(tokens)
    return parts[1] if parts else 0


def event(data: dict[str, Any]) -> bytes:
    """A server-sent event."""
    return f"data: {json.dumps(data, separators=(',', ':'))}\n\n".encode()


def _cache_usage(handle: RequestHandle) -> dict[str, Any]:
    """Tokens that the answer's cache held: our addition to a choice."""
    usage = handle.generation.result().usage
    return {
        "peak_kv_tokens": usage.peak_kv_tokens,
        "mean_kv_tokens": round(usage.mean_kv_tokens, 1),
        "compressions": usage.compressions,
    }


def usage_of(handles: Sequence[RequestHandle]) -> dict[str, Any]:
    """Tokens of all choices; a prompt that several answer counts once."""
    prompts = sum(len(prompt) for prompt in dict.fromkeys(handle.ask.prompt for handle in handles))
    output = sum(handle.generation.result().usage.output_tokens for handle in handles)
    return {
        "prompt_tokens": prompts,
        "completion_tokens": output,
        "total_tokens": prompts + output,
        "completion_tokens_details": {"reasoning_tokens": sum(map(_reasoning_tokens, handles))},
    }


def _reasoning_tokens(handle: RequestHandle) -> int:
    """The engine does not know that a prompt closes thinking: the text says whether there was any."""
    closed = handle.ask.opened is False and not handle.text()[0]
    return 0 if closed else handle.generation.result().usage.thinking_tokens


def error(message: str, kind: str = "invalid_request_error", param: str | None = None, code: str | None = None) -> Any:
    """The body of an error; half characters of the request, which JSON can spell and UTF-8 cannot, are replaced."""

    def whole(text: str) -> str:
        return text.encode("utf-8", "replace").decode()

    name = None if param is None else whole(param)
    return {"error": {"message": whole(message), "type": kind, "param": name, "code": code}}
