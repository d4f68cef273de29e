"""The official client against a real server: answers equal the engine's, and nothing is left behind."""

import asyncio
import json
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from kvatlas import models, policies
from kvatlas.benchmarks import find as benchmark
from kvatlas.core import Sampling, Setting
from kvatlas.engine import Engine, Request
from kvatlas.models import ModelHandle
from kvatlas.serve.service import stream_of
from kvatlas.serve.text_stream import Detokenizer
from kvatlas.text import model_name
from tests.by_the_engine import VALUES, generations, questions
from tests.r1 import FIRST_TEMPLATE, TEMPLATE, save_model
from tests.serve.running import health, served, serving

pytestmark = pytest.mark.newest

MODEL, NAME = "embedded:tiny-llama", "tiny"
CLIENTS, DROPPING, TOKENS, LONG = 32, 5, 90, 900
ASKED = [{"role": "user", "content": "Is it so?"}]
#: A template that reads a value, as Qwen3's.
SWITCHED = TEMPLATE.replace(
    "<think>\\n' }}", "<think>\\n' }}{% if enable_thinking is false %}{{ '\\n</think>\\n' }}{% endif %}"
)


@pytest.fixture(scope="module")
def server(tiny_llama: ModelHandle) -> Iterator[str]:
    with served(tiny_llama, "dynts", **VALUES) as url:
        yield url


@pytest.fixture
def client(server: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server}/v1", api_key="none", max_retries=0)


def expected(model: ModelHandle, texts: list[str], tokens: int) -> list[Any]:
    """Return the engine's text for these messages under seed 11."""
    return generations(model, [model.encode(text) for text in texts], Sampling(max_new_tokens=tokens), 11)


async def listen(client: openai.AsyncOpenAI, text: str, pieces: int | None) -> tuple[str, str, str | None]:
    """(thinking, answer, finish reason) of a stream, left after so many pieces."""
    thinking, answer, reason, count = "", "", None, 0
    stream = await client.chat.completions.create(
        model=NAME, messages=[{"role": "user", "content": text}], seed=11, stream=True,
        # Who leaves does so in the middle, however fast the machine is.
        max_tokens=LONG if pieces else TOKENS,
    )  # fmt: skip
    async for piece in stream:
        (choice,) = piece.choices
        thinking += getattr(choice.delta, "reasoning_content", None) or ""
        answer += choice.delta.content or ""
        reason = choice.finish_reason or reason
        count += 1
        if count == pieces:
            await stream.close()
            break
    return thinking, answer, reason


def idle(server: str) -> bool:
    state = health(server)
    return not (state["decoding"] or state["waiting"])


def test_32_streaming_clients_of_which_5_drop_out(server: str, tiny_llama: ModelHandle) -> None:
    texts = questions(CLIENTS)
    before = health(server).get("decoded_tokens", 0)

    async def all_of_them() -> list[tuple[str, str, str | None]]:
        async with openai.AsyncOpenAI(base_url=f"{server}/v1", api_key="none", max_retries=0) as client:
            leaving = [2 if number < DROPPING else None for number in range(CLIENTS)]
            return await asyncio.gather(*map(listen, [client] * CLIENTS, texts, leaving))

    result = asyncio.run(all_of_them())
    # Two pieces of a fast server may hold more than TOKENS tokens, and even the end.
    for generation, (read, _, reason) in zip(expected(tiny_llama, texts[:DROPPING], LONG), result, strict=False):
        thinking, _ = Detokenizer(tiny_llama).push(generation.tokens, last=True)
        assert reason in (None, "stop")
        assert thinking.startswith(read)
    for generation, whole in zip(expected(tiny_llama, texts, TOKENS)[DROPPING:], result[DROPPING:], strict=True):
        thinking, answer = Detokenizer(tiny_llama).push(generation.tokens, last=True)
        assert whole == (thinking, answer, "stop" if generation.finished else "length")
    limit = time.monotonic() + 30
    while not idle(server) and time.monotonic() < limit:
        time.sleep(0.05)
    assert idle(server)
    state = health(server)
    assert state["kv_tokens"] == 0
    # Answers of clients that left end early: whole ones would have taken more tokens.
    whole = sum(len(generation.tokens) for generation in expected(tiny_llama, texts[:DROPPING], LONG))
    served = sum(len(generation.tokens) for generation in expected(tiny_llama, texts[DROPPING:], TOKENS))
    assert state["decoded_tokens"] - before < whole + served


