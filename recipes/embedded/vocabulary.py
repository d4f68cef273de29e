"""The tokens of the embedded models: whole phrases of chains and mazes, spaces included, so that decoding only joins.

A fact of a maze (`Room A6 and A5 are connected by an open door.`) is five tokens, a move of a plan two.
"""

from __future__ import annotations

import re
import string
from pathlib import Path

from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerFast

PAD, UNKNOWN, END = "<|pad|>", "<unk>", "<|end|>"
USER, ASSISTANT = "<|user|>", "<|assistant|>"
THINK, END_THINK = "<think>", "</think>"
SPECIAL = (PAD, UNKNOWN, END, USER, ASSISTANT)

LETTERS = tuple(string.ascii_lowercase)
DIGITS = tuple(string.digits)
ROOMS = tuple(f"{column}{row}" for column in "ABCDEF" for row in range(1, 7))
SHARED = (" , ", " : ", " .\n", "\n", "yes", "no", "so far, ", "wait, let me check, ")
CHAIN = (" = ", " + ", " - ", " ; ", " ? ", " unknown")
FACTS = (
    "Room ",
    " and ",
    " are connected by an open door.",
    " are connected by a closed and locked door.",
    "The locked door between ",
    " requires key ",
    "Key ",
    " is in room ",
    "Bob",
    "Alice",
    ".",
)
NOTES = (" at ", "key", " to ", " by key to ", " then ", ", want ", "back to ")
STATES = ("none", " done", " new", " open", " locked")
PLAN = (
    "[('start', '",
    "'), ('move_to', '",
    "'), ('pick_up_key', '",
    "'), ('use_key', '",
    "'), ('unlock_and_open_door_to', '",
    "'), ('rescue', 'Alice')]",
)
VOCABULARY = (*SPECIAL, THINK, END_THINK, *LETTERS, *DIGITS, *ROOMS, *SHARED, *CHAIN, *FACTS, *NOTES, *STATES, *PLAN)
IDS = {word: i for i, word in enumerate(VOCABULARY)}
# Tokens of the longest sequences that the models are made for.
POSITIONS = 1536

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}"
    "{{ '<|assistant|>' }}"
    "{% if not message['content'].startswith('<think>') %}{{ '<think>' }}{% endif %}"
    "{{ message['content'] + '<|end|>' }}"
    "{% else %}{{ '<|user|>' + message['content'] + '\n' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|><think>' }}{% endif %}"
)


def tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of phrases, the longest first; only the chat's own marks are special, `<think>` tags are not.

    Every phrase is an added token: transformers gives a folder of a Qwen2 model the pre-tokenizer of Qwen2, whatever
    its tokenizer.json says, and only added tokens are found before any pre-tokenizer comes.
    """
    core = Tokenizer(BPE(dict(IDS), [], unk_token=UNKNOWN))
    core.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = ByteLevelDecoder()
    core.add_special_tokens([AddedToken(word, normalized=False, special=True) for word in SPECIAL])
    core.add_tokens([AddedToken(word, normalized=False, special=False) for word in VOCABULARY[len(SPECIAL) :]])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        unk_token=UNKNOWN,
        pad_token=PAD,
        eos_token=END,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=POSITIONS,
        padding_side="left",
    )


def save_tokenizer(folder: Path) -> None:
    tokenizer().save_pretrained(folder)


def words(text: str) -> list[str]:
    """The tokens of a text that consists of phrases of the vocabulary alone."""
    result = _PHRASE.findall(text)
    assert "".join(result) == text, text
    return result


def _escaped(phrase: str) -> str:
    return re.escape(phrase).replace("\\\n", "\\n")


_PHRASE = re.compile("|".join(map(_escaped, sorted(VOCABULARY[len(SPECIAL) + 2 :], key=len, reverse=True))))
