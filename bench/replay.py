"""What replay and screening save, against trunk sharing alone.

    python bench/replay.py --out bench/results/replay.json

`grid` decodes the demo's grid on the embedded model with replay off and on, and screens it: passes through the model,
decoded and replayed tokens, seconds of processor time; then how a screen's means rank all settings beside decoded
Pass@1 (Spearman's correlation, with the middle 95 % over problems drawn with replacement). `few` is the same for
screens of fewer problems, against Pass@1 on the others, with their part of the time. `tokens` is a Llama of about 100M
parameters with random weights and so many tokens already cached: milliseconds for a decoded token and for a replayed
one, one row and eight rows. One thread, fp32. Prints one JSON document.
"""

from __future__ import annotations

import argparse
import json
import platform
import tempfile
import time
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from kvatlas.engine.screening import Screener
from scipy import stats

from decode import bench_model, shape_of
from kvatlas import policies
from kvatlas.core import Sampling, Setting
from kvatlas.engine import Engine, Generation, Replay, Request
from kvatlas.noise import stream_key
from kvatlas.sweep import make_plan, parse_spec
from kvatlas.sweep.screen import measures
from kvatlas.sweep.work import grade

FULL = policies.of(Setting.of("full"))
#: Problems of smaller screens.
FEW = (2, 4, 8, 16, 32)
MEASURES = ("unchanged", "agreed", "top1", "likeness", "answer_kept")


def grid(problems: int, spec: str) -> dict[str, Any]:
    """The demo's grid on its first model: decoded without and with replay, and screened."""
    data = yaml.safe_load((files("kvatlas.sweep") / f"{spec}.yaml").read_text())
    plan = make_plan(parse_spec({**data, "models": data["models"][:1], "problems": problems}))
    (model,) = plan.models
    chosen = tuple(policy for policy, _ in plan.policies)
    sampling = plan.spec.sampling.sampling()
    asked = {(b.name, p.id): (b, p) for b in plan.benchmarks for p in plan.problems[b.name]}
    work = [
        Request(key, model.encode(b.prompt(p)), stream_key(0, model.weights_digest, *key, 0), chosen)
        for key, (b, p) in asked.items()
    ]
    network = model.network()
    found: dict[str, Any] = {"settings": len(chosen), "traces": len(chosen) * len(work)}
    written: dict[str, list[Generation[Any]]] = {}
    for name, replay in (("decoded", Replay.OFF), ("replayed", Replay.AUTO)):
        engine = Engine(model, network, chosen, sampling, 64, replay)
        began = time.process_time()
        written[name] = list(engine.run(work))
        found[name] = {
            "seconds": round(time.process_time() - began, 1),
            "passes": engine.passes,
            "tokens": engine.decoded_tokens,
            "replayed_tokens": engine.replayed_tokens,
            "near_ties": sum(g.usage.near_ties for g in written[name]),
        }
    tokens = [{(g.key, g.policy.setting.id): g.tokens for g in each} for each in written.values()]
    found["same_tokens"] = tokens[0] == tokens[1]
    full = {g.key: g.tokens for g in written["decoded"] if g.policy == FULL}
    branches = sum(g.decoded for g in written["decoded"] if g.policy != FULL)
    found["replayed_share_of_branches"] = round(found["replayed"]["replayed_tokens"] / branches, 3)

    screener = Screener(model, network, chosen, sampling, 64)
    began = time.process_time()
    screened = {one.key: screener.screen(replace(one, script=full[one.key])) for one in work}
    seconds = time.process_time() - began
    found["screened"] = {
        "seconds": round(seconds, 1),
        "passes": screener.passes,
        "share_of_decoded": round(seconds / found["decoded"]["seconds"], 3),
        "share_of_replayed": round(seconds / found["replayed"]["seconds"], 3),
    }
    right = {(g.key, g.policy): grade(model, *asked[g.key], g.tokens, g.finished).correct for g in written["decoded"]}
    values = {
        (key, one.policy): measures(one.tally, len(full[key])) for key, results in screened.items() for one in results
    }
    settings = [policy for policy in chosen if policy != FULL]
    passed = np.array([[right[key, policy] for policy in settings] for key in asked], float)
    found["rank_correlation_with_pass_at_1"] = {
        name: ranked(passed, np.array([[values[key, policy][name] for policy in settings] for key in asked]))
        for name in MEASURES
    }
    found["few"] = {
        count: {
            "share_of_decoded": round(count / len(work) * found["screened"]["share_of_decoded"], 4),
            **{
                name: few(
                    passed, np.array([[values[key, policy][name] for policy in settings] for key in asked]), count
                )
                for name in MEASURES
            },
        }
        for count in FEW
        if 2 * count <= len(work)
    }
    return found


