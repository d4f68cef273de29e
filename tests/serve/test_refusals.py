"""No request is an error of the server: refusals by host, key, size, number and field; bodies of any JSON, or none."""

import asyncio
import json
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from starlette.testclient import TestClient

from kvatlas.core import Sampling
from kvatlas.models import ModelHandle, Overrides, find
from kvatlas.serve.app import application
from kvatlas.serve.protocol import ChatRequest, Generating
from kvatlas.serve.server import LOOPBACK, MAX_BYTES
from kvatlas.serve.service import Service, find_policy

ASKED = [{"role": "user", "content": "w"}]
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
TOOL = {"type": "function", "function": {"name": "x"}}


@pytest.fixture
def service(tiny_llama: ModelHandle) -> Service:
    """A service that is never started: a request that is not refused would wait for ever."""
    policy = find_policy(tiny_llama, "window", {"kv_budget": 72, "local_window": 8, "ratio": 0.3})
    return Service(tiny_llama, policy, Sampling(), batch_size=2, queue=6)


@pytest.mark.parametrize(
    ("host", "status"),
    [
        *((host, 200) for host in ("localhost:8000", "127.0.0.1", "[::1]:8000")),
        *((host, 403) for host in ("evil.example:8000", "127.0.0.1.evil.example", "127.0.0.1@evil.example", "[", "")),
    ],
)
def test_a_server_of_this_machine_answers_to_its_own_names_alone(service: Service, host: str, status: int) -> None:
    client = TestClient(application(service, "tiny", hosts=LOOPBACK))
    assert client.get("/v1/models", headers={"Host": host}).status_code == status
    assert TestClient(application(service, "tiny")).get("/v1/models", headers={"Host": host}).status_code == 200


def send_parts(app: Any, headers: dict[str, str]) -> tuple[int, list[dict[str, Any]]]:
    """Send a body without an end in parts of 1 MiB: how many of them were read, and what was answered."""
    raw = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": raw, "query_string": b""}
    read, sent = 0, []

    async def receive() -> dict[str, Any]:
        nonlocal read
        read += 1
        return {"type": "http.request", "body": b" " * 2**20, "more_body": True}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    asyncio.run(app(scope, receive, send))
    return read, sent


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Authorization": "Bearer wrong"}, 401),
        ({"Host": "evil.example", "Authorization": "Bearer sesame"}, 403),
        ({"Content-Length": str(MAX_BYTES + 1), "Authorization": "Bearer sesame"}, 413),
        ({"Content-Length": "9" * 5000, "Authorization": "Bearer sesame"}, 413),
    ],
)
def test_what_headers_show_is_refused_without_the_body(service: Service, headers: dict[str, str], status: int) -> None:
    app = application(service, "tiny", "sesame", hosts=("localhost",))
    read, sent = send_parts(app, {"Host": "localhost"} | headers)
    assert (read, sent[0]["status"]) == (0, status)


