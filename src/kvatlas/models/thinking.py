"""Think tags: how a model's thinking begins and ends, found in its tokenizer and chat template or given by the user.

The end of thinking is one token in most reasoning models. In others it is ordinary text, and several tokens that
neighbours may merge with (`</`, `think`, `>` and then a line break): there the decoded text decides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

#: Tags of published reasoning models, the usual ones first.
TAGS = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<thinking>", "</thinking>"),
    ("<|begin_of_thought|>", "<|end_of_thought|>"),
    ("<seed:think>", "</seed:think>"),
)


@dataclass(frozen=True)
class Thinking:
    """The tags of one model. `token` is the id of `close` where that is a token of its own, which merges with nothing.

    An empty `close` says that the model has no tags: thinking never ends, and all that it writes is its answer. Where
    only `open` is empty nobody knows how thinking begins: it is open from the start.
    """

    tokenizer: PreTrainedTokenizerBase = field(repr=False)
    open: str
    close: str
    token: int | None
    #: Whether a token can complete `close`, by id, for those that were asked about.
    _completes: dict[int, bool] = field(default_factory=dict, init=False, repr=False, compare=False)

    def end(self, tokens: Sequence[int], count: int | None = None) -> int | None:
        """Where `close` is text: the number of tokens before it if the newest of the first `count` tokens completes it.

        Every token but an empty one has a byte, so the newest few tokens decide: what a token costs does not grow.
        """
        count = len(tokens) if count is None else count
        if not self._may_complete(tokens[count - 1]):
            return None
        # One token more than can be needed: some decoders drop the space before the first.
        newest = list(tokens[max(0, count - len(self.close.encode()) - 1) : count])
        if self.close not in self._text(newest) or self.close in self._text(newest[:-1]):
            return None
        return count - next(size for size in range(1, len(newest) + 1) if self.close in self._text(newest[-size:]))

    def split(self, tokens: Sequence[int]) -> tuple[int, int] | None:
        """Where `close` is text: the number of tokens before it, and the first token of the answer; None without it.

        The token that completes `close` may hold the beginning of the answer, too: then the answer begins with it.
        """
        for count in range(1, len(tokens) + 1):
            end = self.end(tokens, count)
            if end is not None:
                behind = self._text(tokens[end:count]).partition(self.close)[2]
                return end, count - 1 if behind.strip() else count
        return None

    def _may_complete(self, token: int) -> bool:
        if token not in self._completes:
            # Twice, because some decoders drop the space before the first token of a text. Of a character that is
            # several tokens each is a part that cannot be read alone.
            last, text = self.close[-1], self._text([token, token])
            self._completes[token] = last in text or (not last.isascii() and "\N{REPLACEMENT CHARACTER}" in text)
        return self._completes[token]

    def _text(self, tokens: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=False))


def thinking(tokenizer: PreTrainedTokenizerBase, close: str | None) -> Thinking:
    """The tags of a model: `close` if given, else what tokenizer and template show, else none."""
    template = str(tokenizer.chat_template or "")
    if close is not None:
        opening = next((tag for tag, closing in TAGS if closing == close.strip()), "")
        return _of(tokenizer, opening, close)
    for opening, closing in TAGS:
        if _single(tokenizer, closing) is not None:
            return _of(tokenizer, opening, closing)
    for opening, closing in TAGS:
        if opening in template or closing in template:
            return _of(tokenizer, opening, closing)
    return _of(tokenizer, "", "")


def _of(tokenizer: PreTrainedTokenizerBase, opening: str, close: str) -> Thinking:
    return Thinking(tokenizer, opening, close, _single(tokenizer, close) if close else None)


def _single(tokenizer: PreTrainedTokenizerBase, text: str) -> int | None:
    """The id of a text that is always one token: an added one. Others have other spellings, beside a space for one."""
    added: dict[str, int] = tokenizer.added_tokens_encoder
    return added.get(text)
