"""Real logs of lm-eval: an embedded model under the harness's own `hf` backend, at a temperature."""

import json
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from kvatlas.benchmarks import find
from kvatlas.models import ModelHandle
from tests.lm_eval_task import task_text

#: Problems of the task.
PROBLEMS = 24

#: Filters of the task, and the version that its logs have.
FILTERS = """filter_list:
  - name: after-thinking
    filter:
      - {function: regex, regex_pattern: '</think>\\s*(.*)', group_select: -1}
      - {function: take_first}
  - {name: whole, filter: [{function: take_first}]}
metadata: {version: 1.0}
"""


def run_harness(
    folder: Path, model: ModelHandle, temperature: float, seed: int, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """The folder of samples of one call of lm-eval."""
    from lm_eval.__main__ import cli_evaluate
    from lm_eval.tasks import TaskManager

    benchmark = find("CHAIN3")
    rows = [{"question": benchmark.prompt(each), "answer": each.answer} for each in benchmark.problems(PROBLEMS)]
    tasks = folder / f"tasks-{temperature}"
    tasks.mkdir(parents=True, exist_ok=True)
    # Beside the tasks of both temperatures: the same data set.
    data = folder / "chain.jsonl"
    data.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (tasks / "chain_local.yaml").write_text(task_text(data, 120, temperature, FILTERS))
    out = folder / f"out-{temperature}-{seed}"
    words = ["run", "--model", "hf", "--model_args", f"pretrained={model.folder}", "--tasks", "chain_local"]
    words += ["--include_path", str(tasks), "--apply_chat_template", "--output_path", str(out), "--log_samples"]
    words += ["--batch_size", "24", "--device", "cpu", "--seed", str(seed)]
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", folder / "cache")
    monkeypatch.setattr("datasets.config.HF_DATASETS_OFFLINE", True)
    begin = TaskManager.__init__
    # Without the harness's own tasks, whose thousands of files take long to read.
    monkeypatch.setattr(TaskManager, "__init__", lambda *a, **k: begin(*a, **{**k, "include_defaults": False}))
    # Nor does it need the list of all packages, for which pip is started.
    monkeypatch.setattr("torch.utils.collect_env.get_pretty_env_info", lambda: "not looked up")
    monkeypatch.setattr(sys, "argv", ["lm_eval", *words])
    cli_evaluate()
    return out


def samples_file(folder: Path) -> Path:
    (path,) = folder.rglob("samples_*.jsonl")
    return path


def changed_copy(log: Path, copy: Path, change: Callable[[dict[str, Any]], Any]) -> Path:
    """A copy of a folder of samples whose rows a function changes; rows for which it returns False are left out."""
    shutil.copytree(log, copy)
    path = samples_file(copy)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    kept = [row for row in rows if change(row) is not False]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in kept))
    return copy


def changed_results(log: Path, copy: Path, change: Callable[[dict[str, Any]], Any]) -> Path:
    """A copy of a folder of samples whose results file a function changes."""
    shutil.copytree(log, copy, dirs_exist_ok=True)
    (path,) = copy.rglob("results_*.json")
    results = json.loads(path.read_text())
    change(results)
    path.write_text(json.dumps(results))
    return copy


def scores(folder: Path, filter_name: str = "after-thinking") -> Mapping[int, float]:
    """The scores of a log by document, read without the package."""
    rows = [json.loads(line) for line in samples_file(folder).read_text().splitlines()]
    return {row["doc_id"]: row["exact_match"] for row in rows if row["filter"] == filter_name}