def test_a_body_without_a_length_is_read_no_further_than_the_limit(service: Service) -> None:
    read, (start, body) = send_parts(application(service, "tiny"), {})
    assert (read, start["status"], dict(start["headers"])[b"connection"]) == (5, 413, b"close")
    assert b"The body is larger than 4,194,304 bytes, the limit." in body["body"]


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"best_if": 3}, "best_if is not known."),
        ({"tools": [TOOL]}, "tools is not supported."),
        ({"messages": [{"role": "assistant", "content": "w", "tool_calls": [TOOL]}]}, "messages.0.tool_calls is not"),
        ({"messages": [{"role": "user", "content": "w " * 90}]}, "kv_budget 72 is too small for this prompt"),
        ({"policy": {"policy": "full"}}, "policy is not known."),
        ({"temperature": 9}, "temperature: Input should be less than or equal to 2."),
        ({"top_p": 0}, "top_p: Input should be greater than 0."),
        ({"max_tokens": 5000}, "The model has 1536 positions: a prompt of"),
        ({"logprobs": True}, "logprobs is not supported."),
        (
            {"messages": [{"role": "user", "content": [IMAGE]}]},
            "messages have a part of type 'image_url'; only text is",
        ),
        ({"chat_template_kwargs": {"enable_thinking": False}}, "enable_thinking is not supported: the model's chat"),
        # Too much is refused before it is worked on.
        ({"prompt": ["a"] * 2000, "n": 128}, "prompt and n ask for 256,000 answers at once; expected at most 8."),
        ({"prompt": "a" * 1_000_000}, "a prompt of 1,000,000 characters is more; expected at most"),
        ({"messages": [{"role": "user", "content": "a" * 50_000}] * 20}, "a prompt of 1,000,000 characters is more"),
        ({"prompt": [[]] * 1_000_000}, "prompt"),
        ({"messages": [0] * 1_000_000}, "messages.0"),
    ],
)
def test_a_refusal_names_the_field(service: Service, fields: dict[str, Any], sentence: str) -> None:
    path, body = ("completions", fields) if "prompt" in fields else ("chat/completions", {"messages": ASKED} | fields)
    began = time.process_time()
    answer = TestClient(application(service, "tiny")).post(f"/v1/{path}", json=body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert sentence in error["message"]
    assert error["type"] == "invalid_request_error"
    assert len(answer.content) < 1000
    assert time.process_time() - began < 30


def test_neutral_values_are_taken_and_values_that_only_equal_them_in_python_refused() -> None:
    for name, values in Generating.neutral.items():
        for value in values:
            ChatRequest.model_validate({"messages": ASKED, name: value})
    for name, value in (("frequency_penalty", False), ("echo", 0), ("best_of", True)):
        with pytest.raises(ValueError, match=f"{name} is not supported"):
            ChatRequest.model_validate({"messages": ASKED, name: value})


def test_a_message_in_parts_is_their_text_and_a_developer_speaks_as_the_system() -> None:
    parts = [{"type": "text", "text": text} for text in ("Is it", " so?")]
    messages = [{"role": "developer", "content": "be brief"}, {"role": "user", "content": parts}]
    request = ChatRequest.model_validate({"messages": messages})
    assert [message.for_template() for message in request.messages] == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "Is it so?"},
    ]


def test_a_body_that_is_no_json_is_told_with_the_place(service: Service) -> None:
    client = TestClient(application(service, "tiny"))
    headers = {"Content-Type": "application/json"}
    answer = client.post("/v1/completions", content='{"prompt": "w", }', headers=headers)
    error = answer.json()["error"]
    assert error["message"].startswith("The body is no JSON: ")
    # Versions of Python name the comma or what follows it.
    assert error["message"].endswith((" at character 14.", " at character 16."))
    assert error["param"] is None


# Real answers, of one token each.

MODEL = find("embedded:tiny-llama")
# Every token ends an answer: real answers by the engine, of one token each.
MODEL = replace(MODEL, overrides=Overrides(stops=frozenset(range(len(MODEL.tokenizer)))))
SERVICE = Service(MODEL, find_policy(MODEL, "full", {}), Sampling(), batch_size=8, queue=1000)
APP = application(SERVICE, "tiny")
MANY = {"suppress_health_check": list(HealthCheck), "derandomize": True}


@pytest.fixture(scope="module", autouse=True)
def _running() -> Iterator[None]:
    SERVICE.start()
    yield
    assert SERVICE.failure is None
    SERVICE.close()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters()),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
NAMED = (Generating.neutral, Generating.ignored, ChatRequest.model_fields, ["prompt"])
FIELDS = st.sampled_from(list(dict.fromkeys(name for names in NAMED for name in names)))
PATHS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "w"}]},
    "/v1/completions": {"prompt": "w"},
}


def post(path: str, content: str | bytes) -> Any:
    client = TestClient(APP, raise_server_exceptions=False)
    return client.post(path, content=content, headers={"Content-Type": "application/json"})


@given(st.dictionaries(FIELDS, JSON, max_size=4), st.sampled_from(list(PATHS)))
@settings(max_examples=80, **MANY)
def test_bodies_of_any_json(fields: dict[str, Any], path: str) -> None:
    text = json.dumps({**PATHS[path], **fields})
    answer = post(path, text)
    assert answer.status_code in (200, 400, 404, 429), (text, answer.text)
    if answer.status_code != 200:
        assert answer.json()["error"]["message"]


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b'"\\ud800"', b"\xff", b"[" * 100_000, b'{"n":1e400}'])
@pytest.mark.parametrize("path", PATHS)
def test_bodies_that_are_no_requests(path: str, body: bytes) -> None:
    answer = post(path, body)
    assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error"), answer.text


@pytest.mark.parametrize("text", ["\ud800", "<|end|>" * 3, "\0", "é" * 50, "</think>"])
def test_any_text_is_answered_or_refused(text: str) -> None:
    for fields in ({"prompt": text}, {"prompt": "w", "stop": text}, {"prompt": "w", text: 1}):
        answer = post("/v1/completions", json.dumps(fields))
        assert answer.status_code in (200, 400), answer.text
