"""Answers that other programs are to give: what the engine writes for the same prompts."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from kvatlas.benchmarks import find
from kvatlas.core import Sampling
from kvatlas.engine import Engine, Request
from kvatlas.models import ModelHandle
from kvatlas.serve.service import find_policy, next_stream

#: A setting of `dynts` under which chains are compressed.
VALUES = {"kv_budget": 72, "local_window": 8, "ratio": 0.3, "ratio_over": "thinking"}


def questions(count: int, name: str = "CHAIN4") -> list[str]:
    benchmark = find(name)
    return [benchmark.prompt(problem) for problem in benchmark.problems(count)]


def generations(model: ModelHandle, prompts: Sequence[tuple[int, ...]], sampling: Sampling, seed: int) -> list[Any]:
    """One generation for each prompt, in their order; a prompt that comes again gets its next sample."""
    policy = find_policy(model, "dynts", VALUES)
    seen: Counter[tuple[int, ...]] = Counter()
    work = [Request(n, prompt, next_stream(seed, prompt, seen), (policy,)) for n, prompt in enumerate(prompts)]
    return sorted(Engine(model, model.load(), [policy], sampling, 4).run(work), key=lambda item: item.key)
