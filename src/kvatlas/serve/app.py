"""The HTTP endpoints over the shared service: chat completions, completions, models, health, metrics."""

from __future__ import annotations

import asyncio
import logging
import re
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client import Counter as CounterMetric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from kvatlas import __version__
from kvatlas.core import KvatlasError
from kvatlas.serve.protocol import ChatRequest, CompletionRequest, Generating
from kvatlas.serve.replies import AnswerFormat, answer_span, error_body, event_bytes
from kvatlas.serve.server import RequestLimits, add_error_handlers
from kvatlas.serve.service import (
    ClosedError,
    GenerationRequest,
    LengthError,
    RequestHandle,
    Service,
    follow_tokens,
    next_stream,
    room_for,
    sampling_with,
    stream_of,
)
from kvatlas.text import model_name, visible

_log = logging.getLogger("kvatlas.serve")
#: Texts with more characters for each position of the model are refused before tokenization; five are usual.
MOST_PER_TOKEN = 32
#: Bucket limits of the histograms in seconds.
_SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800)
Body = TypeVar("Body", bound=Generating)


def application(service: Service, name: str, api_key: str | None = None, hosts: Collection[str] = ()) -> FastAPI:
    """Return the application over a service; `name` is the model's name for clients.

    `api_key` and `hosts` are those of `RequestLimits`.
    """
    app = FastAPI(
        title="kvatlas",
        version=__version__,
        summary="OpenAI-compatible chat and text completions under KV-cache token selection.",
        # These pages would load scripts and styles from another host.
        docs_url=None,
        redoc_url=None,
    )
    handler = CompletionHandler(service, name)
    add_error_handlers(app)
    app.add_middleware(RequestLimits, api_key=api_key, hosts=hosts, on_response=handler.metrics.note)

    @app.post("/v1/chat/completions", response_model=None)
    async def chat(body: ChatRequest, request: Request) -> Response:
        """Answer a conversation."""
        return await handler.serve(body, request, handler.chat_requests)

    @app.post("/v1/completions", response_model=None)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """Continue texts as they are, without a chat template."""
        return await handler.serve(body, request, handler.completion_requests)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        """List the model."""
        return {"object": "list", "data": [handler.about]}

    @app.get("/v1/models/{model:path}")
    async def model(model: str) -> dict[str, Any]:
        """Describe the model."""
        handler.check_model(model)
        return handler.about

    @app.get("/health")
    async def health() -> dict[str, Any]:
        """Report if the server accepts requests."""
        if service.failure is not None or service.closing:
            raise HTTPException(503, "The server is stopping." if service.closing else "The engine has failed.")
        return {"status": "ok", "waiting": service.waiting, "decoding": service.decoding}

    @app.get("/metrics")
    async def metrics() -> Response:
        """Report metrics in the format of Prometheus."""
        text = generate_latest(handler.metrics.registry)
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    return app


