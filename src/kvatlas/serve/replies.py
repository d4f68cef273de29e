"""Bodies of answers in the form of OpenAI's API: whole answers, pieces of streams, errors."""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

from kvatlas.models import ModelHandle
from kvatlas.serve.service import RequestHandle
from kvatlas.serve.text_stream import TokenLogprob


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
        span = answer_span(handle, handle.generation.result().tokens, len(answer))
        logprobs = self._logprobs(handle, span, 0)
        about = {"finish_reason": handle.reason(), "logprobs": logprobs, "kvatlas": _cache_usage(handle)}
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

    def text_event(
        self, index: int, handle: RequestHandle, texts: tuple[str, str], span: tuple[int, int], offset: int
    ) -> bytes:
        """Return the event for new `texts` (thinking, answer) of a choice.

        `span` are the tokens of the answer's new text, which begins at its character `offset`.
        """
        logprobs = self._logprobs(handle, span, offset)
        return self._delta(index, *texts, finish_reason=None, logprobs=logprobs)

    def end_event(self, index: int, handle: RequestHandle) -> bytes:
        """Return the last event of a choice."""
        return self._delta(index, "", "", finish_reason=handle.reason(), kvatlas=_cache_usage(handle))

    def _delta(self, index: int, thinking: str, answer: str, **about: Any) -> bytes:
        named = {"reasoning_content": thinking, "content": answer}
        delta = {name: text for name, text in named.items() if text}
        content: dict[str, Any] = {"delta": delta} if self.chat else {"text": answer}
        return self.piece([{"index": index, **content, **about}])

    def _logprobs(self, handle: RequestHandle, span: tuple[int, int], offset: int) -> dict[str, Any] | None:
        """Return log-probabilities of the tokens of an answer in `span`."""
        recorder = handle.recorder
        if recorder is None:
            return None
        recorded = recorder.logprobs[slice(*span)]
        if self.chat:
            return _chat_logprobs(handle.model, recorded)
        return _completion_logprobs(handle.model, recorded, offset)

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


def answer_span(handle: RequestHandle, tokens: Sequence[int], characters: int) -> tuple[int, int]:
    """Return the index of the answer's first token, and that after the last one of its first `characters`.

    A stop text ends an answer within its tokens: a token that begins behind the end is not part of the answer.
    """
    model = handle.model
    if not characters or handle.recorder is None:
        return 0, 0
    start = 0
    close = model.thinking.close if handle.ask.split else ""
    # None if the text has no thinking.
    lengths = model.split(tokens) if close else None
    if lengths:
        start = lengths[1]
    end = len(tokens)
    if tokens and tokens[-1] in model.stops:
        end -= 1
    if not handle.ask.stop:
        return start, end

    def text_before(count: int) -> str:
        return str(model.tokenizer.decode(list(tokens[:count]), skip_special_tokens=False))

    thinking = ""
    if lengths:
        before, found, _ = text_before(end).partition(close)
        thinking = before + found
    limit = len(thinking) + characters
    return start, bisect_left(range(end), limit, lo=start, key=lambda count: len(text_before(count)))


def _token_text(model: ModelHandle, token: int) -> str:
    return str(model.tokenizer.decode([token], skip_special_tokens=False))


def _chat_logprobs(model: ModelHandle, recorded: Sequence[TokenLogprob]) -> dict[str, Any]:
    """Return log-probabilities in the form of chat completions: one object for each token."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        text = _token_text(model, token)
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}

    content = []
    for token, logprob, likeliest in recorded:
        top = [entry(*candidate) for candidate in likeliest]
        content.append({**entry(token, logprob), "top_logprobs": top})
    return {"content": content, "refusal": None}


def _completion_logprobs(model: ModelHandle, recorded: Sequence[TokenLogprob], offset: int) -> dict[str, Any]:
    """Return log-probabilities in the form of completions: lists in parallel; the first text is at `offset`."""
    texts = []
    logprobs = []
    top_logprobs = []
    offsets = []
    for token, logprob, likeliest in recorded:
        text = _token_text(model, token)
        texts.append(text)
        logprobs.append(logprob)
        top_logprobs.append({_token_text(model, candidate): value for candidate, value in likeliest})
        offsets.append(offset)
        offset += len(text)
    return {"tokens": texts, "token_logprobs": logprobs, "top_logprobs": top_logprobs, "text_offset": offsets}


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
