"""The asynchronous front of the engine: one thread decodes the requests of threads and event loops.

A client gets a handle with the tokens so far and the future of the finished generation. Requests wait in one bounded
queue and enter the batch as rows become free. A cancelled request leaves the queue, or its row at the next step.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import threading
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel

from kvatlas import policies
from kvatlas.core import MAX_NEW_TOKENS, KvatlasError, Sampling, Setting
from kvatlas.engine import Engine, Generation, Request
from kvatlas.models import ModelHandle
from kvatlas.noise import stream_key
from kvatlas.policies import CompressingPolicy, Policy
from kvatlas.serve.text_stream import Detokenizer

#: Seconds between two pieces of a stream for each sequence that is being decoded. The event loop's work is then the
#: same for any number of streams: under load a piece holds several tokens.
PIECE_SECONDS = 0.0075


class LengthError(KvatlasError):
    """Prompt and new tokens exceed the positions of the model."""


class BusyError(KvatlasError):
    """The queue is full."""


class ClosedError(KvatlasError):
    """The service is closed, or its engine has failed."""


@dataclass(frozen=True)
class GenerationRequest:
    """A request for one generation: token ids of the prompt, sampling, random stream, and stop texts.

    With `split` thinking is separated from the answer, and `stop` is searched in the answer only, else in the whole
    text. `opened` is True if the prompt opens thinking; None means as the chat template does.
    """

    prompt: tuple[int, ...]
    sampling: Sampling
    stream: int
    stop: tuple[str, ...] = ()
    split: bool = True
    opened: bool | None = None

    def detokenizer(self, model: ModelHandle) -> Detokenizer:
        """Return a new detokenizer for its tokens."""
        return Detokenizer(model, self.stop, self.split, self.opened)


def find_policy(model: ModelHandle, name: str, values: dict[str, Any]) -> Policy:
    """Return the policy for this model; None values are left out, texts are read by the declared type.

    Raises KvatlasError for unknown or missing parameters, and for policies that need a finished trace.
    """
    owner = policies.policies.get(name)
    given = {
        parameter: policies.read_parameter(owner, parameter, value) if isinstance(value, str) else value
        for parameter, value in values.items()
        if value is not None
    }

    policy = policies.from_setting(Setting.from_parameters(name, **given))
    return policies.fit_policy(policy, model)


def stream_of(seed: int | None, prompt: tuple[int, ...], sample: int) -> int:
    """Return the random stream of the answer number `sample` (from 0) to a prompt; without a seed a random one."""
    if seed is None:
        return secrets.randbits(63)
    return stream_key("ask", seed, " ".join(map(str, prompt)), sample)


def next_stream(seed: int, prompt: tuple[int, ...], seen: Counter[tuple[int, ...]]) -> int:
    """Return the random stream of the next answer to a prompt, and count it in `seen`."""
    seen[prompt] += 1
    return stream_of(seed, prompt, seen[prompt] - 1)


def sampling_with(sampling: Sampling, **changes: Any) -> Sampling:
    """Return the sampling with the `changes` that are not None; KvatlasError for a temperature out of range."""
    changed = replace(sampling, **{name: value for name, value in changes.items() if value is not None})
    if not 0 <= changed.temperature <= 10:
        raise KvatlasError(f"temperature: expected a number in [0, 10], got {changed.temperature!r}.")
    return changed


def room_for(model: ModelHandle, policy: Policy, prompt: tuple[int, ...], limit: int | None) -> int:
    """Return the limit of new tokens for a prompt, by default the free positions of the model or `MAX_NEW_TOKENS`.

    Raises LengthError if prompt and new tokens exceed the positions of the model, KvatlasError if the prompt is empty
    or too long for the KV budget.
    """
    if not prompt:
        raise KvatlasError("The prompt is empty; expected one token or more.")

    positions = model.positions
    left = MAX_NEW_TOKENS if positions is None else positions - len(prompt)
    if left < 1 or (limit is not None and positions is not None and limit > left):
        raise LengthError(
            f"The model has {positions} positions: a prompt of {len(prompt)} tokens and {limit or 1} new tokens are "
            "more."
        )
    if isinstance(policy, CompressingPolicy):
        policy.check_prompt(len(prompt), "this prompt")
    return min(MAX_NEW_TOKENS, left) if limit is None else limit


class RequestHandle:
    """One open request; `generation` is the future of its result."""

    def __init__(self, ask: GenerationRequest, service: Service) -> None:
        self.ask = ask
        self.service = service
        self.model = service.model
        self.generation: Future[Generation[RequestHandle]] = Future()
        self._text = ask.detokenizer(self.model)
        #: The new tokens so far: the engine's own list.
        self.tokens: Sequence[int] = ()

    def cancel(self) -> None:
        """End the request, because its client has disconnected."""
        self.generation.cancel()
        self.service.drop(self)

    def stopping_criterion(self, tokens: Sequence[int]) -> bool:
        """Take the new tokens from the engine; return True if the generation ends here."""
        self.tokens = tokens
        if self.ask.stop:
            self._text.push(tokens)
        return self.generation.done() or self._text.stopped

    async def finished(self) -> Generation[RequestHandle]:
        """Wait for the generation; cancelling the waiting task cancels the request."""
        try:
            return await asyncio.wrap_future(self.generation)
        except asyncio.CancelledError:
            self.cancel()
            raise

    def text(self) -> tuple[str, str]:
        """Return (thinking, answer) of the finished generation."""
        return self.ask.detokenizer(self.model).push(self.generation.result().tokens, last=True)

    def reason(self) -> str:
        """Return the finish reason: `stop` (end token or stop text) or `length`."""
        return "stop" if self.generation.result().finished or self._text.stopped else "length"


async def follow_tokens(handles: Sequence[RequestHandle]) -> AsyncIterator[tuple[int, list[int], bool]]:
    """Yield (index of a handle, all its new tokens so far, True if it is finished) whenever a handle has new tokens.

    Raises the error of a generation. Pieces are rarer when the service is busy.
    """
    loop = asyncio.get_running_loop()
    news = asyncio.Event()
    open_handles = dict(enumerate(handles))
    sent = [0 for _ in handles]

    def wake(_: object) -> None:
        # A finished answer is sent at once, so that the client can send its next request. The loop may be closed.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(news.set)

    for handle in handles:
        handle.generation.add_done_callback(wake)
    while open_handles:
        # All streams wake at the same moments, so that they rarely interrupt the thread that decodes.
        period = PIECE_SECONDS * max(1, handles[0].service.decoding)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(news.wait(), period - loop.time() % period)
        news.clear()
        for index, handle in list(open_handles.items()):
            tokens = list(handle.tokens)
            if handle.generation.done():
                del open_handles[index]
                yield index, list(handle.generation.result().tokens), True
            # A restarted generation has fewer tokens.
            elif len(tokens) > sent[index]:
                sent[index] = len(tokens)
                yield index, tokens, False


@dataclass
class Service:
    """A decoder of requests to one model under one policy, `batch_size` at a time; `queue` more may wait.

    `sampling` is the default of a request, and so is `seed`: the n-th answer to a prompt gets its sample n, so that all
    answers of an evaluation can be repeated; without it such answers are random. `start` loads the weights, unless
    `loaded` has them. `on_failure` is called when the engine fails.
    """

    model: ModelHandle
    policy: Policy
    sampling: Sampling = field(default_factory=Sampling)
    batch_size: int = 32
    queue: int = 256
    seed: int | None = None
    loaded: PreTrainedModel | None = None
    engine: Engine | None = field(init=False, default=None)
    failure: BaseException | None = field(init=False, default=None)
    on_failure: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        self._waiting: deque[RequestHandle] = deque()
        self._decoding: set[RequestHandle] = set()
        self._news = threading.Condition()
        #: True if new requests are refused because the service ends.
        self.closing = False
        self._thread: threading.Thread | None = None

    def start(self) -> Service:
        """Load the weights and begin to decode; a second call has no effect."""
        if self._thread is None:
            self.loaded = self.loaded or self.model.load()
            self.engine = Engine(self.model, self.loaded, [self.policy], self.sampling, self.batch_size)
            work = partial(self._decode, self.engine)
            self._thread = threading.Thread(target=work, name="kvatlas-engine", daemon=True)
            self._thread.start()
        return self

    @property
    def rows(self) -> int:
        """The number of requests decoded at a time: `batch_size`, or fewer after memory ran out."""
        return self.batch_size if self.engine is None else self.engine.batch_size

    @property
    def _failed(self) -> str:
        if isinstance(self.failure, KvatlasError):
            return f"The engine has failed: {self.failure}"
        return f"The engine has failed: {type(self.failure).__name__}."

    @property
    def waiting(self) -> int:
        """The number of requests that wait for a row."""
        return len(self._waiting)

    @property
    def decoding(self) -> int:
        """The number of requests with a row."""
        return len(self._decoding)

    def ask(self, asks: Iterable[GenerationRequest]) -> list[RequestHandle]:
        """Return a handle for each request; all enter the queue or none.

        Raises BusyError if they do not fit into the queue, ClosedError if the service has ended.
        """
        handles = [RequestHandle(ask, self) for ask in asks]

        with self._news:
            if self.failure is not None:
                raise ClosedError(self._failed)
            if self.closing:
                raise ClosedError("The server is stopping; it takes no more requests.")
            # Requests with a free row need no place in the queue.
            free = max(0, self.rows - len(self._decoding))
            if self.waiting + len(handles) > self.queue + free:
                raise BusyError(f"{self.waiting} requests are waiting, and {self.queue} may; try again later.")
            self._waiting.extend(handles)
            self._news.notify()
        return handles

    def close(self, seconds: float = 0.0) -> None:
        """Refuse new requests, wait so long for open ones, end the rest with ClosedError, and free the weights."""
        with self._news:
            self.closing = True
            self._news.wait_for(lambda: not (self._waiting or self._decoding), timeout=seconds)
        self._fail_all("The server has stopped before this answer was finished.")
        if self._thread is not None:
            self._thread.join()
        self.engine = self.loaded = None

    def drop(self, handle: RequestHandle) -> None:
        """Remove a handle from the queue, if it waits there."""
        with self._news, contextlib.suppress(ValueError):
            self._waiting.remove(handle)
            self._news.notify_all()

    def _fail_all(self, sentence: str) -> None:
        """End all requests; those with a row leave it at the next step."""
        with self._news:
            open_handles = [*self._decoding, *self._waiting]
            self._waiting.clear()
            self._news.notify()
        for handle in open_handles:
            with contextlib.suppress(InvalidStateError):
                handle.generation.set_exception(ClosedError(sentence))

    def _decode(self, engine: Engine) -> None:
        """Decode until the service is closed; runs in a thread of its own."""
        # The event loops of the clients need a core, and with one thread answers are bitwise the same.
        torch.set_num_threads(1)
        try:
            for generation in engine.run(self.requests()):
                handle = generation.key
                # The client may have disconnected, or the service may have ended the request.
                with contextlib.suppress(InvalidStateError):
                    handle.generation.set_result(generation)
                with self._news:
                    self._decoding.discard(handle)
                    self._news.notify_all()
        except BaseException as error:
            self.failure = error
            self._fail_all(self._failed)
            with self._news:
                self._decoding.clear()
                self._news.notify_all()
            self.on_failure()

    def requests(self) -> Iterator[Request[RequestHandle] | None]:
        """Yield the next requests for the engine, and None if no request waits; blocks while the engine is idle."""
        while True:
            with self._news:
                while not (self._waiting or self._decoding or self.closing):
                    self._news.wait()
                handle = self._waiting.popleft() if self._waiting else None
                if handle is not None:
                    self._decoding.add(handle)
                elif self.closing and not self._decoding:
                    return
            if handle is None:
                yield None
                continue
            ask = handle.ask
            yield Request(handle, ask.prompt, ask.stream, (self.policy,), ask.sampling, handle.stopping_criterion)
