"""Log-probabilities, penalties, biases and values for the chat template, by the official client."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from kvatlas.models import ModelHandle
from tests.r1 import FIRST_TEMPLATE, TEMPLATE, save_model
from tests.server.running import served

ASKED = [{"role": "user", "content": "Is it so?"}]
#: A template that reads a value, as Qwen3's.
SWITCHED = TEMPLATE.replace(
    "<think>\\n' }}", "<think>\\n' }}{% if enable_thinking is false %}{{ '\\n</think>\\n' }}{% endif %}"
)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> ModelHandle:
    """A model that does not think."""
    return save_model("llama", tmp_path_factory.mktemp("plain") / "m", template=FIRST_TEMPLATE, tags=())


@pytest.fixture(scope="module")
def client(plain: ModelHandle) -> Iterator[openai.OpenAI]:
    with served(plain) as url, openai.OpenAI(base_url=url, api_key="none", max_retries=0) as result:
        yield result


def test_logprobs_are_the_models_own(client: openai.OpenAI, plain: ModelHandle) -> None:
    import torch

    wanted: dict[str, Any] = {"model": "tiny", "messages": ASKED, "seed": 5, "max_tokens": 12}
    (choice,) = client.chat.completions.create(logprobs=True, top_logprobs=3, **wanted).choices
    assert choice.logprobs is not None
    told = choice.logprobs.content or []
    assert "".join(item.token for item in told) == choice.message.content
    prompt = plain.encode("Is it so?")
    generation = plain.tokens(choice.message.content or "")
    with torch.no_grad():
        logits = plain.load()(torch.tensor([[*prompt, *generation]])).logits[0].log_softmax(-1)
    if len(generation) == len(told):  # the text has other spellings in tokens, too
        for position, item in enumerate(told):
            row = logits[len(prompt) - 1 + position]
            assert item.logprob == pytest.approx(float(row[generation[position]]), abs=1e-3)
            assert [top_logprob.logprob for top_logprob in item.top_logprobs] == pytest.approx(
                row.topk(3).values.tolist(), abs=1e-3
            )
    stream = client.chat.completions.create(logprobs=True, top_logprobs=3, stream=True, **wanted)
    pieces = [item for piece in stream for item in (piece.choices[0].logprobs or choice.logprobs.model_copy(
        update={"content": []})).content or []]  # fmt: skip
    assert [(piece.token, piece.logprob) for piece in pieces] == [(item.token, item.logprob) for item in told]
    text = client.completions.create(model="tiny", prompt="It is", seed=5, max_tokens=8, logprobs=2).choices[0]
    assert text.logprobs is not None
    assert "".join(text.logprobs.tokens or []) == text.text
    assert all(-math.inf < value <= 0 for value in text.logprobs.token_logprobs or [])
    # Two tokens may have one text.
    assert {len(likely) for likely in text.logprobs.top_logprobs or []} <= {1, 2}


def test_penalties_and_biases_change_what_is_drawn(client: openai.OpenAI, plain: ModelHandle) -> None:
    wanted: dict[str, Any] = {"model": "tiny", "prompt": "It is", "temperature": 0, "max_tokens": 60, "logprobs": 0}
    free = client.completions.create(**wanted).choices[0].logprobs
    stored = client.completions.create(frequency_penalty=2, presence_penalty=2, **wanted).choices[0].logprobs
    assert free is not None
    assert stored is not None
    assert len(set(stored.tokens or [])) > len(set(free.tokens or []))
    first = (free.tokens or [""])[0]
    banned = {str(token): -100 for token in range(len(plain.tokenizer)) if plain.tokenizer.decode([token]) == first}
    without = client.completions.create(logit_bias=banned, **wanted).choices[0].logprobs
    assert without is not None
    assert first not in (without.tokens or [])


def test_harmless_fields_and_values_for_the_template(tmp_path: Path) -> None:
    model = save_model("llama", tmp_path / "m", template=SWITCHED)
    with served(model) as address, openai.OpenAI(base_url=address, api_key="none") as client:
        wanted: dict[str, Any] = {"model": "tiny", "messages": ASKED, "seed": 3, "max_tokens": 8}
        thinking = client.chat.completions.create(**wanted).choices[0].message
        assert (thinking.content, bool(thinking.reasoning_content)) == ("", True)
        answer = client.chat.completions.create(
            **wanted, extra_body={"chat_template_kwargs": {"enable_thinking": False}, "min_p": 0}
        )
        assert (bool(answer.choices[0].message.content), answer.choices[0].message.reasoning_content) == (True, None)
        assert answer.usage.completion_tokens_details.reasoning_tokens == 0
        options: Any = {"include_usage": True, "include_obfuscation": False}
        assert list(client.chat.completions.create(**wanted, stream=True, stream_options=options))
