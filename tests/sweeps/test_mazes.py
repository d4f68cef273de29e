"""A sweep over mazes with real weights: what the problems are goes into the run, and comparisons find it there."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvatlas.benchmarks import find
from kvatlas.core import KvatlasError
from kvatlas.models import EMBEDDED, embedded
from kvatlas.report.app.traces import Sources
from kvatlas.results import Store
from kvatlas.stats.run_data import RunData
from kvatlas.stats.systems import check_complete, pairs_of, systems_of
from kvatlas.sweeps import make_plan, parse_spec, sweep
from tests.r1 import save_model


def test_a_sweep_over_mazes_can_be_compared(spec_data: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    spec = spec_data(
        benchmarks=["SEQBENCH-4x4", "CHAIN4"],
        problems=3,
        samples=1,
        sampling={"temperature": 1.0, "max_new_tokens": 30},
        settings=[{"policy": "window", "kv_budget": 16, "ratio_over": "thinking", "keep_prompt": False}],
        axes={"local_window": [4, 8], "ratio": [0.2, 0.5]},
    )
    sweep(make_plan(parse_spec(spec)), tmp_path, workers=1)
    with Store.open(tmp_path) as store:
        manifest = store.manifest()
        result = systems_of([RunData(manifest, store.traces(texts=False))])
    problems = find("SEQBENCH-4x4").problems(3)
    assert manifest.about["SEQBENCH-4x4"] == {problem.id: dict(problem.about) for problem in problems}
    assert manifest.about["CHAIN4"] == {f"CHAIN4-{index:04d}": {"n": 4} for index in range(3)}
    assert check_complete(result, False) == []
    assert len(pairs_of(result)) == 10
    assert result[0].about["SEQBENCH-4x4", problems[0].id]["L"] == problems[0].about["L"]


def test_models_that_can_read_the_task_are_told_it(tmp_path: Path) -> None:
    r1 = save_model("qwen2", tmp_path / "r1")
    config = tmp_path / "r1" / "config.json"
    config.write_text(config.read_text().replace('"max_position_embeddings": 2048', '"max_position_embeddings": 8192'))
    (maze,) = find("SEQBENCH-4x4").problems(1)
    spec = {"problems": 1, "samples": 1, "sampling": {"max_new_tokens": 3}, "models": [r1.name, *embedded()]}
    plan = make_plan(parse_spec({**spec, "benchmarks": ["SEQBENCH-4x4", "SEQBENCH-4x4-facts"]}))
    sweep(plan, tmp_path / "run", workers=1)
    told, facts, *tiny = (plan.prompts[key] for key in plan.prompts)
    assert told == [len(r1.encode(find("SEQBENCH-4x4-full").prompt(maze)))]
    assert facts == [len(r1.encode(maze.question))]
    # The embedded models have no tokens for the task, whatever their tokenizers make of such characters.
    assert (tiny[0], tiny[2]) == (tiny[1], tiny[3])
    run = RunData.open(tmp_path / "run")
    sources = Sources.of(run.manifest)
    with run.store() as store:
        for _, trace in store.traces(texts=False):
            asked = plan.prompts[trace.model, trace.benchmark]
            assert [trace.usage.prompt_tokens] == [len(sources.prompt(trace) or ())] == asked


def test_a_context_that_is_too_short_is_told_in_numbers(tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(EMBEDDED / "tiny-llama", folder)
    spec = {"problems": 1, "samples": 1, "sampling": {"max_new_tokens": 20}}
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 64}))
    with pytest.raises(KvatlasError, match=r"has \d+ tokens, and the model .* reads at most 64, its answer included"):
        make_plan(parse_spec({**spec, "models": [f"hf:{folder}"], "benchmarks": ["SEQBENCH-5x5"]}))
