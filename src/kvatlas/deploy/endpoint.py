"""Answers of an OpenAI-compatible endpoint to the problems of a run, graded by the run's grader and stored as a run.

The key of the endpoint is never written to a file or a message.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

from kvatlas import __version__, benchmarks
from kvatlas.benchmarks import Benchmark, reading
from kvatlas.core import Costs, KvatlasError, Problem, Setting, Trace, digest, reason
from kvatlas.deploy.export import MeasuredCell
from kvatlas.noise import stream_key
from kvatlas.results import Expected, Key, Manifest, Store

#: The seconds until a timeout.
SECONDS = 1800.0
#: The longest Retry-After that is waited for, in seconds.
LONGEST_WAIT = 120.0
#: HTTP statuses after which the same request is sent again.
_AGAIN = (429, 500, 502, 503, 504)
#: The most times that a request is sent.
_TRIES = 6
#: The seconds before the second attempt.
_FIRST_PAUSE = 1.0
_KEPT = "earlier answers are kept, and the same command goes on from there"


#: The text of an answer with its thinking in tags, its finish reason, and its usage.
Answer = tuple[str, str, Costs]


@dataclass
class Endpoint:
    """An endpoint by its address (`http://host:port`, with or without `/v1`), a model it serves, and a key."""

    url: str
    model: str = ""
    key: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        try:
            parts = urlsplit(self.url)
            if parts.scheme not in ("http", "https") or not parts.hostname or parts.port == 0:
                raise ValueError
        except ValueError:
            expected = "expected http://HOST:PORT or https://HOST, with or without /v1"
            raise KvatlasError(f"{self.url!r} is not an address; {expected}.") from None
        if parts.username or parts.password or parts.query or parts.fragment:
            raise KvatlasError("The address has a user, a query or a fragment; keys come from the environment alone.")
        self.url = f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/').removesuffix('/v1')}/v1"

    def check_model(self) -> None:
        """Find the only model of the endpoint, or check the given one; KvatlasError lists the models it has."""
        body = self._json("models")
        rows = body.get("data")
        if not isinstance(rows, list):
            raise self._nonsense("models", body)
        names = [str(row["id"]) for row in rows if isinstance(row, dict) and "id" in row]
        if not self.model and len(names) == 1:
            self.model = names[0]
        if self.model not in names:
            fault = f"no model {self.model!r}" if self.model else "several models"
            raise KvatlasError(f"{self.url} has {fault}; name one with --served: {', '.join(names) or 'none'}.")

    def ask(self, question: str, sampling: Mapping[str, Any], seed: int) -> Answer:
        """Return the answer to one user message; `sampling` are fields of the request.

        Cache costs are read from the field that `kvatlas serve` adds to an answer.
        """
        messages = [{"role": "user", "content": question}]
        began = time.monotonic()
        body = self._json("chat/completions", {"model": self.model, "messages": messages, "seed": seed, **sampling})
        seconds = time.monotonic() - began
        try:
            return _answer_of(body, seconds)
        except (LookupError, TypeError, ValueError, AttributeError):
            raise self._nonsense("chat/completions", body) from None

    def _json(self, path: str, content: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Send a request, again while the endpoint is busy or a connection breaks.

        The key goes to this address alone, without redirects. The first request, for the models, fails at once if the
        endpoint cannot be reached.
        """
        headers = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        method = "GET" if content is None else "POST"
        for attempt in range(1, _TRIES + 1):
            try:
                answer = httpx.request(method, f"{self.url}/{path}", json=content, headers=headers, timeout=SECONDS)
            except (httpx.HTTPError, ValueError) as error:
                is_broken = isinstance(error, httpx.NetworkError | httpx.RemoteProtocolError)
                if is_broken and content is not None and attempt < _TRIES:
                    time.sleep(_pause(attempt))
                    continue
                raise KvatlasError(f"{self.url} cannot be reached ({self._hidden(reason(error))}); {_KEPT}.") from None
            if answer.status_code not in _AGAIN or attempt == _TRIES:
                break
            self._wait(answer, attempt)
        text = self._hidden(answer.text)
        if answer.status_code != httpx.codes.OK:
            raise KvatlasError(self._refusal(path, answer.status_code, text[:2000]))
        try:
            body = json.loads(text)
        except (ValueError, RecursionError):
            body = text
        if not isinstance(body, dict):
            raise self._nonsense(path, body)
        return body

    def _wait(self, answer: httpx.Response, attempt: int) -> None:
        """Wait as long as a busy endpoint asks for, else longer after each attempt."""
        wait = _retry_after(answer.headers.get("Retry-After", ""))
        if wait is None:
            wait = _pause(attempt)
        if wait > LONGEST_WAIT:
            raise KvatlasError(f"{self.url} asks to wait for {wait:g} s; {_KEPT}.")
        time.sleep(wait)

    def _refusal(self, path: str, code: int, message: str) -> str:
        refusal = f"refuses the request: {reason(ValueError(message))}"
        if code in (401, 403):
            refusal = "does not accept the key in KVATLAS_API_KEY" if self.key else "asks for a key in KVATLAS_API_KEY"
        elif 300 <= code < 400:
            refusal = "redirects to another address; give that one, keys are not sent on"
        elif code == 404 and path == "models":
            refusal = "does not exist, so this is not an OpenAI-compatible API"
        elif code in _AGAIN:
            refusal = f"is busy or failed {_TRIES} times; {_KEPT}"
        return f"{self.url}/{path} (HTTP {code}) {refusal}."

    def _nonsense(self, path: str, body: object) -> KvatlasError:
        return KvatlasError(f"{self.url}/{path} does not answer as an OpenAI-compatible API: {str(body)[:120]!r}.")

    def _hidden(self, text: str) -> str:
        """Return the text without the key, which a server might repeat."""
        return text.replace(self.key, "***") if self.key and len(self.key) > 3 else text


