"""Answers of an OpenAI-compatible endpoint to the problems of a run, graded by the run's grader and stored as a run.

Each answer is stored when it arrives, whatever becomes of the others. What an endpoint sends is limited in size and
time. The key of the endpoint is in no message, and is replaced in no answer.
"""

from __future__ import annotations

import contextlib
import json
import queue
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import httpx

from kvatlas import __version__, benchmarks
from kvatlas.answers import reading
from kvatlas.benchmarks import Benchmark
from kvatlas.benchmarks.base import grade_reading
from kvatlas.core import Costs, KvatlasError, Problem, Setting, Trace, canonical, described, digest, reason
from kvatlas.deploy.engine_config import MeasuredCell
from kvatlas.noise import stream_key
from kvatlas.results import Expected, Key, Manifest, Store
from kvatlas.results.records import RefusedTraceError

T = TypeVar("T")
#: The most seconds of a request, from its sending to the end of its answer.
SECONDS = 1800.0
#: The most seconds of a connection's beginning.
CONNECT_SECONDS = 60.0
#: The most bytes of an answer, also unpacked.
MAX_BODY = 2**24
#: The longest Retry-After that is waited for, in seconds.
LONGEST_WAIT = 120.0
#: HTTP statuses after which the same request is sent again.
_AGAIN = (429, 500, 502, 503, 504)
#: The most times that a request is sent.
_TRIES = 6
#: The seconds before the second attempt.
_FIRST_PAUSE = 1.0
#: After so many failures in a row, and as many as there are open questions, no further question is asked.
_FAILURES = 3
#: The longest finish reason and name of a server that is stored, in characters.
_LONGEST_NAME = 200
#: Larger counts and costs are unknown ones.
_MAX_COUNT = 2**53
_KEPT = "earlier answers are kept, and the same command goes on from there"


@dataclass(frozen=True)
class EndpointAnswer:
    """The text of an answer with its thinking in tags, its finish reason, its costs, and what the server says."""

    text: str
    finish: str
    costs: Costs
    server: Mapping[str, str] = field(default_factory=dict)


