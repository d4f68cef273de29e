"""Texts of exact length in tokens, and what is found in them."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from kvatlas.benchmarks import find, ruler
from kvatlas.core import KvatlasError, Status


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level BPE tokenizer, as models have."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=500, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    made.train_from_iterator(ruler._FILLER, trainer)
    folder = tmp_path_factory.mktemp("tokenizer")
    made.save(str(folder / "tokenizer.json"))
    return folder


@pytest.mark.parametrize("name", ["RULER-needle-300", "RULER-needle-1000-K8", "RULER-variables-1001"])
def test_lengths_are_exact_and_references_are_right(tokenizer: Path, name: str) -> None:
    benchmark = find(f"{name}@{tokenizer}")
    assert benchmark.name == name
    count = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    problems = benchmark.problems(3)
    for problem in problems:
        text = benchmark.prompt(problem)
        assert len(count.encode(text, add_special_tokens=False).ids) == int(name.split("-")[2])
        assert all(word in text.rpartition("\n\n")[0] for word in problem.answer.split())
        assert benchmark.grade(problem, f"It is {problem.answer}.").correct
    assert pickle.loads(pickle.dumps(benchmark)).problems(3) == problems


def test_what_is_found_counts_and_what_is_wrong_too(tokenizer: Path) -> None:
    benchmark = find(f"RULER-variables-800@{tokenizer}")
    (problem,) = benchmark.problems(1)
    first, second, *_ = problem.answer.split()
    grade = benchmark.grade(problem, f"{first} and {second}")
    assert (grade.correct, grade.progress) == (False, 2 / 5)
    assert not benchmark.grade(problem, problem.answer + " VAAAA").correct
    assert benchmark.grade(problem, "none").status is Status.NO_ANSWER


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("RULER-needle-4096", "needs a tokenizer to count tokens with: RULER-needle-4096@MODEL_FOLDER"),
        ("RULER-hay-4096", "Unknown benchmark 'RULER-hay-4096'"),
        ("RULER-needle-20@{}", "is too short for what it hides"),
        ("RULER-needle-4096@/nowhere", "There is no tokenizer '/nowhere'"),
    ],
)
def test_what_cannot_be_is_refused(tokenizer: Path, name: str, sentence: str) -> None:
    with pytest.raises(KvatlasError, match=sentence):
        find(name.format(tokenizer)).problems(1)
