"""Measure the cost of a 4 x 5 grid as trees with shared trunks, against 20 separate runs, at given trace lengths.

    python bench/sweep_cost.py --rounds 2 --out bench/results/sweep_cost.json
    python bench/sweep_cost.py --full                      # every problem of the four benchmarks, 5 samples

Trace lengths follow a log-normal distribution around the means that `kvatlas plan` expects on each benchmark, cut at
the published 16,384 new tokens; all settings of a problem and sample have the same length.
`published` counts tokens at these lengths and the published budget of 5000. What is decoded here is the same grid on a
small random-weight model at a scale of 1 : 24 (`--scale`): budget, windows, prompts and lengths are divided by it, and
each trace ends after exactly its length. Both sides are decoded by the same engine with the same batch size, in turns.
Prints one JSON document.

`bound` is the least share that any sharing can reach: a setting that compresses at F tokens decodes the L - F after it
alone, so that 20 settings cost F + 20 (L - F) of 20 L tokens.
"""

from __future__ import annotations

import itertools
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from common import arguments, bench_model, keep
from kvatlas import policies
from kvatlas.benchmarks.public_data import SOURCES
from kvatlas.core import Sampling, Setting
from kvatlas.engine import Engine, Request
from kvatlas.policies import Policy

#: Problems and mean new tokens of the four benchmarks.
LENGTHS = {name: (SOURCES[name].size, SOURCES[name].output_tokens) for name in ("AIME24", "AIME25", "AMC23", "GPQA_D")}
#: Of the logarithm of a length, around its mean.
SPREAD = 0.5
BUDGET, WINDOWS, RATIOS = 5000, (500, 1000, 2000, 3000), (0.1, 0.2, 0.3, 0.4, 0.5)
GRID = tuple(itertools.product(WINDOWS, RATIOS))
PROMPT, LONGEST = 200, 16_384
SHAPE = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
}


def lengths(
    problems: int | None, samples: int, seed: int, benchmarks: Sequence[str] = tuple(LENGTHS)
) -> dict[str, list[int]]:
    """New tokens of every (problem, sample) of each benchmark: their mean before the cut is the benchmark's."""
    rng = random.Random(seed)
    by_name = {}
    for name in benchmarks:
        count, mean = LENGTHS[name]
        drawn = [
            mean * rng.lognormvariate(-SPREAD * SPREAD / 2, SPREAD)
            for _ in range(min(count, problems or count) * samples)
        ]
        by_name[name] = [min(LONGEST, max(1, round(item))) for item in drawn]
    return by_name


def tokens(result: list[int], fork: int, settings: int) -> tuple[int, int]:
    """Decoded tokens of separate runs, and of trees that fork at `fork` tokens."""
    separate = settings * sum(result)
    shared = sum(min(item, fork) + settings * max(0, item - fork) for item in result)
    return separate, shared


def window_policy(budget: float, window: float, ratio: float) -> Policy:
    return policies.from_setting(
        Setting.from_parameters("window", kv_budget=round(budget), local_window=round(window), ratio=ratio)
    )


def main() -> None:
    options = arguments(__doc__, full=False, problems=4, rounds=1, scale=24, benchmarks=list(LENGTHS), batch=64, seed=0)
    torch.set_num_threads(1)

    settings, scale = len(GRID), options.scale
    published = lengths(None, 5, options.seed)
    counted = {name: tokens(item, BUDGET - PROMPT + 1, settings) for name, item in published.items()}
    problems, samples = (None, 5) if options.full else (options.problems, 1)
    decoded = lengths(problems, samples, options.seed, options.benchmarks)
    new = [max(2, round(length / scale)) for item in decoded.values() for length in item]
    prompt = tuple(5 + i % 400 for i in range(round(PROMPT / scale)))
    grid = [window_policy(BUDGET / scale, window / scale, ratio) for window, ratio in GRID]
    ends = [Sampling(max_new_tokens=length) for length in new]
    arms = {
        "shared": [Request(n, prompt, n, tuple(grid), sampling=end) for n, end in enumerate(ends)],
        "separate": [Request(n, prompt, n, (policy,), sampling=end) for policy in grid for n, end in enumerate(ends)],
    }
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    written: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as folder:
        handle = bench_model(Path(folder), SHAPE)
        model = handle.load()
        for _ in range(options.rounds):
            for name, requests in arms.items():
                engine = Engine(handle, model, grid, Sampling(), options.batch)
                began = time.perf_counter()
                traces = sum(1 for _ in engine.run(requests))
                seconds[name].append(time.perf_counter() - began)
                assert traces == len(new) * settings
                written[name] = engine.decoded_tokens
    separate, shared = (sum(item[side] for item in counted.values()) for side in (0, 1))
    share = written["shared"] / written["separate"]
    times = statistics.median(s / a for s, a in zip(seconds["shared"], seconds["separate"], strict=True))
    keep(
        options,
        bench="sweep_cost",
        published={
            "mean_new_tokens": {name: round(statistics.mean(item)) for name, item in published.items()},
            "traces": {name: len(item) * settings for name, item in published.items()},
            "decoded_tokens": {"separate": separate, "shared": shared},
            "share": round(shared / separate, 4),
            "share_by_benchmark": {name: round(two[1] / two[0], 4) for name, two in counted.items()},
        },
        scale=scale,
        decoded_tokens=written,
        bound=round(tokens(new, grid[0].budget.kv_budget - len(prompt) + 1, settings)[1] / (settings * sum(new)), 4),
        share_of_tokens=round(share, 4),
        seconds={name: round(statistics.median(item), 2) for name, item in seconds.items()},
        share_of_time=round(times, 4),
        time_against_tokens=round(times / share, 3),
    )


if __name__ == "__main__":
    main()
