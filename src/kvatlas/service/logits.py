"""Changes of a request's logits (biases, penalties), and the log-probabilities that it notes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


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
