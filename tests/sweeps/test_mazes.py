"""A sweep over mazes with real weights: what the problems are goes into the run, and comparisons find it there."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from kvatlas.benchmarks import find
from kvatlas.core import KvatlasError
from kvatlas.models import EMBEDDED, embedded
from kvatlas.models import find as find_model
from kvatlas.report.app.traces import Sources
from kvatlas.results import Store
from kvatlas.stats.run_data import RunData
from kvatlas.sweeps import make_plan, parse_spec, sweep
from tests.r1 import save_model


@pytest.mark.slow
def test_a_model_gets_further_with_all_it_has_seen_than_with_a_tenth_of_it(
    tmp_path: Path, succeed: Callable[..., str]
) -> None:
    """The embedded model on 40 mazes under three settings: one figure with three panels, and its curves."""
    model, benchmark = find_model("embedded:tiny-llama"), find("SEQBENCH-4x4")
    longest = max(len(model.encode(benchmark.prompt(problem))) for problem in benchmark.problems(40))
    settings = [
        {"policy": name, "kv_budget": longest + 64, "ratio_over": "thinking", "local_window": 32, "ratio": ratio}
        for name, ratio in (("random", 0.5), ("window", 0.1))
    ]
    spec = {"models": [model.name], "benchmarks": [benchmark.name], "problems": 40, "samples": 1, "settings": settings}
    sweep(make_plan(parse_spec({**spec, "sampling": {"max_new_tokens": 400}})), tmp_path / "run", workers=1)
    pairs = json.loads(succeed("compare", tmp_path / "run", "--out", tmp_path / "pairs.png", "--json"))["pairs"]
    assert [pair["problems"] for pair in pairs] == [40] * 3
    with Store.open(tmp_path / "run") as store:
        about = store.manifest().about[benchmark.name]
    assert about == {problem.id: dict(problem.about) for problem in benchmark.problems(40)}
    (against,) = [pair for pair in pairs if {pair["x"], pair["y"]} == {"full", "window"}]
    difference = against["difference"] if against["x"] == "full" else {"low": -against["difference"]["high"]}
    assert difference["low"] > 0
    assert ": L0 " in succeed("draw", "curves", tmp_path / "run", "--policy", "full", "--out", tmp_path / "curves.png")


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