@dataclass
class Endpoint:
    """An endpoint by its address (`http://host:port`, with or without `/v1`), a model it serves, and a key."""

    url: str
    model: str = ""
    key: str | None = field(default=None, repr=False)
    #: What the endpoint says of the model.
    about: Mapping[str, Any] = field(default_factory=dict, init=False)
    #: Set to send nothing any more.
    stopped: threading.Event = field(default_factory=threading.Event, init=False, repr=False)

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
        if self.key and not (self.key.isascii() and self.key.isprintable() and " " not in self.key):
            raise KvatlasError("The key in KVATLAS_API_KEY holds characters that no header can have.")
        self.url = f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/').removesuffix('/v1')}/v1"

    def check_model(self) -> None:
        """Find the only model of the endpoint, or check the given one; KvatlasError lists the models it has."""
        body, _ = self._json("models")
        rows = body.get("data")
        if not isinstance(rows, list):
            raise self._nonsense("models", body)
        by_name = {row["id"]: row for row in rows if isinstance(row, dict) and _is_name(row.get("id"))}

        names = list(by_name)
        if not self.model and len(names) == 1:
            self.model = names[0]
        if self.model not in names:
            if not names:
                raise KvatlasError(f"{self.url} lists no model that has a name of printable characters.")
            fault = f"no model {self.model!r}" if self.model else "several models"
            listed = self._hidden(", ".join(names))
            raise KvatlasError(f"{self.url} has {fault}; name one with --served: {listed}.")

        description = by_name[self.model]
        self.about = {name: value for name, value in description.items() if isinstance(value, int) or _is_name(value)}

    def ask(self, question: str, sampling: Mapping[str, Any], seed: int) -> EndpointAnswer:
        """Return the answer to one user message; `sampling` are fields of the request.

        Cache costs are read from the field that `kvatlas serve` adds to an answer.
        """
        messages = [{"role": "user", "content": question}]
        began = time.monotonic()
        content = {"model": self.model, "messages": messages, "seed": seed, **sampling}
        body, headers = self._json("chat/completions", content)
        seconds = time.monotonic() - began
        try:
            (choice,) = body["choices"]
            message = choice["message"]
            thinking = _text_of_content(message.get("reasoning_content")) or _text_of_content(message.get("reasoning"))
            text = reading.join_thinking(thinking, _text_of_content(message.get("content")))
            # Half a character cannot be stored: UnicodeEncodeError is a ValueError.
            text.encode()

            usage = body.get("usage") or {}
            details = usage.get("completion_tokens_details") or {}
            cache = choice.get("kvatlas") or {}
            mean: Any = cache.get("mean_kv_tokens")
            costs = Costs(
                prompt_tokens=_known_count(usage.get("prompt_tokens")),
                output_tokens=_known_count(usage.get("completion_tokens")),
                thinking_tokens=_known_count(details.get("reasoning_tokens")),
                peak_kv_tokens=_known_count(cache.get("peak_kv_tokens")),
                mean_kv_tokens=float(mean) if type(mean) in (int, float) and 0 <= mean < _MAX_COUNT else None,
                compressions=_known_count(cache.get("compressions")),
                seconds=seconds,
            )

            finish = str(choice.get("finish_reason"))[:_LONGEST_NAME].encode(errors="backslashreplace").decode()
            server = {name: body.get(name) for name in ("model", "system_fingerprint")}
            server["server"] = headers.get("Server")
            named = {name: str(value) for name, value in server.items() if _is_name(value)}
            return EndpointAnswer(text, finish, costs, named)
        except (LookupError, TypeError, ValueError, AttributeError):
            raise self._nonsense("chat/completions", body) from None

    def _json(self, path: str, content: Mapping[str, Any] | None = None) -> tuple[dict[str, Any], httpx.Headers]:
        """Send a request, again while the endpoint is busy or a connection breaks; return body and headers.

        The key goes to this address alone, without redirects. The first request, for the models, fails at once if the
        endpoint cannot be reached.
        """
        for attempt in range(1, _TRIES + 1):
            try:
                status, headers, raw = self._send(path, content)
            except (httpx.HTTPError, ValueError, zlib.error) as error:
                is_broken = isinstance(error, httpx.NetworkError | httpx.RemoteProtocolError)
                if is_broken and content is not None and attempt < _TRIES:
                    self._pause(_pause_seconds(attempt))
                    continue
                raise KvatlasError(f"{self.url} cannot be reached ({self._hidden(reason(error))}); {_KEPT}.") from None
            if status not in _AGAIN or attempt == _TRIES:
                break
            self._wait(headers, attempt)

        body = _json_or_text(raw, headers)
        if status != httpx.codes.OK:
            raise KvatlasError(self._refusal(path, status, body))
        if not isinstance(body, dict):
            raise self._nonsense(path, body)
        return body, headers

    def _send(self, path: str, content: Mapping[str, Any] | None) -> tuple[int, httpx.Headers, bytes]:
        """Send a request once; return status, headers and the unpacked body, which are limited in size and time."""
        headers = {"Accept-Encoding": "identity"}
        if self.key:
            headers["Authorization"] = f"Bearer {self.key}"
        method = "GET" if content is None else "POST"

        timeout = httpx.Timeout(SECONDS, connect=CONNECT_SECONDS)
        end = time.monotonic() + SECONDS
        raw = bytearray()
        with httpx.stream(method, f"{self.url}/{path}", json=content, headers=headers, timeout=timeout) as answer:
            for piece in answer.iter_raw():
                raw += piece
                if len(raw) > MAX_BODY:
                    raise KvatlasError(f"{self.url}/{path} answers more than {MAX_BODY:,} bytes; {_KEPT}.")
                if time.monotonic() > end:
                    raise KvatlasError(f"{self.url}/{path} needs more than {SECONDS:g} s for an answer; {_KEPT}.")
                if self.stopped.is_set():
                    raise KvatlasError("Stopped.")

        encoding = answer.headers.get("Content-Encoding", "identity").strip().lower()
        if encoding in ("gzip", "x-gzip", "deflate"):
            # The header of gzip or of zlib decides.
            unpacked = zlib.decompressobj(zlib.MAX_WBITS | 32).decompress(bytes(raw), MAX_BODY + 1)
            if len(unpacked) > MAX_BODY:
                raise KvatlasError(f"{self.url}/{path} answers more than {MAX_BODY:,} bytes, unpacked; {_KEPT}.")
            return answer.status_code, answer.headers, unpacked
        if encoding not in ("", "identity"):
            raise KvatlasError(f"{self.url}/{path} answers in the encoding {encoding[:40]!r}, which was not asked for.")
        return answer.status_code, answer.headers, bytes(raw)

    def _pause(self, seconds: float) -> None:
        """Wait; raise KvatlasError at once if asking is stopped."""
        if self.stopped.wait(seconds):
            raise KvatlasError("Stopped.")

    def _wait(self, headers: httpx.Headers, attempt: int) -> None:
        """Wait as long as a busy endpoint asks for, else longer after each attempt."""
        wait = _retry_after(headers.get("Retry-After", ""))
        if wait is None:
            wait = _pause_seconds(attempt)
        if not wait <= LONGEST_WAIT:
            raise KvatlasError(f"{self.url} asks to wait for {wait:g} s; {_KEPT}.")
        self._pause(wait)

    def _refusal(self, path: str, code: int, body: object) -> str:
        # Of JSON without its escapes, which might hide a key.
        message = body if isinstance(body, str) else json.dumps(body, ensure_ascii=False)
        said = self._hidden(message).strip()
        refusal = f"refuses the request: {reason(ValueError(said))}" if said else "answers without a text"
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
        message = self._hidden(str(body))[:120]
        return KvatlasError(f"{self.url}/{path} does not answer as an OpenAI-compatible API: {message!r}.")

    def _hidden(self, text: str) -> str:
        """Return a message without the key, which a server might repeat."""
        return text.replace(self.key, "***") if self.key and len(self.key) > 3 else text


