"""What every policy costs: time per decoding step and per compression, at 1k, 4k and 16k cached tokens.

    python bench/policies.py --tokens 1024 4096 16384 > bench/results/policies.json

One model with random weights, one thread, fp32, eight sequences of equal length. A round decodes one step under every
policy in turn, from the same cache, with `window` before and after every three; a policy's ratio is the median over the
rounds of its time to the mean of those two. Times are processor time of the one thread, so that other programs on the
machine do not count. Policies that want no attention weights (`fast`) are to stay within 3 %. Keys are random, of which
hardly one repeats another: for `rkv` the worst case (bench/redundancy.py has a real model's). Prints one JSON document.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import statistics
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file

from filled import FilledEngine, bench_model, shape_of
from kvatlas import models, policies
from kvatlas.core import Sampling, Setting
from kvatlas.models import ModelHandle
from kvatlas.policies import CompressingPolicy, Policy
from kvatlas.policies.dynts import HEAD_FILE
from kvatlas.policies.triattention import STATISTICS_FILE
from kvatlas.predictor.calibration import query_statistics
from kvatlas.predictor.training import new_head

FAST = ("full", "window", "streaming", "random", "keydiff", "dynts")
ROWS = 8


def settings(model: ModelHandle) -> dict[str, Policy]:
    """Every policy that runs on any model by itself; none compresses before the bench says so."""
    save_file(new_head(model.shape.hidden).state_dict(), model.folder / HEAD_FILE)
    text = tuple(5 + i % 50 for i in range(64))
    save_file(query_statistics(model, model.load(), [text]), model.folder / STATISTICS_FILE)
    by_name: dict[str, Policy] = {}
    for name in policies.policies.names():
        if name == "full":
            by_name[name] = policies.of(Setting.of(name))
        elif name != "oracle":
            values = {"kv_budget": 10**6, "local_window": 256, "ratio": 0.3}
            by_name[name] = policies.of(Setting.of(name, **values))
    return by_name


def measure(model: ModelHandle, tokens: int, rounds: int, compressions: int) -> dict[str, dict[str, float]]:
    """Medians for every policy at one cache length."""
    result = settings(model)
    engine = FilledEngine(model, result.values(), Sampling(temperature=0.0, max_new_tokens=10**6), ROWS, tokens + 64)

    def step(name: str) -> float:
        engine.put(tokens, result[name])
        return engine.step()

    def compression(policy: Policy) -> float:
        engine.put(tokens, policy)
        return engine.compression(1)

    seconds: dict[str, list[float]] = {name: [] for name in result}
    ratios: dict[str, list[float]] = {name: [] for name in result}
    names = list(result)
    for turn in range(-1, rounds):
        before = step("window")
        for start in range(0, len(names), 3):
            own = {name: step(name) for name in names[start : start + 3]}
            after = step("window")
            for name, taken in own.items() if turn >= 0 else ():
                seconds[name].append(taken)
                ratios[name].append(2 * taken / (before + after))
            before = after
    rows = {}
    for name, policy in result.items():
        row = {
            "step_ms": round(1000 * statistics.median(seconds[name]), 3),
            "step_against_window": round(statistics.median(ratios[name]), 4),
        }
        if isinstance(policy, CompressingPolicy):
            if tokens <= 4096:
                compression(policy)
            row["compression_ms"] = round(1000 * statistics.median(compression(policy) for _ in range(compressions)), 3)
        rows[name] = row
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 4096, 16_384])
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=20, help="at the shortest length, fewer at longer ones")
    parser.add_argument("--compressions", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(1)
    gc.disable()
    with tempfile.TemporaryDirectory() as folder:
        model = bench_model(Path(folder), shape_of(options.layers, options.hidden))
        vars(model).update(tokenizer=models.find("embedded:tiny-llama").tokenizer)
        by_name = {}
        for tokens in options.tokens:
            rounds = max(5, options.rounds * min(options.tokens) // tokens)
            by_name[str(tokens)] = measure(model, tokens, rounds, options.compressions)
    fast = {tokens: {name: rows[name]["step_against_window"] for name in FAST} for tokens, rows in by_name.items()}
    print(
        json.dumps(
            {
                "bench": "policies",
                "options": vars(options),
                "torch": torch.__version__,
                "machine": platform.processor() or platform.machine(),
                "sequences": ROWS,
                "cached_tokens": by_name,
                "fast": fast,
                "fast_within_3_percent": all(ratio <= 1.03 for rows in fast.values() for ratio in rows.values()),
            }
        )
    )


if __name__ == "__main__":
    main()
