"""Replay: what the full cache wrote for a sample is proposed to its branches, which take over what they would write.

All settings of a sample share their random numbers, so a branch that lost nothing writes the very tokens of the full
cache. They are fed in chunks and every choice is compared with the branch's own; at the first difference its own choice
stays and the rest of the chunk is dropped. What comes out is what decoding would have written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from kvatlas.engine.cache import Snapshot

#: Tokens in a row that must have equalled the script before more of it is proposed.
SURE = 4
#: Proposed tokens of one row in one pass, and of all rows together: their logits have to fit into memory.
LONGEST, TOGETHER = 64, 512


class Replay(StrEnum):
    """Whether branches replay the full cache's tokens.

    AUTO: where these are known. STRICT: choices that chunked arithmetic might turn are drawn again, one token at a
    time; on CPUs in fp32, where both are the same, none are. OFF: every token is decoded.
    """

    AUTO = "auto"
    STRICT = "strict"
    OFF = "off"


@dataclass
class Tree:
    """What all rows of one request share: the full cache's new tokens once they are known, and who waits for them."""

    script: tuple[int, ...] | None = None
    held: list[tuple[Snapshot, Any]] = field(default_factory=list)


@dataclass
class Reader:
    """How one row follows its script: tokens in a row that equalled it, and what it took over so far."""

    streak: int = SURE
    replayed: int = 0
    near_ties: int = 0

    def proposal(self, script: Sequence[int] | None, written: int, room: int) -> list[int]:
        """What the script goes on with after so many tokens, at most `room`; nothing where the row has departed.

        As long as the streak, so chunks double while all agree. The script's last token is never fed.
        """
        if script is None or self.streak < SURE:
            return []
        count = min(self.streak, room)
        return list(script[written : max(written, min(written + count, len(script) - 1))])

    def take_over(self, proposal: Sequence[int], own: Sequence[int], near: Sequence[int], wary: bool) -> int:
        """How many proposed tokens stay: those before the first that differs from the row's own draw in its place.

        `own` has one draw more: the first was drawn as in decoding, the others after proposed tokens, `near` tie or
        not. Who is `wary` stops before a near tie, which is then drawn as in decoding.
        """
        pairs = enumerate(zip(proposal, own, strict=False))
        kept = next((count for count, (token, drawn) in pairs if token != drawn), len(proposal))
        ties = list(near[:kept])
        if wary and True in ties:
            kept = ties.index(True)
            ties = [True]
        self.replayed += kept
        self.near_ties += sum(ties)
        return kept

    def note(self, script: Sequence[int] | None, written: int, token: int) -> None:
        """See the token that follows after so many."""
        if script is not None:
            self.streak = self.streak + 1 if written < len(script) and script[written] == token else 0

    def compressed(self) -> None:
        """See that the row was compressed: here it is likeliest to depart, so chunks begin short again."""
        self.streak = min(self.streak, SURE)


def taken_over(
    readers: Sequence[Reader],
    proposals: Sequence[Sequence[int]],
    drawn: Sequence[int],
    later: Sequence[int],
    near: Sequence[int],
    wary: bool,
) -> list[list[int]]:
    """The new tokens of each row: its draws up to the first that is no proposed token, that included.

    `drawn` are the draws after the rows' newest tokens, `later` those after all proposed ones, near ties or not.
    """
    chosen, start = [], 0
    for reader, proposal, first in zip(readers, proposals, drawn, strict=True):
        part = slice(start, start + len(proposal))
        own = [first, *later[part]]
        chosen.append(own[: 1 + reader.take_over(proposal, own, near[part], wary)])
        start = part.stop
    return chosen
