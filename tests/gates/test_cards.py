"""`kvatlas gate` on whole and plausible logs that are not alike: what differs is refused, or told, also as unknown."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

import kvatlas
from kvatlas.core import KvatlasError
from kvatlas.gates.cards import more_is_better
from tests.command_line import Call
from tests.gates.logs import (
    DRAWN,
    GREEDY,
    inspect_sample,
    lm_row,
    results_of,
    write_inspect,
    write_lm,
    write_rows,
)

N = range(200)
ROOT = Path(__file__).parents[2]


def lossy(index: int) -> float:
    """A score that falls on a fifth of the problems."""
    return float(index % 5 > 0)


# -- lossless and lossy pairs ------------------------------------------------------------------------------------------

#: A pair of logs by its kind: a function writes a side from scores by problem, and from a word that tells it apart.
Write = Callable[[Path, Callable[[int], float], str], Path]
PAIRS: dict[str, Write] = {
    "greedy samples": lambda folder, score, _: write_lm(folder, (lm_row(i, score(i)) for i in N), results_of()),
    "drawn samples": lambda folder, score, word: write_lm(
        folder, (lm_row(i, score(i), generation=DRAWN, text=f"{word} {i}") for i in N), results_of()
    ),
    "samples beside FILE_DATE.json": lambda folder, score, _: write_lm(
        folder, (lm_row(i, score(i)) for i in N), results_of(), name="out"
    ),
    "packed samples": lambda folder, score, _: write_lm(folder, (lm_row(i, score(i)) for i in N), gz=True),
    "log-likelihoods": lambda folder, score, _: write_lm(
        folder,
        (lm_row(i, score(i), metric="acc", resps=[[["-1.5", "True"]], [["-2.5", "False"]]],
                arguments={"gen_args_0": {"arg_0": f"q{i}", "arg_1": " a"}}) for i in N),
    ),
    "arguments as lists": lambda folder, score, _: write_lm(
        folder, (lm_row(i, score(i), arguments=[[f"Q{i}?", GREEDY]]) for i in N)
    ),
    "repeats in a row": lambda folder, score, word: write_lm(
        folder,
        (lm_row(i, [score(i)] * 4, generation=DRAWN, resps=[[f"{word} {i} {k}" for k in range(4)]]) for i in N),
    ),
    "Inspect": lambda folder, score, _: write_inspect(
        folder.with_suffix(".json"), [inspect_sample(i, "C" if score(i) else "I") for i in N]
    ),
    "a folder of Inspect's JSON": lambda folder, score, _: write_inspect(
        folder / "2026_log.json", [inspect_sample(i, "C" if score(i) else "I") for i in N]
    ).parent,
    "packed Inspect in epochs": lambda folder, score, word: write_inspect(
        folder / "log.json.gz",
        [inspect_sample(i, "C" if score(i) else "I", epoch=k, text=f"{word} {i} {k}") for i in N for k in (1, 2)],
    ),
    "answers of any program": lambda folder, score, _: write_rows(
        folder.with_suffix(".jsonl"), ({"problem": f"p{i}", "correct": score(i), "question": f"q{i}"} for i in N)
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", PAIRS)
def test_the_exit_code_tells_lossless_lossy_and_doubtful_changes(kind: str, kvatlas: Call, tmp_path: Path) -> None:
    write = PAIRS[kind]
    before = write(tmp_path / "before", lambda i: 1.0, "before")
    equal = write(tmp_path / "equal", lambda i: 1.0, "before")
    harmless = write(tmp_path / "harmless", lambda i: float(i != 7), "after")
    harmful = write(tmp_path / "harmful", lossy, "after")
    code, out, _ = kvatlas("gate", before, equal)
    assert code == 0
    assert " answers are equal" in out.splitlines()[0]
    assert kvatlas("gate", before, harmless)[0] == 0
    assert kvatlas("gate", before, harmful)[0] == 1
    doubtful = write(tmp_path / "doubtful", lambda i: float(i % 50 != 7), "after")
    assert kvatlas("gate", before, doubtful)[0] == 3
    assert "are the same answers" in kvatlas.refuse("gate", before, before)


def test_the_workflow_passes_lossless_changes_and_fails_lossy_ones(tmp_path: Path) -> None:
    """The step of the workflow for GitHub, run in a shell."""
    (job,) = yaml.safe_load((ROOT / "examples/gate-workflow.yml").read_text())["jobs"].values()
    (step,) = [step["run"] for step in job["steps"] if "kvatlas gate" in step.get("run", "")]
    # Samples of another run of the workflow are found by its number alone.
    (found,) = [step["with"] for step in job["steps"] if "download-artifact" in step.get("uses", "")]
    assert {"run-id", "github-token"} <= found.keys()
    assert found["name"] in [step["with"]["name"] for step in job["steps"] if "upload" in step.get("uses", "")]
    scores: dict[str, Callable[[int], float]] = {
        "lossless": lambda i: 1.0,
        "lossy": lossy,
        "doubtful": lambda i: float(i % 100 != 7),
    }
    expected = {"lossless": (0, "# Keeps"), "lossy": (1, "# Loses"), "doubtful": (3, "# Cannot tell")}
    for name, score in scores.items():
        folder = tmp_path / name
        write_lm(folder / "before", (lm_row(i) for i in N), results_of())
        write_lm(folder / "after", (lm_row(i, score(i)) for i in N), results_of(), day=2)
        summary = folder / "summary.md"
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        environment = {**os.environ, "GITHUB_STEP_SUMMARY": str(summary), "PATH": path}
        ended = subprocess.run(["bash", "-e", "-c", step], cwd=folder, env=environment, check=False)
        code, headline = expected[name]
        assert ended.returncode == code
        assert summary.read_text().startswith(headline)
        assert (folder / "gate.html").stat().st_size > 1000


# -- what is refused ---------------------------------------------------------------------------------------------------

Sides = tuple[Path, Path]
#: Two sides of which each problem is right, by what differs, and the words of the refusal.
REFUSALS: dict[str, tuple[Callable[[Path], Sides], str]] = {}


def refused(words: str) -> Callable[[Callable[[Path], Sides]], Callable[[Path], Sides]]:
    def note(make: Callable[[Path], Sides]) -> Callable[[Path], Sides]:
        REFUSALS[make.__name__] = (make, words)
        return make

    return note


def two_lm(folder: Path, change: Callable[[int], dict[str, Any]], results: Any = None, **first: Any) -> Sides:
    """Logs of lm-eval with equal scores whose rows a function changes after."""
    before = write_lm(folder / "a", (lm_row(i, **first) for i in N), results and results_of())
    return before, write_lm(folder / "b", (lm_row(i, **{**first, "text": f"b{i}", **change(i)}) for i in N), results)


def two_inspect(folder: Path, change: Callable[[int], dict[str, Any]], **spec: Any) -> Sides:
    """Logs of Inspect with equal scores; the second has other samples or another `eval`."""
    before = write_inspect(folder / "a.json", [inspect_sample(i) for i in N])
    return before, write_inspect(folder / "b.json", [inspect_sample(i, **change(i)) for i in N], **spec)


@refused("ask other questions of the task 'answers'")
def one_blank_question(folder: Path) -> Sides:
    before = ({"problem": i, "correct": 1, "question": f"q{i}"} for i in N)
    after = ({"problem": i, "correct": 1, "question": f"other {i}" if i else ""} for i in N)
    return write_rows(folder / "a.jsonl", before), write_rows(folder / "b.jsonl", after)


@refused("have another reference")
def references_without_questions(folder: Path) -> Sides:
    sides = [[{"problem": i, "correct": 1, "reference": i + shift} for i in N] for shift in (0, 1)]
    return write_rows(folder / "a.jsonl", sides[0]), write_rows(folder / "b.jsonl", sides[1])


@refused("numbered from 0 to 199 before and from 1 to 200 after")
def shifted_names(folder: Path) -> Sides:
    before = write_lm(folder / "a", (lm_row(i) for i in N))
    return before, write_rows(folder / "b.jsonl", ({"problem": i + 1, "correct": 1, "benchmark": "t"} for i in N))


@refused("expected a whole number from 0")
def half_samples(folder: Path) -> Sides:
    rows = [{"problem": i, "correct": 1, "sample": sample} for i in N for sample in (0.5, 1.5)]
    return write_rows(folder / "a.jsonl", rows), write_rows(folder / "b.jsonl", rows)


@refused("is '0_1'; expected a score")
def underscores(folder: Path) -> Sides:
    sides = [[{"problem": i, "score": score} for i in N] for score in (1, "0_1")]
    return write_rows(folder / "a.jsonl", sides[0]), write_rows(folder / "b.jsonl", sides[1])


@refused("'sample' is '1000000000.*expected a whole number from 0")
def a_number_beyond_floats(folder: Path) -> Sides:
    sides = [[{"problem": i, "correct": 1, "sample": sample} for i in N] for sample in (0, 10**400)]
    return write_rows(folder / "a.jsonl", sides[0]), write_rows(folder / "b.jsonl", sides[1])


@refused("2 logs of one task at temperature 0")
def an_older_run_beside_the_new_one(folder: Path) -> Sides:
    before = write_lm(folder / "a", (lm_row(i) for i in N))
    write_lm(folder / "b", (lm_row(i, text=f"old {i}") for i in N))
    return before, write_lm(folder / "b", (lm_row(i, 0.0, text=f"new {i}") for i in N), day=2)


@refused("were put in other words")
def other_examples_in_the_second_log(folder: Path) -> Sides:
    for name in "ab":
        for day in (1, 2):
            prompt = {"prompt": "Other examples."} if (name, day) == ("b", 2) else {}
            rows = (lm_row(i, generation=DRAWN, text=f"{name}{day}{i}", **prompt) for i in N)
            write_lm(folder / name, rows, results_of(config={"torch_seed": day}), day=day)
    return folder / "a", folder / "b"


@refused("were put in other words")
def other_examples_in_lists(folder: Path) -> Sides:
    return two_lm(folder, lambda i: {"arguments": [[f"An example. Q{i}?", GREEDY]]}, arguments=[["Q?", GREEDY]])


@refused("were put in other words")
def another_first_message(folder: Path) -> Sides:
    return two_inspect(folder, lambda i: {"prompt": f"Think. q{i}"})


@refused("task version .'1' before, '2' after")
def version_of_another_results_file(folder: Path) -> Sides:
    before = write_lm(folder / "a", (lm_row(i) for i in N), results_of(), name="out")
    return before, write_lm(folder / "b", (lm_row(i) for i in N), results_of(versions={"t": 2}), name="out")


@refused("grading rules")
def another_expression_of_a_filter(folder: Path) -> Sides:
    configs = [{"t": {"filter_list": [{"name": "none", "filter": [{"regex_pattern": word}]}]}} for word in "ab"]
    sides = [
        write_lm(folder / c, (lm_row(i) for i in N), results_of(configs=config))
        for c, config in zip("ab", configs, strict=True)
    ]
    return sides[0], sides[1]


@refused("task version of math .'1' before, '2' after")
def a_task_whose_name_ends_another(folder: Path) -> Sides:
    for name, version in (("a", 1), ("b", 2)):
        for task, of_task in (("hard_math", 1), ("math", version)):
            samples = [inspect_sample(i, text=f"{name}{i}") for i in N]
            write_inspect(folder / name / f"{task}.json", samples, task=task, task_version=of_task)
    return folder / "a", folder / "b"


@refused("metric .'match' before, 'model_graded_qa' after")
def another_scorer(folder: Path) -> Sides:
    return two_inspect(folder, lambda i: {"scorer": "model_graded_qa"})


@refused("metric .'match' before, 'other' after")
def scorers_in_another_order(folder: Path) -> Sides:
    both = {"scores": {"match": {"value": "C"}, "other": {"value": "C"}}}
    before = write_inspect(folder / "a.json", [inspect_sample(i, **both) for i in N], scorers=[{"name": "match"}])
    after = [inspect_sample(i, scores={"match": {"value": "I"}, "other": {"value": "C"}}) for i in N]
    return before, write_inspect(folder / "b.json", after, scorers=[{"name": "other"}])


@refused("models of roles .'{.grader.:.*openai/big")
def another_model_that_grades(folder: Path) -> Sides:
    before = write_inspect(
        folder / "a.json", [inspect_sample(i) for i in N], model_roles={"grader": {"model": "openai/big"}}
    )
    after = [inspect_sample(i, text=f"b{i}") for i in N]
    return before, write_inspect(folder / "b.json", after, model_roles={"grader": {"model": "openai/tiny"}})


@refused("scorer options .'none' before")
def another_option_of_the_scorer(folder: Path) -> Sides:
    return two_inspect(folder, lambda i: {}, scorers=[{"name": "match", "options": {"location": "any"}}])


@refused("has 100 answers of the task 'answers' twice")
def names_that_differ_in_blanks(folder: Path) -> Sides:
    rows = [{"problem": f"p{i // 2}" + " " * (i % 2), "correct": 1} for i in N]
    return write_rows(folder / "a.jsonl", rows), write_rows(folder / "b.jsonl", rows)


@refused("'finish' is 'error'; expected stop,")
def a_failed_request(folder: Path) -> Sides:
    sides = [[{"problem": i, "correct": 1, "finish": finish} for i in N] for finish in ("stop", "error")]
    return write_rows(folder / "a.jsonl", sides[0]), write_rows(folder / "b.jsonl", sides[1])


@refused("task arguments .'none' before")
def arguments_on_one_side(folder: Path) -> Sides:
    return two_inspect(folder, lambda i: {}, task_args={"hard": True})


@refused("system message .'none' before, 'Be brief.' after")
def system_message_on_one_side(folder: Path) -> Sides:
    return two_inspect(folder, lambda i: {}, config={"temperature": 0.7, "system_message": "Be brief."})


@refused("2 logs of one task at temperature 0")
def greedy_logs_of_inspect(folder: Path) -> Sides:
    before = write_inspect(folder / "a.json", [inspect_sample(i) for i in N])
    for name in "xy":
        write_inspect(folder / "b" / f"{name}.json", [inspect_sample(i) for i in N], config={"temperature": 0})
    return before, folder / "b"


@refused("unlike conditions: stop sequences is")
def logs_of_inspect_with_other_stops(folder: Path) -> Sides:
    before = write_inspect(folder / "a.json", [inspect_sample(i) for i in N])
    for name in "xy":
        config = {"temperature": 0.7, "stop_seqs": [name]}
        write_inspect(folder / "b" / f"{name}.json", [inspect_sample(i) for i in N], config=config)
    return before, folder / "b"


@refused("2 logs of one task of one run")
def a_packed_copy_beside_the_log(folder: Path) -> Sides:
    rows = [lm_row(i, generation=DRAWN) for i in N]
    return write_lm(folder / "a", rows), write_lm(write_lm(folder / "b", rows), rows, gz=True)


@refused("2 logs of one task of one run")
def one_evaluation_twice(folder: Path) -> Sides:
    before = write_inspect(folder / "a.json", [inspect_sample(i) for i in N])
    for name in "xy":
        write_inspect(folder / "b" / f"{name}.json", [inspect_sample(i) for i in N], eval_id="one")
    return before, folder / "b"


@refused("several results files beside it")
def two_results_files_of_one_date(folder: Path) -> Sides:
    before, after = two_lm(folder, lambda i: {}, results_of())
    write_lm(after, (lm_row(i) for i in N), results_of(versions={"t": 2}), name="other")
    return before, after


@pytest.mark.parametrize("name", ["brier_score", "wer", "toxicity", "pct_stereotype"])
def test_less_of_some_metrics_is_better(name: str, tmp_path: Path) -> None:
    sides = [
        write_lm(tmp_path / c, (lm_row(i, score, metric=name) for i in N)) for c, score in (("a", 0.1), ("b", 0.9))
    ]
    with pytest.raises(KvatlasError, match="less is better"):
        kvatlas.gate(*sides)


@pytest.mark.parametrize(("value", "is_unknown"), [("C", False), (True, True), (1, True)])
def test_letters_say_what_is_right_and_numbers_do_not(value: Any, is_unknown: bool, tmp_path: Path) -> None:
    sides = [
        write_inspect(tmp_path / f"{c}.json", [inspect_sample(i, value, scorer="judge", text=f"{c}{i}") for i in N])
        for c in "ab"
    ]
    result = kvatlas.gate(*sides)
    assert result.verdict == "keeps"
    assert ("whether more is better (both sides)" in str(result)) == is_unknown


def test_a_metric_of_unknown_direction_is_refused_unless_allowed(tmp_path: Path) -> None:
    sides = [write_lm(tmp_path / c, (lm_row(i, metric="vibes") for i in N)) for c in "ab"]
    with pytest.raises(KvatlasError, match="Nothing says whether more of 'vibes' of t is better"):
        kvatlas.gate(*sides)
    assert kvatlas.gate(*sides, allow=["grading"]).verdict == "keeps"
    for folder in sides:
        write_lm(folder, (lm_row(i, metric="vibes") for i in N), results_of(higher_is_better={"t": {"vibes": True}}))
    assert kvatlas.gate(*sides).verdict == "keeps"
    known = {"prompt_level_strict_acc": True, "f1": True, "pass@1": True, "error_rate": False, "score": None}
    # A word that is not known may turn those that are.
    known |= dict.fromkeys(("not_correct", "attack_success", "jailbreak_pass", "false_match"))
    assert {name: more_is_better(name) for name in known} == known


@pytest.mark.parametrize("name", REFUSALS)
def test_sides_that_are_not_alike_are_refused(name: str, kvatlas: Call, tmp_path: Path) -> None:
    make, words = REFUSALS[name]
    before, after = make(tmp_path)
    kvatlas.refuse("gate", before, after)
    with pytest.raises(KvatlasError, match=words):
        kvatlas_gate(before, after)


kvatlas_gate = kvatlas.gate


@pytest.mark.parametrize(
    "results",
    [
        {"versions": [1]},
        {"versions": None},
        {"n-shot": None},
        {"config": "x"},
        {"config": {"model_args": ["a"]}},
        {"higher_is_better": None},
        {"higher_is_better": {"t": "no"}},
        {"configs": {"t": 5}},
    ],
)
def test_a_results_file_of_other_types_is_refused_in_a_sentence(results: Any, kvatlas: Call, tmp_path: Path) -> None:
    before = write_lm(tmp_path / "a", (lm_row(i) for i in N))
    after = write_lm(tmp_path / "b", (lm_row(i) for i in N), results)
    assert "expected an object" in kvatlas.refuse("gate", before, after)


# -- what is told ------------------------------------------------------------------------------------------------------


def test_other_sampling_stands_first_and_strict_refuses_it(kvatlas: Call, tmp_path: Path) -> None:
    before = write_inspect(tmp_path / "a.json", [inspect_sample(i) for i in N])
    config = {"temperature": 0.7, "top_p": 0.1, "reasoning_effort": "low", "stop_seqs": ["."]}
    steps = [{"solver": "chain_of_thought", "params": {}}, {"solver": "generate", "params": {}}]
    after = write_inspect(tmp_path / "b.json", [inspect_sample(i, text=f"b{i}") for i in N], config, steps=steps)
    code, out, _ = kvatlas("gate", before, after)
    assert code == 0
    told = out.splitlines()[2]
    for words in ("top_p none before, 0.1 after", "reasoning_effort", "stop sequences", "solver generate before"):
        assert words in told
    document = json.loads(kvatlas("gate", before, after, "--json")[1])
    assert {"condition": "top_p", "before": "none", "after": "0.1"} in document["sampling"]
    assert "--strict: " in kvatlas.refuse("gate", before, after, "--strict")
    assert (
        kvatlas("gate", before, write_inspect(tmp_path / "c.json", [inspect_sample(i) for i in N]), "--strict")[0] == 0
    )


def test_all_that_a_results_file_names_is_listed(tmp_path: Path) -> None:
    sides = [
        write_lm(
            tmp_path / c,
            (lm_row(i, text=f"{c}{i}") for i in N),
            results_of(config={"batch_size": size}, fewshot_as_multiturn=turns, configs={"t": {"doc_to_text": c}}),
        )
        for c, size, turns in (("a", 1, False), ("b", 64, True))
    ]
    listed = {item.condition: item[1:3] for item in kvatlas.gate(*sides).pairs.differences}
    assert listed.pop("task configuration")
    assert listed == {"batch size": ("1", "64"), "examples as turns": ("false", "true")}


def test_what_is_unknown_is_told_to_be_unknown(tmp_path: Path) -> None:
    named = write_lm(tmp_path / "named", (lm_row(i) for i in N), results_of())
    rows = ({**lm_row(i, text=f"b{i}"), "arguments": "lost"} for i in N)
    result = kvatlas.gate(named, write_lm(tmp_path / "bare", rows))
    assert result.verdict == "keeps"
    unknown = {entry["condition"]: (entry["before"], entry["after"]) for entry in result.to_dict()["unknown"]}
    assert unknown["task version"] == ("1", "unknown")
    assert unknown["prompts"] == ("unknown", "unknown")
    assert unknown["sampling"][1] == "unknown"
    assert str(result).split("\n\n")[1].startswith("Unknown, so not compared: ")
    assert not any(difference.condition == "task version" for difference in result.pairs.differences)


def test_rows_without_a_text_are_paired_by_name_and_counted(tmp_path: Path) -> None:
    sides = []
    for name, blank in (("a", -1), ("b", 3)):
        rows = [{"problem": i, "correct": 1, "question": "" if i == blank else f"q{i}", "reference": i} for i in N]
        # 8 and "8" are one reference.
        rows = [{**row, "reference": str(row["reference"]) if name == "a" else row["reference"]} for row in rows]
        sides.append(write_rows(tmp_path / f"{name}.jsonl", reversed(rows) if name == "b" else rows))
    result = kvatlas.gate(*sides)
    assert (result.verdict, result.pairs.tasks[0].by_name) == ("keeps", 1)
    assert "questions of 1 of 200 problems" in str(result)


def test_a_lost_grade_of_an_equal_text_is_the_graders(tmp_path: Path) -> None:
    sides = []
    for name, wrong in (("a", -1), ("b", 3)):
        rows = ({"problem": i, "correct": int(i != wrong), "text": f"text {i}"} for i in N)
        sides.append(write_rows(tmp_path / f"{name}.jsonl", rows))
    assert "The grader differs: 1 answer of equal texts" in str(kvatlas.gate(*sides))


def test_answers_that_were_perhaps_cut_are_told(tmp_path: Path) -> None:
    def row(index: int, is_cut: bool, text: str) -> dict[str, Any]:
        said = "thinking " * 30 if is_cut else f"{text} \\boxed{{{index}}}"
        return lm_row(index, float(not is_cut), text=said, generation=DRAWN)

    before = write_lm(tmp_path / "a", (row(i, False, "a") for i in N))
    after = write_lm(tmp_path / "b", (row(i, i % 5 == 0, "b") for i in N))
    result = kvatlas.gate(before, after)
    assert result.verdict == "loses"
    assert "have no box, 0 on the other side: perhaps cut: 256 new tokens" in result.warnings[0]
    invalid = ({**row(i, i % 5 == 0, "b"), "filtered_resps": ["[invalid]" if i % 5 == 0 else "b"]} for i in N)
    result = kvatlas.gate(before, write_lm(tmp_path / "c", invalid))
    assert result.warnings[0].startswith("40 of 200 answers after have no answer or were cut off (0 on the other")


# -- samples -----------------------------------------------------------------------------------------------------------


def test_means_over_all_samples_are_compared(tmp_path: Path) -> None:
    one = write_rows(tmp_path / "one.jsonl", ({"problem": i, "correct": 1} for i in N))
    four = [{"problem": i, "correct": int(k == 0), "sample": k} for i in N for k in range(4)]
    result = kvatlas.gate(one, write_rows(tmp_path / "four.jsonl", four))
    document = result.to_dict()
    assert (result.verdict, document["loses"], document["unit"]) == ("loses", 75.0, "problem")
    assert document["tasks"][0]["samples"] == [1, 4]
    assert "1 and 4 samples" in document["limits"]["these_problems"]["refused"]
    # One of four answers is missing: a quarter of the pair is at its worst.
    lacking = [row for row in four if (row["problem"], row["sample"]) != (0, 0)]
    worse = kvatlas.gate(one, write_rows(tmp_path / "lacking.jsonl", lacking)).to_dict()
    assert worse["after"]["missing"] == 1
    assert document["loses_high"] < worse["loses_high"] < document["loses_high"] + 1


def test_equal_questions_are_one_unit(tmp_path: Path) -> None:
    """40 questions that stand five times in a log, under names of their own, prove as much as 40 problems."""
    sides = []
    for name in "ab":
        rows = (lm_row(i, doc={"question": f"q{i % 40}"}, target=str(i % 40), prompt=f"Q{i % 40}?") for i in N)
        sides.append(write_lm(tmp_path / name, rows))
    document = kvatlas.gate(*sides, lose_at_most=5).to_dict()
    assert (document["verdict"], document["units"]) == ("cannot tell", 40)
    assert document["loses_high"] == pytest.approx(100 * (1 - 0.05 ** (1 / 40)), abs=0.1)
    assert any("200 problems with 40 questions or passages" in note for note in document["notes"])
    # The same stem with other choices in its prompt is another question.
    for name in "cd":
        rows = (lm_row(i, doc={"question": "Which is true?"}, target="A", prompt=f"Q{i}?") for i in N)
        sides.append(write_lm(tmp_path / name, rows))
    assert kvatlas.gate(*sides[2:], lose_at_most=5).to_dict()["units"] == 200


@pytest.mark.parametrize(("target", "samples"), [("right", 4), ("other", 1)])
def test_repeats_of_a_row_are_samples_where_each_has_a_grade(target: str, samples: int, tmp_path: Path) -> None:
    def rows(name: str, wrong: int) -> list[dict[str, Any]]:
        found = []
        for i in N:
            answers = ["right" if k >= wrong * (i % 3 == 0) else "wrong" for k in range(4)]
            score = answers.count("right") / 4
            texts = [f"{name} {i} {k} " * 40 for k in range(4)]
            found.append(lm_row(i, score, target=target, resps=[texts], filtered_resps=[answers], generation=DRAWN))
        return found

    result = kvatlas.gate(
        write_lm(tmp_path / "a", rows("a", 0)), write_lm(tmp_path / "b", rows("b", 1)), lose_at_most=20
    )
    document = result.to_dict()
    (task,) = document["tasks"]
    assert (task["samples"], task["lost"]) == (samples, 67)
    assert document["loses"] == pytest.approx(100 * 67 / 800, abs=1e-3)
    assert document["claim"] == ("these_problems" if samples == 4 else "problems_like_these")
    assert "refused" not in document["limits"]["these_problems"]
    assert ("each score is the mean of 4 responses" in str(result)) == (samples == 1)
    assert f"200 x {samples}" in str(result)


@pytest.mark.parametrize("seeds", [(1, 2), (1, 1)])
def test_several_logs_are_samples_unless_their_seed_is_one(seeds: tuple[int, int], tmp_path: Path) -> None:
    for name in "ab":
        for day, seed in enumerate(seeds, 1):
            rows = (lm_row(i, [1.0] * 4, generation=DRAWN, resps=[[f"{name}{day}{i}{k}" for k in range(4)]]) for i in N)
            write_lm(tmp_path / name, rows, results_of(config={"torch_seed": seed}), day=day)
    document = kvatlas.gate(tmp_path / "a", tmp_path / "b").to_dict()
    assert document["tasks"][0]["samples"] == 8
    assert document["claim"] == ("these_problems" if seeds == (1, 2) else "problems_like_these")


def test_several_logs_of_inspect_are_epochs(tmp_path: Path) -> None:
    for name in "ab":
        for number in range(2):
            samples = [inspect_sample(i, epoch=k, text=f"{name}{i}{k}{number}") for i in N for k in (1, 2)]
            write_inspect(tmp_path / name / f"{number}.json", samples, created=f"2026-01-0{number + 1}T00:00:00+00:00")
    document = kvatlas.gate(tmp_path / "a", tmp_path / "b").to_dict()
    assert (document["tasks"][0]["samples"], document["units"]) == (4, 800)


def test_sampling_of_every_row_counts(tmp_path: Path) -> None:
    before = write_lm(tmp_path / "a", (lm_row(i) for i in N))
    rows = (lm_row(i, generation={**GREEDY, "do_sample": i == 199, "temperature": 0.7}) for i in N)
    result = kvatlas.gate(before, write_lm(tmp_path / "b", rows))
    assert "temperature 0 before, 0 and 0.7 after" in result.warnings[0]
    assert "temperature 0" in result.to_dict()["limits"]["these_problems"]["refused"]


@pytest.mark.parametrize(
    ("share", "claim", "is_told"),
    [
        (1.0, "problems_like_these", False),
        (0.05, "problems_like_these", False),
        (0.005, "these_problems", True),
        (0.0, "these_problems", False),
    ],
)
def test_copies_are_counted_by_share(share: float, claim: str, is_told: bool, tmp_path: Path) -> None:
    def rows(name: str) -> list[dict[str, Any]]:
        copies = share * len(N)
        return [
            lm_row(i, [1.0] * 4, generation=DRAWN, resps=[[f"{name} {i} {k * (i >= copies)} " * 60 for k in range(4)]])
            for i in N
        ]

    result = kvatlas.gate(write_lm(tmp_path / "a", rows("a")), write_lm(tmp_path / "b", rows("b")))
    assert result.judgement.claim.value == claim
    assert any("copies of one long text" in line for line in result.warnings) == is_told


# -- limits and options ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("lost", "gained", "words"), [(22, 20, "at most 1.05"), (15, 12, "at most 0.97")])
def test_a_limit_beside_the_margin_has_as_many_digits_as_it_needs(
    lost: int, gained: int, words: str, tmp_path: Path
) -> None:
    """Counts as reviewers of kernels publish them: 1,103 of 1,319 right."""
    before = [float(i < 1103) for i in range(1319)]
    after = [0.0 if i < lost else 1.0 if 1103 <= i < 1103 + gained else before[i] for i in range(1319)]
    sides = [
        write_rows(tmp_path / f"{name}.jsonl", ({"problem": i, "score": score} for i, score in enumerate(scores)))
        for name, scores in (("a", before), ("b", after))
    ]
    text = str(kvatlas.gate(*sides, lose_at_most=1))
    assert words in text
    assert "at most 1.0 " not in text


def test_options_that_do_nothing_are_refused(kvatlas: Call, tmp_path: Path) -> None:
    sides = [write_rows(tmp_path / f"{name}.jsonl", [{"problem": "p", "correct": 1}]) for name in "ab"]
    assert "'file of answers' has no filters" in kvatlas.refuse("gate", *sides, "--filter", "nope")
    for option in (("--samples", 4), ("--temperature", 0), ("--served", "m"), ("--answers", "x"), ("--again",)):
        assert f"{option[0]}: for endpoints alone" in kvatlas.refuse("gate", *sides, *option)
    assert "'runs/mine@dynts ratio=0.3'" in kvatlas("gate", "runs/mine")[2]
