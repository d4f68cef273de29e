"""The endpoints: chat completions, completions, models, health, metrics. Each answer comes from the shared service."""

from __future__ import annotations

import asyncio
import re
import time
import uuid
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from kvatlas import __version__
from kvatlas.core import KvatlasError
from kvatlas.server.answers import Shape, error, event, usage_of
from kvatlas.server.limits import Gate, answer_errors_as_openai_does
from kvatlas.server.metrics import Metrics
from kvatlas.server.protocol import ChatRequest, CompletionRequest, Generating
from kvatlas.service import ClosedError, Decoder, GenerationRequest, RequestHandle, Service, Steering, stream_of
from kvatlas.service.request_validation import LengthError, drawing, room_for

#: Characters for each position of the model, from which on a text is refused unread: five are usual.
MOST_PER_TOKEN = 32
Body = TypeVar("Body", bound=Generating)
_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"description": text}
    for status, text in {
        400: "The request is malformed or asks for what is not supported.",
        401: "The API key is missing or wrong.",
        403: "The Host header names another host than this one.",
        404: "There is no such model.",
        413: "The body is too large.",
        429: "The queue is full.",
        503: "The server is stopping, or its engine has failed.",
    }.items()
}


def application(service: Service, name: str, api_key: str | None = None, hosts: Collection[str] = ()) -> FastAPI:
    """The server's application over a service that was started; `name` is what clients call the model.

    `api_key` and `hosts` are those of `Gate`.
    """
    app = FastAPI(
        title="kvatlas",
        version=__version__,
        summary="OpenAI-compatible chat and text completions under KV-cache token selection.",
        responses=_ERRORS,
        # Its pages would fetch their script and style from elsewhere.
        docs_url=None,
        redoc_url=None,
    )
    answer_errors_as_openai_does(app)
    _add_endpoints(app, CompletionHandler(service, name))
    app.add_middleware(Gate, api_key=api_key, hosts=hosts)
    return app


