"""Requests of random prompts, decoded by the engine, for the tests of all rooms."""

import random
from collections.abc import Iterable, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any

from kvatlas import models, policies
from kvatlas.core import Sampling, Setting
from kvatlas.engine import Engine, Generation, Request
from kvatlas.models import ModelHandle
from kvatlas.policies import Policy

BUDGET = 96


def prompts(model: ModelHandle, count: int, lengths: tuple[int, int] = (12, 60)) -> list[tuple[int, ...]]:
    rng = random.Random(1)
    words = [i for i in range(len(model.tokenizer)) if i not in model.stops and i != model.think_close]
    return [tuple(rng.choice(words) for _ in range(rng.randrange(*lengths))) for _ in range(count)]


def endless(model: ModelHandle) -> ModelHandle:
    """The same model without an end token and end of thinking: every trace thinks up to the limit."""
    return replace(models.find(model.name), overrides=models.ENDLESS)


def grid(ratio_over: str = "thinking") -> list[Policy]:
    results = [policies.from_setting(Setting.from_parameters("full"))]
    for name in ("window", "random"):
        for window in (4, 16):
            for ratio in (0.1, 0.5):
                values = {"kv_budget": BUDGET, "local_window": window, "ratio": ratio, "ratio_over": ratio_over}
                results.append(policies.from_setting(Setting.from_parameters(name, **values)))
    results.append(
        policies.from_setting(Setting.from_parameters("window", kv_budget=BUDGET + 20, local_window=8, ratio=0.25))
    )
    return results


def requests(
    model: ModelHandle, settings: Iterable[Policy], count: int = 9, lengths: tuple[int, int] = (12, 60)
) -> list[Request[int]]:
    chosen = tuple(settings)
    return [Request(i, prompt, 1000 + i, chosen) for i, prompt in enumerate(prompts(model, count, lengths))]


def run(
    model: ModelHandle, work: Sequence[Request[Any]], batch_size: int, backend: str | None = None, **sampling: Any
) -> tuple[Engine, list[Generation[Any]]]:
    by_name = dict.fromkeys(policy for request in work for policy in request.policies)
    drawn = Sampling(**{"temperature": 0.9, "top_k": 20, "top_p": 0.95, "max_new_tokens": 120, **sampling})
    engine = Engine(model, model.load(), by_name, drawn, batch_size, backend)
    return engine, list(engine.run(work))


def greedy(model: ModelHandle, prompt: Sequence[int], count: int) -> list[int]:
    """The likeliest tokens after a prompt, with the full cache."""
    request = Request(0, tuple(prompt), 0, (policies.from_setting(Setting.from_parameters("full")),))
    _, (generation,) = run(model, [request], 1, temperature=0.0, max_new_tokens=count)
    return list(generation.tokens)


def outcome(generations: Iterable[Generation[int]]) -> dict[Any, Any]:
    """All of each generation but the time that it took."""
    parts = ("tokens", "finished", "thinking_end", "eviction_trace")
    usage = ("usage.compressions", "usage.peak_kv_tokens", "usage.mean_kv_tokens")
    return {(item.key, item.policy.setting.id): attrgetter(*parts, *usage)(item) for item in generations}