def test_choices_usage_and_our_additions(client: openai.OpenAI, tiny_llama: ModelHandle) -> None:
    (text,) = questions(1)
    result = client.chat.completions.create(
        model=NAME, messages=[{"role": "user", "content": text}], n=3, seed=11, max_completion_tokens=TOKENS
    )
    engine = expected(tiny_llama, [text] * 3, TOKENS)
    for choice, generation in zip(result.choices, engine, strict=True):
        thinking, answer = Detokenizer(tiny_llama).push(generation.tokens, last=True)
        assert (choice.message.content, choice.message.reasoning_content) == (answer, thinking or None)
        assert choice.kvatlas["compressions"] == generation.usage.compressions
        assert choice.kvatlas["peak_kv_tokens"] == generation.usage.peak_kv_tokens
    assert result.usage.prompt_tokens == len(tiny_llama.encode(text))
    assert result.usage.completion_tokens == sum(len(generation.tokens) for generation in engine)
    thought = sum(generation.usage.thinking_tokens for generation in engine)
    assert result.usage.completion_tokens_details.reasoning_tokens == thought


def test_completions_continue_texts_and_stop(client: openai.OpenAI, tiny_llama: ModelHandle) -> None:
    prompts = [tiny_llama.prompt(text) for text in questions(2)]
    whole = client.completions.create(model=NAME, prompt=prompts, seed=11, max_tokens=60)
    engine = expected(tiny_llama, questions(2), 60)
    assert [choice.text for choice in whole.choices] == [tiny_llama.text(generation.tokens) for generation in engine]
    ids = list(tiny_llama.tokens(prompts[0]))
    again = client.completions.create(model=NAME, prompt=ids, seed=11, max_tokens=60)
    assert again.choices[0].text == whole.choices[0].text
    stop = whole.choices[0].text[10:13]
    cut = client.completions.create(model=NAME, prompt=prompts[0], seed=11, max_tokens=60, stop=[stop, "never"])
    assert cut.choices[0].text == whole.choices[0].text.partition(stop)[0]
    assert cut.choices[0].finish_reason == "stop"
    pieces = client.completions.create(
        model=NAME, prompt=prompts, seed=11, max_tokens=60, stop=[stop], stream=True,
        stream_options={"include_usage": True},
    )  # fmt: skip
    texts, usage = ["", ""], None
    for piece in pieces:
        usage = piece.usage or usage
        for choice in piece.choices:
            texts[choice.index] += choice.text
    assert texts == [choice.text.partition(stop)[0] for choice in whole.choices]
    assert usage.prompt_tokens == sum(len(tiny_llama.tokens(prompt)) for prompt in prompts)