def _add_endpoints(app: FastAPI, handler: CompletionHandler) -> None:
    service = handler.service

    @app.post("/v1/chat/completions", response_model=None)
    async def chat(body: ChatRequest, request: Request) -> Response:
        """Answer a conversation."""
        return await handler.serve("chat", body, request, await handler.read(handler.chat_asks, body))

    @app.post("/v1/completions", response_model=None)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """Continue texts as they are, without a chat template."""
        return await handler.serve("completions", body, request, await handler.read(handler.completion_asks, body))

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        """The one model that is served."""
        return {"object": "list", "data": [handler.about]}

    @app.get("/v1/models/{model:path}")
    async def model(model: str) -> dict[str, Any]:
        """The same by its name."""
        handler.check_model(model)
        return handler.about

    @app.get("/health")
    async def health() -> dict[str, Any]:
        """Whether requests are taken."""
        if service.failure is not None or service.closing:
            raise HTTPException(503, "The server is stopping." if service.closing else "The engine has failed.")
        return {"status": "ok", "waiting": service.waiting, "decoding": service.decoding}

    @app.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
    async def metrics() -> Response:
        """The state of the engine for Prometheus."""
        return Response(handler.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


class CompletionHandler:
    """Turns requests into asks, and handles into answers."""

    def __init__(self, service: Service, name: str) -> None:
        self.service, self.name = service, name
        # One thread reads prompts, so that other answers go on; one tokenizer is not for several at a time.
        self._reader = ThreadPoolExecutor(1, "kvatlas-prompts")
        self.metrics = Metrics(service)
        self.about = {
            "id": name,
            "object": "model",
            "created": int(time.time()),
            "owned_by": "kvatlas",
            "policy": {"policy": service.policy.name, **service.policy.setting.values},
        }

    def check_model(self, model: str | None) -> None:
        """Raise 404 for another model's name."""
        if model is not None and model != self.name:
            raise HTTPException(404, f"There is no model {model!r}; valid is {self.name!r}.")

    async def read(self, asks: Callable[[Body], list[GenerationRequest]], body: Body) -> list[GenerationRequest]:
        """What a request asks for, found beside the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._reader, asks, body)

    def _check_count(self, prompts: int, choices: int | None) -> None:
        asked, most = prompts * (choices or 1), self.service.batch_size + self.service.queue
        if asked > most:
            raise KvatlasError(f"prompt and n ask for {asked:,} answers at once; valid are up to {most:,}.")

    def _check_length(self, characters: int) -> None:
        """Raise LengthError for texts that are too long whatever their tokens are: before they are tokenised."""
        known = self.service.model.positions
        if known is not None and characters > known * MOST_PER_TOKEN:
            raise LengthError(
                f"The model has {known} positions: a prompt of {characters:,} characters is more; valid are up to "
                f"{known * MOST_PER_TOKEN:,}."
            )

    def chat_asks(self, body: ChatRequest) -> list[GenerationRequest]:
        """What a conversation asks for."""
        messages = [message.for_template() for message in body.messages]
        self._check_count(1, body.n)
        self._check_length(sum(len(message["content"]) for message in messages))
        model = self.service.model
        values = self._template_values(body)
        text = model.conversation(messages, values)
        # What a template is told may close thinking in the prompt, or leave it to the model.
        opened = text.rstrip().endswith(model.thinking.open) if values and model.thinking.open else None
        most = body.max_completion_tokens or body.max_tokens
        steering = self._steering(body, (body.top_logprobs or 0) if body.logprobs else None)
        return self._asks(body, model.tokens(text), most, steering, split=True, opened=opened)

    def _template_values(self, body: ChatRequest) -> dict[str, Any]:
        """What a request tells the chat template; KvatlasError for a name that the template does not have."""
        values = dict(body.chat_template_kwargs or {})
        if body.reasoning_effort is not None:
            values["reasoning_effort"] = body.reasoning_effort
        template = str(self.service.model.tokenizer.chat_template or "")
        for name in values:
            if not re.search(rf"(?<!\w){re.escape(name)}(?!\w)", template):
                raise KvatlasError(f"{name} is not supported: the model's chat template does not read it.")
        return values

    def _steering(self, body: Generating, top_logprobs: int | None) -> Steering:
        size = len(self.service.model.tokenizer)
        bias = body.logit_bias or {}
        valid = (token.isascii() and token.isdecimal() and len(token) < 10 and int(token) < size for token in bias)
        wrong = next((token for token, fits in zip(bias, valid, strict=True) if not fits), None)
        if wrong is not None:
            raise KvatlasError(f"logit_bias has the token {wrong!r}; valid are ids from 0 to {size - 1}.")
        return Steering(
            {int(token): value for token, value in bias.items()},
            body.frequency_penalty or 0.0,
            body.presence_penalty or 0.0,
            top_logprobs,
        )

    def completion_asks(self, body: CompletionRequest) -> list[GenerationRequest]:
        """What one prompt or several ask for."""
        given = body.prompt
        prompts: Sequence[Any] = [given] if isinstance(given, str) or (given and isinstance(given[0], int)) else given
        if not prompts:
            raise KvatlasError("prompt is empty; valid are a text, token ids, and lists of them.")
        self._check_count(len(prompts), body.n)
        for prompt in prompts:
            self._check_length(len(prompt))
        model = self.service.model
        size = len(model.tokenizer)
        steering = self._steering(body, body.logprobs)
        asks = []
        for prompt in prompts:
            tokens = model.tokens(prompt) if isinstance(prompt, str) else tuple(prompt)
            wrong = next((token for token in tokens if not 0 <= token < size), None)
            if wrong is not None:
                raise KvatlasError(f"prompt has the token {wrong}; valid are ids from 0 to {size - 1}.")
            # 16 is what OpenAI's completions write where nobody says how many.
            asks += self._asks(body, tokens, body.max_tokens or 16, steering, split=False)
        return asks

    def _asks(
        self,
        body: Generating,
        prompt: tuple[int, ...],
        most: int | None,
        steering: Steering,
        *,
        split: bool,
        opened: bool | None = None,
    ) -> list[GenerationRequest]:
        self.check_model(body.model)
        service = self.service
        room = room_for(service.model, service.policy, prompt, most)
        sampling = drawing(
            service.sampling, temperature=body.temperature, top_p=body.top_p, top_k=body.top_k, max_new_tokens=room
        )
        return [
            GenerationRequest(
                prompt, sampling, stream_of(body.seed, prompt, sample), body.stops, split, opened, steering
            )
            for sample in range(body.n or 1)
        ]

    async def serve(self, endpoint: str, body: Generating, request: Request, asks: list[GenerationRequest]) -> Response:
        """The answer to a request, whole or as a stream; what nobody waits for any more is not decoded further."""
        handles = self.service.ask(asks)
        chat = endpoint == "chat"
        shape = Shape(chat, f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}", int(time.time()), self.name)
        began = time.perf_counter()
        if body.stream:
            with_usage = body.stream_options is not None and bool(body.stream_options.include_usage)
            events = self._events(endpoint, shape, handles, with_usage, began)
            return _Stream(events, handles)
        outcome = "gone"
        try:
            if not await _unless_gone(request, asyncio.gather(*(handle.finished() for handle in handles))):
                return Response(status_code=499)
            outcome = "ok"
            return JSONResponse(shape.whole(handles))
        except ClosedError:
            outcome = "stopped"
            raise
        finally:
            self._note(endpoint, outcome, began, handles)

    async def _events(
        self, endpoint: str, shape: Shape, handles: list[RequestHandle], with_usage: bool, began: float
    ) -> AsyncIterator[bytes]:
        outcome, events = "gone", 0
        try:
            async for piece in _merged([_pieces(shape, index, handle) for index, handle in enumerate(handles)]):
                events += 1
                # The first event of a chat only opens it.
                if events == (2 if shape.chat else 1):
                    self.metrics.first.labels(endpoint).observe(time.perf_counter() - began)
                yield piece
            if with_usage:
                yield shape.piece([], usage=usage_of(handles))
            outcome = "ok"
            yield shape.done
        except ClosedError as closed:
            outcome = "stopped"
            yield event(error(str(closed), "server_error"))
        finally:
            self._note(endpoint, outcome, began, handles)

    def _note(self, endpoint: str, outcome: str, began: float, handles: list[RequestHandle]) -> None:
        if outcome != "ok":
            for handle in handles:
                handle.cancel()
        self.metrics.answered.labels(endpoint, outcome).inc()
        self.metrics.seconds.labels(endpoint).observe(time.perf_counter() - began)


class _Stream(StreamingResponse):
    """Server-sent events; whichever way they end, their requests leave with them, even if not one was sent."""

    def __init__(self, events: AsyncIterator[bytes], handles: list[RequestHandle]) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"Cache-Control": "no-store"})
        self.handles = handles

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            for handle in self.handles:
                handle.cancel()


async def _pieces(shape: Shape, index: int, handle: RequestHandle) -> AsyncIterator[bytes]:
    """The events of one choice."""
    decoder, writing = Decoder(handle.model), handle.ask.detokenizer(handle.model)
    told = offset = 0
    begin = shape.begin(index)
    if begin:
        yield begin
    async for tokens, last in handle.pieces():
        thinking, answer = writing.push(decoder.push(tokens, last), last)
        if thinking or answer:
            yield shape.news(index, handle, (thinking, answer), tokens, told, offset)
            told, offset = len(tokens), offset + len(answer)
    yield shape.end(index, handle)


async def _merged(streams: list[AsyncIterator[bytes]]) -> AsyncIterator[bytes]:
    """All events of several streams as they come."""
    if len(streams) == 1:
        async for piece in streams[0]:
            yield piece
        return
    nexts = {asyncio.ensure_future(_next(stream)): stream for stream in streams}
    try:
        while nexts:
            done, _ = await asyncio.wait(nexts, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                result = task.result()
                stream = nexts.pop(task)
                if result is not None:
                    nexts[asyncio.ensure_future(_next(stream))] = stream
                    yield result
    finally:
        for task in nexts:
            task.cancel()
        # Of several that ended together the first error was told; the others are looked at, too.
        await asyncio.gather(*nexts, return_exceptions=True)


async def _next(stream: AsyncIterator[bytes]) -> bytes | None:
    return await anext(stream, None)


async def _unless_gone(request: Request, answer: asyncio.Future[Any]) -> bool:
    """Wait for an answer, and say whether the client waited as well; if not, the answer is cancelled."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    left = asyncio.ensure_future(gone())
    try:
        await asyncio.wait({answer, left}, return_when=asyncio.FIRST_COMPLETED)
        if not answer.done():
            return False
        answer.result()
        return True
    finally:
        left.cancel()
        answer.cancel()
        await asyncio.gather(left, answer, return_exceptions=True)
