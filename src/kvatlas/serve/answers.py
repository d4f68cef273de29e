"""Bodies of answers in the form of OpenAI's API: whole answers, pieces of streams, errors."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from kvatlas.serve.service import RequestHandle


class AnswerFormat:
    """The bodies of the answer with the id `number` of the model `model`, as a chat completion or a completion."""

    #: The last event of a stream.
    done = b"data: [DONE]\n\n"

    def __init__(self, chat: bool, number: str, created: int, model: str) -> None:
        self.chat = chat
        self.head = {"id": number, "created": created, "model": model}

    def whole(self, handles: Sequence[RequestHandle]) -> dict[str, Any]:
        """Return the body of a whole answer."""
        kind = "chat.completion" if self.chat else "text_completion"
        choices = [self._choice(index, handle) for index, handle in enumerate(handles)]
        return {**self.head, "object": kind, "choices": choices, "usage": usage_of(handles)}

    def _choice(self, index: int, handle: RequestHandle) -> dict[str, Any]:
        thinking, answer = handle.text()
        logprobs = self._logprobs(handle, handle.generation.result().tokens, 0, 0, bool(answer))
        about = {"finish_reason": handle.reason(), "logprobs": logprobs, "kvatlas": _cache_usage(handle)}
        message = {"role": "assistant", "content": answer, "reasoning_content": thinking or None, "refusal": None}
        return {"index": index, **({"message": message} if self.chat else {"text": answer}), **about}

    def piece(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        """Return one event of a stream."""
        kind = "chat.completion.chunk" if self.chat else "text_completion"
        return event({**self.head, "object": kind, "choices": choices, **more})

    def begin(self, index: int) -> bytes:
        """Return the first event of a choice of a chat."""
        delta = {"role": "assistant", "content": ""}
        return self.piece([{"index": index, "delta": delta, "finish_reason": None}])

    def news(
        self, index: int, handle: RequestHandle, texts: tuple[str, str], tokens: Sequence[int], sent: int, offset: int
    ) -> bytes:
        """Return the event for new `texts` (thinking, answer) of a choice.

        `tokens` are all new tokens, of which the first `sent` are sent; the answer goes on at character `offset`.
        """
        logprobs = self._logprobs(handle, tokens, sent, offset, bool(texts[1]))
        return self._delta(index, *texts, finish_reason=None, logprobs=logprobs)

    def end(self, index: int, handle: RequestHandle) -> bytes:
        """Return the last event of a choice."""
        return self._delta(index, "", "", finish_reason=handle.reason(), kvatlas=_cache_usage(handle))

    def _delta(self, index: int, thinking: str, answer: str, **about: Any) -> bytes:
        named = {"reasoning_content": thinking, "content": answer}
        delta = {name: text for name, text in named.items() if text}
        return self.piece([{"index": index, **({"delta": delta} if self.chat else {"text": answer}), **about}])

    def _logprobs(
        self, handle: RequestHandle, tokens: Sequence[int], sent: int, offset: int, answered: bool
    ) -> dict[str, Any] | None:
        """Return log-probabilities of the answer's tokens after the first `sent`, without thinking and end token."""
        recorder, model = handle.recorder, handle.model
        if recorder is None:
            return None
        parts = model.split(tokens) if handle.ask.split and model.thinking.close else None
        start, end = parts[1] if parts else 0, len(tokens) - int(bool(tokens) and tokens[-1] in model.stops)
        noted = recorder.logprobs[max(sent, start) : end] if answered else []

        def text(token: int) -> str:
            return str(model.tokenizer.decode([token], skip_special_tokens=False))

        def entry(token: int, logprob: float) -> dict[str, Any]:
            return {"token": text(token), "logprob": logprob, "bytes": list(text(token).encode())}

        if self.chat:
            content = [
                {**entry(token, logprob), "top_logprobs": [entry(*likely) for likely in top]}
                for token, logprob, top in noted
            ]
            return {"content": content, "refusal": None}
        texts = [text(token) for token, *_ in noted]
        return {
            "tokens": texts,
            "token_logprobs": [logprob for _, logprob, _ in noted],
            "top_logprobs": [{text(token): value for token, value in top} for *_, top in noted],
            "text_offset": [offset + sum(map(len, texts[:number])) for number in range(len(texts))],
        }


def event(data: dict[str, Any]) -> bytes:
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


def usage_of(handles: Sequence[RequestHandle]) -> dict[str, Any]:
    """Return the numbers of tokens of all choices; a prompt with several answers counts once."""
    usages = [handle.generation.result().usage for handle in handles]
    prompts = sum(len(prompt) for prompt in dict.fromkeys(handle.ask.prompt for handle in handles))
    output = sum(usage.output_tokens for usage in usages)
    # If the prompt closes thinking the engine does not know it; the text then has no thinking.
    thought = [handle.ask.opened is not False or handle.text()[0] for handle in handles]
    reasoning = sum(usage.thinking_tokens for usage, some in zip(usages, thought, strict=True) if some)
    return {
        "prompt_tokens": prompts,
        "completion_tokens": output,
        "total_tokens": prompts + output,
        "completion_tokens_details": {"reasoning_tokens": reasoning},
    }


def error(message: str, kind: str = "invalid_request_error", param: str | None = None, code: str | None = None) -> Any:
    """Return the body of an error; unpaired surrogates of the request are replaced."""
    body = {"message": message, "type": kind, "param": param, "code": code}
    return {"error": {name: text and text.encode("utf-8", "replace").decode() for name, text in body.items()}}
