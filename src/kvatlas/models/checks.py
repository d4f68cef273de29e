"""Checks of a model against problems, without its weights: the ranges that it claims, and its tokenizer."""

import re
import unicodedata
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import Field, TypeAdapter

from kvatlas.core import Check, CheckResult, KvatlasError, Problem, first_difference, refusal
from kvatlas.models.handle import ModelHandle

CLAIMS = "kvatlas_claims.json"

# Shares from which a tokenizer is surely not the model's.
#: Of unknown tokens among the prompts' tokens.
UNKNOWN = 0.2
#: Of characters that change.
CHANGED = 0.05
#: Of spaces that come or go, among all characters; some decoders write one beside each special token.
SPACES = 0.1
#: Of marker letters.
MARKERS = 0.01
#: Spaces, line breaks and bytes in byte-level and SentencePiece vocabularies; no decoded text holds them.
_MARKS = ("Ġ", "Ċ", "ĉ", "č", "▁", "<0x")
_NUMBER = re.compile(r"[0-9]+(?:\.[0-9]+)?")
_End = Annotated[int | float | str, Field(union_mode="left_to_right")]
_RANGES = TypeAdapter(dict[str, dict[str, Annotated[list[_End], Field(min_length=2, max_length=2)]]])
_EXAMPLE = '{"CHAIN": {"n": [3, 13]}}'
_OTHER = "take the tokenizer that came with the weights, with its own tokenizer_class in tokenizer_config.json"


@dataclass(frozen=True)
class Claims:
    """The ranges of problems that a model claims to solve, in a file beside its weights; empty for most models.

    By family of benchmarks, then by name in `Problem.about`: `{"CHAIN": {"n": [3, 13]}, "SEQBENCH": {"grid": ["4x4",
    "6x6"], "B": [0, 1]}}`. Both ends are within; of a grid both sides are compared.
    """

    ranges: Mapping[str, Mapping[str, Sequence[Any]]] = field(default_factory=dict)

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Return the claims of a model's folder. Raises KvatlasError for a file of another form."""
        file = folder / CLAIMS
        if not file.is_file():
            return cls()
        with refusal(f"The file {str(file)!r} does not hold ranges of problems such as {_EXAMPLE}"):
            return cls(_RANGES.validate_json(file.read_bytes(), strict=True))

    def __str__(self) -> str:
        families = []
        for family, ranges in self.ranges.items():
            texts = [f"{name} {low}" + (f" to {high}" if high != low else "") for name, (low, high) in ranges.items()]
            families.append(f"{family} with {', '.join(texts)}")
        return "; ".join(families)

    def outside(self, benchmark: str, problems: Sequence[Problem]) -> int:
        """Return the number of problems of a benchmark outside the claimed ranges; 0 without claims.

        What a problem does not tell about itself counts as within.
        """
        ranges = next((self.ranges[name] for name in self.ranges if benchmark.startswith(name)), None)
        if ranges is None:
            return len(problems) if self.ranges else 0

        count = 0
        for problem in problems:
            for name, (low, high) in ranges.items():
                sizes, lowest, highest = (_sides(value) for value in (problem.about.get(name, low), low, high))
                alike = len(sizes) == len(lowest) == len(highest)
                # A grid has two sides, each of which is compared.
                if not alike or any(not a <= size <= b for a, size, b in zip(lowest, sizes, highest, strict=True)):
                    count += 1
                    break
        return count


def _sides(value: Any) -> list[float]:
    """Return the numbers in a value: one, or the sides of a grid."""
    return [float(text) for text in _NUMBER.findall(str(value))]


def check_tokenizer(model: ModelHandle, prompts: Sequence[str]) -> list[CheckResult]:
    """Check that prompts of the model survive encoding and decoding."""
    tokens = [model.tokens(prompt) for prompt in prompts]
    back = [str(model.tokenizer.decode(list(ids), skip_special_tokens=False)) for ids in tokens]
    return [
        _check_vocabulary(model, tokens),
        _check_unknown_tokens(model, prompts, tokens),
        _check_round_trip(model, prompts, back),
        _check_marker_letters(prompts, back),
    ]


def notes_for(model: ModelHandle, prompts: Sequence[str], benchmark: str) -> list[str]:
    """Return warnings about the tokenizer and prompts of a benchmark, as sentences.

    Raises KvatlasError if the tokenizer surely does not fit.
    """
    findings = check_tokenizer(model, prompts)
    for finding in findings:
        if finding.status is Check.FAILED:
            raise KvatlasError(f"The tokenizer of the model {model.name!r} does not fit {benchmark}: {finding}.")
    return [f"{model.name} on {benchmark}: {finding}." for finding in findings if finding.status is Check.WARNING]


