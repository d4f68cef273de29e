"""Checks of a model against problems: its tokenizer on their prompts, and the ranges that it claims."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from kvatlas import models
from kvatlas.benchmarks import find
from kvatlas.core import Check, KvatlasError
from kvatlas.models import ModelHandle
from kvatlas.models.checks import CLAIMS, Claims, check_tokenizer, notes_for
from kvatlas.sweeps import make_plan, parse_spec
from tests.r1 import AIME, copied

RANGES = {"CHAIN": {"n": [3, 12]}, "SEQBENCH": {"grid": ["4x4", "6x5"], "B": [0, 1], "N": [0, 1.5], "L": [3, 16]}}
OK, WARNING, FAILED = Check.OK, Check.WARNING, Check.FAILED
QUESTIONS = [json.loads(line)["problem"] for line in AIME.read_text().splitlines()]


@pytest.fixture
def r1(r1_model: Callable[..., ModelHandle]) -> ModelHandle:
    return r1_model()


def statuses(model: ModelHandle, questions: list[str]) -> dict[str, Check]:
    return {item.name: item.status for item in check_tokenizer(model, [model.prompt(text) for text in questions])}


def test_a_tokenizer_that_fits_is_fine(r1: ModelHandle) -> None:
    assert set(statuses(r1, [*QUESTIONS, "▁Ġ 🙂"]).values()) == {OK}
    assert notes_for(r1, [r1.prompt(item) for item in QUESTIONS], "AIME24") == []


def test_a_tokenizer_that_is_read_as_another_class_is_refused(r1: ModelHandle, tmp_path: Path) -> None:
    # Without the parts that turn bytes into letters and back, as a wrong class reads it.
    model = copied(r1, tmp_path / "m", "tokenizer.json", pre_tokenizer=None, decoder=None)
    status = statuses(model, QUESTIONS)
    assert status["round trip"] is FAILED
    with pytest.raises(KvatlasError, match=r"does not fit AIME24: .* differ after encoding .* tokenizer_class"):
        notes_for(model, [model.prompt(item) for item in QUESTIONS], "AIME24")


def test_forms_of_characters_may_differ(r1: ModelHandle, tmp_path: Path) -> None:
    model = copied(r1, tmp_path / "m", "tokenizer.json", normalizer={"type": "Lowercase"})
    assert statuses(model, QUESTIONS)["round trip"] is WARNING
    (note,) = notes_for(model, [model.prompt(item) for item in QUESTIONS], "AIME24")
    assert "prompts differ after encoding and decoding, first at" in note
    assert "(0.0% of the characters, 0.0% in spaces)" in note


def test_a_fifth_of_unknown_tokens_is_too_much(tiny_llama: ModelHandle) -> None:
    prompt = tiny_llama.prompt(find("CHAIN8").problems(1)[0].question)
    length = len(tiny_llama.tokens(prompt))
    for count, status in [(0, OK), (1, WARNING), (length // 4 - 1, WARNING), (length // 4 + 1, FAILED)]:
        (unknown,) = [
            item for item in check_tokenizer(tiny_llama, [prompt + "~" * count]) if item.name == "unknown tokens"
        ]
        assert unknown.status is status
        assert unknown.message.startswith(f"{count} of {length + count} prompt tokens are unknown")
    spec = {"models": [tiny_llama.name], "benchmarks": [f"AIME24@{AIME}"]}
    with pytest.raises(
        KvatlasError, match=r"'embedded:tiny-llama' does not fit AIME24: .* are unknown .*; it is made for CHAIN"
    ):
        make_plan(parse_spec(spec))


def test_a_vocabulary_larger_than_the_matrix_is_never_ok(r1: ModelHandle, tmp_path: Path) -> None:
    size = max(r1.tokenizer.get_vocab().values())
    model = copied(r1, tmp_path / "m", "config.json", vocab_size=size)
    # No prompt holds the last token.
    (finding,) = [item for item in check_tokenizer(model, [model.prompt("7")]) if item.name == "vocabulary"]
    assert finding.status is WARNING
    assert f"{size + 1:,} tokens, {size:,} in the model: 1 of them" in str(finding)
    (note,) = notes_for(model, [model.prompt("7")], "AIME24")
    assert "are unknown to the model" in note


def test_tokens_beyond_the_models_are_refused(r1: ModelHandle, tmp_path: Path) -> None:
    model = copied(r1, tmp_path / "m", "config.json", vocab_size=100)
    with pytest.raises(KvatlasError, match=r"a prompt holds the token .*, and the model knows those from 0 to 99"):
        notes_for(model, [model.prompt("x")], "AIME24")


@pytest.mark.parametrize(
    ("name", "outside"),
    [
        ("CHAIN12", 0),
        ("CHAIN10-14", 4),
        ("SEQBENCH-6x5-B1-N1.5", 0),
        ("SEQBENCH-5x6", 10),
        ("SEQBENCH-3x4", 10),
        ("SEQBENCH-6x5-N1.6", 10),
        ("SEQBENCH-6x5-L16-N0.5", 0),
        ("SEQBENCH-6x5-L17-N0.5", 10),
        ("WORDS4", 10),
    ],
)
def test_both_ends_are_within(name: str, outside: int, tmp_path: Path) -> None:
    (tmp_path / CLAIMS).write_text(json.dumps(RANGES))
    assert Claims.read(tmp_path).outside(name, find(name).problems(10)) == outside


def test_a_model_that_claims_nothing_is_never_asked_too_much(tmp_path: Path) -> None:
    assert Claims.read(tmp_path).outside("CHAIN26", find("CHAIN26").problems(3)) == 0
    claims = Claims.read(models.find("embedded:tiny-llama").folder)
    assert str(claims).startswith("CHAIN with n 3 to ")


def test_a_plan_says_in_one_line_what_lies_outside() -> None:
    spec = {"models": ["embedded:tiny-llama"], "problems": 5, "samples": 1, "baseline": {"policy": "full"}}
    spec |= {"sampling": {"max_new_tokens": 200}}
    inside = make_plan(parse_spec(spec | {"benchmarks": ["CHAIN6", "SEQBENCH-4x4-B1"]}))
    assert not inside.warnings
    (said,) = make_plan(parse_spec(spec | {"benchmarks": ["CHAIN6", "CHAIN20", "SEQBENCH-4x4-N3"]})).warnings
    assert "5 of 5 of CHAIN20, 5 of 5 of SEQBENCH-4x4-N3." in said
    assert "\n" not in said
    assert "CHAIN6" not in said