def _pause(attempt: int) -> float:
    """Return the seconds before the next attempt, twice those before this one."""
    return _FIRST_PAUSE * 2.0 ** (attempt - 1)


def _retry_after(header: str) -> float | None:
    """Return the seconds that a Retry-After asks for, as a number or as a date; None if it says neither."""
    try:
        return max(0.0, float(header))
    except ValueError:
        pass
    try:
        date = parsedate_to_datetime(header)
    except ValueError:
        return None
    return max(0.0, date.timestamp() - time.time())


def _answer_of(body: Mapping[str, Any], seconds: float) -> Answer:
    """Return the answer in the body of a chat completion; raises the errors of Python for a body of another form."""
    (choice,) = body["choices"]
    message = choice["message"]
    thinking = message.get("reasoning_content") or message.get("reasoning") or ""
    text = reading.joined(thinking, message.get("content") or "")
    usage = body.get("usage") or {}
    details = usage.get("completion_tokens_details") or {}
    cache = choice.get("kvatlas") or {}
    costs = Costs(
        prompt_tokens=_count(usage.get("prompt_tokens")),
        output_tokens=_count(usage.get("completion_tokens")),
        thinking_tokens=_count(details.get("reasoning_tokens")),
        peak_kv_tokens=_numeric(cache.get("peak_kv_tokens")),
        mean_kv_tokens=_numeric(cache.get("mean_kv_tokens")),
        compressions=_numeric(cache.get("compressions")),
        seconds=seconds,
    )
    return text, str(choice.get("finish_reason")), costs


def _count(value: Any) -> int | None:
    """Return the value if it is an integer from 0; None for others, which servers may send."""
    return value if isinstance(value, int) and value >= 0 else None


def _numeric(value: Any) -> Any:
    """Return the value if it is a number, else None."""
    return value if isinstance(value, int | float) else None


#: Traces by benchmark, problem and sample.
Traces = Mapping[tuple[str, str, int], Trace]


