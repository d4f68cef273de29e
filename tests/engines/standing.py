"""Real HTTP servers that answer what a test says, and questions to them."""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from kvatlas.benchmarks import find
from kvatlas.engines.asking import AskedCell, served_setting
from kvatlas.engines.client import Endpoint
from kvatlas.results import Expected, Manifest
from tests.web_server import answering

#: Status, headers and body of an answer.
Answer = tuple[int, Mapping[str, str], bytes]
#: The answer to the fields of a request for an answer.
Reply = Callable[[Mapping[str, Any]], Answer]
#: Path, headers and fields of a request.
Request = tuple[str, Mapping[str, str], Mapping[str, Any]]
MODELS: Answer = (200, {}, json.dumps({"data": [{"id": "tiny"}]}).encode())
SAMPLING = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "max_new_tokens": 300}


def completion(text: str | None, finish: str = "stop", prompt: int = 30, output: int = 20, **more: Any) -> Answer:
    """The usual answer; `more` are fields of it beside `choices`."""
    usage = {"prompt_tokens": prompt, "completion_tokens": output}
    choice = {"message": {"content": text}, "finish_reason": finish}
    return 200, {}, json.dumps({"choices": [choice], "usage": usage, **more}).encode()


@contextmanager
def standing(reply: Reply, models: Answer = MODELS) -> Iterator[tuple[str, list[Request]]]:
    """Serve replies to questions; yields the address, and the requests so far."""
    asked: list[Request] = []

    def answer(_: str, path: str, headers: Mapping[str, str], content: bytes) -> Answer:
        body = json.loads(content or b"{}")
        asked.append((path, headers, body))
        return models if path.endswith("models") else reply(body)

    with answering(answer) as url:
        yield url, asked


def ready(url: str, key: str | None = None, model: str = "") -> Endpoint:
    """An endpoint whose model is known."""
    endpoint = Endpoint(url, model, key)
    endpoint.check_model()
    return endpoint


def cells_of(
    *endpoints: Endpoint, problems: int = 8, samples: int = 2, benchmark: str = "CHAIN4", **sampling: Any
) -> list[AskedCell]:
    """The cells of endpoints that are asked the first problems of a benchmark."""
    found = find(benchmark)
    questions = found.problems(problems)
    ids = tuple(problem.id for problem in questions)
    cells = []
    for endpoint in endpoints:
        expected = Expected(endpoint.model, found.name, served_setting(endpoint), "", ids, samples, True)
        cells.append(AskedCell(endpoint, expected, found, questions, {**SAMPLING, **sampling}, 0).with_attempt(0))
    return cells


def manifest() -> Manifest:
    """The manifest of a new folder of answers."""
    return Manifest((), (), {}, {"kvatlas": "test"})
