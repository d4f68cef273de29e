"""Logs of anyone's tasks: Inspect's with any scorer, our own provider's, and lm-eval's sample files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvatlas.api import open_run
from kvatlas.core import SERVED, KvatlasError, Setting, Status
from kvatlas.results import Store
from kvatlas.stats.estimates.validity import validity
from tests.command_line import Call

pytest.importorskip("inspect_ai", reason="needs the extra inspect")

from tests.integrations.test_inspect import run_task


def sums(scorers: Any, name: str = "sums") -> Any:
    from inspect_ai import Task
    from inspect_ai.dataset import Sample

    samples = [Sample("2 + 2?", target="4", id="two"), Sample("3 + 3?", target="6", id=3)]
    return Task(dataset=samples, scorer=scorers, name=name)


def marked() -> Any:
    from inspect_ai.scorer import Score, Scorer, Target, mean, scorer
    from inspect_ai.solver import TaskState

    @scorer(metrics={"*": [mean()]})
    def shares() -> Scorer:
        async def score(state: TaskState, target: Target) -> Score:
            right = target.text in state.output.completion
            return Score(value={"steps": 1.0 if right else 0.25, "tone": 0.5}, answer=state.output.completion[:3])

        return score

    return shares()


def test_logs_of_two_foreign_tasks_are_imported_at_once_and_drawn(
    tmp_path: Path, succeed: Callable[..., str], kvatlas: Call
) -> None:
    from inspect_ai.scorer import includes

    replies = [("it is 4", "stop"), ("it is 5", "max_tokens")]
    first = run_task(tmp_path / "a", [*replies, *replies], task=sums(includes()), epochs=2)
    second = run_task(tmp_path / "b", replies, task=sums(marked(), "marks"))
    run = tmp_path / "run"
    said = succeed("import", first, second, run).splitlines()
    assert said == [
        f"{run}: 4 of 4 traces of mockllm/model on sums",
        f"{run}: 2 of 2 traces of mockllm/model on marks",
    ]
    with Store.open(run) as store:
        traces = [trace for _, trace in store.traces()]
    by_name = {(t.benchmark, t.problem, t.sample): t for t in traces}
    assert {t.setting for t in traces} == {SERVED}
    right, cut, marked_cut = by_name["sums", "two", 0], by_name["sums", "3", 0], by_name["marks", "3", 0]
    assert (right.grade.correct, right.grade.answer) == (True, "it is 4")
    assert (cut.grade.correct, cut.grade.status) == (False, Status.TRUNCATED)
    assert (marked_cut.grade.correct, marked_cut.grade.progress) == (False, 0.25)
    assert marked_cut.grade.metrics == {"steps": 0.25, "tone": 0.5}
    assert (right.usage.output_tokens, right.usage.peak_kv_tokens, right.usage.compressions) == (40, None, None)
    succeed("map", run, "--out", tmp_path / "map.png")
    assert (tmp_path / "map.png").stat().st_size > 5000
    succeed("export", run, "--format", "jsonl", "--out", tmp_path / "t.jsonl")
    rows = [json.loads(line) for line in (tmp_path / "t.jsonl").read_text().splitlines()]
    assert {row["peak_kv_tokens"] for row in rows} == {None}

    assert kvatlas("import", second, run, "--scorer", "tone")[2].strip().endswith("valid are: shares.")


def test_scores_that_are_no_shares_are_refused(tmp_path: Path) -> None:
    from inspect_ai.log import read_eval_log, write_eval_log
    from inspect_ai.scorer import includes

    from kvatlas.integrations.inspect_logs import import_log

    log = run_task(tmp_path / "a", [("4", "stop"), ("6", "stop")], task=sums(includes()))
    read = read_eval_log(str(log))
    read.samples[0].scores["includes"].value = 7
    write_eval_log(read, str(tmp_path / "b.eval"))
    with pytest.raises(KvatlasError, match="of the log has the score 7; valid are numbers from 0 to 1 and"):
        import_log(tmp_path / "b.eval", tmp_path / "run")
    read.samples[0].scores["includes"].value = float("nan")
    write_eval_log(read, str(tmp_path / "c.json"))
    cell, added = import_log(tmp_path / "c.json", tmp_path / "run")
    assert (len(cell.problems), added) == (2, 1)


def test_our_own_model_keeps_its_setting_and_its_costs(tmp_path: Path) -> None:
    from inspect_ai import eval as inspect_eval
    from inspect_ai.model import get_model
    from inspect_ai.scorer import includes

    from kvatlas.integrations.inspect_logs import import_log

    values = {"kv_budget": 24, "local_window": 8, "ratio": 0.3, "ratio_over": "thinking"}
    task = sums(includes())
    for sample in task.dataset:
        sample.input = f"a = {sample.target} . ? a"
    model = get_model("kvatlas/embedded:tiny-llama", memoize=False, policy="window", **values)
    (log,) = inspect_eval(task, model=model, log_dir=str(tmp_path), display="none", max_tokens=40)
    cell, added = import_log(Path(log.location.removeprefix("file://")), tmp_path / "run")
    assert (cell.model, cell.benchmark, added) == ("embedded:tiny-llama", "sums", 2)
    assert cell.setting.policy == "window"
    assert values.items() <= cell.setting.values.items()
    with Store.open(tmp_path / "run") as store:
        usages = [trace.usage for _, trace in store.traces()]
    assert all(usage.compressions and usage.peak_kv_tokens == 24 for usage in usages if usage.output_tokens > 30)
    assert all(
        usage.mean_kv_tokens <= usage.peak_kv_tokens <= usage.prompt_tokens + usage.output_tokens for usage in usages
    )


def sample_file(folder: Path, **changes: Any) -> Path:
    """Two documents with two filters each, as lm-eval 0.4.13 writes them, and the results beside them."""
    date = "2026-11-20T10-11-12.345678"
    folder.mkdir(parents=True)
    rows = [
        {
            "doc_id": number, "doc": {"question": "?"}, "target": "4", "resps": [["The answer is 4."]], "filter": kind,
            "filtered_resps": ["4" if kind == "flexible" else "[invalid]"], "metrics": ["exact_match"],
            "prompt_hash": str(number), "exact_match": float(kind == "flexible"), **changes,
        }
        for number in (0, 1)
        for kind in ("strict", "flexible")
    ]  # fmt: skip
    results = {"model_name": "Qwen/Qwen3-8B", "config": {"model": "hf", "model_args": {"pretrained": "Qwen/Qwen3-8B"}}}
    (folder / f"results_{date}.json").write_text(json.dumps(results))
    path = folder / f"samples_gsm8k_cot_{date}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_sample_files_of_lm_eval(tmp_path: Path, succeed: Callable[..., str], kvatlas: Call) -> None:
    path = sample_file(tmp_path / "out")
    run = tmp_path / "run"
    assert succeed("import", path, run) == f"{run}: 2 of 2 traces of Qwen/Qwen3-8B on gsm8k_cot\n"
    with Store.open(run) as store:
        (trace, _) = [trace for _, trace in store.traces()]
    assert (trace.grade.correct, trace.grade.status, trace.text) == (False, Status.NO_ANSWER, "The answer is 4.")
    assert trace.grade.metrics == {"exact_match,strict": 0.0, "exact_match,flexible": 1.0}
    assert (trace.setting, trace.usage.output_tokens) == (SERVED, None)
    succeed("import", path, run, "--scorer", "exact_match,flexible")
    with Store.open(run) as store:
        assert [trace.grade.correct for _, trace in store.traces()] == [True, True]
    succeed("map", run, "--out", tmp_path / "map.png")

    results = next((tmp_path / "out").glob("results_*"))
    arguments = "pretrained=hf:Qwen/Qwen3-8B,policy=window,kv_budget=5000,local_window=1000,ratio=0.3,batch_size=8"
    results.write_text(json.dumps({"config": {"model": "kvatlas", "model_args": arguments}}))
    succeed("import", path, tmp_path / "own")
    with Store.open(tmp_path / "own") as store:
        (cell,) = store.manifest().expected
    assert (cell.model, cell.setting) == (
        "hf:Qwen/Qwen3-8B",
        Setting.of("window", kv_budget=5000, local_window=1000, ratio=0.3),
    )
    # Nobody knows whether anything was compressed, so nothing is said of it.
    known = validity(open_run(tmp_path / "own").data.cells)
    assert known is not None
    assert (known.traces, known.bounded) == (2, 0)
    assert "exact_match,loose'; valid are: exact_match,strict, exact" in kvatlas(
        "import", path, run, "--scorer", "exact_match,loose"
    )[2]  # fmt: skip
    assert "has the score 12.5; valid are" in kvatlas("import", sample_file(tmp_path / "b", exact_match=12.5), run)[2]
    (tmp_path / "samples_x.jsonl").write_text('{"a": 1}\n')
    assert (
        "is no sample file of lm-eval; its lines have doc_id" in kvatlas("import", tmp_path / "samples_x.jsonl", run)[2]
    )
