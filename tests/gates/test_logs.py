"""`kvatlas gate` on real logs: lm-eval's, Inspect's, our runs and endpoints, and twenty wrong ones."""

import json
import re
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvatlas
from kvatlas.core import KvatlasError
from kvatlas.models import ModelHandle, find
from kvatlas.results import Store
from tests.command_line import Call
from tests.gates.answer_files import numpy_verdict, write_answers
from tests.gates.harness import PROBLEMS, changed_copy, changed_results, run_harness, samples_file, scores
from tests.serve.running import served
from tests.stored import decode_run

pytest.importorskip("lm_eval", reason="needs lm-eval")

pytestmark = pytest.mark.newest


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory, tiny_llama: ModelHandle) -> dict[str, Path]:
    """Real logs of one model: two seeds at a low temperature, one at a high one."""
    folder = tmp_path_factory.mktemp("logs")
    calls = {"cool": (0.3, 1), "again": (0.3, 2), "hot": (4.0, 1)}
    made = {}
    for name, (temperature, seed) in calls.items():
        with pytest.MonkeyPatch.context() as monkeypatch:
            made[name] = run_harness(folder, tiny_llama, temperature, seed, monkeypatch)
        # Dates of logs are compared by the second.
        time.sleep(1 - time.time() % 1)
    return made


# -- lm-eval -----------------------------------------------------------------------------------------------------------


def test_logs_of_the_harness_get_the_verdict_of_numpy(kvatlas: Call, logs: dict[str, Path], tmp_path: Path) -> None:
    page = tmp_path / "gate.html"
    code, out, _ = kvatlas("gate", logs["cool"], logs["hot"], "--lose-at-most", 5, "--out", page, "--json")
    document = json.loads(out)
    before = scores(logs["cool"])
    after = scores(logs["hot"])
    sides = [np.array([side[doc] for doc in sorted(side)])[:, None] for side in (before, after)]
    verdict, low, high = numpy_verdict(sides[0], sides[1], 0.05, "problem")
    assert (document["verdict"], code) == (verdict, {"keeps": 0, "loses": 1, "cannot tell": 3}[verdict])
    assert (document["loses_low"], document["loses_high"]) == pytest.approx((100 * low, 100 * high), abs=0.3)
    assert document["problems"] == PROBLEMS
    assert document["lost"] == int((sides[0] > sides[1]).sum()) > 0
    assert {"condition": "temperature", "before": "0.3", "after": "4"} in document["differences"]
    # Every changed problem stands on the page with both texts, and the question.
    html = page.read_text()
    assert html.count("<details>") == document["lost"] + document["gained"]
    assert "&lt;/think&gt;" in html
    assert "<script" not in html


def test_a_comparison_of_two_seeds_says_that_texts_differ_and_scores_do_not(logs: dict[str, Path]) -> None:
    result = kvatlas.gate(logs["cool"], logs["again"], lose_at_most=20)
    assert result.verdict == "keeps"
    assert not result.same_texts
    assert [item.condition for item in result.pairs.differences] == ["seed"]


def test_logs_of_other_seeds_are_samples(logs: dict[str, Path], tmp_path: Path) -> None:
    """Two calls into one folder, as with `--seed 1` and `--seed 2`."""
    both = shutil.copytree(logs["cool"], tmp_path / "both")
    (model,) = [path for path in both.iterdir() if path.is_dir()]
    for path in logs["again"].rglob("*.json*"):
        shutil.copy(path, model / path.name)
    other = shutil.copytree(both, tmp_path / "other")
    changed = samples_file_of(other, 1)
    rows = [json.loads(line) for line in changed.read_text().splitlines()]
    changed.write_text("".join(f"{json.dumps({**row, 'exact_match': 0.0})}\n" for row in rows))
    document = kvatlas.gate(both, other, lose_at_most=20).to_dict()
    assert document["claim"] == "these_problems"
    assert document["units"] == 2 * PROBLEMS
    # At other temperatures they are no samples of one thing.
    for path in logs["hot"].rglob("*.json*"):
        shutil.copy(path, model / path.name)
    with pytest.raises(KvatlasError, match=r"unlike conditions: temperature is '0.3' in .* and '4' in"):
        kvatlas.gate(both, other)


