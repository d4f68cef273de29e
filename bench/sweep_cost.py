r"""What a 4 x 5 grid costs as trees with shared trunks, against 20 separate runs, at given trace lengths.

    python bench/sweep_cost.py --rounds 2 --out bench/results/sweep_cost.json
    python bench/sweep_cost.py --full                      # every problem of the four benchmarks, 5 samples
    python bench/sweep_cost.py --replay --layers 12 --hidden 768 --problems 1 --out bench/results/sweep_replay.json
    python bench/sweep_cost.py --replay --layers 12 --hidden 768 --problems 1 --scale 1 --benchmarks AMC23 \
        --out bench/results/sweep_replay_full.json         # lengths as published; half an hour and more

Trace lengths follow a log-normal distribution around the means that `kvatlas plan` expects on each benchmark, cut at
the published 16,384 new tokens; all settings of a problem and sample have the same length.
`published` counts tokens at these lengths and the published budget of 5000. What is decoded here is the same grid on a
small random-weight model at a scale of 1 : 24 (`--scale`): budget, windows, prompts and lengths are divided by it, and
each trace ends after exactly its length. Both sides are decoded by the same engine with the same batch size, in turns.
Prints one JSON document.

`bound` is the least share that any sharing can reach: a setting that compresses at F tokens decodes the L - F after it
alone, so that 20 settings cost F + 20 (L - F) of 20 L tokens.

With --replay the two sides are trees with and without replay, the full cache among the settings: passes through the
model, tokens taken over, time. Random weights are the hard case: their next tokens are all but equally likely, so that
settings depart soon after their first compression (`unchanged`: traces that never do) and little can be taken over.
"""

from __future__ import annotations

import argparse
import platform
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from decode import bench_model, shape_of
from keeping import keep
from kvatlas import policies
from kvatlas.benchmarks.public import SOURCES
from kvatlas.core import Sampling, Setting
from kvatlas.engine import Engine, Replay, Request
from kvatlas.engine.rows import Row

#: Problems and mean new tokens of the four benchmarks.
LENGTHS = {name: (SOURCES[name].size, SOURCES[name].output_tokens) for name in ("AIME24", "AIME25", "AMC23", "GPQA_D")}
#: Of the logarithm of a length, around its mean.
SPREAD = 0.5
BUDGET, WINDOWS, RATIOS = 5000, (500, 1000, 2000, 3000), (0.1, 0.2, 0.3, 0.4, 0.5)
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
    found = {}
    for name in benchmarks:
        count, mean = LENGTHS[name]
        drawn = [
            mean * rng.lognormvariate(-SPREAD * SPREAD / 2, SPREAD)
            for _ in range(min(count, problems or count) * samples)
        ]
        found[name] = [min(LONGEST, max(1, round(each))) for each in drawn]
    return found


def tokens(found: list[int], fork: int, settings: int) -> tuple[int, int]:
    """Decoded tokens of separate runs, and of trees that fork at `fork` tokens."""
    separate = settings * sum(found)
    shared = sum(min(each, fork) + settings * max(0, each - fork) for each in found)
    return separate, shared


class Measured(Engine):
    """An engine whose traces end after the lengths that their requests' keys name."""

    def _ended(self, row: Row[Any]) -> bool:
        return len(row.tokens) >= row.request.key[1]


Work = list[tuple[int, int]]


