"""The asynchronous front: answers equal the engine's, the line is bounded, who goes leaves no row behind."""

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from kvatlas.core import KvatlasError, Sampling
from kvatlas.engine import Engine
from kvatlas.models import ModelHandle, Overrides, find
from kvatlas.serve.service import (
    BusyError,
    ClosedError,
    GenerationRequest,
    LengthError,
    Service,
    find_policy,
    room_for,
    sampling_with,
    stream_of,
)
from tests.decoding import prompts

VALUES = {"kv_budget": 56, "local_window": 8, "ratio": 0.3, "ratio_over": "thinking"}
SAMPLING = Sampling(max_new_tokens=40)


@pytest.fixture(scope="module")
def model() -> ModelHandle:
    """Without end tokens, so that every answer is as long as it may be."""
    return replace(find("embedded:tiny-llama"), overrides=Overrides(stops=frozenset()))


@pytest.fixture(scope="module")
def loaded(model: ModelHandle) -> Any:
    return model.load()


@pytest.fixture
def service(model: ModelHandle, loaded: Any) -> Iterator[Service]:
    made = Service(model, find_policy(model, "window", VALUES), SAMPLING, batch_size=4, queue=6, loaded=loaded).start()
    yield made
    made.close()


def asks(model: ModelHandle, count: int, **changes: Any) -> list[GenerationRequest]:
    results = [prompt[:40] for prompt in prompts(model, count)]
    return [GenerationRequest(text, sampling_with(SAMPLING, **changes), stream_of(5, text, 0)) for text in results]


def until(true: Callable[[], bool]) -> None:
    limit = time.monotonic() + 60
    while not true():
        assert time.monotonic() < limit
        time.sleep(0.01)


def test_the_line_is_bounded_and_all_or_nothing(service: Service, model: ModelHandle) -> None:
    handles = service.ask(asks(model, 8))
    with pytest.raises(BusyError, match=r"requests are waiting, and 6 may"):
        service.ask(asks(model, 9, max_new_tokens=1))
    assert all(handle.generation.result(60) for handle in handles)
    until(lambda: service.decoding == service.waiting == 0)


def test_who_goes_leaves_the_line_and_the_row(service: Service, model: ModelHandle) -> None:
    handles = service.ask(asks(model, 8, max_new_tokens=900))
    until(lambda: all(len(handle.tokens) > 2 for handle in handles[:4]))
    for handle in handles:
        handle.cancel()
    until(lambda: service.decoding == service.waiting == 0)
    assert max(len(handle.tokens) for handle in handles) < 900
    assert not handles[7].tokens
    assert service.engine is not None
    until(lambda: service.engine is not None and not service.engine.scheduler.rows)


def test_closing_lets_finish_then_ends_with_a_sentence(
    model: ModelHandle, loaded: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = Engine._step

    def slow_step(engine: Engine) -> None:
        time.sleep(0.01)
        step(engine)

    monkeypatch.setattr(Engine, "_step", slow_step)
    policy = find_policy(model, "full", {})
    made = Service(model, policy, SAMPLING, batch_size=4, queue=6, loaded=loaded).start()
    short = made.ask(asks(model, 2, max_new_tokens=5))
    long = made.ask(asks(model, 2, max_new_tokens=950))
    until(lambda: all(handle.tokens for handle in long))
    made.close(2.0)
    assert [len(handle.generation.result(60).tokens) for handle in short] == [5, 5]
    for handle in long:
        with pytest.raises(ClosedError, match="stopped before this answer was finished"):
            handle.generation.result(60)
    with pytest.raises(ClosedError, match="takes no more requests"):
        made.ask(asks(model, 1))


def test_closing_does_not_wait_for_who_has_gone(service: Service, model: ModelHandle) -> None:
    handles = service.ask(asks(model, 5, max_new_tokens=900))
    until(lambda: bool(handles[0].tokens))
    for handle in handles:
        handle.cancel()
    begin = time.monotonic()
    service.close(60.0)
    assert time.monotonic() - begin < 30


def test_a_failed_engine_says_so_to_everyone(model: ModelHandle, loaded: Any) -> None:
    made = Service(model, find_policy(model, "full", {}), SAMPLING, batch_size=4, loaded=loaded).start()
    bad = made.ask([GenerationRequest((10**9,), SAMPLING, 1)])
    for handle in bad:
        with pytest.raises(ClosedError, match="engine has failed: IndexError"):
            handle.generation.result(60)
    with pytest.raises(ClosedError, match="engine has failed"):
        made.ask(asks(model, 1))
    made.close()


def test_the_full_cache_takes_bits_and_no_budget(model: ModelHandle) -> None:
    assert find_policy(model, "full", {"kv_bits": 8, "local_window": None}).storage.key_bits == 8
    with pytest.raises(KvatlasError, match="'full' never compresses, so it has no kv_budget"):
        find_policy(model, "full", {"kv_budget": 56})


def test_room_and_sampling_are_checked(model: ModelHandle) -> None:
    policy = find_policy(model, "window", VALUES)
    assert room_for(model, policy, (1,) * 24, None) == 1512
    with pytest.raises(LengthError, match="has 1536 positions: a prompt of 24 tokens and 1513 new tokens are more"):
        room_for(model, policy, (1,) * 24, 1513)
    with pytest.raises(KvatlasError, match="prompt is empty"):
        room_for(model, policy, (), 1)
    with pytest.raises(KvatlasError, match=r"temperature: expected a number in \[0, 10\], got 11"):
        sampling_with(SAMPLING, temperature=11)


def test_streams_differ_by_seed_prompt_and_sample() -> None:
    by_name = {stream_of(seed, prompt, n) for seed in (1, 2) for prompt in ((1, 2), (12,)) for n in (0, 1)}
    assert len(by_name) == 8
    assert stream_of(1, (1, 2), 0) == stream_of(1, (1, 2), 0)
    assert stream_of(None, (1,), 0) != stream_of(None, (1,), 0)


def test_where_memory_runs_out_the_batch_is_halved_and_answers_are_the_same(
    service: Service, model: ModelHandle, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = [handle.generation.result(60).tokens for handle in service.ask(asks(model, 6))]
    step, short = Engine._step, [30]

    def failing(engine: Engine) -> Any:
        short[0] -= 1
        if short[0] in (0, -20):
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return step(engine)

    monkeypatch.setattr(Engine, "_step", failing)
    results = [handle.generation.result(60).tokens for handle in service.ask(asks(model, 6))]
    assert results == wanted
    assert (service.rows, service.failure) == (1, None)