def samples_file_of(folder: Path, index: int) -> Path:
    return sorted(folder.rglob("samples_*.jsonl"))[index]


def test_greedy_logs_make_no_claim_on_these_problems_alone(logs: dict[str, Path], tmp_path: Path) -> None:
    def greedy(row: dict[str, Any]) -> None:
        row["arguments"]["gen_args_0"]["arg_1"] |= {"do_sample": False, "temperature": 0.0}

    first = changed_copy(logs["cool"], tmp_path / "first", greedy)
    second = changed_copy(logs["again"], tmp_path / "second", greedy)
    result = kvatlas.gate(first, second)
    assert result.to_dict()["limits"]["these_problems"] == {"refused": "at temperature 0 nothing is drawn"}
    with pytest.raises(KvatlasError, match="at temperature 0 nothing is drawn"):
        kvatlas.gate(first, second, claim="these_problems")


def test_equal_texts_in_other_files_are_said(logs: dict[str, Path], tmp_path: Path) -> None:
    renamed = changed_copy(logs["cool"], tmp_path / "copy", lambda row: row.update(note="another engine"))
    result = kvatlas.gate(logs["cool"], renamed, lose_at_most=20)
    assert result.same_texts
    assert "wrote the same texts" in str(result)


# -- wrong input -------------------------------------------------------------------------------------------------------


def other_question(row: dict[str, Any]) -> None:
    row["doc"]["question"] += " ?"


def other_prompt(row: dict[str, Any]) -> None:
    row["arguments"]["gen_args_0"]["arg_0"] = "An example. " + row["arguments"]["gen_args_0"]["arg_0"]


def other_filter(row: dict[str, Any]) -> bool:
    is_first = row["filter"] == "after-thinking"
    row["filter"] = "none"
    return is_first


