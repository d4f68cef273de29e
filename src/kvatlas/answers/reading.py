"""Reading of what a model wrote: from tokens or text, with its think tags, to thinking, answer and status.

Workers, regrading, imports, verification and labels read here, so that a trace has one answer wherever it is read. A
run keeps the tags of its models: its traces can be read where the models are not.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from kvatlas.core import Status, Trace

#: The channels of gpt-oss, in which several messages make one turn, and the text between two of them.
HARMONY = ("<|channel|>analysis<|message|>", "<|channel|>final<|message|>")
NEXT_MESSAGE = "<|end|><|start|>assistant"
#: Tags of published reasoning models, the usual ones first; the last are the channels of Gemma 4.
PUBLISHED = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<thinking>", "</thinking>"),
    ("<|begin_of_thought|>", "<|end_of_thought|>"),
    ("<seed:think>", "</seed:think>"),
    ("◁think▷", "◁/think▷"),
    ("<thought>", "</thought>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<|inner_prefix|>", "<|inner_suffix|>"),
    HARMONY,
    ("<|channel>thought", "<channel|>"),
)


@dataclass(frozen=True)
class Tags:
    """The think tags of a model; `opened` if its prompts open thinking.

    Without a `close` the whole output is the answer. Without an `open` thinking is open from the start.
    """

    open: str = ""
    close: str = ""
    opened: bool = False

    def leaves_open(self, text: str) -> bool:
        """Return True if a text without `close` is thinking."""
        return bool(self.close) and (self.opened or self.open in text)


#: Those of texts that are put together here from two parts.
JOINED = Tags(*PUBLISHED[0])


@dataclass(frozen=True)
class Reading:
    """The parts of a trace. `answer` is None if thinking does not end.

    `status` is `truncated` for a trace that was cut off, `no_answer` for one without text after its thinking, else
    `ok`. `span` are the numbers of tokens before the end of thinking and before the answer; None if no token ends
    thinking, and for a text.
    """

    thinking: str
    answer: str | None
    status: Status
    span: tuple[int, int] | None = None


class TokenReader(Protocol):
    """A model whose tokens are read.

    `think_close` is the token that ends thinking, None if a text of several tokens does; `split` returns the `span` of
    a reading; `text` omits the end token.
    """

    @property
    def tags(self) -> Tags: ...

    @property
    def think_close(self) -> int | None: ...

    def split(self, tokens: Sequence[int]) -> tuple[int, int] | None: ...

    def text(self, tokens: Sequence[int]) -> str: ...


def read_text(text: str, tags: Tags | None = None, cut: bool = False) -> Reading:
    """Read a text that may have been `cut` off; without `tags` by the first published ones that it holds."""
    if tags is None:
        tags = Tags()
        for opening, closing in PUBLISHED:
            if opening in text or closing in text:
                tags = Tags(opening, closing, opened=opening not in text)
                break
    thinking, closed, answer = text.partition(tags.close) if tags.close else ("", "", text)
    if closed:
        return _reading_of_parts(tags, thinking, answer, cut)
    return _reading_without_end(tags, text, cut)


def read_tokens(model: TokenReader, tokens: Sequence[int], finished: bool = True) -> Reading:
    """Read the new tokens of a model; the first end of thinking counts."""
    span = model.split(tokens)
    text = model.text(tokens)
    if span is None:
        return _reading_without_end(model.tags, text, not finished)

    end, start = span
    if model.think_close is None:
        # The token that ends thinking may hold the beginning of the answer.
        thinking, _, answer = text.partition(model.tags.close)
    else:
        thinking = model.text(tokens[:end])
        answer = model.text(tokens[start:])
    return replace(_reading_of_parts(model.tags, thinking, answer, not finished), span=span)


def read_trace(trace: Trace, tags: Tags | None) -> Reading:
    """Read a stored trace; without `tags` of its model by the first published ones that it holds."""
    cut = not trace.grade.status.ended
    read = read_text(trace.text, tags if trace.tokens else None, cut)
    if cut:
        read = replace(read, status=trace.grade.status)
    if trace.tokens and trace.usage.thinking_tokens == trace.usage.output_tokens:
        # Thinking that no tag ended, whatever the tags were.
        return replace(read, answer=None, status=read.status if cut else Status.NO_ANSWER)
    return read


def _reading_without_end(tags: Tags, text: str, cut: bool) -> Reading:
    """Return the reading of a text in which thinking does not end."""
    if tags.leaves_open(text):
        return _reading_of_parts(tags, text, None, cut)
    return _reading_of_parts(tags, "", text, cut)


def _reading_of_parts(tags: Tags, thinking: str, answer: str | None, cut: bool) -> Reading:
    status = Status.OK if answer is not None and answer.strip() else Status.NO_ANSWER
    thinking = thinking.removeprefix(tags.open).removesuffix(NEXT_MESSAGE)
    return Reading(thinking, answer, Status.TRUNCATED if cut else status)


def join_thinking(thinking: str, answer: str) -> str:
    """Return one text of thinking and answer that come apart, as endpoints and logs give them."""
    if not thinking:
        return answer
    # An end of thinking inside it would end it early.
    return f"{JOINED.open}{thinking.replace(JOINED.close, '')}{JOINED.close}{answer}"
