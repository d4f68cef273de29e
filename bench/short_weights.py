"""Measure decoding with weights of linear layers in bfloat16 and int8 beside the same model in fp32.

    python bench/short_weights.py qwen2.5-coder-1.5b.gguf MATH500@panel.jsonl --batches 1 16 64
    python bench/short_weights.py qwen2.5-coder-1.5b.gguf MATH500@panel.jsonl --weights bfloat16 int8

All models answer the same problems greedily with the full cache, one thread each, so many new tokens of so many
problems at once, in turns; the first of `--weights` is what the others are compared with. `tokens_per_second` is the
median over rounds of new tokens per CPU second, `best` that of the fastest round: other work on the machine only takes
time. `speed_against_first` is the median over rounds of the ratios of two turns. The first texts of a model at the
largest batch, `--alone` many, are compared with those alone (`equal_alone` of them are equal), and all with those of
the first model: `shares` is the share of a text before the first token that differs, mean over problems, `equal` the
share of texts without one. `weight_bytes` are those of the packed weights; with `--peaks` `peak_bytes` is the largest
memory of a process that has them mapped, decodes the largest batch and does nothing else (Linux).
"""

from __future__ import annotations

import subprocess
import sys
import time
from statistics import median
from typing import Any

import torch

from common import arguments, keep, resident
from kvatlas import models, policies
from kvatlas.benchmarks import find
from kvatlas.core import Sampling, Setting, first_difference
from kvatlas.engine import Engine, Request
from kvatlas.serve.service import stream_of

FULL = policies.from_setting(Setting.from_parameters("full"))
Texts = list[tuple[int, ...]]


class Arm:
    """A model in one type of weights, with the prompts of a benchmark's problems."""

    def __init__(self, options: Any, weights: str) -> None:
        self.handle = models.find(options.model, weights=weights)
        self.model = self.handle.load()
        benchmark = find(options.benchmark)
        problems = benchmark.problems(max(options.batches))
        self.prompts = [self.handle.encode(benchmark.prompt(problem)) for problem in problems]
        self.sampling = Sampling(temperature=0.0, max_new_tokens=options.new_tokens)

    def texts(self, prompts: list[tuple[int, ...]]) -> tuple[Texts, float]:
        """Return the texts of these prompts, decoded together, and new tokens per CPU second."""
        requests = [Request(index, p, stream_of(0, p, 0), (FULL,)) for index, p in enumerate(prompts)]
        engine = Engine(self.handle, self.model, (FULL,), self.sampling, len(prompts))
        began = time.process_time()
        texts = {done.key: tuple(done.tokens) for done in engine.run(iter(requests))}
        seconds = time.process_time() - began
        return [texts[index] for index in range(len(prompts))], sum(map(len, texts.values())) / seconds


def shared_text(first: Texts, others: Texts) -> tuple[float, float]:
    """Return the share of a text before the first token that differs, mean over texts, and the share of equal texts."""
    shares = []
    for expected, text in zip(first, others, strict=True):
        index = first_difference(expected, text)
        shares.append(1.0 if index is None else index / len(expected))
    return sum(shares) / len(shares), shares.count(1.0) / len(shares)


def peak_bytes(options: Any, weights: str) -> int:
    """Return the peak memory of a process that decodes the largest batch of problems with these weights."""
    words = [sys.executable, __file__, options.model, options.benchmark, "--peak", weights]
    words += ["--new-tokens", str(options.new_tokens), "--batches", str(max(options.batches))]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    return int(done.stdout.splitlines()[-1])


def main() -> None:
    parser_options: dict[str, Any] = {
        "batches": [1, 16, 64],
        "new_tokens": 100,
        "rounds": 3,
        "alone": 4,
        "peaks": False,
    }
    types = ["auto", "bfloat16", "int8"]
    options = arguments(__doc__, "model", "benchmark", weights=types, peak=str, **parser_options)
    options.model, options.benchmark = str(options.model), str(options.benchmark)
    torch.set_num_threads(1)
    if options.peak:
        arm = Arm(options, options.peak)
        arm.texts(arm.prompts)
        print(resident("VmHWM"))
        return

    arms = {weights: Arm(options, weights) for weights in options.weights}
    first = options.weights[0]
    speeds: dict[tuple[str, int], list[float]] = {}
    texts: dict[str, Texts] = {}
    for batch in options.batches:
        for _ in range(options.rounds):
            for weights, arm in arms.items():
                texts[weights], speed = arm.texts(arm.prompts[:batch])
                speeds.setdefault((weights, batch), []).append(speed)
        print(batch, {weights: speeds[weights, batch] for weights in arms}, flush=True)

    against: dict[str, dict[int, float]] = {}
    equal_alone = {}
    shared = {}
    for weights, arm in arms.items():
        if weights == first:
            continue
        against[weights] = {}
        for batch in options.batches:
            turns = zip(speeds[weights, batch], speeds[first, batch], strict=True)
            against[weights][batch] = round(median(own / other for own, other in turns), 2)
        alone = [arm.texts([prompt])[0][0] for prompt in arm.prompts[: options.alone]]
        equal_alone[weights] = sum(a == b for a, b in zip(alone, texts[weights], strict=False))
        shared[weights] = shared_text(texts[first], texts[weights])

    def by_batch(choose: Any) -> dict[str, dict[int, float]]:
        return {w: {b: round(choose(speeds[w, b]), 2) for b in options.batches} for w in options.weights}

    bytes_of_weights = {weights: arm.handle.weight_bytes for weights, arm in arms.items()}
    arms.clear()
    keep(
        options,
        bench="short_weights",
        tokens_per_second=by_batch(median),
        best=by_batch(max),
        speed_against_first=against,
        equal_alone=equal_alone,
        shares={weights: round(share, 3) for weights, (share, _) in shared.items()},
        equal={weights: round(equal, 3) for weights, (_, equal) in shared.items()},
        weight_bytes=bytes_of_weights,
        peak_bytes={weights: peak_bytes(options, weights) for weights in options.weights} if options.peaks else None,
    )


if __name__ == "__main__":
    main()
