"""Measure decoding with the weights of linear layers in bfloat16 beside the same model in fp32.

    python bench/short_weights.py qwen2.5-coder-1.5b.gguf MATH500@panel.jsonl --batches 1 16 64

Both models answer the same problems greedily with the full cache, one thread each, so many new tokens of so many
problems at once, in turns: `tokens_per_second` is the median over rounds of new tokens per CPU second. With bfloat16
the first four texts at the largest batch are compared with those alone (`equal_alone` is 4 if all are equal), and all
with those of fp32: `shares` is the share of a text before the first token that differs, mean over problems.
`weight_bytes` are those of the packed weights.
"""

from __future__ import annotations

import time
from statistics import median
from typing import Any

import torch

from common import arguments, keep
from kvatlas import models, policies
from kvatlas.benchmarks import find
from kvatlas.core import Sampling, Setting, first_difference
from kvatlas.engine import Engine, Request
from kvatlas.serve.service import stream_of

FULL = policies.from_setting(Setting.from_parameters("full"))


class Arm:
    """A model in one type of weights, with the prompts of a benchmark's problems."""

    def __init__(self, options: Any, weights: str) -> None:
        self.handle = models.find(options.model, weights=weights)
        self.model = self.handle.load()
        asked = find(options.benchmark)
        problems = asked.problems(max(options.batches))
        self.prompts = [self.handle.encode(asked.prompt(problem)) for problem in problems]
        self.sampling = Sampling(temperature=0.0, max_new_tokens=options.new_tokens)

    def texts(self, batch: int) -> tuple[list[tuple[int, ...]], float]:
        """Return the texts of the first `batch` problems, decoded together, and new tokens per CPU second."""
        requests = [Request(index, p, stream_of(0, p, 0), (FULL,)) for index, p in enumerate(self.prompts[:batch])]
        engine = Engine(self.handle, self.model, (FULL,), self.sampling, batch)
        began = time.process_time()
        texts = {done.key: tuple(done.tokens) for done in engine.run(iter(requests))}
        seconds = time.process_time() - began
        return [texts[index] for index in range(batch)], sum(map(len, texts.values())) / seconds


def main() -> None:
    parser_options: dict[str, Any] = {"batches": [1, 16, 64], "new_tokens": 100, "rounds": 3}
    options = arguments(__doc__, "model", "benchmark", **parser_options)
    options.model, options.benchmark = str(options.model), str(options.benchmark)
    torch.set_num_threads(1)
    arms = {weights: Arm(options, weights) for weights in ("auto", "bfloat16")}
    speeds: dict[tuple[str, int], list[float]] = {}
    texts: dict[str, list[tuple[int, ...]]] = {}
    for batch in options.batches:
        for _ in range(options.rounds):
            for weights, arm in arms.items():
                texts[weights], speed = arm.texts(batch)
                speeds.setdefault((weights, batch), []).append(speed)
        print(batch, {weights: speeds[weights, batch] for weights in arms}, flush=True)
    short = arms["bfloat16"]
    alone = []
    for prompt in short.prompts[:4]:
        short.prompts = [prompt]
        alone += short.texts(1)[0]
    shares = []
    for exact, rounded in zip(texts["auto"], texts["bfloat16"], strict=True):
        first = first_difference(exact, rounded)
        shares.append(1.0 if first is None else first / len(exact))
    keep(
        options,
        bench="short_weights",
        tokens_per_second={
            weights: {batch: round(median(speeds[weights, batch]), 2) for batch in options.batches} for weights in arms
        },
        equal_alone=sum(a == b for a, b in zip(alone, texts["bfloat16"], strict=False)),
        shares=round(sum(shares) / len(shares), 3),
        weight_bytes={weights: arm.handle.weight_bytes for weights, arm in arms.items()},
    )


if __name__ == "__main__":
    main()
