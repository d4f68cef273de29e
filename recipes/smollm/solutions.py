"""The reference solutions of WORDS problems that the thinking adapter learns from, in plain English.

A trace thinks in the open: it looks up backwards who is compared with whom until a count is known, then computes
forwards, one sentence for each person; about a third of the sums are checked, and every few people a recap repeats some
counts. So a count is written in several places, as in the traces of large reasoning models.
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
    """How a problem is thought through."""
    done = Solution(answer=story.answer)
    way = story.way
    done.say(f"How many {way[-1].things} does {way[-1].name} have?")
    for fact in reversed(way[1:]):
        done.say(f" {fact.name} is compared with {fact.than}.")
    done.state(f" {way[0].name} has {way[0].count}.\n", way[0].name)
    until_recap = rng.choice((3, 4))
    for number, (before, fact) in enumerate(pairwise(way), 1):
        _step(done, before, fact, rng)
        until_recap -= 1
        if until_recap == 0 and number < len(way) - 1:
            until_recap = rng.choice((3, 4))
            _recap(done, way[: number + 1], rng)
    return done


def _step(done: Solution, before: Fact, fact: Fact, rng: random.Random) -> None:
    sign, size = ("+" if fact.difference > 0 else "-"), abs(fact.difference)
    done.say(f"{fact.name} has {size} {fact.comparison} than {before.name}:")
    done.state(f" {before.count}", before.name)
    done.say(f" {sign} {size} =")
    done.state(f" {fact.count}.", fact.name)
    if rng.random() < CHECK_RATE:
        back = "-" if fact.difference > 0 else "+"
        done.say(f" Check: {fact.count} {back} {size} = {before.count}, yes.")
    done.say("\n")


def _recap(done: Solution, known: tuple[Fact, ...], rng: random.Random) -> None:
    chosen = sorted(rng.sample(range(len(known)), min(len(known), rng.randint(2, 4))))
    done.say("So far")
    for number, i in enumerate(chosen):
        done.state(f"{',' if number else ''} {known[i].name} {known[i].count}", known[i].name)
    done.say(".\n")