WRONG_LOGS = {
    "other questions": (other_question, "ask other questions of the task 'chain_local'"),
    "other examples": (other_prompt, "were put in other words"),
    "half a log": (lambda row: row["doc_id"] < PROBLEMS // 2, r"chain_local', .* lacks 12 of 24 answers .* unfinished"),
    "no 0 and 1": (lambda row: row.update(exact_match=73.0), "is '73.0'; expected a score from 0 to 1"),
    "a list as score": (lambda row: row.update(exact_match=[1, 2]), "expected a score from 0 to 1"),
    "no such metric": (lambda row: row.pop("exact_match"), "has no 'exact_match'"),
    "not lm-eval's": (lambda row: row.pop("doc_id"), "has no column 'problem'"),
    "no metric": (lambda row: row.update(metrics=[]), "has no metric ''; there are: none"),
    "another filter": (other_filter, "differ in filter"),
}


@pytest.mark.parametrize("name", WRONG_LOGS)
def test_a_wrong_log_is_refused_in_a_sentence(name: str, kvatlas: Call, logs: dict[str, Path], tmp_path: Path) -> None:
    change, sentence = WRONG_LOGS[name]
    wrong = changed_copy(logs["cool"], tmp_path / "wrong", change)
    target: Path = samples_file(wrong) if name == "not lm-eval's" else wrong
    assert re.search(sentence, kvatlas.refuse("gate", logs["cool"], target))


WRONG_RESULTS = {
    "few-shot": (lambda results: results["n-shot"].update(chain_local=5), "few-shot examples .*'0' before, '5' after"),
    "version": (lambda results: results["versions"].update(chain_local=2.0), "task version .*--allow version"),
    "less is better": (
        lambda results: results["higher_is_better"]["chain_local"].update(exact_match=False),
        "less is better",
    ),
}


@pytest.mark.parametrize("name", WRONG_RESULTS)
def test_other_conditions_are_refused_in_a_sentence(name: str, logs: dict[str, Path], tmp_path: Path) -> None:
    change, sentence = WRONG_RESULTS[name]
    wrong = changed_results(logs["again"], tmp_path / "wrong", change)
    with pytest.raises(KvatlasError, match=sentence):
        kvatlas.gate(logs["cool"], wrong)


def test_differences_can_be_allowed(logs: dict[str, Path], tmp_path: Path) -> None:
    wrong = changed_copy(logs["again"], tmp_path / "wrong", other_prompt)
    assert kvatlas.gate(logs["cool"], wrong, allow=["prompts"], lose_at_most=20).verdict == "keeps"
    half = changed_copy(logs["again"], tmp_path / "half", lambda row: row["doc_id"] < 12)
    result = kvatlas.gate(logs["cool"], half, allow=["missing"], lose_at_most=90)
    assert result.verdict == "cannot tell"
    assert "lack an answer" in result.to_dict()["reasons"][0]
    with pytest.raises(KvatlasError, match="--allow everything: expected prompts"):
        kvatlas.gate(logs["cool"], half, allow=["everything"])


def test_swapped_sides_are_pointed_out(logs: dict[str, Path]) -> None:
    result = kvatlas.gate(logs["again"], logs["cool"], lose_at_most=20)
    assert any("are they swapped" in note for note in result.pairs.notes)
    assert not any("are they swapped" in note for note in kvatlas.gate(logs["cool"], logs["again"]).pairs.notes)


def test_wrong_paths_are_refused_in_a_sentence(kvatlas: Call, logs: dict[str, Path], tmp_path: Path) -> None:
    table = write_answers(tmp_path / "table.csv", {"math": np.ones((5, 1))})
    other = write_answers(tmp_path / "other.csv", {"law": np.ones((5, 1))})
    twice = tmp_path / "twice.csv"
    twice.write_text(table.read_text() + "".join(table.read_text().splitlines(True)[1:]))
    link = tmp_path / "link.csv"
    link.symlink_to(table)
    percent = write_answers(tmp_path / "percent.csv", {"math": np.full((5, 1), 87.5)})
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "nothing").mkdir()
    (tmp_path / "notes.txt").write_text("443 of 1,319")
    (tmp_path / "no-grade.csv").write_text("problem,answer\np0,4\n")
    (tmp_path / "both.csv").write_text("problem,correct,score\np0,1,0.5\n")
    cut = shutil.copytree(logs["cool"], tmp_path / "cut")
    samples_file(cut).write_bytes(samples_file(cut).read_bytes()[:-40])
    results = shutil.copytree(logs["cool"], tmp_path / "results")
    samples_file(results).unlink()
    several = tmp_path / "several"
    for name in ("cool", "hot"):
        shutil.copytree(logs[name], several / name)
    sentences = {
        tmp_path / "missing": "is not there; expected a folder or file of lm-eval's samples",
        table: "are the same answers",
        link: "are the same answers",
        other: "lacks the task",
        twice: "has 5 answers of the task 'math' twice",
        percent: "expected a score from 0 to 1",
        tmp_path / "empty.jsonl": "is empty",
        tmp_path / "nothing": "is a folder without answers",
        tmp_path / "notes.txt": "has a suffix that no log",
        tmp_path / "no-grade.csv": "expected one of 'correct' and 'score'",
        tmp_path / "both.csv": "has correct and score; expected one of",
        cut: "the log is cut off or damaged",
        results: "run it with --log_samples",
        several: "in 2 folders",
    }
    for path, sentence in sentences.items():
        assert sentence in kvatlas.refuse("gate", table, path)
    assert "expected a number of points above 0" in kvatlas.refuse("gate", table, other, "--lose-at-most", 0)
    assert "must end in .html" in kvatlas.refuse("gate", table, other, "--out", "gate.doc")
    assert "name a benchmark" in kvatlas.refuse("gate", "http://127.0.0.1:1", "http://127.0.0.1:2")
    assert "is asked of two endpoints" in kvatlas.refuse("gate", table, other, "CHAIN4")
    assert "has no task 'law'" in kvatlas.refuse("gate", logs["cool"], logs["hot"], "--task", "law")
    assert "has no filter 'loose'" in kvatlas.refuse("gate", logs["cool"], logs["hot"], "--filter", "loose")


