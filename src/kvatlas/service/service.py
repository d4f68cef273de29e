"""The asynchronous front of the engine: one thread decodes, anyone asks, from threads and from event loops.

Who asks gets a handle: its tokens as they are drawn, its generation when it is finished. Waiting requests stand in one
bounded queue and enter the batch as rows become free. A cancelled one leaves the queue, or its row at the next step.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, InvalidStateError
from concurrent.futures import wait as wait_for
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvatlas.core import KvatlasError, Sampling
from kvatlas.service.detokenizer import Decoder
from kvatlas.service.queue import FairQueue
from kvatlas.service.request_validation import GenerationRequest

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from kvatlas.engine import Engine, Generation, Request
    from kvatlas.models import ModelHandle
    from kvatlas.policies import Policy

#: Seconds between two pieces of the streams, for each sequence that is being decoded. All streams together then cost
#: the event loop the same however many there are: under load a piece holds several tokens.
PIECE_SECONDS = 0.0075


class BusyError(KvatlasError):
    """The queue is full."""


class ClosedError(KvatlasError):
    """The service takes no more, or its engine has failed."""


class RequestHandle:
    """One ask on its way; `generation` is the future of the finished one."""

    def __init__(self, ask: GenerationRequest, service: Service) -> None:
        model = service.model
        self.ask, self.model, self._service = ask, model, service
        self.generation: Future[Generation[RequestHandle]] = Future()
        self._gone = False
        self.begin()

    def begin(self) -> None:
        """Nothing of it is decoded yet, or nothing any more: its tokens will be the same."""
        self._tokens: Sequence[int] = ()
        self._noted = 0
        self._decoder = Decoder(self.model)
        self._writing = self.ask.detokenizer(self.model)
        self.steerer = self.ask.steerer()

    @property
    def tokens(self) -> Sequence[int]:
        """Its new tokens so far. The engine's own list may have one more, of which nothing is noted yet."""
        return self._tokens[: self._noted]

    def cancel(self) -> None:
        """Nobody waits for this any more."""
        self._gone = True
        self._service.drop(self)

    def fail(self, error: KvatlasError) -> None:
        """End it with an error."""
        self._gone = True
        with contextlib.suppress(InvalidStateError):
            self.generation.set_exception(error)

    def stopping_criterion(self, tokens: Sequence[int]) -> bool:
        """The engine's side: note new tokens, say whether this ends here."""
        if self.steerer is not None:
            self.steerer.note(tokens[-1])
        self._tokens, self._noted = tokens, len(tokens)
        if self.ask.stop and not self._gone:
            self._writing.push(self._decoder.push(tokens))
        return self._gone or self._writing.stopped

    async def pieces(self) -> AsyncIterator[tuple[list[int], bool]]:
        """All new tokens so far, each time that there are more of them, and whether these are all there will be.

        Raises what the generation ended with. The busier the service, the rarer are pieces.
        """
        loop, news, told = asyncio.get_running_loop(), asyncio.Event(), 0

        def end(_: object) -> None:
            # Who is finished is told at once: the next question of the same client has a row to fill. A loop that was
            # closed has nobody left to tell.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(news.set)

        self.generation.add_done_callback(end)
        with self._service.beat.joined(self, news):
            while not self.generation.done():
                await news.wait()
                news.clear()
                tokens = list(self.tokens)
                # Who begins again has fewer of them.
                if len(tokens) > told and not self.generation.done():
                    told = len(tokens)
                    yield tokens, False
        yield list(self.generation.result().tokens), True

    async def finished(self) -> Generation[RequestHandle]:
        """The finished generation; cancelled with the task that waits for it."""
        try:
            return await asyncio.wrap_future(self.generation)
        except asyncio.CancelledError:
            self.cancel()
            raise

    def written(self) -> tuple[str, str]:
        """(thinking, answer) of the finished generation."""
        text = Decoder(self.model).push(self.generation.result().tokens, last=True)
        return self.ask.detokenizer(self.model).push(text, last=True)

    def reason(self) -> str:
        """Why the finished generation ended: `stop` (its end token or a stop text) or `length`."""
        generation = self.generation.result()
        return "stop" if generation.finished or self._writing.stopped else "length"


class Beat:
    """Wakes all streams that have new tokens together, so that the thread that decodes is rarely interrupted.

    The event loop looks; nobody calls it for a token. There is one round for all streams of one event loop.
    """

    def __init__(self, service: Service) -> None:
        self._service = service
        self._streams: dict[asyncio.AbstractEventLoop, dict[asyncio.Event, tuple[RequestHandle, int]]] = {}

    @contextlib.contextmanager
    def joined(self, handle: RequestHandle, news: asyncio.Event) -> Iterator[None]:
        """While this lasts `news` is set whenever the handle has more tokens."""
        loop = asyncio.get_running_loop()
        if loop not in self._streams:
            self._streams[loop] = {}
            self._next(loop)
        streams = self._streams[loop]
        streams[news] = (handle, 0)
        try:
            yield
        finally:
            del streams[news]

    def _next(self, loop: asyncio.AbstractEventLoop) -> None:
        loop.call_later(PIECE_SECONDS * max(1, self._service.decoding), self._look, loop)

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        streams = self._streams[loop]
        if not streams:
            del self._streams[loop]
            return
        for news, (handle, seen) in streams.items():
            if len(handle.tokens) > seen:
                streams[news] = (handle, len(handle.tokens))
                news.set()
        self._next(loop)


