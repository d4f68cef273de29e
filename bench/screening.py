"""Measure the cost of screens, and their ranking of settings beside that of decoding.

    python bench/screening.py --problems 20 --out bench/results/screening.json

The demo's grid on the embedded model is decoded and screened: passes through the model, tokens, seconds of processor
time; then how a screen's means rank all settings beside decoded Pass@1 (Spearman's correlation, with the middle 95 %
over problems drawn with replacement). `few` is the same for screens of fewer problems, against Pass@1 on the others,
with their part of the time. One thread, fp32. Prints one JSON document.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import yaml
from scipy import stats

from common import arguments, keep
from kvatlas import policies
from kvatlas.answers.reading import read_tokens
from kvatlas.benchmarks.base import grade_reading
from kvatlas.core import Setting
from kvatlas.engine import Engine, Request
from kvatlas.noise import stream_key
from kvatlas.sweeps import make_plan, parse_spec
from kvatlas.sweeps.spec import recipes
from kvatlas.sweeps.worker import measures

FULL = policies.from_setting(Setting.from_parameters("full"))
#: Problems of smaller screens.
FEW = (2, 4, 8, 16, 32)
MEASURES = ("unchanged", "agreed", "top1", "likeness", "answer_kept")


def grid(problems: int, spec: str) -> dict[str, Any]:
    """The demo's grid on its first model: decoded, and screened."""
    data = yaml.safe_load(recipes()[spec])
    plan = make_plan(parse_spec({**data, "models": data["models"][:1], "problems": problems}))
    (handle,) = plan.models
    chosen = tuple(policy for policy, _ in plan.policies)
    sampling = plan.spec.sampling.sampling()
    asked = {(b.name, p.id): (b, p) for b in plan.benchmarks for p in plan.problems[b.name]}
    work = [
        Request(key, handle.encode(b.prompt(p)), stream_key(0, handle.stream, *key, 0), chosen)
        for key, (b, p) in asked.items()
    ]
    model = handle.load()
    engine = Engine(handle, model, chosen, sampling, 64)
    began = time.process_time()
    written = list(engine.run(work))
    decoding = time.process_time() - began
    full = {g.key: g.tokens for g in written if g.policy == FULL}

    reader = Engine(handle, model, chosen, sampling, max(64, len(chosen)))
    began = time.process_time()
    screened = list(reader.run(replace(item, script=full[item.key]) for item in work))
    reading = time.process_time() - began

    right = {}
    for generation in written:
        answer = read_tokens(handle, generation.tokens, generation.finished)
        right[generation.key, generation.policy] = grade_reading(*asked[generation.key], answer).correct
    settings = [policy for policy in chosen if policy != FULL]
    passed = np.array([[right[key, policy] for policy in settings] for key in asked], float)
    values = {(result.key, result.policy): measures(result.likeness, len(full[result.key])) for result in screened}
    tables = {
        name: np.array([[values[key, policy][name] for policy in settings] for key in asked]) for name in MEASURES
    }
    share = reading / decoding
    return {
        "settings": len(chosen),
        "traces": len(chosen) * len(work),
        "decoded": {"seconds": round(decoding, 1), "passes": engine.passes, "tokens": engine.decoded_tokens},
        "screened": {"seconds": round(reading, 1), "passes": reader.passes, "share_of_decoded": round(share, 3)},
        "rank_correlation_with_pass_at_1": {name: ranked(passed, table) for name, table in tables.items()},
        "few": {
            count: {
                "share_of_decoded": round(count / len(work) * share, 4),
                **{name: few(passed, table, count) for name, table in tables.items()},
            }
            for count in FEW
            if 2 * count <= len(work)
        },
    }


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


def main() -> None:
    options = arguments(__doc__, spec={"default": "demo", "choices": ("demo", "demo-quick")}, problems=8)
    torch.set_num_threads(1)
    keep(options, bench="screening", grid=grid(options.problems, options.spec))


if __name__ == "__main__":
    main()