class Metrics(Collector):
    """The metrics of one server for Prometheus: counters of the engine, and durations of requests."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self.registry = CollectorRegistry()
        self.registry.register(self)
        timing: dict[str, Any] = {"labelnames": ("endpoint",), "buckets": _SECONDS, "registry": self.registry}
        self.answered = CounterMetric(
            "kvatlas_requests", "Requests by how they ended.", ("endpoint", "outcome"), registry=self.registry
        )
        self.refused = CounterMetric(
            "kvatlas_refused_requests", "Requests by HTTP status from 400 on.", ("endpoint", "status"),
            registry=self.registry,
        )  # fmt: skip
        self.seconds = Histogram("kvatlas_request_seconds", "From request to last token.", **timing)
        self.first = Histogram("kvatlas_first_token_seconds", "From request to first piece of a stream.", **timing)

    def note(self, method: str, path: str, status: int, seconds: float) -> None:
        """Log a request, and count it if it is refused or fails."""
        if path not in ("/health", "/metrics"):
            _log.info("%s %s %d %.3f s", method, visible(path)[:200], status, seconds)
        if status >= 400:
            endpoint = {"/v1/chat/completions": "chat", "/v1/completions": "completions"}.get(path, "other")
            self.refused.labels(endpoint, str(status)).inc()

    def collect(self) -> Iterator[Metric]:
        """Yield the state of the engine."""
        service = self.service
        engine = service.engine
        if engine is None:
            return
        # Read once: the engine goes on while its state is reported.
        rows = engine.active_rows

        for name, text, value in (
            ("kvatlas_requests_waiting", "Sequences that wait for a row.", service.waiting),
            ("kvatlas_rows_active", "Sequences that are being decoded.", rows),
            ("kvatlas_batch_fill", "Share of the rows that are active.", rows / service.rows),
            ("kvatlas_kv_tokens", "Tokens kept in the caches of active rows.", engine.cached_tokens),
            ("kvatlas_kv_bytes", "Bytes allocated for the cache.", engine.cache.bytes),
        ):
            yield GaugeMetricFamily(name, text, value)
        yield CounterMetricFamily(
            "kvatlas_evicted_tokens", "Tokens that compressions dropped from caches.", engine.evicted_tokens
        )
        yield CounterMetricFamily(
            "kvatlas_decoded_tokens", "Tokens drawn; its rate is the tokens per second.", engine.decoded_tokens
        )


class CompletionHandler:
    """The conversion of bodies to requests of the service, and of handles to answers."""

    def __init__(self, service: Service, name: str) -> None:
        self.service = service
        self.name = name
        # One thread reads prompts beside the event loop; a tokenizer is not thread-safe.
        self._reader = ThreadPoolExecutor(1, "kvatlas-prompts")
        # Answers to each prompt so far, for requests without a seed.
        self._samples: Counter[tuple[int, ...]] = Counter()
        self.metrics = Metrics(service)
        self.about = {
            "id": name,
            "object": "model",
            "created": int(time.time()),
            "owned_by": "kvatlas",
            "policy": {"policy": service.policy.name, **service.policy.setting.values},
        }

    def check_model(self, model: str | None) -> None:
        """Raise 404 for another model than the served one, which has a short name, too: that of figures."""
        if model is not None and model not in (self.name, model_name(self.name)):
            raise HTTPException(404, f"There is no model {model!r}; expected {self.name!r}.")

    def _check_size(self, lengths: Sequence[int], choices: int | None) -> None:
        """Raise KvatlasError for too many answers, and for prompts with too many characters."""
        count = len(lengths) * (choices or 1)
        most = self.service.batch_size + self.service.queue
        if count > most:
            raise KvatlasError(f"prompt and n ask for {count:,} answers at once; expected at most {most:,}.")
        positions = self.service.model.positions
        if positions is not None and max(lengths) > positions * MOST_PER_TOKEN:
            raise LengthError(
                f"The model has {positions} positions: a prompt of {max(lengths):,} characters is more; expected at "
                f"most {positions * MOST_PER_TOKEN:,}."
            )

    def chat_requests(self, body: ChatRequest) -> list[GenerationRequest]:
        """Return the requests of a conversation."""
        messages = [message.for_template() for message in body.messages]
        self._check_size([sum(len(message["content"]) for message in messages)], body.n)
        model = self.service.model
        values = dict(body.chat_template_kwargs or {})
        if body.reasoning_effort is not None:
            values["reasoning_effort"] = body.reasoning_effort
        template = str(model.tokenizer.chat_template or "")
        for name in values:
            if not re.search(rf"(?<!\w){re.escape(name)}(?!\w)", template):
                raise KvatlasError(f"{name} is not supported: the model's chat template does not read it.")

        text = model.conversation(messages, values)
        # Variables of the template may close thinking in the prompt, or leave it to the model.
        opened = None
        if values and model.thinking.open:
            opened = text.rstrip().endswith(model.thinking.open)

        most = body.max_completion_tokens or body.max_tokens
        top = None
        if body.logprobs:
            top = body.top_logprobs or 0
        return self._generation_requests(body, model.tokens(text), most, top, split=True, opened=opened)

    def completion_requests(self, body: CompletionRequest) -> list[GenerationRequest]:
        """Return the requests of one or several prompts."""
        prompts: Sequence[Any] = body.prompt
        # One text, or the token ids of one prompt.
        if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)):
            prompts = [prompts]
        if not prompts:
            raise KvatlasError("prompt is empty; expected a text, token ids, or a list of them.")
        self._check_size([len(prompt) for prompt in prompts], body.n)

        model = self.service.model
        size = len(model.tokenizer)
        requests: list[GenerationRequest] = []
        for prompt in prompts:
            tokens = model.tokens(prompt) if isinstance(prompt, str) else tuple(prompt)
            wrong = next((token for token in tokens if not 0 <= token < size), None)
            if wrong is not None:
                raise KvatlasError(f"prompt has the token {wrong}; expected ids from 0 to {size - 1}.")
            # OpenAI's completions have 16 new tokens by default.
            requests += self._generation_requests(body, tokens, body.max_tokens or 16, body.logprobs, split=False)
        return requests

    def _generation_requests(
        self,
        body: Generating,
        prompt: tuple[int, ...],
        most: int | None,
        top_logprobs: int | None,
        *,
        split: bool,
        opened: bool | None = None,
    ) -> list[GenerationRequest]:
        self.check_model(body.model)
        service = self.service
        policy = service.policy_for(body.policy)

        room = room_for(service.model, policy, prompt, most)
        sampling = sampling_with(
            service.sampling, temperature=body.temperature, top_p=body.top_p, top_k=body.top_k, max_new_tokens=room
        )
        if body.seed is None and service.seed is not None:
            streams = [next_stream(service.seed, prompt, self._samples) for _ in range(body.n or 1)]
        else:
            streams = [stream_of(body.seed, prompt, sample) for sample in range(body.n or 1)]
        return [
            GenerationRequest(prompt, sampling, stream, body.stops, split, opened, top_logprobs, policy)
            for stream in streams
        ]

    async def serve(self, body: Body, request: Request, read: Callable[[Body], list[GenerationRequest]]) -> Response:
        """Answer a request, whole or as a stream; decoding ends if the client disconnects."""
        requests = await asyncio.get_running_loop().run_in_executor(self._reader, read, body)
        handles = self.service.ask(requests)
        chat = isinstance(body, ChatRequest)
        endpoint = "chat" if chat else "completions"
        prefix = "chatcmpl" if chat else "cmpl"
        answer_id = f"{prefix}-{uuid.uuid4().hex}"
        answer_format = AnswerFormat(chat, answer_id, int(time.time()), self.name, body.n or 1)

        began = time.perf_counter()
        if body.stream:
            with_usage = body.stream_options is not None and bool(body.stream_options.include_usage)
            return _EventStream(self._events(endpoint, answer_format, handles, with_usage, began), handles)
        try:
            with self._counted(endpoint, began):
                await _unless_gone(request, asyncio.gather(*(handle.finished() for handle in handles)))
                return JSONResponse(answer_format.whole(handles))
        except ClientDisconnect:
            return Response(status_code=499)

    async def _events(
        self, endpoint: str, answer_format: AnswerFormat, handles: list[RequestHandle], with_usage: bool, began: float
    ) -> AsyncIterator[bytes]:
        """Yield the events of a stream; an error of the service is its last event."""
        try:
            with self._counted(endpoint, began):
                if answer_format.chat:
                    for index in range(len(handles)):
                        yield answer_format.begin_event(index)
                is_first = True
                async for piece in _answer_events(answer_format, handles):
                    if is_first:
                        self.metrics.first.labels(endpoint).observe(time.perf_counter() - began)
                        is_first = False
                    # A piece without text ends within a character or a stop text.
                    if piece:
                        yield piece
                if with_usage:
                    yield answer_format.piece([], usage=answer_format.usage(handles))
            yield answer_format.done
        except ClosedError as closed:
            yield event_bytes(error_body(str(closed), "server_error"))

    @contextmanager
    def _counted(self, endpoint: str, began: float) -> Iterator[None]:
        """Count a request by how it ends, and measure its time."""
        outcome = "gone"
        try:
            yield
            outcome = "ok"
        except ClosedError:
            outcome = "stopped"
            raise
        finally:
            self.metrics.answered.labels(endpoint, outcome).inc()
            self.metrics.seconds.labels(endpoint).observe(time.perf_counter() - began)


async def _answer_events(answer_format: AnswerFormat, handles: list[RequestHandle]) -> AsyncIterator[bytes]:
    """Yield the events of new tokens of all choices, empty if they add no text yet."""
    detokenizers = [handle.ask.detokenizer(handle.model) for handle in handles]
    sent_tokens = [0 for _ in handles]
    sent_characters = [0 for _ in handles]
    async for index, tokens, is_last in follow_tokens(handles):
        handle = handles[index]
        thinking, answer = detokenizers[index].push(tokens, is_last)
        if thinking or answer:
            offset = sent_characters[index]
            sent_characters[index] += len(answer)
            # Thinking alone has no tokens of the answer yet.
            start, end = answer_span(handle, tokens, sent_characters[index]) if answer else (0, 0)
            start = max(start, sent_tokens[index])
            sent_tokens[index] = max(end, sent_tokens[index])
            yield answer_format.text_event(index, handle, (thinking, answer), (start, end), offset)
        else:
            yield b""
        if is_last:
            yield answer_format.end_event(index, handle)


class _EventStream(StreamingResponse):
    """Server-sent events whose requests are cancelled when the response ends."""

    def __init__(self, events: AsyncIterator[bytes], handles: list[RequestHandle]) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"Cache-Control": "no-store"})
        self.handles = handles

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            for handle in self.handles:
                handle.cancel()


async def _unless_gone(request: Request, answer: asyncio.Future[Any]) -> None:
    """Wait for an answer; if the client disconnects before, cancel it and raise ClientDisconnect."""

    async def watch() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        answer.cancel()

    watching = asyncio.ensure_future(watch())
    try:
        await answer
    except asyncio.CancelledError as error:
        if watching.done():
            raise ClientDisconnect from error
        raise
    finally:
        watching.cancel()
