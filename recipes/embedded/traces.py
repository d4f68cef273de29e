"""The reference solutions of CHAINn problems that the embedded models learn from, and their tokenizer.

A trace thinks in the open: every definition is evaluated once its operands are known, operands are restated, about half
of the sums are checked, and every few steps a recap repeats some results. A result is therefore written in several
places, as in the traces of large reasoning models.
"""

from __future__ import annotations

import random
import string
from dataclasses import dataclass, replace
from pathlib import Path

from tokenizers import AddedToken, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

from kvatlas.benchmarks.chain import Definition, System, draw

PAD, UNKNOWN, END = "<|pad|>", "<unk>", "<|end|>"
USER, ASSISTANT = "<|user|>", "<|assistant|>"
THINK, END_THINK = "<think>", "</think>"
SPECIAL = (PAD, UNKNOWN, END, USER, ASSISTANT)
LETTERS = tuple(string.ascii_lowercase)
DIGITS = tuple(string.digits)
WORDS = ("=", "+", "-", ";", ",", ".", ":", "?", "wait", "let", "me", "check", "yes", "so", "far")
VOCABULARY = (*SPECIAL, THINK, END_THINK, *LETTERS, *DIGITS, *WORDS)

CHECK_RATE = 0.5
# Attempts that run into an unknown operand (`w = d + b : d ? .`): a model that sometimes picks a definition too early
# goes on from there instead of inventing a value.
ATTEMPT_RATE = 0.15
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}"
    "{{ '<|assistant|> ' }}"
    "{% if not message['content'].startswith('<think>') %}{{ '<think> ' }}{% endif %}"
    "{{ message['content'] + ' <|end|> ' }}"
    "{% else %}{{ '<|user|> ' + message['content'] + ' ' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|> <think>' }}{% endif %}"
)


@dataclass(frozen=True)
class Example:
    """One training sequence as words; `prompt` of them are given, the rest is to be learnt."""

    words: tuple[str, ...]
    prompt: int


def tokenizer() -> PreTrainedTokenizerFast:
    """A word-level tokenizer whose decoding joins by single spaces; `<think>` tags survive `skip_special_tokens`."""
    core = Tokenizer(WordLevel({word: i for i, word in enumerate(VOCABULARY)}, unk_token=UNKNOWN))
    core.pre_tokenizer = WhitespaceSplit()
    core.add_special_tokens([AddedToken(word, normalized=False, special=True) for word in SPECIAL])
    core.add_tokens([AddedToken(word, normalized=False, special=False) for word in (THINK, END_THINK)])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        unk_token=UNKNOWN,
        pad_token=PAD,
        eos_token=END,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=1024,
        padding_side="left",
    )


def save_tokenizer(folder: Path) -> None:
    tokenizer().save_pretrained(folder)


def prompt_words(question: str) -> list[str]:
    """What the chat template makes of a question, as words."""
    return [USER, *question.split(), ASSISTANT, THINK]


def thinking_words(system: System, rng: random.Random, drill: bool = False) -> list[str]:
    """A reference solution: definitions in a random order in which operands are known, with checks and recaps.

    A drill recaps up to 8 results after every step, which teaches recall by letter many times faster than the steps do.
    """
    words: list[str] = []
    known: dict[str, int] = {}
    waiting = list(system.definitions)
    until_recap = 1 if drill else rng.choice((3, 4))
    while waiting:
        ready = [d for d in waiting if not d.operator or (d.left in known and d.right in known)]
        early = [d for d in waiting if d not in ready]
        if early and rng.random() < ATTEMPT_RATE:
            words += _attempt(rng.choice(early), known)
            continue
        definition = rng.choice(ready)
        waiting.remove(definition)
        words += _step(definition, known, rng)
        known[definition.name] = definition.value
        until_recap -= 1
        if until_recap == 0 and waiting:
            until_recap = 1 if drill else rng.choice((3, 4))
            words += _recap(known, 8 if drill else rng.randint(2, 4), rng)
    return words


def example(system: System, rng: random.Random, drill: bool = False) -> Example:
    """Prompt, thinking and answer of one problem."""
    prompt = prompt_words(system.question)
    words = [*prompt, *thinking_words(system, rng, drill), END_THINK, *system.answer.split(), END]
    return Example(tuple(words), len(prompt))


def training_example(size: int, rng: random.Random, drill: bool = False) -> Example:
    """A fresh random problem of that size with its solution; a drill asks for every letter."""
    system = draw(size, rng)
    if drill:
        system = replace(system, queries=tuple(rng.sample(list(system.values), size)))
    return example(system, rng, drill)


def _step(definition: Definition, known: dict[str, int], rng: random.Random) -> list[str]:
    name, value = definition.name, str(definition.value)
    if not definition.operator:
        return [name, "=", value, ",", name, value, "."]
    left, right = str(known[definition.left]), str(known[definition.right])
    result = [left, definition.operator, right, "=", value, ","]
    words = [name, "=", definition.left, definition.operator, definition.right, ":"]
    words += [definition.left, left, ",", definition.right, right, ",", *result, name, value, "."]
    if rng.random() < CHECK_RATE:
        words += ["wait", "let", "me", "check", ",", *result, "yes", "."]
    return words


def _attempt(definition: Definition, known: dict[str, int]) -> list[str]:
    words = [definition.name, "=", definition.left, definition.operator, definition.right, ":"]
    if definition.left not in known:
        return [*words, definition.left, "?", "."]
    return [*words, definition.left, str(known[definition.left]), ",", definition.right, "?", "."]


def _recap(known: dict[str, int], most: int, rng: random.Random) -> list[str]:
    names = rng.sample(list(known), min(most, len(known)))
    words = ["so", "far"]
    for name in names:
        words += [name, str(known[name]), ","]
    return [*words[:-1], "."]
