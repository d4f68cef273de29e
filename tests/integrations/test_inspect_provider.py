"""`kvatlas/MODEL` under Inspect: our chain task and a task of Inspect's own, on an embedded model."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvatlas.core import KvatlasError, Sampling
from kvatlas.models import ModelHandle
from kvatlas.serve.text import split_text
from tests.by_the_engine import VALUES, generations, questions

pytest.importorskip("inspect_ai", reason="needs the extra inspect")

from inspect_ai.model import GenerateConfig, get_model

pytestmark = pytest.mark.newest

NAME = "kvatlas/embedded:tiny-llama"

NATIVE = """
from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.scorer import includes
from inspect_ai.solver import generate, system_message


@task
def native(name):
    return Task(dataset=[Sample(input="a = 3 . ? a", target="3"), Sample(input="b = 4 . ? b", target="4")],
                solver=[generate(max_tokens=30, temperature=0)], scorer=includes())
"""


def test_concurrent_requests_get_the_engines_answers(tiny_llama: ModelHandle) -> None:
    texts = questions(4)

    async def ask() -> list[Any]:
        config = GenerateConfig(temperature=0.9, max_tokens=60)
        async with get_model(NAME, config=config, memoize=False, policy="dynts", seed=4, **VALUES) as model:
            assert model.api.max_connections() == 32
            first = await asyncio.gather(*(model.generate(text) for text in texts))
            return [*first, *await asyncio.gather(*(model.generate(text) for text in texts))]

    outputs = asyncio.run(ask())
    # The second time that a prompt is asked it gets its second sample.
    prompts = [tiny_llama.encode(text) for text in texts * 2]
    expected = generations(tiny_llama, prompts, Sampling(temperature=0.9, max_new_tokens=60), 4)
    for output, generation in zip(outputs, expected, strict=True):
        thinking, answer = split_text(tiny_llama, generation.tokens)
        assert output.completion == answer
        message = output.choices[0].message
        assert [part.reasoning for part in message.content if part.type == "reasoning"] == [thinking]
        assert output.stop_reason == ("stop" if generation.finished else "max_tokens")
        assert output.usage.output_tokens == len(generation.tokens)
        assert output.usage.reasoning_tokens == generation.usage.thinking_tokens
        assert output.metadata["compressions"] == generation.usage.compressions


def test_a_model_without_think_tags_has_no_reasoning(tiny_llama: ModelHandle) -> None:
    (text,) = questions(1)

    async def ask() -> Any:
        config = GenerateConfig(max_tokens=12)
        async with get_model(NAME, config=config, memoize=False, think_close="") as model:
            return await model.generate(text)

    output = asyncio.run(ask())
    assert (output.usage.output_tokens, output.usage.reasoning_tokens) == (12, 0)
    assert [part.type for part in output.choices[0].message.content] == ["text"]
    assert output.completion


def test_choices_stops_lengths_and_refusals() -> None:
    (text,) = questions(1)

    async def ask() -> None:
        async with get_model(NAME, memoize=False, batch_size=4) as model:
            output = await model.generate(text, config=GenerateConfig(num_choices=3, seed=1, max_tokens=9))
            assert len(output.choices) == 3
            assert output.stop_reason == "max_tokens"
            long = await model.generate("w " * 2000)
            assert (long.stop_reason, long.completion) == ("model_length", "")
            with pytest.raises(KvatlasError, match="logprobs is set; kvatlas models do not honour it"):
                await model.generate(text, config=GenerateConfig(logprobs=True))

    asyncio.run(ask())
    with pytest.raises(KvatlasError, match="has no parameter 'depth'"):
        get_model(NAME, memoize=False, policy="window", depth=3, **VALUES)
    with pytest.raises(KvatlasError, match="Unknown model 'gpt'"):
        get_model("kvatlas/gpt", memoize=False)


@pytest.mark.slow
def test_inspect_eval_runs_on_an_embedded_model(tmp_path: Path) -> None:
    """A task of Inspect's own and ours, in one process."""
    from inspect_ai.log import list_eval_logs, read_eval_log

    (tmp_path / "native.py").write_text(NATIVE)
    tasks = ["native.py", "kvatlas/benchmark", "-T", "name=CHAIN3", "--limit", "4", "--epochs", "2"]
    setting = [word for name, value in VALUES.items() for word in ("-M", f"{name}={value}")]
    words = ["eval", *tasks, "--model", NAME, "-M", "policy=dynts", *setting, "--log-dir", str(tmp_path / "logs")]
    done = subprocess.run(
        [sys.executable, "-m", "inspect_ai", *words, "--display", "plain"], cwd=tmp_path, capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    logs = [read_eval_log(info) for info in list_eval_logs(str(tmp_path / "logs"))]
    assert {log.eval.task: len(log.samples or ()) for log in logs} == {"native": 4, "kvatlas/benchmark": 8}
    for log in logs:
        assert log.status == "success"
        assert log.samples is not None
        assert {sample.output.stop_reason for sample in log.samples} <= {"stop", "max_tokens"}
        assert all(sample.output.usage.output_tokens > 0 for sample in log.samples)
        assert log.eval.model_args["policy"] == "dynts"
