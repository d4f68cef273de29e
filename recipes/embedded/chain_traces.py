"""The reference solutions of CHAINn problems that the embedded models learn from.

A trace thinks in the open: it wants one letter after the other in the order in which they are asked for. It restates
the operands of a definition and evaluates it; at an operand that is not known it takes up the definition of that, and
then wants the same letter again. So what comes next can always be looked up. (To choose among all that are not done
takes many tokens more to learn.) Some sums are checked, and every few steps a recap repeats some results. A result is
therefore written in several places, as in the traces of large reasoning models.
"""

from __future__ import annotations

import random
from dataclasses import replace

from examples import Example, Scribe
from vocabulary import words

from kvatlas.benchmarks.chain import Definition, System, draw

CHECK_RATE = 0.3
# At weight 1 each kind of lookup forms millions of tokens later.
LOOKUP_WEIGHT = 3.0


def chain_example(size: int, rng: random.Random, drill: bool = False) -> Example:
    """A fresh random problem of that size with its solution; a drill recaps all the time and asks for every letter."""
    system = draw(size, rng)
    if drill:
        system = replace(system, queries=tuple(rng.sample(list(system.values), size)))
    return solution(system, rng, drill)


def solution(system: System, rng: random.Random, drill: bool = False) -> Example:
    """Prompt, thinking and answer of one problem."""
    scribe = Scribe(system.question)
    by_name = {definition.name: definition for definition in system.definitions}
    known: dict[str, int] = {}
    until_recap = 1 if drill else rng.choice((3, 4))
    for goal in system.queries:
        if goal in known:
            _want(scribe, goal)
            _recall(scribe, goal, str(known[goal]))
            _end(scribe, True)
        while goal not in known:
            _want(scribe, goal)
            definition = by_name[goal]
            while missing := next((name for name in (definition.left, definition.right) if name not in known), ""):
                _attempt(scribe, definition, known)
                definition = by_name[missing]
            _step(scribe, definition, known, goal, rng)
            known[definition.name] = definition.value
            until_recap -= 1
            if until_recap == 0:
                until_recap = 1 if drill else rng.choice((3, 4))
                _recap(scribe, known, 8 if drill else rng.randint(2, 4), rng)
    return scribe.finish(words(system.answer))


def _want(scribe: Scribe, goal: str) -> None:
    scribe.say("want ")
    scribe.goals.append(len(scribe.words))
    scribe.heavy(LOOKUP_WEIGHT, goal)
    scribe.say(" : ")


def _operands(scribe: Scribe, definition: Definition) -> None:
    scribe.heavy(LOOKUP_WEIGHT, f"{definition.name} = ", definition.left, f" {definition.operator} {definition.right}")
    scribe.say(" : ")


def _step(scribe: Scribe, definition: Definition, known: dict[str, int], goal: str, rng: random.Random) -> None:
    name, value = definition.name, str(definition.value)
    if not definition.operator:
        scribe.heavy(LOOKUP_WEIGHT, f"{name} = ", value)
        scribe.say(" , ")
        scribe.result(name, name, value)
        _end(scribe, name == goal)
        return
    left, right = str(known[definition.left]), str(known[definition.right])
    sum_ = [left, f" {definition.operator} ", right, " = ", value, " , "]
    _operands(scribe, definition)
    _recall(scribe, definition.left, left)
    scribe.say(" , ")
    _recall(scribe, definition.right, right)
    scribe.say(" , ", *sum_)
    scribe.result(name, name, value)
    _end(scribe, name == goal)
    if rng.random() < CHECK_RATE:
        scribe.say("wait, let me check, ", *sum_, "yes", " .\n")


def _end(scribe: Scribe, done: bool) -> None:
    """A line that ends with a result. The last " done" or " unknown" tells whether the same letter is wanted again."""
    if done:
        scribe.heavy(LOOKUP_WEIGHT, " done")
    scribe.say(" .\n")


def _attempt(scribe: Scribe, definition: Definition, known: dict[str, int]) -> None:
    _operands(scribe, definition)
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
