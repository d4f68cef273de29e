"""The reference solutions of LEDGERn problems that the embedded models learn from.

Every line restates the balance before it and the amount, and ends with the new balance. Lines that the answer needs are
marked: `key` for one that is asked for by name, `new B2` for the first with the balance that is sought. Half of the
sums are checked. Nothing is recapped, so the answer has to recall what was written long ago.
"""

from __future__ import annotations

import random

from examples import Example, Scribe
from vocabulary import words

from kvatlas.benchmarks.ledger import Ledger, amount_of, draw_ledger, operator_of

CHECK_RATE = 0.5
LOOKUP_WEIGHT = 3.0
# The few values that the answer recalls are what all is about.
RECALL_WEIGHT = 10.0
# One missed mark, or end of the thinking, loses the whole problem; marks too many count alike.
MARK_WEIGHT = 4.0
# Lines that a drill asks for by name.
DRILLED = 12


def ledger_example(size: int, rng: random.Random, drill: bool = False) -> Example:
    """A fresh random problem of that size with its solution; a drill asks for many lines."""
    return solution(draw_ledger(size, rng, DRILLED if drill else 0), rng)


def solution(ledger: Ledger, rng: random.Random) -> Example:
    """Prompt, thinking and answer of one problem."""
    scribe = Scribe("ledger", ledger.question, needed=frozenset({*ledger.named, "first", "found"}))
    balance = -1
    before = ""
    for line, after in ledger.balances.items():
        if not before:
            scribe.say(line, " = ", str(after), " , ")
            scribe.result(line, line, str(after))
            scribe.say(" .\n")
        else:
            _line(scribe, ledger, line, before, balance, rng)
        before, balance = line, after
    answer = _answer(scribe, ledger)
    scribe.weights.append((len(scribe.words), MARK_WEIGHT))
    return scribe.finish(answer)


def _line(scribe: Scribe, ledger: Ledger, line: str, before: str, balance: int, rng: random.Random) -> None:
    letter, after = amount_of(line), ledger.balances[line]
    amount = str(ledger.amounts[letter])
    scribe.say(line, " : ")
    scribe.result(before, before, str(balance))
    scribe.weigh(LOOKUP_WEIGHT)
    scribe.say(" , ", letter)
    scribe.heavy(LOOKUP_WEIGHT, amount)
    sum_ = [str(balance), f" {operator_of(balance)} ", amount, " = ", str(after), " , "]
    scribe.say(" , ", *sum_)
    scribe.result(line, line, str(after))
    if line in ledger.named:
        scribe.heavy(MARK_WEIGHT, " , ")
        scribe.heavy(MARK_WEIGHT, "key")
        scribe.say(" .\n")
    elif line == ledger.found:
        scribe.heavy(MARK_WEIGHT, " , ")
        scribe.result("found", " new")
        scribe.weigh(MARK_WEIGHT)
        scribe.result("first", line)
        scribe.say(" .\n")
    elif after == ledger.sought:
        # That it is not the first is known from the mark of the first alone.
        scribe.result("found", " .\n")
        scribe.weigh(MARK_WEIGHT)
    else:
        scribe.heavy(MARK_WEIGHT, " .\n")
    if rng.random() < CHECK_RATE:
        scribe.say("wait, let me check, ", *sum_, "yes", " .\n")


def _answer(scribe: Scribe, ledger: Ledger) -> list[str]:
    """The words of the answer, with the places where it recalls a result."""
    answer = words(ledger.answer)
    start = len(scribe.words) + 1
    for i, line in enumerate(ledger.named):
        at = start + 4 * i
        # The value alone is recalled: the name is in the question.
        scribe.results.append((line, at + 1, at + 3))
        scribe.weights.append((at + 2, RECALL_WEIGHT))
    if ledger.found is not None:
        at = start + 4 * len(ledger.named)
        scribe.results.append(("first", at, at + 1))
        scribe.weights.append((at, RECALL_WEIGHT))
    return answer
