"""Tools over a template that knows them: calls forced and free, whole and in streams, and answers sent back."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from kvatlas.server.tools import CallText, split_calls
from tests.r1 import ASSISTANT, FIRST_TEMPLATE, USER, save_model
from tests.server.test_features import served

#: In the way of Hermes and Qwen.
TEMPLATE = (
    "{% if tools %}{{ '" + USER + "' }}{% for tool in tools %}{{ tool | tojson }}{% endfor %}{% endif %}"
    "{% for message in messages %}{% if message.tool_calls %}{% for call in message.tool_calls %}"
    "{{ '" + ASSISTANT + "<tool_call>\\n' ~ call.function.name ~ (call.function.arguments | tojson) ~ '</tool_call>' }}"
    "{% endfor %}{% elif message.role == 'tool' %}{{ '" + USER + "<tool_response>' ~ message.content }}"
    "{% else %}{{ message.content }}{% endif %}{% endfor %}{{ '" + ASSISTANT + "' }}"
)
SCHEMA = {
    "type": "object",
    "properties": {"on": {"type": "boolean"}, "room": {"enum": ["a", "b"]}},
    "required": ["on", "room"],
    "additionalProperties": False,
}
TOOLS: Any = [
    {"type": "function", "function": {"name": "switch_light", "description": "w", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "wait"}},
]
ASKED: Any = {"model": "tiny", "messages": [{"role": "user", "content": "w"}], "seed": 3, "max_tokens": 300}
NAMED: Any = {"type": "function", "function": {"name": "switch_light"}}


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    model = save_model("llama", tmp_path_factory.mktemp("tools") / "m", template=TEMPLATE, tags=())
    with served(model) as address, openai.OpenAI(base_url=address, api_key="none", max_retries=0) as result:
        yield result


def test_a_call_that_is_asked_for_is_made(client: openai.OpenAI) -> None:
    (choice,) = client.chat.completions.create(tools=TOOLS, tool_choice=NAMED, **ASKED).choices
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    (call,) = choice.message.tool_calls or []
    assert call.function.name == "switch_light"
    assert set(json.loads(call.function.arguments)) == {"on", "room"}
    pieces = list(client.chat.completions.create(tools=TOOLS, tool_choice=NAMED, stream=True, **ASKED))
    (streamed,) = [item for piece in pieces for item in piece.choices[0].delta.tool_calls or []]
    assert (streamed.index, streamed.function.name) == (0, "switch_light")
    assert streamed.function.arguments == call.function.arguments
    assert pieces[-1].choices[0].finish_reason == "tool_calls"
    (either,) = client.chat.completions.create(tools=TOOLS[:1], tool_choice="required", **ASKED).choices
    assert either.finish_reason == "tool_calls"
    # What was called and what it gave goes on in the conversation.
    messages = [
        *ASKED["messages"],
        choice.message.model_dump(exclude_none=True, include={"role", "content", "tool_calls"}),
        {"role": "tool", "tool_call_id": call.id, "content": "done"},
    ]
    after = client.chat.completions.create(**{**ASKED, "messages": messages, "max_tokens": 4}, tools=TOOLS)
    before = client.chat.completions.create(**{**ASKED, "max_tokens": 4}, tools=TOOLS)
    assert after.usage.prompt_tokens > before.usage.prompt_tokens
    assert before.choices[0].message.tool_calls is None


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"tool_choice": {"type": "function", "function": {"name": "x"}}}, "valid are the tools: switch_light, wait"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice is given without tools"),
        ({"response_format": {"type": "json_object"}}, "response_format is given with tools"),
        ({"messages": [{"role": "user"}]}, "content is missing in a message"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type: Input should be 'function'"),
    ],
)
def test_what_does_not_fit_is_refused(client: openai.OpenAI, changes: Any, sentence: str) -> None:
    with pytest.raises(openai.BadRequestError, match=sentence):
        client.chat.completions.create(**{**ASKED, "tools": TOOLS, **changes})


def test_a_template_without_tools_is_refused(tmp_path_factory: pytest.TempPathFactory) -> None:
    for template in (FIRST_TEMPLATE, "{{ tools }}<tool_call><function=x>"):
        model = save_model("llama", tmp_path_factory.mktemp("none") / "m", template=template, tags=())
        with (
            served(model) as address,
            openai.OpenAI(base_url=address, api_key="none") as client,
            pytest.raises(openai.BadRequestError, match="tools is not supported: the model's chat template"),
        ):
            client.chat.completions.create(tools=TOOLS, **ASKED)


def test_calls_are_told_from_text_in_pieces_of_any_size() -> None:
    text = (
        'a < b <tool_call>\n{"name": "f", "arguments": {"x": "<"}}\n</tool_call>\n<tool_call>{"name": "g"}</tool_call>'
    )
    whole, calls = split_calls(text)
    assert whole == "a < b"
    assert [(call["function"]["name"], call["function"]["arguments"]) for call in calls] == [
        ("f", '{"x": "<"}'),
        ("g", "{}"),
    ]
    for size in (1, 3, 7, 200):
        writing = CallText()
        told = "".join(writing.push(text[at : at + size]) for at in range(0, len(text), size))
        rest, result = writing.end()
        assert (told + rest).strip() == "a < b"
        assert [call["function"] for call in result] == [call["function"] for call in calls]
    assert split_calls("<tool_call>no JSON</tool_call>") == ("<tool_call>no JSON</tool_call>", [])
