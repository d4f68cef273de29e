"""What a single request may bring: its own sampling, a watcher, adjusted logits; and sources that have nothing yet."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from kvatlas import policies
from kvatlas.core import Sampling, Setting
from kvatlas.engine import Engine, Request
from kvatlas.models import Model
from tests.engine.test_loop import prompts

SAMPLINGS = (
    Sampling(temperature=0.9, top_k=20, top_p=0.95, max_new_tokens=40),
    Sampling(temperature=0, max_new_tokens=25),
    Sampling(temperature=1.3, top_k=0, top_p=1.0, max_new_tokens=33),
)
WINDOW = policies.of(Setting.of("window", kv_budget=56, local_window=8, ratio=0.3, ratio_over="thinking"))


@pytest.fixture(scope="module")
def network(tiny_llama: Model) -> Any:
    return tiny_llama.network()


def requests(model: Model, count: int = 6) -> list[Request[int]]:
    drawn = [SAMPLINGS[number % 3] for number in range(count)]
    found = prompts(model, count)
    return [Request(i, found[i][:40], 70 + i, (WINDOW,), sampling=drawn[i]) for i in range(count)]


def tokens(model: Model, network: Any, work: Any, sampling: Sampling = SAMPLINGS[0], rows: int = 6) -> Any:
    engine = Engine(model, network, [WINDOW], sampling, rows)
    return {generation.key: generation.tokens for generation in engine.run(work)}


def test_requests_with_different_samplings_share_a_batch(tiny_llama: Model, network: Any) -> None:
    together = tokens(tiny_llama, network, requests(tiny_llama))
    for request in requests(tiny_llama):
        alone = tokens(tiny_llama, network, [replace(request, sampling=None)], request.sampling)
        assert together[request.key] == alone[request.key]
    assert max(map(len, together.values())) <= 40


def test_a_watcher_sees_every_token_and_can_end_its_row(tiny_llama: Model, network: Any) -> None:
    whole = tokens(tiny_llama, network, requests(tiny_llama))
    seen: list[int] = []

    def watch(new: Sequence[int]) -> bool:
        seen.append(new[-1])
        return len(new) == 7

    first, *others = requests(tiny_llama)
    engine = Engine(tiny_llama, network, [WINDOW], SAMPLINGS[0], 4)
    ended = {generation.key: generation for generation in engine.run([replace(first, watch=watch), *others])}
    assert ended[0].tokens == tuple(seen) == whole[0][:7]
    assert not ended[0].finished
    assert all(ended[key].tokens == whole[key] for key in whole if key)
    assert engine.active_rows == engine.cached_tokens == 0
    assert engine.evicted_tokens > 0


def test_a_source_may_have_nothing_yet(tiny_llama: Model, network: Any) -> None:
    def slowly() -> Iterator[Request[int] | None]:
        for request in requests(tiny_llama):
            yield None
            yield request
            yield None
            yield None

    assert tokens(tiny_llama, network, slowly()) == tokens(tiny_llama, network, requests(tiny_llama))


def test_adjusted_logits_are_of_one_request_alone(tiny_llama: Model, network: Any) -> None:
    work = requests(tiny_llama)
    whole = tokens(tiny_llama, network, work)
    # A token that some trace writes for the first time, later than at once: until there nothing may change.
    key, place = next(
        (key, place)
        for key, written in whole.items()
        for place, token in enumerate(written)
        if place > 2 and token not in written[:place]
    )
    forbidden = whole[key][place]
    lengths: list[int] = []

    def adjust(so_far: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
        lengths.append(len(so_far))
        return logits.index_fill(0, torch.tensor([forbidden]), float("-inf"))

    found = tokens(tiny_llama, network, [replace(one, adjust=adjust) if one.key == key else one for one in work])
    assert forbidden not in found[key]
    assert found[key][:place] == whole[key][:place]
    assert lengths == list(range(len(work[key].prompt), len(work[key].prompt) + len(found[key])))
    assert all(found[other] == whole[other] for other in whole if other != key)


def test_the_network_gets_its_attention_back(tiny_llama: Model, network: Any) -> None:
    before = network.config._attn_implementation
    tokens(tiny_llama, network, requests(tiny_llama, 1))
    assert network.config._attn_implementation == before != "kvatlas"


def test_new_prompts_are_read_between_steps_a_few_at_a_time(tiny_llama: Model, network: Any) -> None:
    """A row that is being decoded waits for two prompts of 600 tokens at most, not for all that came."""
    first, *others = requests(tiny_llama)
    events: list[str] = []

    def watch(new: Sequence[int]) -> bool:
        events.append("token")
        return len(new) == 20

    def source() -> Iterator[Request[int] | None]:
        yield replace(first, watch=watch)
        yield None
        for request in others:
            events.append("prompt")
            yield replace(request, prompt=(request.prompt * 50)[:600])

    assert len(tokens(tiny_llama, network, source())) == 6
    between = "".join("p" if event == "prompt" else " " for event in events).split()
    assert between == ["pp", "pp", "p"]