def replayed(work: Work, prompt: tuple[int, ...], grid: list[Any], shape: dict[str, Any], batch: int) -> dict[str, Any]:
    """The grid and the full cache, decoded without and with replay."""
    chosen = [*grid, policies.of(Setting.of("full"))]
    found: dict[str, Any] = {}
    traces: dict[str, dict[Any, tuple[int, ...]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        model = bench_model(Path(folder), shape)
        network = model.network()
        found["parameters"] = sum(weight.numel() for weight in network.parameters())
        for name, replay in (("decoded", Replay.OFF), ("replayed", Replay.AUTO)):
            engine = Measured(model, network, chosen, Sampling(max_new_tokens=10**6), batch, replay)
            began = time.process_time()
            requests = [Request(key, prompt, key[0], tuple(chosen)) for key in work]
            traces[name] = {(one.key, one.policy): one.tokens for one in engine.run(requests)}
            found[name] = {
                "seconds": round(time.process_time() - began, 1),
                "passes": engine.passes,
                "tokens": engine.decoded_tokens,
                "replayed_tokens": engine.replayed_tokens,
            }
    full = {key: tokens for (key, policy), tokens in traces["decoded"].items() if policy == chosen[-1]}
    same = [tokens == full[key] for (key, policy), tokens in traces["decoded"].items() if policy != chosen[-1]]
    return {
        **found,
        "same_tokens": traces["decoded"] == traces["replayed"],
        "unchanged": round(statistics.mean(same), 4),
        "share_of_time": round(found["replayed"]["seconds"] / found["decoded"]["seconds"], 4),
        "share_of_passes": round(found["replayed"]["passes"] / found["decoded"]["passes"], 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--problems", type=int, default=4, help="of each benchmark, for what is decoded here")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--scale", type=int, default=24, help="what lengths are divided by")
    parser.add_argument("--benchmarks", nargs="+", choices=LENGTHS, default=list(LENGTHS), help="to decode here")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--replay", action="store_true", help="trees with replay against trees without")
    parser.add_argument("--layers", type=int, help="of the model; default: a small one")
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--out", type=Path, help="keep the document in this file too")
    options = parser.parse_args()
    torch.set_num_threads(1)

    settings, scale = len(WINDOWS) * len(RATIOS), options.scale
    published = lengths(None, 5, options.seed)
    counted = {name: tokens(each, BUDGET - PROMPT + 1, settings) for name, each in published.items()}
    problems, samples = (None, 5) if options.full else (options.problems, 1)
    decoded = lengths(problems, samples, options.seed, options.benchmarks)
    work = [
        (number, max(2, round(length / scale)))
        for number, length in enumerate(length for each in decoded.values() for length in each)
    ]
    prompt = tuple(5 + i % 400 for i in range(round(PROMPT / scale)))
    grid = [
        policies.of(
            Setting.of("window", kv_budget=round(BUDGET / scale), local_window=round(window / scale), ratio=ratio)
        )
        for window in WINDOWS
        for ratio in RATIOS
    ]
    shape = SHAPE if options.layers is None else shape_of(options.layers, options.hidden)
    asked = {name: value for name, value in vars(options).items() if name != "out"}
    common = {"bench": "sweep_cost", "options": asked, "machine": platform.processor() or platform.machine()}
    if options.replay:
        keep(
            {
                **common,
                "scale": scale,
                "new_tokens": [length for _, length in work],
                **replayed(work, prompt, grid, shape, options.batch),
            },
            options.out,
        )
        return
    arms = {
        "shared": [Request(key, prompt, key[0], tuple(grid)) for key in work],
        "separate": [Request(key, prompt, key[0], (policy,)) for policy in grid for key in work],
    }
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    written: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as folder:
        model = bench_model(Path(folder), shape)
        network = model.network()
        for _ in range(options.rounds):
            for name, requests in arms.items():
                engine = Measured(model, network, grid, Sampling(max_new_tokens=10**6), options.batch)
                began = time.perf_counter()
                traces = sum(1 for _ in engine.run(requests))
                seconds[name].append(time.perf_counter() - began)
                assert traces == len(work) * settings
                written[name] = engine.decoded_tokens
    separate, shared = (sum(each[side] for each in counted.values()) for side in (0, 1))
    share = written["shared"] / written["separate"]
    times = statistics.median(s / a for s, a in zip(seconds["shared"], seconds["separate"], strict=True))
    keep(
        {
            **common,
            "published": {
                "mean_new_tokens": {name: round(statistics.mean(each)) for name, each in published.items()},
                "traces": {name: len(each) * settings for name, each in published.items()},
                "decoded_tokens": {"separate": separate, "shared": shared},
                "share": round(shared / separate, 4),
                "share_by_benchmark": {name: round(two[1] / two[0], 4) for name, two in counted.items()},
            },
            "scale": scale,
            "decoded_tokens": written,
            "bound": round(
                tokens([length for _, length in work], grid[0].kv_budget - len(prompt) + 1, settings)[1]
                / (settings * sum(length for _, length in work)),
                4,
            ),
            "share_of_tokens": round(share, 4),
            "seconds": {name: round(statistics.median(each), 2) for name, each in seconds.items()},
            "share_of_time": round(times, 4),
            "time_against_tokens": round(times / share, 3),
        },
        options.out,
    )


if __name__ == "__main__":
    main()
