"""A compression that can drop nothing does not take place: it is neither computed nor counted."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from kvatlas import policies
from kvatlas.benchmarks import find as benchmark
from kvatlas.core import Sampling, Setting
from kvatlas.engine import Engine, Generation, Request
from kvatlas.models import ModelHandle

NEW = 150
CLOSE_TO_THE_PROMPT = {"kv_budget": 72, "local_window": 8}
FULL = policies.from_setting(Setting.from_parameters("full"))


def ends_thinking(handle: ModelHandle, prompt: Sequence[int], after: int) -> Callable[..., torch.Tensor]:
    """Write the end of thinking after so many new tokens, and no end token."""
    stops = torch.tensor([*handle.stops])

    def processor(so_far: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
        here = len(so_far) == len(prompt) + after
        logits = logits.index_fill(0, stops, float("-inf"))
        return logits.index_fill(0, torch.tensor([handle.think_close]), 1e9 if here else float("-inf"))

    return processor


def answer(handle: ModelHandle, after: int, *names: str, **values: Any) -> tuple[Engine, dict[str, Generation[int]]]:
    """The generations of one prompt with a long answer, by policy."""
    chains = benchmark("CHAIN6")
    prompt = handle.tokens(handle.prompt(chains.prompt(chains.problems(1)[0])))
    chosen = tuple(
        policies.from_setting(Setting.from_parameters(name, **CLOSE_TO_THE_PROMPT | values)) for name in names
    )
    engine = Engine(handle, handle.load(), [FULL, *chosen], Sampling(0.9, 20, 0.95, NEW), 8)
    processor = ends_thinking(handle, prompt, after)
    request = Request(0, prompt, 5, (FULL, *chosen), logits_processor=processor)
    return engine, {generation.policy.name: generation for generation in engine.run([request])}


@pytest.mark.parametrize(
    ("values", "after", "most"),
    [
        ({"ratio": 0.5, "ratio_over": "thinking"}, 5, 3),
        ({"ratio": 0.5, "ratio_over": "older"}, 5, 2),
        ({"ratio": 0.9, "ratio_over": "thinking", "keep_prompt": False}, 5, 30),
        ({"ratio": 0.5, "ratio_over": "thinking"}, 45, 12),
        ({"every": 8}, 45, 12),
        ({"every": 8, "every_from": "start"}, 45, 12),
    ],
)
def test_every_compression_drops_tokens(
    tiny_llama: ModelHandle, monkeypatch: pytest.MonkeyPatch, values: dict[str, Any], after: int, most: int
) -> None:
    selected = []
    select = policies.select_tokens

    def noted(*arguments: Any) -> torch.Tensor:
        selected.append(1)
        return select(*arguments)

    monkeypatch.setattr("kvatlas.engine.rows.select_tokens", noted)
    _, generations = answer(tiny_llama, after, "random", **values)
    generation = generations["random"]
    assert generation.thinking_end == after
    assert len(generation.tokens) == NEW
    # The numbers of new tokens at which tokens left: those of the last holder.
    assert 0 < len(set(generation.eviction_trace.evicted_at) - {0}) <= generation.usage.compressions <= most
    assert len(selected) == generation.usage.compressions


@pytest.mark.parametrize(
    "values",
    [
        {"ratio": 1, "ratio_over": "thinking"},
        {"every": 8, "budget_over": "thinking", "kv_budget": 32},
        {"every": 8, "budget_over": "thinking", "kv_budget": 32, "every_from": "prompt"},
    ],
)
def test_settings_that_drop_nothing_stay_in_the_trunk(tiny_llama: ModelHandle, values: dict[str, Any]) -> None:
    """Without thinking, prompt and answer are all that there is, and each token of both stays."""
    engine, generations = answer(tiny_llama, 0, "window", "rkv", **values)
    assert len({generation.tokens for generation in generations.values()}) == 1
    assert {generation.usage.compressions for generation in generations.values()} == {0}
    assert engine.decoded_tokens == NEW


def test_empty_places_are_no_compression_where_no_token_leaves(tiny_llama: ModelHandle) -> None:
    """The tokens decide how many places of `sepllm` stay empty, so its selection is computed: it counts if it drops."""
    values = {"ratio": 1, "ratio_over": "thinking", "rest": "empty"}
    _, generations = answer(tiny_llama, 60, "sepllm", **values)
    assert 0 < generations["sepllm"].usage.compressions < 50
