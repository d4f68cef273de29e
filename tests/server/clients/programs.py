"""What people write with clients other than OpenAI's own, each with structured output.

python programs.py CLIENT URL URL_WITH_TOOLS; it runs in an environment of that client, with nothing of kvatlas.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

ASKED = "Is it so?"
MESSAGES: list[Any] = [{"role": "user", "content": ASKED}]


class Kind(StrEnum):
    FIRST = "first"
    SECOND = "second"


class Verdict(BaseModel):
    model_config = ConfigDict(extra="forbid")

    kind: Kind
    right: bool
    sure: list[bool] | None


def langchain(url: str, _: str) -> None:
    import langchain_openai

    chat: Any = langchain_openai.ChatOpenAI(base_url=url, api_key="none", model="tiny", seed=3, max_tokens=400)
    assert isinstance(chat.with_structured_output(Verdict, method="json_schema").invoke(ASKED), Verdict)
    assert chat.with_structured_output(Verdict.model_json_schema(), method="json_schema").invoke(ASKED)["kind"]
    assert "".join(piece.content for piece in chat.stream(ASKED)) == chat.invoke(ASKED).content
    newer: Any = langchain_openai.ChatOpenAI(base_url=url, api_key="none", model="tiny", use_responses_api=True)
    assert newer.invoke(ASKED, max_tokens=4).text


def instructor(url: str, tooled: str) -> None:
    import instructor
    import openai

    for address, mode in ((url, instructor.Mode.JSON_SCHEMA), (tooled, instructor.Mode.TOOLS)):
        client = instructor.from_openai(openai.OpenAI(base_url=address, api_key="none"), mode=mode)
        result = client.chat.completions.create(
            model="tiny", messages=MESSAGES, response_model=Verdict, max_tokens=400, max_retries=0, seed=3
        )
        assert isinstance(result, Verdict)


def litellm(url: str, _: str) -> None:
    import litellm

    common: Any = {"model": "openai/tiny", "api_base": url, "api_key": "none", "seed": 3, "max_tokens": 400}
    result: Any = litellm.completion(messages=MESSAGES, response_format=Verdict, **common)
    assert Verdict.model_validate_json(result.choices[0].message.content)
    pieces = litellm.completion(messages=MESSAGES, stream=True, **common)
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces)


def llm(url: str, _: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        os.environ["LLM_USER_PATH"] = folder
        import llm

        (Path(folder) / "extra-openai-models.yaml").write_text(
            f"- model_id: tiny\n  model_name: tiny\n  api_base: {url}\n  supports_schema: true\n"
        )
        model: Any = llm.get_model("tiny")
        result = model.prompt(ASKED, key="none", schema=Verdict, stream=False, seed=3, max_tokens=400).text()
        assert Verdict.model_validate_json(result)
        assert model.prompt(ASKED, key="none", stream=True, max_tokens=8).text()


def pydantic_ai(url: str, tooled: str) -> None:
    import pydantic_ai
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    # By response_format, and as the call of a tool.
    for address, output in ((url, pydantic_ai.NativeOutput(Verdict)), (tooled, Verdict)):
        model = OpenAIChatModel("tiny", provider=OpenAIProvider(base_url=address, api_key="none"))
        agent: Any = pydantic_ai.Agent(model, output_type=output, retries=0)
        result = agent.run_sync(ASKED, model_settings={"seed": 3, "max_tokens": 400})
        assert isinstance(result.output, Verdict)


#: Which of the two files of requirements a client needs.
CLIENTS: dict[str, tuple[str, Callable[[str, str], None]]] = {
    "langchain": ("newer", langchain),
    "llm": ("newer", llm),
    "pydantic_ai": ("newer", pydantic_ai),
    "instructor": ("older", instructor),
    "litellm": ("older", litellm),
}

if __name__ == "__main__":
    name, *urls = sys.argv[1:]
    CLIENTS[name][1](*urls)
