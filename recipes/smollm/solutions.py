"""The reference solutions of WORDS problems that the thinking adapter learns from, in plain English.

A trace thinks in the open: it quotes the facts backwards, with numbers, until a count is known, then counts the numbers
down and computes, one sentence for each person; about a third of the sums are checked, and every few people a recap
repeats the newest counts. So a count is written in several places, as in the traces of large reasoning models.

Facts are quoted as they are told, and each step begins with the number of its fact, because a pretrained model copies
what followed the same words before: `Emma is compared with`, which skips words of the fact, was not learnt in 240,000
tokens.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from itertools import pairwise

from kvatlas.benchmarks.words import Fact, Story

CHECK_RATE = 0.3


@dataclass
class Solution:
    """Thinking and answer as pieces of text; `results` are the pieces that state somebody's count, by name."""

    pieces: list[str] = field(default_factory=list)
    results: list[tuple[str, int]] = field(default_factory=list)
    answer: str = ""

    def say(self, text: str) -> None:
        self.pieces.append(text)

    def state(self, text: str, name: str) -> None:
        self.results.append((name, len(self.pieces)))
        self.pieces.append(text)


def solution(story: Story, rng: random.Random) -> Solution:
    """Return the thinking about a problem."""
    done = Solution(answer=story.answer)
    way = story.way
    for number, fact in enumerate(reversed(way[1:]), 1):
        done.say(f"{number}. {fact}\n")
    done.state(f"{len(way)}. {way[0]}\n", way[0].name)
    until_recap = rng.choice((3, 4))
    for number, (before, fact) in enumerate(pairwise(way), 1):
        _step(done, len(way) - number, before, fact, rng)
        until_recap -= 1
        if until_recap == 0 and number < len(way) - 1:
            until_recap = rng.choice((3, 4))
            _recap(done, way[: number + 1], rng)
    return done


def _step(done: Solution, number: int, before: Fact, fact: Fact, rng: random.Random) -> None:
    sign, size = ("+" if fact.difference > 0 else "-"), abs(fact.difference)
    done.say(f"{number}. {str(fact).removesuffix('.')}:")
    done.state(f" {before.count}", before.name)
    done.say(f" {sign} {size} =")
    done.state(f" {fact.count}.", fact.name)
    if rng.random() < CHECK_RATE:
        back = "-" if fact.difference > 0 else "+"
        done.say(f" Check: {fact.count} {back} {size} = {before.count}, yes.")
    done.say("\n")


def _recap(done: Solution, known: tuple[Fact, ...], rng: random.Random) -> None:
    done.say("So far")
    for number, fact in enumerate(known[-rng.randint(2, 4) :]):
        done.state(f"{',' if number else ''} {fact.name} {fact.count}", fact.name)
    done.say(".\n")
