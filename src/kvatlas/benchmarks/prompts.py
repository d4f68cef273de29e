r"""Prompt formats: how a question becomes the user message. Named and versioned, because they change answers.

`r1` is the advice on the model cards of DeepSeek-R1 and its distilled models: no system prompt, and for mathematics a
closing directive to reason step by step and to put the final answer within \boxed{}.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvatlas.core import KvatlasError


@dataclass(frozen=True)
class Format:
    """`math` and `choice` are templates with {question} (and {options}).

    `version` rises whenever one changes, or what counts as an answer to it.
    """

    version: int
    about: str
    math: str
    choice: str


_STEPS = r"Please reason step by step, and put your final answer within \boxed{}."
_LETTER = r"Please reason step by step, and put the letter of your final answer within \boxed{}."

FORMATS = {
    "r1": Format(
        1,
        r"the question, then the advice of the R1 model card: reason step by step, final answer in \boxed{}",
        "{question}\n\n" + _STEPS,
        "{question}\n\n{options}\n\n" + _LETTER,
    ),
    "plain": Format(2, "the question alone, with its options", "{question}", "{question}\n\n{options}"),
    "dynts": Format(
        1, "the question alone, as the code of DynTS asks (Robin930/DynTS)", "{question}", "{question}\n\n{options}"
    ),
    "line": Format(
        1,
        'the question, then a request to end with a line "Answer: ..."',
        "{question}\n\nReason step by step. End with one line that reads: Answer: YOUR ANSWER",
        "{question}\n\n{options}\n\nReason step by step. End with one line that reads: Answer: LETTER",
    ),
}
DEFAULT = "r1"


def message(format_: str, question: str, choices: tuple[str, ...], inside: bool = False) -> str:
    """The user message; `format_` is a name or a template of one's own that contains {question}.

    `inside`: the choices stand in the question already, and only their letter is asked for.
    """
    options = "\n".join(f"{chr(ord('A') + i)}) {choice}" for i, choice in enumerate(choices))
    named = FORMATS.get(format_)
    template = format_ if named is None else named.choice if choices else named.math
    if inside:
        options, template = "", template.replace("{options}\n\n", "").replace("\n\n{options}", "")
    # Not str.format: questions and templates are full of braces.
    before, _, after = template.partition("{question}")
    return f"{before.replace('{options}', options)}{question}{after.replace('{options}', options)}"


def asks_nothing(format_: str) -> bool:
    """Whether a format says nothing about how to end."""
    return format_ in ("plain", "dynts")


def identity(format_: str) -> list[str | int]:
    """What names a format in a run key."""
    return [format_, FORMATS[format_].version if format_ in FORMATS else 0]


def check(format_: str) -> None:
    """KvatlasError unless it is the name of a format or a template with {question}."""
    if format_ not in FORMATS and "{question}" not in format_:
        raise KvatlasError(
            f"Unknown prompt format {format_!r}; valid are {', '.join(FORMATS)} and any text with {{question}}."
        )
