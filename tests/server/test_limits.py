"""What is refused before any work: by host, key, size and number."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from starlette.testclient import TestClient

from kvatlas.core import Sampling
from kvatlas.models import ModelHandle
from kvatlas.server.app import CompletionHandler, application
from kvatlas.server.limits import MOST_BYTES
from kvatlas.server.running import LOOPBACK
from kvatlas.service import Service, chosen


@pytest.fixture
def service(tiny_llama: ModelHandle) -> Service:
    """Never started: whatever is refused here is refused before anything is decoded."""
    return Service(tiny_llama, chosen(tiny_llama, "full", {}), Sampling(), batch_size=2, queue=6)


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost:8000", 200),
        ("127.0.0.1", 200),
        ("[::1]:8000", 200),
        ("evil.example:8000", 403),
        ("127.0.0.1.evil.example", 403),
        ("127.0.0.1@evil.example", 403),
        ("[", 403),
        ("", 403),
    ],
)
def test_a_server_of_this_machine_answers_to_its_own_names_alone(service: Service, host: str, status: int) -> None:
    client = TestClient(application(service, "tiny", hosts=LOOPBACK))
    assert client.get("/v1/models", headers={"Host": host}).status_code == status
    assert TestClient(application(service, "tiny")).get("/v1/models", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Authorization": "Bearer wrong"}, 401),
        ({"Host": "evil.example", "Authorization": "Bearer sesame"}, 403),
        ({"Content-Length": str(MOST_BYTES + 1), "Authorization": "Bearer sesame"}, 413),
        ({"Content-Length": "9" * 5000, "Authorization": "Bearer sesame"}, 413),
    ],
)
def test_what_headers_show_is_refused_without_the_body(service: Service, headers: dict[str, str], status: int) -> None:
    app = application(service, "tiny", "sesame", hosts=("localhost",))
    raw = [(name.lower().encode(), value.encode()) for name, value in ({"Host": "localhost"} | headers).items()]
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": raw, "query_string": b""}
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        raise AssertionError("the body was read")

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    asyncio.run(app(scope, receive, send))
    assert sent[0]["status"] == status


def test_a_body_without_a_length_is_read_no_further_than_the_limit(service: Service) -> None:
    given = 0

    def pieces() -> Iterator[bytes]:
        nonlocal given
        for _ in range(100):
            given += 1
            yield b" " * 2**20

    answer = TestClient(application(service, "tiny")).post("/v1/completions", content=pieces())
    assert answer.status_code == 413
    assert answer.json()["error"]["message"] == "The body is larger than 4,194,304 bytes, the most that is read."


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ({"prompt": ["a"] * 2000, "n": 128}, "prompt and n ask for 256,000 answers at once; valid are up to 8."),
        ({"prompt": ["a"] * 3, "n": 3}, "prompt and n ask for 9 answers at once; valid are up to 8."),
        ({"prompt": "a" * 1_000_000}, "a prompt of 1,000,000 characters is more; valid are up to"),
        ({"prompt": ["a", "a" * 1_000_000]}, "a prompt of 1,000,000 characters is more; valid are up to"),
        ({"messages": [{"role": "user", "content": "a" * 50_000}] * 20}, "a prompt of 1,000,000 characters is more"),
        ({"prompt": ["a"] * 5000, "n": 128}, "prompt has 5,000 prompts; valid are up to 2,048."),
        ({"prompt": [[]] * 1_000_000}, "prompt has 1,000,000 prompts; valid are up to 2,048."),
        ({"prompt": [None] * 2000}, "prompt"),
        ({"messages": [0] * 1_000_000}, "messages.0"),
    ],
)
def test_too_much_is_refused_before_it_is_worked_on(service: Service, body: dict[str, Any], sentence: str) -> None:
    client = TestClient(application(service, "tiny"))
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    began = time.process_time()
    answer = client.post(path, json=body)
    assert answer.status_code == 400
    assert sentence in answer.json()["error"]["message"]
    assert len(answer.content) < 1000
    assert time.process_time() - began < 3


def test_prompts_are_read_beside_the_event_loop(service: Service) -> None:
    news = threading.Event()

    async def both() -> None:
        reading = asyncio.ensure_future(
            CompletionHandler(service, "tiny").read(lambda _: [] if news.wait(60) else None, None)
        )
        await asyncio.sleep(0.01)
        news.set()
        assert await reading == []

    asyncio.run(both())
