"""Think tags in tokens: the beginning and end of a model's thinking, from its tokenizer and chat template or from the
user. Texts are read by answers/reading.py.

The end of thinking is one token in most reasoning models. In others it is ordinary text of several tokens, which may
merge with their neighbours (`</`, `think`, `>` and then a line break): there the decoded text decides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvatlas.answers.reading import PUBLISHED

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Thinking:
    """The tags of one model.

    An empty `close` means a model without tags: its whole output is its answer. An empty `open` beside a `close` means
    that the beginning is unknown: thinking is open from the start.
    """

    tokenizer: PreTrainedTokenizerBase = field(repr=False)
    open: str
    close: str
    #: (Tag, token id) -> True if the token can complete the tag.
    _completes: dict[tuple[str, int], bool] = field(default_factory=dict, init=False, repr=False, compare=False)

    def before(self, tag: str, tokens: Sequence[int], count: int) -> int | None:
        """Return the number of tokens before a textual tag that the newest of the first `count` tokens completes, or
        None.

        Every token but an empty one has a byte, so the newest few tokens decide: the cost of a token does not grow.
        """
        newest_token = tokens[count - 1]
        if (tag, newest_token) not in self._completes:
            # Twice, because some decoders drop the space before the first token of a text. A token that is a part of a
            # character cannot be read alone.
            last = tag[-1]
            text = self._text([newest_token, newest_token])
            may_end_character = not last.isascii() and "\N{REPLACEMENT CHARACTER}" in text
            self._completes[tag, newest_token] = last in text or may_end_character
        if not self._completes[tag, newest_token]:
            return None

        # One token more than can be needed: some decoders drop the space before the first.
        newest = list(tokens[max(0, count - len(tag.encode()) - 1) : count])
        if tag not in self._text(newest) or tag in self._text(newest[:-1]):
            return None
        return count - next(size for size in range(1, len(newest) + 1) if tag in self._text(newest[-size:]))

    def split(self, tokens: Sequence[int]) -> tuple[int, int] | None:
        """Return the number of tokens before a textual `close` and the first token of the answer; None without it.

        If the token that completes `close` holds the beginning of the answer, too, the answer begins with it.
        """
        for count in range(1, len(tokens) + 1):
            end = self.before(self.close, tokens, count)
            if end is not None:
                behind = self._text(tokens[end:count]).partition(self.close)[2]
                return end, count - 1 if behind.strip() else count
        return None

    def _text(self, tokens: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=False))


def find_tags(tokenizer: PreTrainedTokenizerBase, close: str | None) -> Thinking:
    """Return the tags of a model: with `close` if given, else the first published ones whose end is an added token,
    else the first in the template, else none."""
    if close is not None:
        opening = next((tag for tag, closing in PUBLISHED if closing == close.strip()), "")
        return Thinking(tokenizer, opening, close)

    added = tokenizer.added_tokens_encoder
    template = str(tokenizer.chat_template or "")
    in_tokens = [tags for tags in PUBLISHED if tags[1] in added]
    in_template = [tags for tags in PUBLISHED if tags[0] in template or tags[1] in template]
    return Thinking(tokenizer, *[*in_tokens, *in_template, ("", "")][0])