#: The problems of the side after, of which before has p1 to p40, and what is said.
OTHER_NAMES = {
    "padded": ([f"p{i:02d}" for i in range(1, 41)], r"before.csv' lacks 9 .* p01, .*after.csv' lacks 9 .* p1, .*'p01'"),
    "in capitals": ([f"P{i}" for i in range(1, 41)], r"no problem .* in common: .*'p1' and 'P1' differ .* `question`"),
    "with a blank": ([f"p {i}" for i in range(1, 41)], r"'p1' and 'p 1' differ"),
    "three others": ([*(f"p{i}" for i in range(1, 38)), "x", "y", "z"], r"before.csv' lacks 3 of 43 .* x, y, z\) and"),
    "fewer": ([f"p{i}" for i in range(1, 31)], r"after.csv' lacks 10 of 40 answers \(as problem p31, p32, p33\)"),
}


@pytest.mark.parametrize("name", OTHER_NAMES)
def test_each_side_is_told_what_it_lacks(name: str, tmp_path: Path) -> None:
    problems, sentence = OTHER_NAMES[name]
    before = answers_of(tmp_path / "before.csv", {f"p{i}": 1 for i in range(1, 41)})
    with pytest.raises(KvatlasError, match=sentence) as refused:
        kvatlas.gate(before, answers_of(tmp_path / "after.csv", dict.fromkeys(problems, 1)))
    assert ("leading zeros" in str(refused.value)) == (name in ("padded", "in capitals", "with a blank"))


def answers_of(path: Path, grades: Mapping[str, Any]) -> Path:
    """A file without a column of benchmarks."""
    path.write_text("problem,correct\n" + "".join(f"{problem},{grade}\n" for problem, grade in grades.items()))
    return path


def test_a_file_without_the_task_and_one_without_grades_are_told(kvatlas: Call, tmp_path: Path) -> None:
    before = answers_of(tmp_path / "before.csv", {"p1": 1, "p2": 0})
    after = answers_of(tmp_path / "after.csv", {"p1": "", "p2": ""})
    assert "has no task 'law'; there are: answers." in kvatlas.refuse("gate", before, after, "--task", "law")
    assert "after.csv: 'correct' is blank in row 1 and all others" in kvatlas.refuse("gate", before, after)


# -- runs and endpoints ------------------------------------------------------------------------------------------------