def ask(  # noqa: PLR0913
    endpoint: Endpoint,
    reference: MeasuredCell,
    folder: Path,
    *,
    problems: int | None = None,
    samples: int | None = None,
    concurrency: int = 8,
    top_k: bool = True,
    on_trace: Callable[[int, int], None] = lambda done, total: None,
) -> Traces:
    """Ask for the missing answers, store each as it comes, and return all answers of this endpoint.

    `problems` limits each benchmark to its first problems, `samples` each problem to its first samples. Some endpoints
    do not know the field `top_k`. `on_trace` is called with the numbers of present and of all answers. Raises
    KvatlasError if the endpoint cannot be reached; stored answers are kept, and a second call goes on.
    """
    endpoint.check_model()
    by_name = reference.benchmarks()
    cells = _served_cells(endpoint, reference, by_name, problems, samples, top_k)
    questions = _Questions(endpoint, reference, by_name, _request_fields(reference.sampling, top_k))
    with Store.create(folder, {"kvatlas": __version__}) as store:
        margin = {"lose_at_most": 100 * reference.run.margin}
        measured = reference.run.manifest
        empty = Manifest((), (), margin, {"kvatlas": __version__}, measured.about, contents=measured.contents)
        before = store.manifest(empty)
        # Cells of other endpoints stay.
        verified = {"against": str(reference.setting), "model": reference.model}
        store.put_manifest(before.with_cells(cells, verified=verified))
        missing = list(questions.missing(cells, store.keys()))
        total = sum(len(cell.problems) * cell.samples for cell in cells)
        pool = ThreadPoolExecutor(concurrency)
        try:
            running = {pool.submit(questions.answer, *question): question for question in missing}
            for done, future in enumerate(as_completed(running), total - len(missing) + 1):
                cell, problem, sample = running[future]
                store.add(cell.run_key, questions.trace(cell, problem, sample, future.result()))
                on_trace(done, total)
        finally:
            pool.shutdown(cancel_futures=True)
        keys = {cell.run_key for cell in cells}
        return {(t.benchmark, t.problem, t.sample): t for key, t in store.traces() if key in keys}


def _served_cells(
    endpoint: Endpoint,
    reference: MeasuredCell,
    by_name: Mapping[str, Benchmark],
    problems: int | None,
    samples: int | None,
    top_k: bool,
) -> list[Expected]:
    """Return the cells of an endpoint, one for each cell of the reference, with run keys of their own."""
    setting = Setting.from_parameters("served", endpoint=endpoint.url, model=endpoint.model)
    seed = reference.run.manifest.spec["seed"]
    sampling = dict(reference.sampling)
    cells = []
    for cell in reference.cells:
        identity = [setting.id, endpoint.model, benchmarks.identity(by_name[cell.benchmark]), sampling, top_k]
        key = digest(["verify", *identity, seed])[:32]
        count = min(samples or cell.samples, cell.samples)
        ids = cell.problems[:problems]
        cells.append(replace(cell, setting=setting, run_key=key, problems=ids, samples=count, baseline=True))
    return cells


def _request_fields(sampling: Mapping[str, Any], top_k: bool) -> dict[str, Any]:
    """Return the sampling as fields of a request, with `top_k` if the endpoint knows it."""
    request_fields = {
        "temperature": sampling["temperature"],
        "top_p": sampling["top_p"],
        "max_tokens": sampling["max_new_tokens"],
    }
    if top_k and sampling["top_k"]:
        request_fields["top_k"] = sampling["top_k"]
    return request_fields


#: A question to an endpoint: its cell, its problem, and the index of the sample.
Question = tuple[Expected, Problem, int]


@dataclass(frozen=True)
class _Questions:
    """The questions of a run to an endpoint, and the traces of the answers; `fields` are the sampling of a request."""

    endpoint: Endpoint
    reference: MeasuredCell
    benchmarks: Mapping[str, Benchmark]
    fields: Mapping[str, Any]

    def missing(self, cells: Sequence[Expected], stored_keys: Collection[Key]) -> Iterator[Question]:
        """Yield the questions without a stored answer: the first sample of all problems, then the next."""
        spec = self.reference.run.manifest.spec
        for sample in range(max(cell.samples for cell in cells)):
            for cell in cells:
                if sample >= cell.samples:
                    continue
                for problem in self.benchmarks[cell.benchmark].problems(spec["problems"]):
                    key = (cell.run_key, cell.setting.id, cell.benchmark, problem.id, sample)
                    if problem.id in cell.problems and key not in stored_keys:
                        yield cell, problem, sample

    def answer(self, cell: Expected, problem: Problem, sample: int) -> Answer:
        """Ask one question."""
        spec = self.reference.run.manifest.spec
        # All servers accept seeds of 31 bits.
        seed = stream_key(spec["seed"], cell.benchmark, problem.id, sample) >> 32
        return self.endpoint.ask(self.benchmarks[cell.benchmark].prompt(problem), self.fields, seed)

    def trace(self, cell: Expected, problem: Problem, sample: int, answer: Answer) -> Trace:
        """Return an answer with its grade as a trace."""
        text, finish, costs = answer
        read = reading.read_text(text, cut=finish == "length")
        grade = replace(reading.grade(self.benchmarks[cell.benchmark], problem, read), metrics={"finish": finish})
        return Trace(cell.model, cell.benchmark, problem.id, sample, cell.setting, (), text, grade, costs)