@dataclass
class Service:
    """Answers asks about one model under one policy, `batch_size` at a time; `queue` more may wait.

    `sampling` is what an ask starts from. The weights are loaded by `start`, unless `loaded` brings them. Where memory
    runs out the batch is halved. `on_failure` is called where that does not help, or the engine fails otherwise.
    """

    model: ModelHandle
    policy: Policy
    sampling: Sampling = field(default_factory=Sampling)
    batch_size: int = 32
    queue: int = 256
    loaded: PreTrainedModel | None = None
    engine: Engine | None = field(init=False, default=None)
    failure: BaseException | None = field(init=False, default=None)
    on_failure: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        self.beat = Beat(self)
        self._waiting: FairQueue[RequestHandle] = FairQueue()
        self._decoding: set[RequestHandle] = set()
        self._news = threading.Condition()
        self._closing = False
        self._thread: threading.Thread | None = None

    def start(self) -> Service:
        """Load the weights and begin to decode; does nothing the second time."""
        if self._thread is None:
            self.loaded = self.loaded or self.model.load()
            self.engine = self._new_engine()
            self._thread = threading.Thread(target=self._decode, name="kvatlas-engine", daemon=True)
            self._thread.start()
        return self

    @property
    def waiting(self) -> int:
        """Asks that wait for a row."""
        return len(self._waiting)

    @property
    def decoding(self) -> int:
        """Asks that have a row."""
        return len(self._decoding)

    @property
    def closing(self) -> bool:
        """Whether new asks are refused because the service ends."""
        return self._closing

    def ask(self, asks: Iterable[GenerationRequest]) -> list[RequestHandle]:
        """A handle for each, all or none. BusyError if they do not fit into the queue, ClosedError after the end."""
        handles = [RequestHandle(ask, self) for ask in asks]
        if len(handles) > self.batch_size + self.queue:
            raise KvatlasError(
                f"{len(handles)} answers are asked for at once; valid are up to {self.batch_size + self.queue}."
            )
        with self._news:
            self._check_open()
            # What finds a free row at once does not have to wait, so it needs no place in the queue.
            free = max(0, self.batch_size - len(self._decoding))
            if len(self._waiting) + len(handles) > self.queue + free:
                raise BusyError(f"{len(self._waiting)} requests are waiting, and {self.queue} may; try again later.")
            self._waiting.extend(handles)
            self._news.notify()
        return handles

    def _check_open(self) -> None:
        if self.failure is not None:
            raise ClosedError(f"The engine has failed: {type(self.failure).__name__}.")
        if self._closing:
            raise ClosedError("The server is stopping; it takes no more requests.")

    def close(self, seconds: float = 0.0) -> None:
        """Take no more, give what is under way so long to finish, end the rest with ClosedError, end the thread.

        Engine and weights are let go.
        """
        with self._news:
            self._closing = True
            left = [*self._decoding, *self._waiting]
        wait_for([handle.generation for handle in left], timeout=seconds)
        with self._news:
            left = [*self._decoding, *self._waiting.clear()]
            self._news.notify()
        for handle in left:
            handle.fail(ClosedError("The server has stopped before this answer was finished."))
        if self._thread is not None:
            self._thread.join()
        self.engine = self.loaded = None

    def drop(self, handle: RequestHandle) -> None:
        """Take a handle out of the queue, if it waits there."""
        with self._news:
            self._waiting.drop(handle)

    # -- the engine's thread -------------------------------------------------------------------------------------

    def _decode(self) -> None:
        import torch

        from kvatlas.engine.memory import out_of_memory, release

        # The event loops of those who ask need a core of their own, and one thread keeps answers bitwise the same.
        torch.set_num_threads(1)
        while True:
            try:
                self.engine = self.engine or self._new_engine()
                self._run(self.engine)
            except BaseException as error:
                if not out_of_memory(error) or self.batch_size == 1:
                    self._fail(error)
                    return
            else:
                return
            self.batch_size //= 2
            self.engine = None
            release()
            with self._news:
                for handle in self._decoding:
                    handle.begin()
                    self._waiting.back(handle)
                self._decoding.clear()

    def _new_engine(self) -> Engine:
        from kvatlas.engine import Engine

        assert self.loaded is not None
        return Engine(self.model, self.loaded, [self.policy], self.sampling, self.batch_size)

    def _run(self, engine: Engine) -> None:
        for generation in engine.run(self._requests()):
            handle = generation.key
            with self._news:
                self._decoding.discard(handle)
                self._waiting.done(handle)
            # Who asked may have gone, or been told that the service ends.
            with contextlib.suppress(InvalidStateError):
                handle.generation.set_result(generation)

    def _fail(self, error: BaseException) -> None:
        with self._news:
            self.failure = error
            left = [*self._decoding, *self._waiting.clear()]
            self._decoding.clear()
        for handle in left:
            handle.fail(ClosedError(f"The engine has failed: {type(error).__name__}."))
        self.on_failure()

    def _requests(self) -> Iterator[Request[RequestHandle] | None]:
        """What the engine is to decode next; None if that is nothing now. Waits where nothing is being decoded."""
        from kvatlas.engine import Request

        while True:
            with self._news:
                while not (self._waiting or self._decoding or self._closing):
                    self._news.wait()
                handle = self._waiting.take()
                if handle is None and self._closing and not self._decoding:
                    return
                if handle is not None:
                    self._decoding.add(handle)
            if handle is None:
                yield None
                continue
            ask = handle.ask
            yield Request(
                handle,
                ask.prompt,
                ask.stream,
                (self.policy,),
                sampling=ask.sampling,
                stopping_criterion=handle.stopping_criterion,
                logits_processor=handle.steerer,
            )
