"""What clients get, as OpenAI's API shapes it: whole answers, pieces of streams, errors."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvatlas.service import RequestHandle, TokenLogprob

if TYPE_CHECKING:
    from kvatlas.engine import Generation


class Shape:
    """The bodies of one endpoint's answer `number`: `chat` or not, about the model of that name."""

    #: The last event of a stream.
    done = b"data: [DONE]\n\n"

    def __init__(self, chat: bool, number: str, created: int, model: str) -> None:
        self.chat = chat
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
        named = {"reasoning_content": thinking, "content": answer}
        delta = {name: text for name, text in named.items() if text}
        return self.piece([{"index": index, "delta": delta, **about}])

    def _logprobs(
        self, handle: RequestHandle, tokens: Sequence[int], told: int, offset: int, answered: bool
    ) -> dict[str, Any] | None:
        if handle.ask.steering.top_logprobs is None:
            return None
        logprobs = _noted(handle, tokens, told, answered)
        return _chat_logprobs(handle, logprobs) if self.chat else _completion_logprobs(handle, logprobs, offset)

    def end(self, index: int, handle: RequestHandle) -> bytes:
        """The last event of a choice."""
        about = {"finish_reason": handle.reason(), "kvatlas": cache_of(handle.generation.result())}
        return self.piece([{"index": index, **({"delta": {}} if self.chat else {"text": ""}), **about}])


def _noted(handle: RequestHandle, tokens: Sequence[int], told: int, answered: bool) -> Sequence[TokenLogprob]:
    """What was noted of these new tokens behind the first `told`, without thinking and the end token.

    `answered` says whether anything of an answer is there at all.
    """
    if handle.steerer is None or not answered:
        return []
    end = len(tokens) - int(bool(tokens) and tokens[-1] in handle.model.stops)
    return handle.steerer.logprobs[max(told, _answer(handle, tokens)) : end]


def _answer(handle: RequestHandle, tokens: Sequence[int]) -> int:
    """The first new token of the answer."""
    tags = handle.model.thinking
    if not (handle.ask.split and tags.close):
        return 0
    if tags.token is not None:
        return tokens.index(tags.token) + 1 if tags.token in tokens else 0
    parts = tags.split(tokens)
    return parts[1] if parts else 0


def _chat_logprobs(handle: RequestHandle, tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
    """The `logprobs` of a chat's choice."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        text = _text(handle, token)
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}

    content = [
        {**entry(token.token, token.logprob), "top_logprobs": [entry(*likely) for likely in token.top]}
        for token in tokens
    ]
    return {"content": content, "refusal": None}


def _completion_logprobs(handle: RequestHandle, tokens: Sequence[TokenLogprob], offset: int) -> dict[str, Any]:
    """The `logprobs` of a completion's choice, whose text begins at `offset`."""
    texts = [_text(handle, token.token) for token in tokens]
    offsets = [offset + sum(map(len, texts[:number])) for number in range(len(texts))]
    return {
        "tokens": texts,
        "token_logprobs": [token.logprob for token in tokens],
        "top_logprobs": [{_text(handle, token): value for token, value in likely.top} for likely in tokens],
        "text_offset": offsets,
    }


def _text(handle: RequestHandle, token: int) -> str:
    return str(handle.model.tokenizer.decode([token], skip_special_tokens=False))


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