def _retry_after(header: str) -> float | None:
    """Return the seconds that a Retry-After asks for, as a number or as a date; None if it says neither."""
    try:
        return max(0.0, float(header))
    except ValueError:
        pass
    try:
        return max(0.0, parsedate_to_datetime(header).timestamp() - time.time())
    except (ValueError, OverflowError, OSError):
        # Dates of any year, which a clock may not have.
        return None


def _pause_seconds(attempt: int) -> float:
    """Return the seconds before the next attempt, twice those before this one."""
    return _FIRST_PAUSE * 2.0 ** (attempt - 1)


def _json_or_text(raw: bytes, headers: httpx.Headers) -> Any:
    """Return the value of a body in JSON, or its text; NaN and infinite numbers are None."""
    _, _, charset = headers.get("Content-Type", "").lower().partition("charset=")
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError:
        try:
            text = raw.decode(charset.partition(";")[0].strip(" \"'") or "utf-8")
        except (LookupError, ValueError):
            return raw.decode(errors="backslashreplace")
    try:
        return json.loads(text, parse_constant=lambda _: None)
    except (ValueError, RecursionError):
        return text


def _text_of_content(content: Any) -> str:
    """Return the text of a message, which may be missing or come in parts; TypeError for content that is no text."""
    if content is None:
        return ""
    if isinstance(content, list):
        content = "".join(piece["text"] for piece in content)
    if not isinstance(content, str):
        raise TypeError(f"the content is {content!r}")
    return content


def _is_name(value: Any) -> bool:
    """Return True for a short text that can be stored and printed."""
    return isinstance(value, str) and 0 < len(value) <= _LONGEST_NAME and value.isprintable()


def _known_count(value: Any) -> int | None:
    """Return the value if it is an integer that a count can be; None for others, which servers may send."""
    return value if type(value) is int and 0 <= value < _MAX_COUNT else None


#: Traces by benchmark, problem and sample.
Traces = Mapping[tuple[str, str, int], Trace]


@dataclass(frozen=True)
class AskedAnswers:
    """The answers of an endpoint: those that were stored before, by the day of each, and those that came now."""

    traces: Traces
    earlier: Mapping[str, int]
    now: int

    def __str__(self) -> str:
        total = sum(self.earlier.values()) + self.now
        if not self.earlier:
            return f"All {total:,} answers are new."
        days = ", ".join(f"{count:,} of {day}" for day, count in sorted(self.earlier.items()))
        return f"{total - self.now:,} of {total:,} answers were stored before ({days}); --again asks all anew."