def few(passed: np.ndarray, screened: np.ndarray, count: int) -> dict[str, float]:
    """The correlation where so many problems are screened and the others are decoded: median, middle 95 % of draws."""
    rng = np.random.default_rng(count)
    draws = []
    for _ in range(500):
        order = rng.permutation(len(passed))
        own, others = screened[order[:count]].mean(0), passed[order[count:]].mean(0)
        draws.append(float(stats.spearmanr(own, others).statistic))
    low, value, high = np.nanquantile(draws, (0.025, 0.5, 0.975))
    return {"value": round(float(value), 3), "low": round(float(low), 3), "high": round(float(high), 3)}


def ranked(passed: np.ndarray, screened: np.ndarray) -> dict[str, float]:
    """Spearman's correlation over settings of their means over problems [problems, settings], with its interval."""

    def correlation(chosen: np.ndarray) -> float:
        return float(stats.spearmanr(passed[chosen].mean(0), screened[chosen].mean(0)).statistic)

    rng = np.random.default_rng(0)
    everyone = np.arange(len(passed))
    again = [correlation(rng.choice(everyone, len(everyone))) for _ in range(500)]
    low, high = np.nanquantile(again, (0.025, 0.975))
    return {"value": round(correlation(everyone), 3), "low": round(float(low), 3), "high": round(float(high), 3)}


class Filled(Engine):
    """An engine whose rows begin with so many cached tokens of random keys and values."""

    cached: int

    def _prefill(self, request: Request[Any]) -> list[Generation[Any]]:
        done = super()._prefill(request)
        index = len(self._rows) - 1
        self.slots.reserve(index, self.cached + 512)
        random = torch.Generator().manual_seed(index)
        for layer in range(self.slots.shape.layers):
            for table in (self.slots.key(layer, index), self.slots.value(layer, index)):
                table[:, : self.cached] = torch.randn(table[:, : self.cached].shape, generator=random)
        self.slots.lengths[index] = self.cached
        return done


def tokens(lengths: list[int], layers: int, hidden: int, new: int) -> dict[str, Any]:
    """Milliseconds for each new token, decoded and replayed, at several lengths of the cache."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        model = bench_model(Path(folder), shape_of(layers, hidden))
        network = model.network()
        found["parameters"] = sum(weight.numel() for weight in network.parameters())
        for cached in lengths:
            for rows in (1, 8):
                sampling = Sampling(max_new_tokens=new)
                work = [Request(row, tuple(range(5 + row, 25 + row)), row, (FULL,)) for row in range(rows)]
                engine = Filled(model, network, [FULL], sampling, rows)
                engine.cached = cached
                decoded, written = _timed(engine, work)
                scripted = [replace(one, script=written[one.key]) for one in work]
                engine.passes = engine.replayed_tokens = 0
                replayed, again = _timed(engine, scripted)
                assert again == written
                found[f"{cached} cached, {rows} rows"] = {
                    "decoded_ms": round(1000 * decoded / (rows * new), 2),
                    "replayed_ms": round(1000 * replayed / (rows * new), 2),
                    "faster": round(decoded / replayed, 2),
                    "passes": [new - 1, engine.passes],
                }
    return found


def _timed(engine: Filled, work: list[Request[Any]]) -> tuple[float, dict[Any, tuple[int, ...]]]:
    """Seconds of processor time without prefilling and filling, and what was written."""
    stepped = 0.0
    step = engine._step

    def timed() -> list[Generation[Any]]:
        nonlocal stepped
        began = time.process_time()
        done = step()
        stepped += time.process_time() - began
        return done

    vars(engine)["_step"] = timed
    written = {g.key: g.tokens for g in engine.run(work)}
    del vars(engine)["_step"]
    return stepped, written


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--spec", default="demo", choices=("demo", "demo-quick"))
    parser.add_argument("--problems", type=int, default=8, help="Of each benchmark of the grid.")
    parser.add_argument("--lengths", type=int, nargs="*", default=[1024, 4096, 16384])
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = {
        "bench": "replay",
        "options": {name: value for name, value in vars(options).items() if name != "out"},
        "torch": torch.__version__,
        "machine": platform.processor() or platform.machine(),
        "grid": grid(options.problems, options.spec),
        "tokens": tokens(options.lengths, options.layers, options.hidden, options.new),
    }
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(found, indent=2) + "\n")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
