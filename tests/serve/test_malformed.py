"""No request is an error of the server: bodies of any JSON, and of none."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from starlette.testclient import TestClient

from kvatlas.core import Sampling
from kvatlas.models import find
from kvatlas.serve.app import application
from kvatlas.serve.protocol import ChatRequest, Generating
from kvatlas.serve.service import Service, find_policy

MODEL = find("embedded:tiny-llama")
# Every token ends an answer: real answers by the engine, of one token each.
vars(MODEL).update(stops=frozenset(range(len(MODEL.tokenizer))))
SERVICE = Service(MODEL, find_policy(MODEL, "full", {}), Sampling(), batch_size=8, queue=1000)
APP = application(SERVICE, "tiny")
MANY = {"deadline": None, "suppress_health_check": list(HealthCheck), "derandomize": True}


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
