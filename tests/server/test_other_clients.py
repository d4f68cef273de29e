"""Clients that people use besides OpenAI's own, each with structured output; those that are installed."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.r1 import FIRST_TEMPLATE, save_model
from tests.server.test_features import Verdict, served
from tests.server.test_tools import TEMPLATE

ASKED = "Is it so?"


def needs(package: str) -> pytest.MarkDecorator:
    """Skips, before any model is made, where a client is not installed; none of them is needed for anything else."""
    return pytest.mark.skipif(find_spec(package) is None, reason=f"{package} is not installed")


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    model = save_model("llama", tmp_path_factory.mktemp("plain") / "m", template=FIRST_TEMPLATE, tags=())
    with served(model) as address:
        yield address


@pytest.fixture(scope="module")
def tooled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The same with a chat template that knows tools."""
    model = save_model("llama", tmp_path_factory.mktemp("tools") / "m", template=TEMPLATE, tags=())
    with served(model) as address:
        yield address


@needs("langchain_openai")
def test_langchain(url: str) -> None:
    import langchain_openai

    chat = langchain_openai.ChatOpenAI(base_url=url, api_key="none", model="tiny", seed=3, max_tokens=400)
    assert isinstance(chat.with_structured_output(Verdict, method="json_schema").invoke(ASKED), Verdict)
    assert chat.with_structured_output(Verdict.model_json_schema(), method="json_schema").invoke(ASKED)["kind"]
    assert "".join(piece.content for piece in chat.stream(ASKED)) == chat.invoke(ASKED).content
    newer = langchain_openai.ChatOpenAI(base_url=url, api_key="none", model="tiny", use_responses_api=True)
    assert newer.invoke(ASKED, max_tokens=4).text


@needs("instructor")
def test_instructor(url: str, tooled: str) -> None:
    import instructor
    import openai

    asked: Any = [{"role": "user", "content": ASKED}]
    for address, mode in ((url, instructor.Mode.JSON_SCHEMA), (tooled, instructor.Mode.TOOLS)):
        client = instructor.from_openai(openai.OpenAI(base_url=address, api_key="none"), mode=mode)
        found = client.chat.completions.create(
            model="tiny", messages=asked, response_model=Verdict, max_tokens=400, max_retries=0, seed=3
        )
        assert isinstance(found, Verdict)


@needs("litellm")
def test_litellm(url: str) -> None:
    import litellm

    common = {"model": "openai/tiny", "api_base": url, "api_key": "none", "seed": 3, "max_tokens": 400}
    found = litellm.completion(messages=[{"role": "user", "content": ASKED}], response_format=Verdict, **common)
    assert Verdict.model_validate_json(found.choices[0].message.content)
    pieces = litellm.completion(messages=[{"role": "user", "content": ASKED}], stream=True, **common)
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces)


@needs("llm")
def test_llm(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import llm

    monkeypatch.setenv("LLM_USER_PATH", str(tmp_path))
    (tmp_path / "extra-openai-models.yaml").write_text(
        f"- model_id: tiny\n  model_name: tiny\n  api_base: {url}\n  supports_schema: true\n"
    )
    model = llm.get_model("tiny")
    found = model.prompt(ASKED, key="none", schema=Verdict, stream=False, seed=3, max_tokens=400).text()
    assert Verdict.model_validate_json(found)
    assert model.prompt(ASKED, key="none", stream=True, max_tokens=8).text()


@needs("pydantic_ai")
def test_pydantic_ai(url: str, tooled: str) -> None:
    import pydantic_ai
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    # By response_format, and as the call of a tool.
    for address, output in ((url, pydantic_ai.NativeOutput(Verdict)), (tooled, Verdict)):
        model = OpenAIChatModel("tiny", provider=OpenAIProvider(base_url=address, api_key="none"))
        agent = pydantic_ai.Agent(model, output_type=output, retries=0)
        found = agent.run_sync(ASKED, model_settings={"seed": 3, "max_tokens": 400})
        assert isinstance(found.output, Verdict)
