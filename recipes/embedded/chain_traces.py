"""The reference solutions of CHAINn problems that the embedded models learn from.

A trace thinks in the open: every definition is evaluated once its operands are known, operands are restated, about half
of the sums are checked, and every few steps a recap repeats some results. A result is therefore written in several
places, as in the traces of large reasoning models.
"""

from __future__ import annotations

import random
from dataclasses import replace

from examples import Example, Scribe
from vocabulary import words

from kvatlas.benchmarks.chain import Definition, System, draw_system

CHECK_RATE = 0.5
# Attempts that run into an unknown operand: a model that sometimes picks a definition too early goes on from there
# instead of inventing a value.
ATTEMPT_RATE = 0.15
# Lookups count more than free choices: at weight 1 each kind of lookup forms millions of tokens later.
LOOKUP_WEIGHT = 3.0


def chain_example(size: int, rng: random.Random, drill: bool = False) -> Example:
    """A fresh random problem of that size with its solution; a drill recaps all the time and asks for every letter."""
    system = draw_system(size, rng)
    if drill:
        system = replace(system, queries=tuple(rng.sample(list(system.values), size)))
    return solution(system, rng, drill)


def solution(system: System, rng: random.Random, drill: bool = False) -> Example:
    """Prompt, thinking and answer of one problem."""
    scribe = Scribe("chain", system.question)
    known: dict[str, int] = {}
    waiting = list(system.definitions)
    until_recap = 1 if drill else rng.choice((3, 4))
    while waiting:
        ready = [item for item in waiting if not item.operator or (item.left in known and item.right in known)]
        early = [item for item in waiting if item not in ready]
        if early and not drill and rng.random() < ATTEMPT_RATE:
            _attempt(scribe, rng.choice(early), known)
            continue
        definition = rng.choice(ready)
        waiting.remove(definition)
        _step(scribe, definition, known, rng)
        known[definition.name] = definition.value
        until_recap -= 1
        if until_recap == 0 and waiting:
            until_recap = 1 if drill else rng.choice((3, 4))
            _recap(scribe, known, 8 if drill else rng.randint(2, 4), rng)
    return scribe.finish(words(system.answer))


def _definition(scribe: Scribe, definition: Definition) -> None:
    scribe.say(definition.name, " = ")
    scribe.heavy(LOOKUP_WEIGHT, definition.left, f" {definition.operator} ", definition.right)
    scribe.say(" : ")


def _step(scribe: Scribe, definition: Definition, known: dict[str, int], rng: random.Random) -> None:
    name, value = definition.name, str(definition.value)
    if not definition.operator:
        scribe.say(name, " = ", value, " , ")
        scribe.result(name, name, value)
        scribe.say(" .\n")
        return
    left, right = str(known[definition.left]), str(known[definition.right])
    sum_ = [left, f" {definition.operator} ", right, " = ", value, " , "]
    _definition(scribe, definition)
    _recall(scribe, definition.left, left)
    scribe.say(" , ")
    _recall(scribe, definition.right, right)
    scribe.say(" , ", *sum_)
    scribe.result(name, name, value)
    scribe.say(" .\n")
    if rng.random() < CHECK_RATE:
        scribe.say("wait, let me check, ", *sum_, "yes", " .\n")


def _attempt(scribe: Scribe, definition: Definition, known: dict[str, int]) -> None:
    _definition(scribe, definition)
    if definition.left not in known:
        scribe.say(definition.left, " unknown", " .\n")
        return
    _recall(scribe, definition.left, str(known[definition.left]))
    scribe.say(" , ", definition.right, " unknown", " .\n")


def _recap(scribe: Scribe, known: dict[str, int], most: int, rng: random.Random) -> None:
    names = rng.sample(list(known), min(most, len(known)))
    scribe.say("so far, ")
    for i, name in enumerate(names):
        if i:
            scribe.say(" , ")
        _recall(scribe, name, str(known[name]))
    scribe.say(" .\n")


def _recall(scribe: Scribe, name: str, value: str) -> None:
    scribe.result(name, name, value)
    scribe.weigh(LOOKUP_WEIGHT)
