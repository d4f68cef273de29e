from __future__ import annotations

import pickle

import pytest

from kvatlas.benchmarks import find
from kvatlas.core import KvatlasError, Status

pytest.importorskip("reasoning_gym", reason="needs the extra reasoning-gym")


@pytest.mark.parametrize("name", ["chain_sum", "countdown", "acre", "maze", "spell_backward"])
def test_data_sets_ask_the_same_and_score_with_their_own_scorer(name: str) -> None:
    bench = find(f"RG-{name}")
    problems = bench.problems(4)
    assert bench.problems(2) == problems[:2]
    assert bench.prompt(problems[0]).endswith("Give your final answer between <answer> and </answer>.")
    for problem in problems:
        right = bench.grade(problem, f"<answer>7 7</answer> or rather\n<answer> {problem.answer}\n</answer>")
        assert (right.correct, right.progress, right.status) == (True, 1.0, Status.OK)
        assert not bench.grade(problem, "<answer>nonsense</answer>").correct
        assert bench.grade(problem, f"It is {problem.answer}").status is Status.NO_ANSWER
    assert pickle.loads(pickle.dumps(bench)) == bench


def test_settings_are_part_of_the_name() -> None:
    bench = find("RG-chain_sum-min_terms=5-max_terms=5")
    assert bench.name == "RG-chain_sum-max_terms=5-min_terms=5"
    assert find(bench.name) == bench
    assert all(p.question.count("+") + p.question.count(" - ") == 4 for p in bench.problems(5))
    assert bench.identity[0] == "reasoning-gym"


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("RG-chain", "valid are the .* data sets of reasoning-gym, such as RG-chain_sum"),
        ("RG", "Unknown benchmark 'RG'"),
        ("RG-intermediate_integration", "cannot be a benchmark: some of its reference answers are integrals"),
        ("RG-chain_sum-foo=3", "Unknown setting 'foo=3' of RG-chain_sum; valid are NAME=VALUE of min_terms"),
        ("RG-chain_sum-min_terms=99", "reasoning-gym refuses the settings of RG-chain_sum-min_terms=99"),
        ("RG-list_functions", "draws other questions each time"),
    ],
)
def test_what_is_not_there_is_one_sentence(name: str, sentence: str) -> None:
    with pytest.raises(KvatlasError, match=sentence):
        find(name)


def test_more_problems_than_there_are_is_one_sentence() -> None:
    with pytest.raises(KvatlasError, match="has 1000 problems; 1001 were asked for"):
        find("RG-chain_sum").problems(1001)


@pytest.mark.parametrize(
    "hostile",
    [
        '__import__("os").system("touch PATH")',
        'open("PATH", "w")',
        'open("PATH", "w") + 5!',
        "[c for c in ().__class__.__base__.__subclasses__()]",
        "9**9**9**9",
        "2**(10**10)",
        "x" * 30_000,
    ],
)
@pytest.mark.parametrize("name", ["countdown", "polynomial_multiplication", "n_queens", "string_insertion"])
def test_answers_are_never_run(name: str, hostile: str, tmp_path) -> None:
    """The scorers of these data sets evaluate answers as expressions."""
    bench = find(f"RG-{name}")
    grade = bench.grade(bench.problems(1)[0], f"<answer>{hostile.replace('PATH', str(tmp_path / 'run'))}</answer>")
    assert not grade.correct
    assert not (tmp_path / "run").exists()


def test_expressions_that_do_no_harm_are_scored() -> None:
    bench = find("RG-polynomial_multiplication")
    problem = bench.problems(1)[0]
    assert bench.grade(problem, f"<answer>{problem.answer}</answer>").correct
    assert bench.grade(problem, f"<answer>0 + {problem.answer}</answer>").correct