def ask(
    endpoint: Endpoint,
    reference: MeasuredCell,
    folder: Path,
    *,
    problems: int | None = None,
    samples: int | None = None,
    concurrency: int = 8,
    top_k: bool = True,
    again: bool = False,
    on_trace: Callable[[int, int], None] = lambda done, total: None,
) -> AskedAnswers:
    """Ask for the missing answers, store each when it arrives, and return all answers of this endpoint.

    `problems` limits each benchmark to its first problems, `samples` each problem to its first samples. Some endpoints
    do not know the field `top_k`. With `again` earlier answers do not count, and stay in the store. `on_trace` is
    called with the numbers of present and of all answers. Raises KvatlasError if questions failed; all answers that
    arrived are stored, and a second call goes on.
    """
    endpoint.stopped = threading.Event()
    endpoint.check_model()
    setting = Setting.from_parameters("served", endpoint=endpoint.url, model=endpoint.model)
    questions = _RunQuestions(endpoint, reference, reference.benchmarks(), top_k)
    with Store.create(folder, {"kvatlas": __version__}) as store:
        spec = {"lose_at_most": 100 * reference.run.margin, "claim": reference.run.stored_claim.value}
        measured = reference.run.manifest
        new = Manifest((), (), spec, {"kvatlas": __version__}, measured.about, contents=measured.contents)
        manifest = store.manifest(new)

        # The cells of this attempt; those of other endpoints and attempts stay.
        attempts = {**manifest.provenance.get("attempts", {})}
        attempts[setting.id] = attempts.get(setting.id, 0) + again
        cells = questions.cells(setting, problems, samples, attempts[setting.id])
        verified = {"against": str(reference.setting), "model": reference.model, "server": dict(endpoint.about)}
        store.put_manifest(manifest.with_cells(cells, verified=verified, attempts=attempts))

        earlier: Counter[str] = Counter()
        for trace in _stored_answers(store, cells).values():
            earlier[str(json.loads(trace.made_with or "{}").get("day", "an unknown day"))] += 1
        missing = list(questions.missing(cells, store.keys()))
        total = sum(len(cell.problems) * cell.samples for cell in cells)

        # Each answer is stored when it arrives.
        failures: list[KvatlasError] = []
        stored = 0
        for question, answer in _arriving(questions, missing, concurrency):
            if not isinstance(answer, EndpointAnswer):
                failures.append(answer)
                continue
            try:
                store.add(question[0].run_key, questions.trace(*question, answer))
            except RefusedTraceError as error:
                failures.append(error)
                continue
            stored += 1
            on_trace(total - len(missing) + stored, total)

        if failures and len(missing) == 1:
            raise failures[0]
        if failures:
            raise KvatlasError(
                f"{failures[0]} Of {len(missing):,} questions {len(failures):,} failed, {stored:,} answers were stored."
            )
        return AskedAnswers(_stored_answers(store, cells), dict(earlier), stored)


def _arriving(
    questions: _RunQuestions, missing: Sequence[Question], concurrency: int
) -> Iterator[tuple[Question, EndpointAnswer | KvatlasError]]:
    """Yield each question with its answer, or its failure, when it arrives.

    Asking ends early if every question fails. Ctrl-C ends it at once: what has arrived is still yielded, and what is
    under way is lost.
    """
    waiting: queue.SimpleQueue[Question] = queue.SimpleQueue()
    for question in missing:
        waiting.put(question)
    arrived: queue.SimpleQueue[tuple[Question, EndpointAnswer | BaseException]] = queue.SimpleQueue()
    stopped = questions.endpoint.stopped

    def work() -> None:
        while not stopped.is_set():
            try:
                question = waiting.get_nowait()
            except queue.Empty:
                return
            try:
                arrived.put((question, questions.answer(*question)))
            except BaseException as error:  # it is raised where the answers are awaited
                arrived.put((question, error))

    for _ in range(min(concurrency, len(missing))):
        # A daemon, since a request that hangs must not keep the process from its end.
        threading.Thread(target=work, daemon=True).start()

    open_questions = len(missing)
    failures_in_row = 0
    try:
        while open_questions:
            question, answer = arrived.get()
            open_questions -= 1
            if not isinstance(answer, EndpointAnswer | Exception):
                raise answer
            if not isinstance(answer, EndpointAnswer | KvatlasError):
                # One answer of an unforeseen form is a failure of its own; the others go on.
                answer = KvatlasError(f"{questions.endpoint.url} was not understood ({described(answer)}).")
            failures_in_row = 0 if isinstance(answer, EndpointAnswer) else failures_in_row + 1
            if failures_in_row >= max(concurrency, _FAILURES):
                # The questions that wait are not asked; those under way are awaited.
                open_questions -= len(_drained(waiting))
            yield question, answer
    except KeyboardInterrupt:
        yield from [(question, answer) for question, answer in _drained(arrived) if isinstance(answer, EndpointAnswer)]
        raise
    finally:
        stopped.set()


