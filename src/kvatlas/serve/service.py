"""The asynchronous front of the engine: one thread decodes, clients ask from threads and from event loops.

A client gets a handle: its tokens as they are drawn, its generation when it is finished. Waiting requests stand in one
bounded queue and enter the batch as rows become free. A cancelled one leaves the queue, or its row at the next step.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, InvalidStateError
from concurrent.futures import wait as wait_for
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from kvatlas import policies
from kvatlas.core import KvatlasError, Sampling, Setting
from kvatlas.models import ModelHandle
from kvatlas.noise import stream_key
from kvatlas.policies import CompressingPolicy, Policy, Signal
from kvatlas.serve.text import Detokenizer, Steerer, Steering
from kvatlas.text import read_value

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from kvatlas.engine import Engine, Generation, Request

#: New tokens of a request that names no number: the published one.
MAX_NEW_TOKENS = Sampling().max_new_tokens
#: Seconds between two pieces of the streams, for each sequence that is being decoded. All streams together then cost
#: the event loop the same however many there are: under load a piece holds several tokens.
PIECE_SECONDS = 0.0075


class LengthError(KvatlasError):
    """Prompt and new tokens are more than the model has positions for."""


class BusyError(KvatlasError):
    """The queue is full."""


class ClosedError(KvatlasError):
    """The service takes no more, or its engine has failed."""


@dataclass(frozen=True)
class GenerationRequest:
    """One generation to be decoded: token ids of the prompt, its sampling, its random stream, texts that end it.

    With `split` thinking is told apart from the answer, and only the answer is searched for the texts of `stop`;
    without it the whole text is searched. `opened` says whether the prompt opens thinking, by default whether the chat
    template does; `steering` changes its logits.
    """

    prompt: tuple[int, ...]
    sampling: Sampling
    stream: int
    stop: tuple[str, ...] = ()
    split: bool = True
    opened: bool | None = None
    steering: Steering = field(default_factory=Steering)

    def detokenizer(self, model: ModelHandle) -> Detokenizer:
        """A new detokenizer for its tokens."""
        return Detokenizer(model, self.stop, self.split, self.opened)


def find_policy(model: ModelHandle, name: str, values: dict[str, Any]) -> Policy:
    """The policy of that name for this model; values that are None are left out, texts are read by their type.

    Raises KvatlasError for unknown or missing parameters, and for policies that look at a finished trace.
    """
    owner = policies.policies.get(name)
    given = {
        parameter: read_value(owner, parameter, value) if isinstance(value, str) else value
        for parameter, value in values.items()
        if value is not None
    }
    if name == "full":
        # So that one command line serves for the full cache too, as a baseline of the others.
        shared = {field.name for field in fields(CompressingPolicy)}
        given = {parameter: value for parameter, value in given.items() if parameter not in shared}
    policy = policies.of(Setting.of(name, **given))
    if Signal.ANSWER in policy.observes:
        raise KvatlasError(
            f"The policy {name!r} looks at the finished full-cache trace of the same sample, which only a sweep has."
        )
    policy.check(model)
    return policy


def stream_of(seed: int | None, prompt: tuple[int, ...], sample: int) -> int:
    """The random stream of the `sample`-th answer (from 0) to a prompt; without a seed an unpredictable one."""
    if seed is None:
        return secrets.randbits(63)
    return stream_key("ask", seed, " ".join(map(str, prompt)), sample)


def sampling_with(sampling: Sampling, **changes: Any) -> Sampling:
    """The sampling with the `changes` that are not None; KvatlasError names a value that is out of its range."""
    changed = replace(sampling, **{name: value for name, value in changes.items() if value is not None})
    limits = {
        "temperature": (changed.temperature, 0 <= changed.temperature <= 10, "a number in [0, 10]"),
        "top_p": (changed.top_p, 0 < changed.top_p <= 1, "a number in (0, 1]"),
        "top_k": (changed.top_k, changed.top_k >= 0, "an integer >= 0 (0 is off)"),
        "max_new_tokens": (changed.max_new_tokens, changed.max_new_tokens >= 1, "an integer >= 1"),
    }
    for name, (value, fits, expected) in limits.items():
        if not fits:
            raise KvatlasError(f"{name}: expected {expected}, got {value!r}.")
    return changed


def room_for(model: ModelHandle, policy: Policy, prompt: tuple[int, ...], wanted: int | None) -> int:
    """New tokens for this prompt: `wanted`, else as many as the model has positions for, at most the published number.

    Raises LengthError if prompt and new tokens are more than the model has positions for, KvatlasError if the prompt is
    empty or no compression could get below the KV budget.
    """
    if not prompt:
        raise KvatlasError("The prompt is empty; expected one token or more.")
    known = model.positions
    left = MAX_NEW_TOKENS if known is None else known - len(prompt)
    if left < 1 or (wanted is not None and known is not None and wanted > left):
        raise LengthError(
            f"The model has {known} positions: a prompt of {len(prompt)} tokens and {wanted or 1} new tokens are more."
        )
    if isinstance(policy, CompressingPolicy):
        policy.check_prompt(len(prompt), "this prompt")
    return min(MAX_NEW_TOKENS, left) if wanted is None else wanted


@dataclass(eq=False)
class RequestGroup:
    """Requests that came together: those that wait, and the number of those that have a row."""

    waiting: deque[RequestHandle] = field(default_factory=deque)
    rows: int = 0


class RequestHandle:
    """One request on its way; `generation` is the future of the finished one."""

    def __init__(self, ask: GenerationRequest, service: Service, group: RequestGroup) -> None:
        self.ask, self.service, self.model, self.group = ask, service, service.model, group
        self.generation: Future[Generation[RequestHandle]] = Future()
        self.steerer = Steerer(ask.steering, len(ask.prompt)) if ask.steering else None
        self._text = ask.detokenizer(self.model)
        self._tokens: Sequence[int] = ()
        self._noted = 0
        self._gone = False

    @property
    def tokens(self) -> Sequence[int]:
        """Its new tokens so far. The engine's own list may have one more, of which nothing is noted yet."""
        return self._tokens[: self._noted]

    def cancel(self) -> None:
        """End it, because its client has gone."""
        self._gone = True
        self.service.drop(self)

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
            self._text.push(tokens)
        return self._gone or self._text.stopped

    async def finished(self) -> Generation[RequestHandle]:
        """The finished generation; cancelled with the task that waits for it."""
        try:
            return await asyncio.wrap_future(self.generation)
        except asyncio.CancelledError:
            self.cancel()
            raise

    def text(self) -> tuple[str, str]:
        """(thinking, answer) of the finished generation."""
        return self.ask.detokenizer(self.model).push(self.generation.result().tokens, last=True)

    def reason(self) -> str:
        """The reason why the finished generation ended: `stop` (its end token or a stop text) or `length`."""
        return "stop" if self.generation.result().finished or self._text.stopped else "length"