def _check_vocabulary(model: ModelHandle, tokens: Sequence[Sequence[int]]) -> CheckResult:
    last = max(max(ids, default=0) for ids in tokens)
    size = model.vocabulary
    if last >= size:
        message = f"a prompt holds the token {last}, and the model knows those from 0 to {size - 1}"
        return CheckResult("vocabulary", Check.FAILED, message, _OTHER)

    vocabulary = model.tokenizer.get_vocab()
    message = f"{len(vocabulary):,} tokens, {size:,} in the model"
    beyond = [token for token, token_id in vocabulary.items() if token_id >= size]
    if beyond:
        some = f"{len(beyond)} of them, {min(beyond)!r} for one, are unknown to the model"
        return CheckResult("vocabulary", Check.WARNING, f"{message}: {some}", _OTHER)
    return CheckResult("vocabulary", Check.OK, message)


def _check_unknown_tokens(model: ModelHandle, prompts: Sequence[str], tokens: Sequence[Sequence[int]]) -> CheckResult:
    unknown = model.tokenizer.unk_token_id
    if unknown is None:
        return CheckResult("unknown tokens", Check.OK, "the tokenizer has no unknown token")

    # In some tokenizers the end of text is the unknown token, too, and templates write it.
    count = max(0, sum(ids.count(unknown) for ids in tokens) - sum(p.count(model.tokenizer.unk_token) for p in prompts))
    total = sum(map(len, tokens))
    message = f"{count:,} of {total:,} prompt tokens are unknown ({count / max(1, total):.1%})"
    if count >= UNKNOWN * total > 0:
        claims = Claims.read(model.folder)
        advice = f"{_OTHER}, or ask what the model has tokens for"
        if claims.ranges:
            advice = f"it is made for {claims}, so ask other questions of smollm2-135m-think or of a model of your own"
        return CheckResult("unknown tokens", Check.FAILED, message, advice)
    if count:
        return CheckResult("unknown tokens", Check.WARNING, message, "the model does not see what they stand for")
    return CheckResult("unknown tokens", Check.OK, message)


def _check_round_trip(model: ModelHandle, prompts: Sequence[str], back: Sequence[str]) -> CheckResult:
    name = "round trip"
    differing = [(prompt, text) for prompt, text in zip(prompts, back, strict=True) if prompt != text]
    if not differing:
        return CheckResult(name, Check.OK, "prompts are the same after encoding and decoding")

    unknown = str(model.tokenizer.unk_token or "")
    changes = [_count_changes(_tolerant(prompt, unknown), _tolerant(text, unknown)) for prompt, text in differing]
    characters = max(1, sum(len(_tolerant(prompt, unknown)) for prompt in prompts))
    letters = sum(change[0] for change in changes) / characters
    spaces = sum(change[1] for change in changes) / characters

    prompt, text = differing[0]
    first = first_difference(prompt, text) or 0
    around = slice(max(0, first - 8), first + 12)
    message = (
        f"{len(differing)} of {len(prompts)} prompts differ after encoding and decoding, first at {prompt[around]!r}, "
        f"which became {text[around]!r} ({letters:.1%} of the characters, {spaces:.1%} in spaces)"
    )
    if letters >= CHANGED or spaces >= SPACES:
        return CheckResult(name, Check.FAILED, message, _OTHER)
    return CheckResult(name, Check.WARNING, message, "the model reads or writes these characters otherwise")


def _tolerant(text: str, unknown: str) -> str:
    """Return a text without the differences that models tolerate: forms of characters, case, kinds of space."""
    if unknown:
        text = text.replace(unknown, "")
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def _count_changes(before: str, after: str) -> tuple[int, int]:
    """Return the numbers of characters that were lost, added or moved, and of spaces that were lost or added."""
    old = Counter(before)
    new = Counter(after)
    spaces = abs(old.pop(" ", 0) - new.pop(" ", 0))
    letters = ((old - new) + (new - old)).total()
    if not letters:
        # The same characters in another order count as one change.
        letters = int(before.replace(" ", "") != after.replace(" ", ""))
    return letters, spaces


def _check_marker_letters(prompts: Sequence[str], back: Sequence[str]) -> CheckResult:
    name = "marker letters"
    before = "\n".join(prompts)
    after = "\n".join(back)
    counts = {mark: after.count(mark) - before.count(mark) for mark in _MARKS}
    left = {mark: count for mark, count in counts.items() if count > 0}
    if not left:
        return CheckResult(name, Check.OK, "decoded text holds no marker letters of the vocabulary")
    message = f"decoded text holds {sum(left.values()):,} marker letters ({' '.join(left)})"
    failed = sum(left.values()) >= MARKERS * sum(map(len, back))
    return CheckResult(name, Check.FAILED if failed else Check.WARNING, message, _OTHER)