def test_models_and_names(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert model.id == NAME
    assert model.policy["local_window"] == 8
    assert client.models.retrieve(NAME).id == NAME
    client.completions.create(model=model_name(NAME), prompt="x", max_tokens=1)
    with pytest.raises(openai.NotFoundError, match=f"There is no model 'gpt'; expected '{NAME}'"):
        client.completions.create(model="gpt", prompt="x")
    with pytest.raises(openai.NotFoundError):
        client.responses.create(model=NAME, input="x")


def lasting_seed(text: str, tokens: int) -> Any:
    """The seed with which the full cache writes longest, at most so many tokens."""
    model = models.find(MODEL)
    full, prompt = policies.from_setting(Setting.from_parameters("full")), model.tokens(text)
    engine = Engine(model, model.load(), [full], Sampling(1.0, max_new_tokens=tokens), 16)
    asked = [Request(seed, prompt, stream_of(seed, prompt, 0), (full,)) for seed in range(5)]
    return max(engine.run(asked), key=lambda item: len(item.tokens)).key


def test_a_full_line_and_a_graceful_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVATLAS_API_KEY", "open sesame")
    words = (MODEL, "--batch-size", "1", "--queue", "1", "--grace", "0.2", "--name", NAME)
    # Far more than it has learned to solve: it goes on until it is stopped.
    text = benchmark("CHAIN26").prompt(benchmark("CHAIN26").problems(1)[0])
    body = {"model": NAME, "prompt": text, "max_tokens": 700, "temperature": 1.0, "stream": True}
    body["seed"] = lasting_seed(text, 700)
    with serving(*words) as (process, output, url), httpx.Client(base_url=url, timeout=60) as client:
        assert client.post("/v1/completions", json=body).status_code == 401
        assert client.get("/v1/models", headers={"Authorization": "Bearer sesame"}).status_code == 401
        idle = dict.fromkeys(("waiting", "decoding", "decoded_tokens", "evicted_tokens", "kv_tokens", "kv_bytes"), 0)
        assert client.get("/health").json() == {"status": "ok", **idle}
        client.headers["Authorization"] = "Bearer open sesame"
        with (
            client.stream("POST", "/v1/completions", json=body) as first,
            client.stream("POST", "/v1/completions", json=body) as second,
        ):
            lines = first.iter_lines()
            assert next(lines).startswith("data: ")
            full = client.post("/v1/completions", json=body)
            assert (full.status_code, full.headers["retry-after"]) == (429, "1")
            assert full.json()["error"]["message"] == "1 requests are waiting, and 1 may; try again later."
            process.terminate()
            ends = [[line for line in item if line][-1] for item in (lines, second.iter_lines())]
        for end in ends:
            body = json.loads(end.removeprefix("data: "))
            assert body["error"]["message"] == "The server has stopped before this answer was finished."
        process.join(30)
        assert process.exitcode == -signal.SIGTERM
        said = output.read().splitlines()
        assert said.count("Stopping: open answers have 0.2 s to finish.") == 1
        # Each request has a line; /health has none.
        assert [re.sub(r"^[-\d]+ [\d:,]+ | [\d.]+ s$", "", line) for line in said if "/" in line] == [
            "POST /v1/completions 401", "GET /v1/models 401", "POST /v1/completions 429",
            "POST /v1/completions 200", "POST /v1/completions 200",
        ]  # fmt: skip


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> ModelHandle:
    """A model that does not think."""
    return save_model("llama", tmp_path_factory.mktemp("plain") / "m", template=FIRST_TEMPLATE, tags=())


@pytest.fixture(scope="module")
def small(plain: ModelHandle) -> Iterator[openai.OpenAI]:
    with served(plain) as url, openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as result:
        yield result


def test_a_prompt_counts_as_often_as_it_is_sent(client: openai.OpenAI, tiny_llama: ModelHandle) -> None:
    prompt = tiny_llama.prompt(questions(1)[0])
    count = len(tiny_llama.tokens(prompt))
    wanted: dict[str, Any] = {"model": NAME, "seed": 11, "max_tokens": 8}
    twice = client.completions.create(prompt=[prompt, prompt], n=2, **wanted)
    assert (len(twice.choices), twice.usage.prompt_tokens) == (4, 2 * count)
    # The whole text of a completion is its answer.
    assert twice.usage.completion_tokens_details.reasoning_tokens == 0
    (*_, last) = client.completions.create(
        prompt=[prompt, prompt], stream=True, stream_options={"include_usage": True}, **wanted
    )
    assert last.usage.prompt_tokens == 2 * count


def test_harmless_fields_and_values_for_the_template(tmp_path: Path) -> None:
    model = save_model("llama", tmp_path / "m", template=SWITCHED)
    with served(model) as address, openai.OpenAI(base_url=f"{address}/v1", api_key="none") as client:
        wanted: dict[str, Any] = {"model": NAME, "messages": ASKED, "seed": 3, "max_tokens": 8}
        thinking = client.chat.completions.create(**wanted).choices[0].message
        assert (thinking.content, bool(thinking.reasoning_content)) == ("", True)
        answer = client.chat.completions.create(
            **wanted, extra_body={"chat_template_kwargs": {"enable_thinking": False}, "min_p": 0}
        )
        assert (bool(answer.choices[0].message.content), answer.choices[0].message.reasoning_content) == (True, None)
        assert answer.usage.completion_tokens_details.reasoning_tokens == 0
        options: Any = {"include_usage": True, "include_obfuscation": False}
        assert list(client.chat.completions.create(**wanted, stream=True, stream_options=options))