def _drained(items: queue.SimpleQueue[T]) -> list[T]:
    """Return all items of a queue, which is empty then."""
    drained = []
    with contextlib.suppress(queue.Empty):
        while True:
            drained.append(items.get_nowait())
    return drained


def _stored_answers(store: Store, cells: Sequence[Expected]) -> dict[tuple[str, str, int], Trace]:
    """Return the stored answers of these cells by benchmark, problem and sample."""
    keys = {cell.run_key for cell in cells}
    return {(t.benchmark, t.problem, t.sample): t for key, t in store.traces() if key in keys}


#: A question to an endpoint: its cell, its problem, and the index of the sample.
Question = tuple[Expected, Problem, int]


@dataclass(frozen=True)
class _RunQuestions:
    """The questions of a run to an endpoint, and the traces of the answers."""

    endpoint: Endpoint
    reference: MeasuredCell
    benchmarks: Mapping[str, Benchmark]
    top_k: bool

    def cells(self, setting: Setting, problems: int | None, samples: int | None, attempt: int) -> list[Expected]:
        """Return the cells of the endpoint, one for each cell of the run, with run keys of their own attempt."""
        seed = self.reference.run.manifest.spec["seed"]
        sampling = dict(self.reference.sampling)
        cells = []
        for cell in self.reference.cells:
            benchmark = benchmarks.identity(self.benchmarks[cell.benchmark])
            identity = [setting.id, setting.values["model"], benchmark, sampling, self.top_k]
            if attempt:
                identity.append({"attempt": attempt})
            key = digest(["verify", *identity, seed])[:32]
            count = min(samples or cell.samples, cell.samples)
            ids = cell.problems[:problems]
            cells.append(replace(cell, setting=setting, run_key=key, problems=ids, samples=count, baseline=True))
        return cells

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

    def answer(self, cell: Expected, problem: Problem, sample: int) -> EndpointAnswer:
        """Ask one question, with the sampling of the run."""
        sampling = self.reference.sampling
        fields = {
            "temperature": sampling["temperature"],
            "top_p": sampling["top_p"],
            "max_tokens": sampling["max_new_tokens"],
        }
        if self.top_k and sampling["top_k"]:
            fields["top_k"] = sampling["top_k"]

        spec = self.reference.run.manifest.spec
        # All servers accept seeds of 31 bits.
        seed = stream_key(spec["seed"], cell.benchmark, problem.id, sample) >> 32
        return self.endpoint.ask(self.benchmarks[cell.benchmark].prompt(problem), fields, seed)

    def trace(self, cell: Expected, problem: Problem, sample: int, answer: EndpointAnswer) -> Trace:
        """Return an answer with its grade as a trace."""
        read = reading.read_text(answer.text, cut=answer.finish == "length")
        grade = grade_reading(self.benchmarks[cell.benchmark], problem, read)
        made_with = {"kvatlas": __version__, "day": f"{datetime.now(UTC):%Y-%m-%d}", **answer.server}
        return Trace(
            cell.model,
            cell.benchmark,
            problem.id,
            sample,
            cell.setting,
            (),
            answer.text,
            replace(grade, metrics={"finish": answer.finish}),
            answer.costs,
            made_with=canonical(made_with),
        )
