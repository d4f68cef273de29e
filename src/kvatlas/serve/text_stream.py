"""Text of new tokens as they come: thinking, answer, stop texts."""

from collections.abc import Sequence
from enum import StrEnum

from kvatlas.models import ModelHandle


class _OutputPart(StrEnum):
    UNKNOWN = "unknown"
    THINKING = "thinking"
    ANSWER = "answer"
    STOPPED = "stopped"


class Detokenizer:
    """The text of new tokens in pieces, split at the end of thinking and cut at stop texts.

    The prompt or the first words of the model open thinking; without `split` the whole text is the answer. `opened` is
    True if the prompt opens thinking; None means as the chat template does. Each piece is decoded together with the
    previous one, because tokenizers treat the first token of a text differently; a piece that ends within a character
    waits for the next.
    """

    def __init__(
        self, model: ModelHandle, stop: Sequence[str] = (), split: bool = True, opened: bool | None = None
    ) -> None:
        self.model = model
        self._tags = model.thinking
        self._stop = tuple(stop)
        self._first = _OutputPart.ANSWER
        if split and self._tags.close:
            opened = model.opens_thinking if opened is None else opened
            self._first = _OutputPart.THINKING if opened or not self._tags.open else _OutputPart.UNKNOWN
        self._restart()

    def _restart(self) -> None:
        self._part = self._first
        #: Text that is decoded and not yet returned.
        self._held = ""
        #: The number of tokens before the newest piece.
        self._before = 0
        #: The number of tokens with decoded text.
        self._done = 0

    @property
    def stopped(self) -> bool:
        """True if a stop text was written."""
        return self._part is _OutputPart.STOPPED

    def push(self, tokens: Sequence[int], last: bool = False) -> tuple[str, str]:
        """Return (thinking, answer) that `tokens`, all tokens so far, add for certain; with `last` the whole rest.

        Fewer tokens than before are those of a restarted generation.
        """
        if len(tokens) < self._done:
            self._restart()
        return self.split(self.decode(tokens, last), last)

    def decode(self, tokens: Sequence[int], last: bool = False) -> str:
        """Return the new text of all `tokens` so far in whole characters; with `last` the whole rest."""
        tokens = tokens[:-1] if tokens and tokens[-1] in self.model.stops else tokens
        if len(tokens) == self._done:
            return ""
        text = self._text(tokens[self._before :])
        if text.endswith("\N{REPLACEMENT CHARACTER}") and not last:
            return ""
        previous = len(self._text(tokens[self._before : self._done]))
        self._before = self._done
        self._done = len(tokens)
        return text[previous:]

    def _text(self, tokens: Sequence[int]) -> str:
        return str(self.model.tokenizer.decode(list(tokens), skip_special_tokens=False))

    def split(self, text: str, last: bool = False) -> tuple[str, str]:
        """Return (thinking, answer) that `text` adds for certain; with `last` the whole rest."""
        self._held += text
        thinking = ""
        answer = ""

        # The first words of the model decide if it thinks; undecided while they may begin a tag.
        if self._part is _OutputPart.UNKNOWN:
            start = self._held.lstrip()
            if start.startswith(self._tags.open):
                self._part = _OutputPart.THINKING
                self._held = start.removeprefix(self._tags.open)
            elif start.startswith(self._tags.close):
                # An answer without thinking, in a channel of its own.
                self._part = _OutputPart.ANSWER
                self._held = start.removeprefix(self._tags.close)
            elif last or not any(tag.startswith(start) for tag in (self._tags.open, self._tags.close)):
                self._part = _OutputPart.ANSWER

        # After the end of thinking the answer is held.
        if self._part is _OutputPart.THINKING:
            before, close, after = self._held.partition(self._tags.close)
            if close:
                thinking = before
                self._part = _OutputPart.ANSWER
                self._held = after
            else:
                thinking = self._release((self._tags.close,), last)

        # The answer ends at the first stop text.
        if self._part is _OutputPart.ANSWER:
            hits = [position for stop in self._stop if (position := self._held.find(stop)) >= 0]
            if hits:
                answer = self._held[: min(hits)]
                self._part = _OutputPart.STOPPED
                self._held = ""
            else:
                answer = self._release(self._stop, last)
        return thinking, answer

    def _release(self, ends: Sequence[str], last: bool) -> str:
        """Return the held text and clear it, except for an end that may begin one of `ends`, unless it is the last."""
        text = self._held
        waiting = 0
        if not last:
            for end in ends:
                # The longest end of the text with which `end` begins, without the whole of `end`.
                for size in range(min(len(end) - 1, len(text)), waiting, -1):
                    if text.endswith(end[:size]):
                        waiting = size
                        break
        self._held = text[len(text) - waiting :]
        return text[: len(text) - waiting]
