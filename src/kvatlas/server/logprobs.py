"""Log-probabilities as OpenAI's API shapes them, of the tokens that an answer's text is made of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvatlas.service import RequestHandle, TokenLogprob


def noted(handle: RequestHandle, tokens: Sequence[int], told: int, answered: bool) -> Sequence[TokenLogprob]:
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


def as_chat(handle: RequestHandle, tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
    """The `logprobs` of a chat's choice."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        text = _text(handle, token)
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}

    content = [
        {**entry(token.token, token.logprob), "top_logprobs": [entry(*likely) for likely in token.top]}
        for token in tokens
    ]
    return {"content": content, "refusal": None}


def as_completion(handle: RequestHandle, tokens: Sequence[TokenLogprob], offset: int = 0) -> dict[str, Any]:
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
