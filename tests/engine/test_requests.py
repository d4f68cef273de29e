"""Requests with their own sampling, a watcher, adjusted logits; and sources that have nothing yet."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from kvatlas import policies
from kvatlas.core import Sampling, Setting
from kvatlas.engine import Engine, Request
from kvatlas.models import ModelHandle
from tests.decoding import endless, prompts

SAMPLINGS = (
    Sampling(temperature=0.9, top_k=20, top_p=0.95, max_new_tokens=40),
    Sampling(temperature=0, max_new_tokens=25),
    Sampling(temperature=1.3, top_k=0, top_p=1.0, max_new_tokens=33),
)
WINDOW = policies.from_setting(
    Setting.from_parameters("window", kv_budget=56, local_window=8, ratio=0.3, ratio_over="thinking")
)


@pytest.fixture(scope="module")
def work(tiny_llama: ModelHandle) -> list[Request[int]]:
    drawn = enumerate(prompts(tiny_llama, 6))
    return [Request(i, prompt[:40], 70 + i, (WINDOW,), sampling=SAMPLINGS[i % 3]) for i, prompt in drawn]


def tokens(handle: ModelHandle, work: Iterable[Request[int] | None], sampling: Sampling = SAMPLINGS[0]) -> Any:
    engine = Engine(handle, handle.load(), [WINDOW], sampling, 6)
    return {generation.key: generation.tokens for generation in engine.run(work)}


@pytest.fixture(scope="module")
def whole(tiny_llama: ModelHandle, work: list[Request[int]]) -> dict[int, tuple[int, ...]]:
    """The tokens of these requests, which are decoded together."""
    return tokens(tiny_llama, work)  # type: ignore[no-any-return]


def test_requests_with_different_samplings_share_a_batch(tiny_llama: ModelHandle, work: Any, whole: Any) -> None:
    for request in work:
        alone = tokens(tiny_llama, [replace(request, sampling=None)], request.sampling)
        assert whole[request.key] == alone[request.key]
    assert max(map(len, whole.values())) <= 40


def test_a_watcher_sees_every_token_and_can_end_its_row(tiny_llama: ModelHandle, work: Any, whole: Any) -> None:
    seen: list[int] = []

    def stopping_criterion(new: Sequence[int]) -> bool:
        seen.append(new[-1])
        return len(new) == 7

    first = replace(work[0], stopping_criterion=stopping_criterion)
    engine = Engine(tiny_llama, tiny_llama.load(), [WINDOW], SAMPLINGS[0], 4)
    ended = {generation.key: generation for generation in engine.run([first, *work[1:]])}
    assert ended[0].tokens == tuple(seen) == whole[0][:7]
    assert not ended[0].finished
    assert all(ended[key].tokens == whole[key] for key in whole if key)
    assert not engine.scheduler.rows
    assert engine.cached_tokens == 0
    assert engine.scheduler.evicted_tokens > 0


def test_a_source_may_have_nothing_yet(tiny_llama: ModelHandle, work: Any, whole: Any) -> None:
    assert tokens(tiny_llama, (item for request in work for item in (None, request, None, None))) == whole


def test_adjusted_logits_are_of_one_request_alone(tiny_llama: ModelHandle, work: Any, whole: Any) -> None:
    # A token that some trace writes for the first time, later than at once: until there nothing may change.
    key, position = next(
        (key, position)
        for key, written in whole.items()
        for position, token in enumerate(written)
        if position > 2 and token not in written[:position]
    )
    forbidden = whole[key][position]
    lengths: list[int] = []

    def logits_processor(so_far: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
        lengths.append(len(so_far))
        return logits.index_fill(0, torch.tensor([forbidden]), float("-inf"))

    adjusted = [replace(item, logits_processor=logits_processor) if item.key == key else item for item in work]
    result = tokens(tiny_llama, adjusted)
    assert forbidden not in result[key]
    assert result[key][:position] == whole[key][:position]
    assert lengths == list(range(len(work[key].prompt), len(work[key].prompt) + len(result[key])))
    assert all(result[other] == whole[other] for other in whole if other != key)


def test_prompts_are_read_in_chunks_beside_rows_that_are_decoded(tiny_llama: ModelHandle, work: Any) -> None:
    """A row that is being decoded gets its next token in every pass, whatever prompts came."""
    first, *others = work
    passes: list[tuple[int, int]] = []

    class Spy(Engine):
        def _pass(self, rows: Any, batch: Any) -> Any:
            decoding = [row for row in rows if not row.prompt_left]
            passes.append((len(decoding), batch.starts[-1] - len(decoding)))
            return super()._pass(rows, batch)

    def source() -> Iterator[Request[int] | None]:
        yield replace(first, sampling=Sampling(max_new_tokens=20))
        yield None
        for request in others:
            yield replace(request, prompt=(request.prompt * 70)[:700])

    engine = Spy(tiny_llama, tiny_llama.load(), [WINDOW], SAMPLINGS[0], 6)
    assert len(list(engine.run(source()))) == 6
    busy = [prompt for decoding, prompt in passes if decoding and prompt]
    # Five prompts of 700 tokens in chunks of 512 and 188, at most 1,024 tokens at a time.
    assert busy == [512 + 512, 188 + 188 + 512, 188 + 512, 188 + 512, 188]


def test_a_prompt_in_chunks_is_the_prompt_in_one(tiny_llama: ModelHandle, work: Any, monkeypatch: Any) -> None:
    """For a policy that sees attention and one that sees hidden states, too."""
    from kvatlas.engine import scheduler

    values = {"kv_budget": 700, "local_window": 8, "ratio": 0.3, "ratio_over": "thinking"}
    chosen = [
        policies.from_setting(Setting.from_parameters(name, **values)) for name in ("h2o", "dynts", "lazyeviction")
    ]
    handle, brief = endless(tiny_llama), Sampling(max_new_tokens=60)
    asked = [
        replace(request, prompt=(request.prompt * 70)[:680], policies=tuple(chosen), sampling=brief)
        for request in work[:2]
    ]
    results = []
    for chunk in (scheduler.PROMPT_CHUNK, 1000):
        monkeypatch.setattr(scheduler, "PROMPT_CHUNK", chunk)
        engine = Engine(handle, handle.load(), chosen, SAMPLINGS[0], 6)
        results.append({(g.key, g.policy): (g.tokens, g.usage.compressions) for g in engine.run(asked)})
    assert results[0] == results[1]
    assert all(compressions for _, compressions in results[0].values())