SPEC: dict[str, Any] = {
    "models": ["embedded:tiny-llama"],
    "benchmarks": ["CHAIN4", "CHAIN6"],
    "problems": 8,
    "samples": 2,
    "sampling": {"temperature": 1.2, "max_new_tokens": 300},
    "settings": [{"policy": "window", "kv_budget": 120, "ratio_over": "thinking"}],
    "axes": {"local_window": [16, 32], "ratio": [0.1]},
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return decode_run(SPEC, tmp_path_factory.mktemp("run") / "run")


def grades(run: Path, policy: str, window: int | None) -> dict[tuple[str, str, int], float]:
    """The grades of a cell, read from the store."""
    with Store.open(run) as store:
        return {
            (trace.benchmark, trace.problem, trace.sample): float(trace.grade.correct)
            for _, trace in store.traces(texts=False)
            if trace.setting.policy == policy and trace.setting.values.get("local_window") == window
        }


def agrees_with_numpy(document: dict[str, Any], before: Mapping[Any, float], after: Mapping[Any, float]) -> bool:
    """True if the verdict on CHAIN6 is that of numpy on its pairs of traces, at a margin of 5 points."""
    names = sorted(name for name in before if name[0] == "CHAIN6")
    sides = [np.array([side[name] for name in names]).reshape(-1, SPEC["samples"]) for side in (before, after)]
    verdict, low, high = numpy_verdict(sides[0], sides[1], 0.05, "pair")
    limits = document["loses_low"], document["loses_high"]
    return document["verdict"] == verdict and limits == pytest.approx((100 * low, 100 * high), abs=0.3)


def test_cells_of_a_run_are_sides(kvatlas: Call, run: Path) -> None:
    code, out, err = kvatlas("gate", f"{run}@full", f"{run}@window local_window=16", "--lose-at-most", 5, "--json")
    document = json.loads(out)
    before = grades(run, "full", None)
    after = grades(run, "window", 16)
    lost = [before[name] - after[name] for name in before]
    assert (document["claim"], document["units"]) == ("these_problems", 32)
    assert document["loses"] == pytest.approx(100 * np.mean(lost), abs=1e-3)
    assert document["exit_code"] == code
    assert document["length"]["unit"] == "tokens"
    assert err == ""
    one_task = ("--task", "CHAIN6", "--lose-at-most", 5, "--json")
    _, out, _ = kvatlas("gate", f"{run}@full", f"{run}@window local_window=16", *one_task)
    assert agrees_with_numpy(json.loads(out), before, after)
    assert "has 3 cells; name one as" in kvatlas.refuse("gate", run, f"{run}@full")
    assert "are the same answers" in kvatlas.refuse("gate", f"{run}@full", f"{run}@full")


def test_two_endpoints_are_compared_and_none_with_a_run(kvatlas: Call, run: Path, tmp_path: Path) -> None:
    setting = {"kv_budget": 120, "local_window": 16, "ratio": 0.1, "ratio_over": "thinking"}
    with (
        served(find("embedded:tiny-llama")) as full,
        served(find("embedded:tiny-llama"), "window", **setting) as window,
    ):
        sentence = kvatlas.refuse("gate", f"{run}@full", window)
        assert f"kvatlas deploy verify {window} --against RUN" in sentence
        both = tmp_path / "both"
        words = [
            "gate",
            full,
            window,
            "CHAIN4",
            "CHAIN6",
            "--problems",
            6,
            "--samples",
            2,
            "--temperature",
            1.2,
            "--max-new-tokens",
            300,
        ]
        words += ["--lose-at-most", 5, "--answers", both, "--json"]
        _, first, _ = kvatlas(*words)
        document = json.loads(first)
        assert (document["claim"], document["units"], document["missing"]) == ("these_problems", 24, 0.0)
        # Nothing is asked twice: the second call reads what is stored.
        with Store.open(both) as store:
            stored = store.keys()
        second = json.loads(kvatlas(*words)[1])
        (told,) = second.pop("notes")
        assert told.startswith("48 of 48 answers were stored before (48 of ")
        assert second.pop("warnings") == [f"{told}.", *document["warnings"]]
        assert second == {name: value for name, value in document.items() if name not in ("notes", "warnings")}
        with Store.open(both) as store:
            assert store.keys() == stored
            questions = [trace.problem for _, trace in store.traces(texts=False)]
        assert len(questions) == 48
        assert "of one endpoint" in kvatlas.refuse("gate", full, full, "CHAIN4")


# -- Inspect -----------------------------------------------------------------------------------------------------------


def test_logs_of_inspect_are_sides(tmp_path: Path) -> None:
    pytest.importorskip("inspect_ai", reason="needs the extra inspect")
    from tests.integrations.test_inspect import run_task

    right = [find_answer(index) for index in range(8)]
    wrong = [*right[:5], "no plan", "no plan", "no plan"]
    sides = []
    for name, texts in (("before", right), ("after", wrong)):
        folder = tmp_path / name
        sides.append(run_task(folder, [(text, "stop") for text in texts], temperature=0.6))
    result = kvatlas.gate(*sides, lose_at_most=5)
    document = result.to_dict()
    assert (document["problems"], document["lost"], document["gained"]) == (8, 3, 0)
    verdict, low, high = numpy_verdict(np.ones((8, 1)), np.array([[1.0]] * 5 + [[0.0]] * 3), 0.05, "problem")
    assert document["verdict"] == verdict
    assert (document["loses_low"], document["loses_high"]) == pytest.approx((100 * low, 100 * high), abs=0.5)
    assert document["before"]["kind"] == "Inspect log"
    assert not result.pairs.tasks[0].by_name
    assert document["length"]["unit"] == "tokens"


def find_answer(index: int) -> str:
    from kvatlas.benchmarks import find as benchmark

    return benchmark("SEQBENCH-5x5").problems(8)[index].answer
