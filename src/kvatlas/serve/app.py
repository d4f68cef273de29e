"""The HTTP endpoints over the shared service: chat completions, completions, models, health."""

import asyncio
import re
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from kvatlas import __version__
from kvatlas.core import KvatlasError
from kvatlas.serve.protocol import AnswerFormat, ChatRequest, CompletionRequest, Generating, error_body, event_bytes
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
from kvatlas.text import model_name

#: Texts with more characters for each position of the model are refused before tokenization; five are usual.
MOST_PER_TOKEN = 32
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
    app.add_middleware(RequestLimits, api_key=api_key, hosts=hosts)

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
        """Report if the server accepts requests, and the state of its engine."""
        if service.failure is not None or service.closing:
            raise HTTPException(503, "The server is stopping." if service.closing else "The engine has failed.")
        state = {"status": "ok", "waiting": service.waiting, "decoding": service.decoding}
        engine = service.engine
        if engine is not None:
            state |= {"decoded_tokens": engine.decoded_tokens, "evicted_tokens": engine.scheduler.evicted_tokens}
            state |= {"kv_tokens": engine.cached_tokens, "kv_bytes": engine.cache.bytes}
        return state

    return app


class CompletionHandler:
    """The conversion of bodies to requests of the service, and of handles to answers."""

    def __init__(self, service: Service, name: str) -> None:
        self.service = service
        self.name = name
        # One thread reads prompts beside the event loop; a tokenizer is not thread-safe.
        self._reader = ThreadPoolExecutor(1, "kvatlas-prompts")
        # Answers to each prompt so far, for requests without a seed.
        self._samples: Counter[tuple[int, ...]] = Counter()
        self.about = {
            "id": name,
            "object": "model",
            "created": int(time.time()),
            "owned_by": "kvatlas",
            "policy": {"policy": service.policy.setting_name, **service.policy.setting.values},
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
        return self._generation_requests(body, model.tokens(text), most, split=True, opened=opened)

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
            requests += self._generation_requests(body, tokens, body.max_tokens or 16, split=False)
        return requests

    def _generation_requests(
        self, body: Generating, prompt: tuple[int, ...], most: int | None, *, split: bool, opened: bool | None = None
    ) -> list[GenerationRequest]:
        self.check_model(body.model)
        service = self.service
        room = room_for(service.model, service.policy, prompt, most)
        sampling = sampling_with(
            service.sampling, temperature=body.temperature, top_p=body.top_p, top_k=body.top_k, max_new_tokens=room
        )
        if body.seed is None and service.seed is not None:
            streams = [next_stream(service.seed, prompt, self._samples) for _ in range(body.n or 1)]
        else:
            streams = [stream_of(body.seed, prompt, sample) for sample in range(body.n or 1)]
        return [GenerationRequest(prompt, sampling, stream, body.stops, split, opened) for stream in streams]

    async def serve(self, body: Body, request: Request, read: Callable[[Body], list[GenerationRequest]]) -> Response:
        """Answer a request, whole or as a stream; decoding ends if the client disconnects."""
        requests = await asyncio.get_running_loop().run_in_executor(self._reader, read, body)
        handles = self.service.ask(requests)
        answer_format = AnswerFormat(isinstance(body, ChatRequest), self.name, body.n or 1)

        if body.stream:
            with_usage = body.stream_options is not None and bool(body.stream_options.include_usage)
            return _EventStream(_events(answer_format, handles, with_usage), handles)
        try:
            await _unless_gone(request, asyncio.gather(*(handle.finished() for handle in handles)))
            return JSONResponse(answer_format.whole(handles))
        except ClientDisconnect:
            return Response(status_code=499)


async def _events(answer_format: AnswerFormat, handles: list[RequestHandle], with_usage: bool) -> AsyncIterator[bytes]:
    """Yield the events of a stream; an error of the service is its last event."""
    try:
        if answer_format.chat:
            for index in range(len(handles)):
                yield answer_format.begin_event(index)
        detokenizers = [handle.ask.detokenizer(handle.model) for handle in handles]
        async for index, tokens, is_last in follow_tokens(handles):
            thinking, answer = detokenizers[index].push(tokens, is_last)
            # New tokens without text end within a character or a stop text.
            if thinking or answer:
                yield answer_format.delta_event(index, thinking, answer, finish_reason=None)
            if is_last:
                yield answer_format.end_event(index, handles[index])
        if with_usage:
            yield answer_format.piece([], usage=answer_format.usage(handles))
        yield answer_format.done
    except ClosedError as closed:
        yield event_bytes(error_body(str(closed), "server_error"))


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
