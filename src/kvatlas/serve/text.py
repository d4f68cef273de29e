"""New tokens into text while they come (thinking, answer, stop texts); changes of logits, and log-probabilities."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from kvatlas.models import ModelHandle

if TYPE_CHECKING:
    from torch import Tensor


class _Part(StrEnum):
    UNKNOWN = "unknown"
    THINKING = "thinking"
    ANSWER = "answer"
    STOPPED = "stopped"


class Detokenizer:
    """The text of a model's new tokens, split where thinking ends and cut at stop texts, however they come in pieces.

    Thinking is opened by the prompt or by the model's first words; without `split` everything is the answer. `opened`
    says whether the prompt opens it, by default whether the chat template does. Each piece is decoded together with the
    one before it, because tokenizers treat the first token of a text in a way of their own; a piece that ends within a
    character waits for the next.
    """

    def __init__(
        self, model: ModelHandle, stop: Sequence[str] = (), split: bool = True, opened: bool | None = None
    ) -> None:
        self.model, self._tags, self._stop = model, model.thinking, tuple(stop)
        self._first = _Part.ANSWER
        if split and self._tags.close:
            opened = model.opens_thinking if opened is None else opened
            self._first = _Part.THINKING if opened or not self._tags.open else _Part.UNKNOWN
        self._restart()

    def _restart(self) -> None:
        self._part, self._held = self._first, ""
        #: Tokens before the newest piece, and tokens whose text is known.
        self._before = self._done = 0

    @property
    def stopped(self) -> bool:
        """Whether a stop text was written."""
        return self._part is _Part.STOPPED

    def push(self, tokens: Sequence[int], last: bool = False) -> tuple[str, str]:
        """The text that is certain now: (thinking, answer) that all `tokens` so far add; with `last` all that is left.

        Fewer tokens than before are those of a generation that started again.
        """
        if len(tokens) < self._done:
            self._restart()
        return self.split(self.decode(tokens, last), last)

    def decode(self, tokens: Sequence[int], last: bool = False) -> str:
        """The text that all `tokens` so far add, in whole characters; with `last` all of it."""
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

    def split(self, text: str, last: bool = False) -> tuple[str, str]:
        """(thinking, answer) that `text` adds, as far as they are certain; with `last` all that is left."""
        self._held += text
        if self._part is _Part.UNKNOWN:
            start = self._held.lstrip()
            if start.startswith(self._tags.open):
                self._part, self._held = _Part.THINKING, start.removeprefix(self._tags.open)
            elif last or not self._tags.open.startswith(start):
                self._part = _Part.ANSWER
        thinking = self._thinking(last) if self._part is _Part.THINKING else ""
        answer = self._answer(last) if self._part is _Part.ANSWER else ""
        return thinking, answer

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


def split_text(
    model: ModelHandle, tokens: Sequence[int], stop: Sequence[str] = (), split: bool = True
) -> tuple[str, str]:
    """(thinking, answer) of finished new tokens."""
    return Detokenizer(model, stop, split).push(tokens, last=True)


@dataclass(frozen=True)
class Steering:
    """Added to logits: `bias` by token; `frequency` times as often as a token was written, `presence` once if it was.

    With `top_logprobs` the log-probabilities of the drawn token and of so many of the likeliest are noted, as the model
    has them.
    """

    bias: Mapping[int, float] = field(default_factory=dict)
    frequency: float = 0.0
    presence: float = 0.0
    top_logprobs: int | None = None

    def __bool__(self) -> bool:
        return self != Steering()


@dataclass(frozen=True)
class TokenLogprob:
    """The log-probability (natural) of a drawn token, and the likeliest tokens with theirs."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


class Steerer:
    """The logits of one generation while it is decoded, by the engine's thread alone."""

    def __init__(self, steering: Steering, prompt: int) -> None:
        self.steering, self.prompt = steering, prompt
        self.logprobs: list[TokenLogprob] = []
        self._seen: Tensor | None = None

    def __call__(self, tokens: Sequence[int], logits: Tensor) -> Tensor:
        """The logits [vocabulary] of the next token, given prompt and new tokens."""
        steering, new = self.steering, tokens[self.prompt :]
        # A generation may start again.
        del self.logprobs[len(new) :]
        if steering.top_logprobs is not None:
            self._seen = logits.float().log_softmax(-1)
        if steering.bias:
            ids = list(steering.bias)
            logits[ids] += logits.new_tensor(list(steering.bias.values()))
        if new and (steering.frequency or steering.presence):
            counts = Counter(new)
            logits[list(counts)] -= steering.frequency * logits.new_tensor(list(counts.values())) + steering.presence
        return logits

    def note(self, token: int) -> None:
        """A token was drawn."""
        if self._seen is not None:
            best = self._seen.topk(self.steering.top_logprobs or 0)
            top = tuple(zip(best.indices.tolist(), best.values.tolist(), strict=True))
            self.logprobs.append(TokenLogprob(token, float(self._seen[token]), top))
            self._seen = None
