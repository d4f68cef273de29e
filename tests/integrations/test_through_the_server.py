"""Inspect and lm-eval evaluate a setting through `kvatlas serve`: they get the texts that the engine writes."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvatlas.benchmarks import find
from kvatlas.core import Sampling
from kvatlas.integrations.inspect_logs import import_log
from kvatlas.models import ModelHandle
from kvatlas.serve.text_stream import Detokenizer
from tests.by_the_engine import VALUES, generations
from tests.lm_eval_task import task_text
from tests.serve.running import served
from tests.stored import traces_of

pytestmark = pytest.mark.newest

SEED = 4
PROBLEMS = 5
TOKENS = 90
#: That of both clients; the server has its own default.
TEMPERATURE = 0.9


@pytest.fixture(scope="module")
def server(tiny_llama: ModelHandle) -> Iterator[str]:
    with served(tiny_llama, "dynts", server_seed=SEED, **VALUES) as url:
        yield url


def engine_answers(model: ModelHandle, samples: int, sampling: Sampling) -> list[str]:
    """The answers to the problems, each sample of all problems after the other."""
    benchmark = find("CHAIN3")
    prompts = [model.encode(benchmark.prompt(problem)) for problem in benchmark.problems(PROBLEMS)]
    written = generations(model, prompts * samples, sampling, SEED)
    return [Detokenizer(model).push(generation.tokens, last=True)[1] for generation in written]


def test_inspect_gets_the_engines_answers_in_every_epoch(server: str, tiny_llama: ModelHandle, tmp_path: Path) -> None:
    """Also of a prompt that comes again without a seed: it gets its next sample."""
    pytest.importorskip("inspect_ai", reason="needs the extra inspect")
    from inspect_ai import eval as inspect_eval
    from inspect_ai.model import get_model

    from kvatlas.integrations.inspect_task import benchmark

    name = "openai-api/kvatlas/tiny"
    (log,) = inspect_eval(
        benchmark("CHAIN3", PROBLEMS),
        model=get_model(name, base_url=f"{server}/v1", api_key="none", memoize=False),
        log_dir=str(tmp_path),
        display="none",
        epochs=2,
        temperature=TEMPERATURE,
        max_tokens=TOKENS,
    )
    expected = engine_answers(tiny_llama, 2, Sampling(TEMPERATURE, max_new_tokens=TOKENS))
    # Epochs are asked at once, so that either may come first.
    assert sorted(sample.output.completion for sample in log.samples) == sorted(expected)
    assert all(sample.output.choices[0].message.content[0].type == "reasoning" for sample in log.samples)

    cell, added, _ = import_log(Path(log.location.removeprefix("file://")), tmp_path / "run")
    assert (cell.model, cell.samples, added) == (name, 2, 2 * PROBLEMS)
    shown = {score.name: score.metrics["mean"].value for score in log.results.scores}
    grades = [trace.grade.correct for trace in traces_of(tmp_path / "run")]
    assert sum(grades) / len(grades) == pytest.approx(shown["correct"])


def test_lm_eval_gets_the_engines_answers(
    server: str, tiny_llama: ModelHandle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("lm_eval", reason="needs lm-eval")
    from lm_eval.__main__ import cli_evaluate
    from lm_eval.tasks import TaskManager

    benchmark = find("CHAIN3")
    problems = benchmark.problems(PROBLEMS)
    rows: list[dict[str, Any]] = [
        {"question": benchmark.prompt(problem), "answer": problem.answer} for problem in problems
    ]
    (tmp_path / "chain.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (tmp_path / "chain_local.yaml").write_text(task_text(tmp_path / "chain.jsonl", TOKENS, TEMPERATURE))
    address = f"model=tiny,base_url={server}/v1/chat/completions,num_concurrent=4,seed={SEED}"
    words = ["run", "--model", "local-chat-completions", "--model_args", address, "--tasks", "chain_local"]
    options = ["--include_path", str(tmp_path), "--apply_chat_template", "--output_path", "out", "--log_samples"]
    options += ["--gen_kwargs", "top_k=0,top_p=1.0"]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr("datasets.config.HF_DATASETS_OFFLINE", True)
    begin = TaskManager.__init__
    # Without the harness's own tasks, whose thousands of files take long to read.
    monkeypatch.setattr(TaskManager, "__init__", lambda *a, **k: begin(*a, **{**k, "include_defaults": False}))
    monkeypatch.setattr(sys, "argv", ["lm_eval", *words, *options])
    cli_evaluate()

    (samples,) = (tmp_path / "out").rglob("samples_*.jsonl")
    logged = sorted((json.loads(line) for line in samples.read_text().splitlines()), key=lambda row: row["doc_id"])
    expected = engine_answers(tiny_llama, 1, Sampling(TEMPERATURE, 0, 1.0, TOKENS))
    assert [row["resps"][0][0] for row in logged] == expected
