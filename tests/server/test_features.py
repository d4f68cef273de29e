"""What clients of OpenAI's API ask for beyond texts: JSON, log-probabilities, penalties, responses, template values."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import uvicorn
from pydantic import BaseModel, ConfigDict

from kvatlas.core import Sampling
from kvatlas.models import ModelHandle
from kvatlas.server.app import application
from kvatlas.service import Service, chosen
from tests.r1 import FIRST_TEMPLATE, TEMPLATE, save_model

ASKED = [{"role": "user", "content": "Is it so?"}]
#: A template that reads a value, as Qwen3's.
SWITCHED = TEMPLATE.replace(
    "<think>\\n' }}", "<think>\\n' }}{% if enable_thinking is false %}{{ '\\n</think>\\n' }}{% endif %}"
)


class Kind(StrEnum):
    FIRST = "first"
    SECOND = "second"


class Verdict(BaseModel):
    model_config = ConfigDict(extra="forbid")

    kind: Kind
    right: bool
    sure: list[bool] | None


@contextmanager
def served(model: ModelHandle) -> Iterator[str]:
    """The application over this model, in a thread: its address."""
    service = Service(model, chosen(model, "full", {}), Sampling(temperature=1.0), batch_size=4).start()
    config = uvicorn.Config(application(service, "tiny"), port=0, log_level="warning")
    socket = config.bind_socket()
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, args=([socket],))
    thread.start()
    try:
        yield f"http://127.0.0.1:{socket.getsockname()[1]}/v1"
    finally:
        server.should_exit = True
        thread.join()
        service.close()


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> ModelHandle:
    """A model that does not think."""
    return save_model("llama", tmp_path_factory.mktemp("plain") / "m", template=FIRST_TEMPLATE, tags=())


@pytest.fixture(scope="module")
def url(plain: ModelHandle) -> Iterator[str]:
    with served(plain) as address:
        yield address


@pytest.fixture
def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=url, api_key="none", max_retries=0)


def test_answers_follow_a_schema_whole_and_in_streams(client: openai.OpenAI) -> None:
    result = client.chat.completions.parse(
        model="tiny", messages=ASKED, response_format=Verdict, n=4, seed=3, max_tokens=400
    )
    for choice in result.choices:
        assert choice.finish_reason == "stop"
        assert isinstance(choice.message.parsed, Verdict)
    assert len({choice.message.content for choice in result.choices}) > 1
    with client.chat.completions.stream(
        model="tiny", messages=ASKED, response_format=Verdict, seed=3, max_tokens=400
    ) as stream:
        streamed = stream.get_final_completion().choices[0].message
    assert streamed.content == result.choices[0].message.content
    anything = client.chat.completions.create(
        model="tiny", messages=ASKED, response_format={"type": "json_object"}, seed=1, max_tokens=30,
        logit_bias={},
    )  # fmt: skip
    assert (anything.choices[0].message.content or "").lstrip().startswith("{")


def test_thinking_before_json_is_free(tmp_path: Path) -> None:
    for template in (TEMPLATE, FIRST_TEMPLATE):
        model = save_model("llama", tmp_path / str(len(template)), template=template)
        close = model.tokenizer.convert_tokens_to_ids("</think>")
        opening = model.tokenizer.convert_tokens_to_ids("<think>")
        wanted = {"model": "tiny", "messages": ASKED, "response_format": Verdict, "seed": 3, "max_tokens": 400}
        with served(model) as address, openai.OpenAI(base_url=address, api_key="none") as client:
            # Without these a model of random weights would think for ever.
            answer = client.chat.completions.parse(logit_bias={close: 100, opening: 60}, **wanted)
            assert answer.choices[0].message.parsed is not None
            assert answer.choices[0].message.content.lstrip().startswith("{")
            if template == FIRST_TEMPLATE:
                # It need not think: its first token may begin the answer.
                direct = client.chat.completions.parse(logit_bias={opening: -100}, **wanted).choices[0].message
                assert direct.parsed is not None
                assert direct.reasoning_content is None


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


def test_responses_whole_and_streamed(client: openai.OpenAI) -> None:
    wanted: dict[str, Any] = {"model": "tiny", "instructions": "w", "input": "Is it so?", "extra_body": {"seed": 3}}
    result = client.responses.create(max_output_tokens=16, **wanted)
    assert (result.status, result.incomplete_details and result.incomplete_details.reason) in (
        ("completed", None),
        ("incomplete", "max_output_tokens"),
    )
    assert result.usage is not None
    assert result.usage.total_tokens == result.usage.input_tokens + result.usage.output_tokens
    chat = client.chat.completions.create(
        model="tiny", seed=3, max_tokens=16, messages=[{"role": "system", "content": "w"}, *ASKED]
    )
    assert result.output_text == chat.choices[0].message.content
    with client.responses.stream(max_output_tokens=16, **wanted) as stream:
        events = list(stream)
    names = [event.type for event in events]
    assert events[-1].response.output_text == result.output_text
    assert names[:3] == ["response.created", "response.in_progress", "response.output_item.added"]
    assert names[-2:] == ["response.output_item.done", f"response.{result.status}"]
    parsed = client.responses.parse(text_format=Verdict, max_output_tokens=400, **wanted)
    assert isinstance(parsed.output_parsed, Verdict)
    again = [*ASKED, {"type": "reasoning", "id": "rs_1", "summary": []}, *result.output, *ASKED]
    items = [item if isinstance(item, dict) else item.model_dump() for item in again]
    assert client.responses.create(**{**wanted, "input": items}, max_output_tokens=2).output
    with pytest.raises(openai.BadRequestError, match="previous_response_id is not"):
        client.responses.create(previous_response_id="resp_1", **wanted)
    with pytest.raises(openai.BadRequestError, match="n is not supported"):
        client.responses.create(**{**wanted, "extra_body": {"n": 2}})


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"response_format": {"type": "json_schema"}}, "response_format has a json_schema exactly where"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "number7"}}}},
            "The JSON schema is not",
        ),
        ({"response_format": {"type": "xml"}}, "response_format.type: Input should be 'text', 'json_object' or"),
        ({"logit_bias": {"99999": 1}}, "logit_bias has the token '99999'; valid are ids from 0 to"),
        ({"top_logprobs": 2}, "top_logprobs is given without logprobs"),
        ({"frequency_penalty": 3}, "frequency_penalty: Input should be less than or equal to 2"),
        ({"reasoning_effort": "low"}, "reasoning_effort is not supported: the model's chat template does not read it"),
        ({"chat_template_kwargs": {"enable_thinking": False}}, "enable_thinking is not supported: the model's chat"),
    ],
)
def test_what_cannot_be_done_is_one_sentence(url: str, changes: dict[str, Any], sentence: str) -> None:
    answer = httpx.post(f"{url}/chat/completions", json={"messages": ASKED, "max_tokens": 2, **changes})
    assert (answer.status_code, sentence in answer.json()["error"]["message"]) == (400, True), answer.text


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


def test_a_tokenizer_that_spells_no_bytes_is_refused_by_name(tiny_llama: ModelHandle) -> None:
    with served(tiny_llama) as address:
        body = {"messages": ASKED, "response_format": {"type": "json_object"}}
        answer = httpx.post(f"{address}/chat/completions", json=body)
    assert answer.status_code == 400
    assert "embedded:tiny-llama' cannot write JSON: none of its" in answer.json()["error"]["message"]
