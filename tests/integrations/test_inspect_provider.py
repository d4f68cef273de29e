"""`kvatlas/MODEL` under Inspect: our chain task and a task of Inspect's own, on an embedded model."""

import asyncio
from typing import Any

import pytest

from kvatlas.core import KvatlasError, Sampling
from kvatlas.models import ModelHandle
from kvatlas.serve.text import Detokenizer
from tests.by_the_engine import VALUES, generations, questions

pytest.importorskip("inspect_ai", reason="needs the extra inspect")

from inspect_ai.model import GenerateConfig, get_model

pytestmark = pytest.mark.newest

NAME = "kvatlas/embedded:tiny-llama"


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
        thinking, answer = Detokenizer(tiny_llama).push(generation.tokens, last=True)
        assert output.completion == answer
        message = output.choices[0].message
        assert [part.reasoning for part in message.content if part.type == "reasoning"] == [thinking]
        assert output.stop_reason == ("stop" if generation.finished else "max_tokens")
        assert output.usage.output_tokens == len(generation.tokens)
        assert output.usage.reasoning_tokens == generation.usage.thinking_tokens
        assert output.metadata["compressions"] == generation.usage.compressions


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
