"""New tokens into text while they come: what is thinking, what is the answer, and where a stop text cuts it."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

from kvatlas.models import ModelHandle


class _Part(StrEnum):
    UNKNOWN = "unknown"
    THINKING = "thinking"
    ANSWER = "answer"
    STOPPED = "stopped"


class Decoder:
    """Text of tokens that come in pieces: what all pieces give together is the text of all tokens.

    Each piece is decoded together with the one before it, because tokenizers treat the first token of a text in a way
    of their own; a piece that ends within a character waits for the next.
    """

    def __init__(self, model: ModelHandle) -> None:
        self.model = model
        self._before = 0
        self._done = 0

    def push(self, tokens: Sequence[int], last: bool = False) -> str:
        """The text that all `tokens` so far add to what was given; with `last` nothing waits any more."""
        tokens = tokens[:-1] if tokens and tokens[-1] in self.model.stops else tokens
        if len(tokens) == self._done:
            return ""
        text = self._text(tokens[self._before :])
        if text.endswith("\N{REPLACEMENT CHARACTER}") and not last:
            return ""
        known = len(self._text(tokens[self._before : self._done]))
        self._before, self._done = self._done, len(tokens)
        return text[known:]

    def _text(self, tokens: Sequence[int]) -> str:
        return str(self.model.tokenizer.decode(list(tokens), skip_special_tokens=False))


class Detokenizer:
    """What a model writes, split where thinking ends and cut at stop texts; the same for every way to cut it in pieces.

    Thinking is what the prompt or the model's first words open; without `split` everything is the answer. `opened` says
    whether the prompt does, by default whether the chat template does.
    """

    def __init__(
        self, model: ModelHandle, stop: Sequence[str] = (), split: bool = True, opened: bool | None = None
    ) -> None:
        self._tags = model.thinking
        self._stop = tuple(stop)
        self._held = ""
        if not (split and self._tags.close):
            self._part = _Part.ANSWER
        else:
            opened = model.opens_thinking if opened is None else opened
            self._part = _Part.THINKING if opened or not self._tags.open else _Part.UNKNOWN

    @property
    def stopped(self) -> bool:
        """Whether a stop text was written."""
        return self._part is _Part.STOPPED

    def push(self, text: str, last: bool = False) -> tuple[str, str]:
        """What is certain now: (thinking, answer) beyond what was given before; with `last` all that is left."""
        self._held += text
        if self._part is _Part.UNKNOWN:
            self._begin(last)
        thinking = self._thinking(last) if self._part is _Part.THINKING else ""
        answer = self._answer(last) if self._part is _Part.ANSWER else ""
        return thinking, answer

    def _begin(self, last: bool) -> None:
        start = self._held.lstrip()
        if start.startswith(self._tags.open):
            self._part, self._held = _Part.THINKING, start.removeprefix(self._tags.open)
        elif last or not self._tags.open.startswith(start):
            self._part = _Part.ANSWER

    def _thinking(self, last: bool) -> str:
        text, close, rest = self._held.partition(self._tags.close)
        if not close:
            return self._take(len(text) - (0 if last else _open_end(text, (self._tags.close,))))
        self._held, self._part = rest, _Part.ANSWER
        return text

    def _answer(self, last: bool) -> str:
        hits = [at for at in (self._held.find(text) for text in self._stop) if at >= 0]
        if hits:
            self._part = _Part.STOPPED
            return self._take(min(hits))
        return self._take(len(self._held) - (0 if last else _open_end(self._held, self._stop)))

    def _take(self, count: int) -> str:
        taken, self._held = self._held[:count], self._held[count:]
        return taken


def _open_end(text: str, wanted: Sequence[str]) -> int:
    """Characters at the end of `text` that may be the beginning of one of `wanted`."""
    return max(
        (size for stop in wanted for size in range(1, min(len(stop), len(text) + 1)) if text.endswith(stop[:size])),
        default=0,
    )


def written(model: ModelHandle, tokens: Sequence[int], stop: Sequence[str] = (), split: bool = True) -> tuple[str, str]:
    """(thinking, answer) of finished new tokens."""
    return Detokenizer(model, stop, split).push(Decoder(model).push(tokens, last=True), last=True)
