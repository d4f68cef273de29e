"""Think tags: how a model's thinking begins and ends, found in its tokenizer and chat template or given by the user.

The end of thinking is one token in most reasoning models. In others it is ordinary text, and several tokens that
neighbours may merge with (`</`, `think`, `>` and then a line break): there the decoded text decides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvatlas.core import KvatlasError

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
    """The tags of one model. `token` is the id of `close` where that is a single token.

    An empty `close` says that the model has no tags: thinking never ends, and all that it writes is its answer.
    """

    tokenizer: PreTrainedTokenizerBase = field(repr=False)
    open: str
    close: str
    token: int | None
    #: Ids of the tokens that can complete `close`; None where any might.
    last: frozenset[int] | None = None

    def end(self, tokens: Sequence[int]) -> int | None:
        """Where `close` is several tokens: the number of tokens before it if the newest of `tokens` completes it."""
        if self.last is not None and tokens[-1] not in self.last:
            return None
        longest = min(len(tokens), len(self.close.encode()))
        for count in range(1, longest + 1):
            if self.close in self.tokenizer.decode(list(tokens[-count:]), skip_special_tokens=False):
                return len(tokens) - count
        return None


def thinking(tokenizer: PreTrainedTokenizerBase, name: str, close: str | None) -> Thinking:
    """The tags of the model called `name`: `close` if given, else what tokenizer and template show."""
    template = str(tokenizer.chat_template or "")
    if close is not None:
        opening = next((each for each, closing in TAGS if closing == close), "")
        return _of(tokenizer, opening, close)
    for opening, closing in TAGS:
        if _single(tokenizer, closing) is not None:
            return _of(tokenizer, opening, closing)
    for opening, closing in TAGS:
        if opening in template or closing in template:
            return _of(tokenizer, opening, closing)
    raise KvatlasError(
        f"Nothing in tokenizer and chat template of the model {name!r} says how its thinking ends; name the text with "
        "think_close ('' if all that it writes is its answer)."
    )


def _of(tokenizer: PreTrainedTokenizerBase, opening: str, close: str) -> Thinking:
    single = _single(tokenizer, close) if close else None
    last = None
    if close and single is None and close[-1].isascii():
        words = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
        last = frozenset(i for i, word in enumerate(words) if word and close[-1] in word)
    return Thinking(tokenizer, opening, close, single, last)


def _single(tokenizer: PreTrainedTokenizerBase, text: str) -> int | None:
    (found,) = tokenizer.convert_tokens_to_ids([text])
    return None if found is None or found == tokenizer.unk_token_id else int(found)