async def follow(handles: Sequence[RequestHandle]) -> AsyncIterator[tuple[int, list[int], bool]]:
    """(index of a handle, all its new tokens so far, whether these are the last), each time that it has more of them.

    Raises the error of a generation. The busier the service, the rarer are pieces.
    """
    loop, news, left, sent = asyncio.get_running_loop(), asyncio.Event(), dict(enumerate(handles)), [0] * len(handles)

    def end(_: object) -> None:
        # At once, because the next request of the same client has a row to fill. The loop may be closed by now.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(news.set)

    for handle in handles:
        handle.generation.add_done_callback(end)
    while left:
        # All streams look at the same moments, so that they rarely interrupt the thread that decodes.
        period = PIECE_SECONDS * max(1, handles[0].service.decoding)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(news.wait(), period - loop.time() % period)
        news.clear()
        for index, handle in list(left.items()):
            tokens = list(handle.tokens)
            if handle.generation.done():
                del left[index]
                yield index, list(handle.generation.result().tokens), True
            # A generation that starts again has fewer of them.
            elif len(tokens) > sent[index]:
                sent[index] = len(tokens)
                yield index, tokens, False


@dataclass
class Service:
    """Decodes requests to one model under one policy, `batch_size` at a time; `queue` more may wait.

    `sampling` is the default of a request. The weights are loaded by `start`, unless `loaded` brings them.
    `on_failure` is called when the engine fails.
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
        #: Groups of which some requests wait.
        self._groups: list[RequestGroup] = []
        self._decoding: set[RequestHandle] = set()
        self._news = threading.Condition()
        #: Whether new requests are refused because the service ends.
        self.closing = False
        self._thread: threading.Thread | None = None

    def start(self) -> Service:
        """Load the weights and begin to decode; does nothing the second time."""
        from kvatlas.engine import Engine

        if self._thread is None:
            self.loaded = self.loaded or self.model.load()
            self.engine = Engine(self.model, self.loaded, [self.policy], self.sampling, self.batch_size)
            work = partial(self._decode, self.engine)
            self._thread = threading.Thread(target=work, name="kvatlas-engine", daemon=True)
            self._thread.start()
        return self

    @property
    def rows(self) -> int:
        """Requests that are decoded at a time: `batch_size`, or fewer after memory ran out."""
        return self.batch_size if self.engine is None else self.engine.batch_size

    @property
    def _cause(self) -> str:
        return str(self.failure) if isinstance(self.failure, KvatlasError) else f"{type(self.failure).__name__}."

    @property
    def waiting(self) -> int:
        """Requests that wait for a row."""
        return sum(len(group.waiting) for group in self._groups)

    @property
    def decoding(self) -> int:
        """Requests that have a row."""
        return len(self._decoding)

    def ask(self, asks: Iterable[GenerationRequest]) -> list[RequestHandle]:
        """A handle for each, all or none. BusyError if they do not fit into the queue, ClosedError after the end."""
        group = RequestGroup()
        handles = [RequestHandle(ask, self, group) for ask in asks]
        group.waiting.extend(handles)
        if len(handles) > self.batch_size + self.queue:
            raise KvatlasError(f"Expected at most {self.batch_size + self.queue} answers at once, got {len(handles)}.")
        with self._news:
            if self.failure is not None:
                raise ClosedError(f"The engine has failed: {self._cause}")
            if self.closing:
                raise ClosedError("The server is stopping; it takes no more requests.")
            # Requests that find a free row need no place in the queue.
            free = max(0, self.rows - len(self._decoding))
            if self.waiting + len(handles) > self.queue + free:
                raise BusyError(f"{self.waiting} requests are waiting, and {self.queue} may; try again later.")
            self._groups.append(group)
            self._news.notify()
        return handles

    def close(self, seconds: float = 0.0) -> None:
        """Take no more, give the open requests so long to finish, end the rest with ClosedError, end the thread.

        Engine and weights are let go.
        """
        with self._news:
            self.closing = True
            left = self._open()
        wait_for([handle.generation for handle in left], timeout=seconds)
        self._fail_all("The server has stopped before this answer was finished.")
        if self._thread is not None:
            self._thread.join()
        self.engine = self.loaded = None

    def drop(self, handle: RequestHandle) -> None:
        """Take a handle out of the queue, if it waits there."""
        with self._news, contextlib.suppress(ValueError):
            handle.group.waiting.remove(handle)

    def _open(self) -> list[RequestHandle]:
        return [*self._decoding, *(handle for group in self._groups for handle in group.waiting)]

    def _fail_all(self, sentence: str) -> None:
        """End all requests; those that have a row leave it at the next step."""
        with self._news:
            left, self._groups = self._open(), []
            self._news.notify()
        for handle in left:
            handle.fail(ClosedError(sentence))

    # -- the engine's thread -------------------------------------------------------------------------------------

    def _decode(self, engine: Engine) -> None:
        import torch

        # The event loops of the clients need a core of their own, and one thread keeps answers bitwise the same.
        torch.set_num_threads(1)
        try:
            for generation in engine.run(self.requests()):
                handle = generation.key
                with self._news:
                    self._decoding.discard(handle)
                    handle.group.rows -= 1
                # The client may have gone, or the service may have ended it.
                with contextlib.suppress(InvalidStateError):
                    handle.generation.set_result(generation)
        except BaseException as error:
            self.failure = error
            self._fail_all(f"The engine has failed: {self._cause}")
            self._decoding.clear()
            self.on_failure()

    def requests(self) -> Iterator[Request[RequestHandle] | None]:
        """The next requests for the engine; None if there is none now. Waits where nothing is being decoded."""
        from kvatlas.engine import Request

        while True:
            with self._news:
                while not (self.waiting or self._decoding or self.closing):
                    self._news.wait()
                handle = self._next()
                if handle is None and self.closing and not self._decoding:
                    return
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

    def _next(self) -> RequestHandle | None:
        """One of the group with the fewest rows, of equal groups by turns.

        So one answer does not wait for 128 that were asked for at once before it, only for the next row that is free.
        """
        self._groups = [group for group in self._groups if group.waiting]
        if not self._groups:
            return None
        group = min(self._groups, key=lambda candidate: candidate.rows)
        self._groups.remove(group)
        self._groups.append(group)
        group.rows += 1
        handle = group.waiting.popleft()
        self._decoding.add(handle)
        return handle
