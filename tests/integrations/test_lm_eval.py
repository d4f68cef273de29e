"""The model class `kvatlas` in lm-eval: a local task by its own command, and what the class does with requests."""

import json
import logging
import sys
from pathlib import Path
from typing import Any

import pytest

from kvatlas.benchmarks import find as benchmark
from kvatlas.core import KvatlasError, Sampling
from kvatlas.models import ModelHandle
from kvatlas.serve.text_stream import Detokenizer
from tests.by_the_engine import VALUES, generations, questions

pytest.importorskip("lm_eval", reason="needs the extra lm-eval")

from lm_eval.__main__ import cli_evaluate
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from kvatlas.integrations.lm_eval import SelectedLM
from tests.lm_eval_task import task_text

pytestmark = pytest.mark.newest

ARGUMENTS = "pretrained=embedded:tiny-llama,policy=dynts," + ",".join(f"{n}={v}" for n, v in VALUES.items())


@pytest.fixture(scope="module")
def ours() -> SelectedLM:
    return SelectedLM.create_from_arg_string(ARGUMENTS + ",seed=4", {"batch_size": 1, "device": "cuda:0"})


def generate(model: SelectedLM, texts: list[str], **arguments: Any) -> list[str]:
    doc: dict[str, Any] = {}
    work = [Instance("generate_until", doc, (text, arguments), i) for i, text in enumerate(texts)]
    return model.generate_until(work, disable_tqdm=True)


def by_the_engine(model: ModelHandle, prompts: list[str], most: int) -> list[str]:
    found = generations(model, [model.tokens(prompt) for prompt in prompts], Sampling(0.9, 0, 1.0, most), 4)
    return [Detokenizer(model).push(item.tokens, last=True)[1].lstrip() for item in found]


def test_generate_until_gives_the_engines_answers(ours: SelectedLM, tiny_llama: ModelHandle) -> None:
    assert ours.rows == 32
    texts = [tiny_llama.prompt(question) for question in questions(3, "CHAIN3")]
    how = {"do_sample": True, "temperature": 0.9, "max_gen_toks": 70}
    result = generate(ours, texts, **how)
    assert result == by_the_engine(tiny_llama, texts, 70)
    whole = next(answer for answer in result if len(answer) > 4)
    number, stop = result.index(whole), whole[2:4]
    cut = generate(ours, texts, **how, until=[stop])
    assert cut[number] == whole.partition(stop)[0]
    twice = generate(ours, [texts[0], texts[0]], do_sample=True, temperature=3.0, max_gen_toks=40)
    assert len(twice) == 2


def test_log_likelihoods_are_the_harnesss_with_a_note(
    ours: SelectedLM, tiny_llama: ModelHandle, caplog: pytest.LogCaptureFixture
) -> None:
    doc: dict[str, Any] = {}
    text = tiny_llama.prompt(questions(1, "CHAIN3")[0])
    work = [Instance("loglikelihood", doc, (text, answer), i) for i, answer in enumerate((" a = 1", " b"))]
    with caplog.at_level(logging.WARNING, "kvatlas"):
        result = ours.loglikelihood(work, disable_tqdm=True)
    assert "Log-likelihoods are of the full cache" in caplog.text
    plain = HFLM(tiny_llama.load(), tokenizer=tiny_llama.tokenizer, batch_size=2, add_bos_token=False)
    expected = plain.loglikelihood(work, disable_tqdm=True)
    assert [value for value, _ in result] == pytest.approx([value for value, _ in expected], abs=1e-4)
    rolling = [Instance("loglikelihood_rolling", doc, (text,), 0)]
    assert ours.loglikelihood_rolling(rolling, disable_tqdm=True)[0] < 0


def test_what_is_not_honoured_is_refused_by_name(ours: SelectedLM) -> None:
    with pytest.raises(KvatlasError, match="generation argument num_beams is not supported"):
        generate(ours, ["w"], num_beams=4)
    with pytest.raises(KvatlasError, match="has no parameter 'depth'"):
        SelectedLM.create_from_arg_string(ARGUMENTS + ",depth=3")


def test_the_command_runs_a_local_task(
    tmp_path: Path, tiny_llama: ModelHandle, monkeypatch: pytest.MonkeyPatch
) -> None:
    benchmark_ = benchmark("CHAIN3")
    problems = benchmark_.problems(5)
    rows = [{"question": benchmark_.prompt(problem), "answer": problem.answer} for problem in problems]
    (tmp_path / "chain.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (tmp_path / "chain_local.yaml").write_text(task_text(tmp_path / "chain.jsonl", 60, 0.9))
    words = ["run", "--model", "kvatlas", "--model_args", f"{ARGUMENTS},seed=4", "--tasks", "chain_local"]
    options = ["--include_path", str(tmp_path), "--apply_chat_template", "--output_path", "out", "--log_samples"]
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
    texts = [tiny_llama.prompt(benchmark_.prompt(problem)) for problem in problems]
    assert [row["resps"][0][0] for row in logged] == by_the_engine(tiny_llama, texts, 60)
