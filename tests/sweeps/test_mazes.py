"""Sweeps over mazes: their prompts, and the features of the problems that a run keeps."""

import json
import shutil
from pathlib import Path

import pytest

from kvatlas.benchmarks import find
from kvatlas.core import KvatlasError
from kvatlas.models import EMBEDDED, embedded
from kvatlas.report.app.traces import Sources
from kvatlas.stats.run_data import RunData
from kvatlas.sweeps import make_plan, parse_spec, sweep
from tests.r1 import save_model


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
    assert run.manifest.about["SEQBENCH-4x4"] == {maze.id: dict(maze.about)}
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
